"""The article's troubleshooting table (section 6.3), run: cause planted, symptom seen, fix applied.

Each row ends in one number that is above its limit with the cause and within it with the fix.
"""

from __future__ import annotations

import math

import torch

from flashdig.generations.walk_data import Shown, Symptom
from flashdig.generations.walk_loop import (
    RIGHT,
    Recurrence,
    attention_scores,
    literal_inputs,
    numbers,
    tiled_attention,
    unit_factor,
)
from flashdig.generations.walk_shared_memory import (
    BLOCK_LIMITS_KIB,
    COLUMN_FLOAT32,
    FITTING_TILE,
    LARGE_TILE,
    PADDINGS,
    PATTERNS,
    TILE_CHOICES,
    wavefronts,
)


def symptoms() -> tuple[Symptom, ...]:
    """Every row of the table, in the article's order."""
    return (
        loss_does_not_converge(),
        output_zero_or_not_a_number(),
        bank_conflicts(),
        small_errors(),
        launch_failure(),
    )


def loss_does_not_converge(steps: int = 400, learning_rate: float = 2.0) -> Symptom:
    """Gradient descent on q towards the output of the walk's queries, with and without the rescale
    of l."""
    at = tuple(range(0, steps + 1, steps // 4))
    faulty = _losses(Recurrence(rescale_sum=unit_factor), steps, learning_rate)
    fixed = _losses(RIGHT, steps, learning_rate)
    return Symptom(
        "the loss does not converge",
        "l_old is not multiplied by exp(m_old - m_new)",
        "rescale l as well as O",
        "The probabilities no longer sum to 1, so the forward computes another function than the "
        "one whose gradient (from the stored LSE) the backward follows: the loss falls a little "
        "and stops.",
        f"mean squared error after {steps} steps of gradient descent",
        1e-6,
        faulty[-1],
        fixed[-1],
        (
            Shown(
                "loss",
                (tuple(faulty[i] for i in at), tuple(fixed[i] for i in at)),
                ("forgotten", "rescaled"),
                tuple(f"step {i}" for i in at),
            ),
        ),
    )


def _losses(recurrence: Recurrence, steps: int, learning_rate: float) -> list[float]:
    q_target, k, v = literal_inputs()
    target = tiled_attention(q_target, k, v).out
    q = torch.zeros_like(q_target)
    losses = []
    for _ in range(steps + 1):
        result = tiled_attention(q, k, v, recurrence=recurrence)
        residual = result.out - target
        losses.append(float(residual.square().mean()))
        grad_out = 2 * residual / residual.numel()
        q = q - learning_rate * _query_gradient(q, k, v, result.out, result.lse, grad_out)
    return losses


def _query_gradient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
) -> torch.Tensor:
    """dq as a fused backward computes it: P again from the stored LSE, delta from dO and O."""
    probs = torch.exp(attention_scores(q, k) - lse[:, None])
    delta = (grad_out * out).sum(1, keepdim=True)
    grad_scores = probs * (grad_out @ v.T - delta)
    return grad_scores @ k * float(q.shape[1] ** -0.5)


def output_zero_or_not_a_number() -> Symptom:
    """float16 exp of three rows of scores without and with the row maximum taken off."""
    scores = torch.tensor(
        (
            (11.0, 11.0, 11.0, 11.0),  # each exp fits float16, their sum does not
            (12.0, 1.0, 0.0, -1.0),  # exp(12) = 162,755 is above 65,504
            (-18.0, -19.0, -20.0, -18.0),  # every exp is below 2**-25
        ),
        dtype=torch.float16,
    )
    v = torch.tensor(((1.0,), (2.0,), (3.0,), (4.0,)), dtype=torch.float16)
    truth = torch.softmax(scores.double(), dim=1) @ v.double()
    faulty = _half_softmax_times(scores, v)
    fixed = _half_softmax_times(scores - scores.amax(1, keepdim=True), v)
    rows = ("all 11", "one 12", "all near -18")
    return Symptom(
        "the output is all 0 (or not a number)",
        "exp in float16 without the maximum taken off",
        "take the row maximum off before exp",
        "Three ways to fail: the sum overflows and finite / inf = 0; one exp overflows and "
        "inf / inf is not a number; every exp underflows and 0 / 0 is not a number. With the "
        "maximum taken off the largest exp is 1, so l is at least 1.",
        "rows of 3 with an error above 0.01",
        0.0,
        _wrong_rows(faulty, truth),
        _wrong_rows(fixed, truth),
        (
            Shown(
                "O",
                numbers(torch.cat((faulty.double(), fixed.double(), truth), dim=1)),
                rows,
                ("plain exp", "maximum off", "float64"),
            ),
        ),
    )


def _half_softmax_times(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(scores)
    return exponentials / exponentials.sum(1, keepdim=True) @ v


def _wrong_rows(out: torch.Tensor, truth: torch.Tensor) -> float:
    close = (out.double() - truth).abs() <= 0.01  # false for NaN
    return float((~close.all(1)).sum())


def bank_conflicts(columns: int = 64) -> Symptom:
    """Wavefronts of column reads and of ldmatrix on a 64-column tile for several paddings."""
    counts = tuple(
        tuple(float(wavefronts(pattern, columns, padding)) for padding in PADDINGS)
        for pattern in PATTERNS
    )
    return Symptom(
        "far slower than expected",
        "a warp reads a column of a 64-wide float32 tile in shared memory: every lane hits bank 0",
        "pad each row by 1 element",
        "The right padding depends on the access: 1 element of float32 (or 2 of float16, 4 bytes) "
        "frees a column read; 8 of float16 (16 bytes) frees ldmatrix but leaves the column read "
        "4-way; the article's 16 leaves "
        "conflicts in all three. Keeping S and P in registers, the "
        "article's last advice, avoids the question. ldmatrix also needs rows that start at "
        "multiples of 16 bytes, so 1 and 2 are no choice for it.",
        "wavefronts of one request (1 is free of conflicts)",
        1.0,
        float(wavefronts(COLUMN_FLOAT32, columns, 0)),
        float(wavefronts(COLUMN_FLOAT32, columns, 1)),
        (
            Shown(
                "wavefronts of one request",
                counts,
                tuple(pattern.name for pattern in PATTERNS),
                tuple(f"padding {padding}" for padding in PADDINGS),
            ),
        ),
    )


def small_errors(seqlen_q: int = 16, seqlen_k: int = 1024, head_dim: int = 16) -> Symptom:
    """Error of a tiled loop that keeps S, l and O in float16 against one that keeps them in
    float32."""
    q, k, v = _wave_inputs(seqlen_q, seqlen_k, head_dim)
    truth = torch.softmax(attention_scores(q.double(), k.double()), dim=1) @ v.double()
    eager = _error(_eager_in_half(q, k, v), truth)
    faulty = _error(_tiled_with_half_products(q, k, v, torch.float16), truth)
    fixed = _error(_tiled_with_half_products(q, k, v, torch.float32), truth)
    rounding = _error(truth.half(), truth)
    return Symptom(
        "the result is slightly off",
        f"S, P, l and O kept in float16 through {seqlen_k // 16} tiles",
        "S, P, l and O in float32; P rounded to float16 only as an operand of P V",
        "Every tile rounds l and O again, and the error grows with the number of tiles. With "
        "float32 sums what is left is the one rounding of the output.",
        "largest error against float64 (limit: twice that of eager attention in float16)",
        2 * eager,
        faulty,
        fixed,
        (
            Shown(
                "largest error",
                (faulty, fixed, eager, rounding),
                columns=("float16 sums", "float32 sums", "eager float16", "rounding of O alone"),
            ),
        ),
    )


def _wave_inputs(
    seqlen_q: int, seqlen_k: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sines of the element's number: the same on every machine, with no random generator."""

    def waves(rows: int, frequency: float, phase: float) -> torch.Tensor:
        index = torch.arange(rows * head_dim, dtype=torch.float64).reshape(rows, head_dim)
        return torch.sin(frequency * index + phase)

    q, k = 2 * waves(seqlen_q, 1.3, 1.0), 2 * waves(seqlen_k, 0.7, 2.0)
    v = waves(seqlen_k, 0.9, 0.0) + 0.5
    return q.half(), k.half(), v.half()


def _eager_in_half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention that rounds q kᵀ, P and O to float16, each product summed in float32."""
    scores = (q.float() @ k.float().T).half() * float(q.shape[1] ** -0.5)
    return (torch.softmax(scores, dim=1).float() @ v.float()).half()


def _tiled_with_half_products(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.dtype, tile_n: int = 16
) -> torch.Tensor:
    """Tiled attention with float16 operands; S, m, l and O are kept in the dtype `kept`."""
    row_max = torch.full((q.shape[0],), -math.inf, dtype=kept)
    row_sum = torch.zeros(q.shape[0], dtype=kept)
    accumulator = torch.zeros(q.shape[0], v.shape[1], dtype=kept)
    for first_key in range(0, k.shape[0], tile_n):
        keys = slice(first_key, first_key + tile_n)
        scores = attention_scores(q.float(), k[keys].float()).to(kept)
        max_new = torch.maximum(row_max, scores.amax(1))
        rescale = torch.exp(row_max - max_new)
        probs = torch.exp(scores - max_new[:, None])
        product = probs.half().float() @ v[keys].float()  # float16 operands, float32 sum: the mma
        row_sum = row_sum * rescale + probs.sum(1)
        accumulator = accumulator * rescale[:, None] + product.to(kept)
        row_max = max_new
    return (accumulator / row_sum[:, None]).half()


def _error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth).abs().max())


def launch_failure() -> Symptom:
    """Shared memory of several tiles against what a block may have on each chip."""
    limit = BLOCK_LIMITS_KIB["sm_80"]
    fits = tuple(
        (choice.shared_kib, *(float(choice.shared_kib <= kib) for kib in BLOCK_LIMITS_KIB.values()))
        for choice in TILE_CHOICES
    )
    return Symptom(
        "the kernel does not launch",
        f"a tile of {LARGE_TILE.label} on sm_80",
        "fewer stages (here 1), a smaller tile, or S and P in registers",
        "An sm_80 SM has 164 KiB, of which a block may use 163. Above 48 KiB the launch also fails "
        "until the kernel opts in (cudaFuncAttributeMaxDynamicSharedMemorySize), whatever the "
        "chip has.",
        "KiB of shared memory a block",
        float(limit),
        LARGE_TILE.shared_kib,
        FITTING_TILE.shared_kib,
        (
            Shown(
                "KiB a block, and whether it fits (1) or not (0)",
                fits,
                tuple(choice.label for choice in TILE_CHOICES),
                ("KiB", *(f"{kib}: {chip}" for chip, kib in BLOCK_LIMITS_KIB.items())),
            ),
        ),
    )
