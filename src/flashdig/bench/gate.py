"""Correct first: an output is compared with float64 before its time counts.

The allowance is what PyTorch itself loses in the same dtype: twice the error of eager attention
that rounds QKᵀ, P and O to the dtype, plus 1e-5. All tensors here are (batch, heads, seqlen,
head_dim), the layout of the exhibits; causal is aligned to the bottom right.
"""

from __future__ import annotations

import contextlib
import math
import random
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

Pair = tuple[int, int]
Pairs = Literal["auto", "all"] | Sequence[Pair]

ERROR_FACTOR = 2.0
ERROR_FLOOR = 1e-5
# of the largest reference value, where eager attention itself overflows
OVERFLOW_ALLOWANCE = 2.0**-8
# An LSE is summed in float32 whatever the inputs are: |error| <= this * (1 + |lse|).
LSE_TOLERANCE = 1e-4
# (query, key) pairs over all heads up to which "auto" checks the whole problem: a second or two of
# float64 on two CPU cores
WHOLE_PROBLEM_LIMIT = 2**27
# scores held at once, 134 MB in float64
CHUNK_SCORES = 2**24
RANDOM_SEED = 2026


@dataclass(frozen=True)
class GateResult:
    """Verdict on one output.

    Attributes:
        ok: everything holds.
        error: max |out - float64 reference| over what was checked; None when the output could not
            be compared (wrong shape or dtype).
        budget: the error that is allowed.
        reason: "ok", or what does not hold.
        checked: which (batch, head) pairs were compared with float64.
    """

    ok: bool
    error: float | None
    budget: float | None
    reason: str
    checked: str


def naive_rounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Eager attention in the inputs' dtype: QKᵀ, P and O are each rounded to it.

    float32 matmuls obey torch's TF32 setting, as any eager code does. Rows that see no key are 0.
    The whole score matrix is in memory.

    Args:
        q: (batch, num_heads, seqlen_q, head_dim).
        k: (batch, num_heads_kv, seqlen_k, head_dim); KV heads are repeated for grouped heads.
        v: (batch, num_heads_kv, seqlen_k, head_dim_v).

    Returns:
        (batch, num_heads, seqlen_q, head_dim_v), the inputs' dtype.
    """
    _require_attention_inputs(q, k, v)
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    offset = k.shape[2] - q.shape[2] if causal else None
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return _eager_rows(q, k, v, offset, _scale(q, softmax_scale))[0]


def check(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    lse: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    pairs: Pairs = "auto",
) -> GateResult:
    """Judge an attention output (and LSE) against float64 on the tensors' own device.

    Over the whole output: shape, dtype, finite values, exact zeros (LSE -inf) in rows that see no
    key. Against float64: the error of the out and of the LSE, on every (batch, head) pair when the
    problem has at most 2^27 scores, else on the first, the last and two random ones.

    Args:
        out: (batch, num_heads, seqlen_q, head_dim_v), q's dtype.
        q, k, v: as for `naive_rounded`.
        lse: (batch, num_heads, seqlen_q), natural logarithm, float32. Its error may be 1e-4 * (1 +
            |lse|); for float32 inputs twice eager attention's is added, so that a TF32 setting is
            allowed for.
        pairs: "auto", "all", or the (batch, head) pairs to compare.

    Raises:
        ValueError: q, k, v do not fit each other, or a pair does not exist.
    """
    _require_attention_inputs(q, k, v)
    chosen, checked = _choose_pairs(q, k, pairs)
    problem = _whole_output_problem(out, lse, q, k, v, causal)
    if problem is not None:
        return GateResult(False, None, None, problem, checked)
    found = _compare(out, lse, q, k, v, causal, _scale(q, softmax_scale), chosen)
    if not math.isfinite(found.largest):
        reason = "the float64 reference is not finite: q, k or v holds NaN or infinite values"
        return GateResult(False, None, None, reason, checked)
    budget = ERROR_FACTOR * found.eager_error + ERROR_FLOOR
    if not math.isfinite(budget):
        budget = OVERFLOW_ALLOWANCE * found.largest
    reason = "ok"
    if found.error > budget:
        reason = f"error {found.error:.3g} against float64 is above the allowed {budget:.3g}"
    elif found.lse_problem is not None:
        reason = found.lse_problem
    return GateResult(reason == "ok", found.error, budget, reason, checked)


def _require_attention_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, seqlen, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"q, k and v must share dtype and device, got {q.dtype} on {q.device} "
                f"and {name} {x.dtype} on {x.device}"
            )
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"k must have q's batch and head_dim, got {tuple(k.shape)} for {tuple(q.shape)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must have k's batch, heads and seqlen, got {tuple(v.shape)} for {tuple(k.shape)}"
        )
    if q.shape[1] and (not k.shape[1] or q.shape[1] % k.shape[1]):
        raise ValueError(
            f"q's heads ({q.shape[1]}) must be a multiple of k's and v's ({k.shape[1]})"
        )


def _scale(q: torch.Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[3] ** -0.5) if softmax_scale is None else softmax_scale


def _choose_pairs(q: torch.Tensor, k: torch.Tensor, pairs: Pairs) -> tuple[list[Pair], str]:
    batch, heads = q.shape[:2]
    total = batch * heads
    numbers: Sequence[int]
    if isinstance(pairs, str):
        if pairs not in ("auto", "all"):
            raise ValueError(f"pairs must be 'auto', 'all' or (batch, head) pairs, got {pairs!r}")
        whole = total * q.shape[2] * k.shape[2] <= WHOLE_PROBLEM_LIMIT
        numbers = range(total) if whole or pairs == "all" else _first_last_and_two_random(total)
    else:
        for b, h in pairs:
            if not (0 <= b < batch and 0 <= h < heads):
                raise ValueError(f"pairs: ({b}, {h}) is outside batch {batch} x heads {heads}")
        numbers = [b * heads + h for b, h in pairs]
        if not numbers:
            raise ValueError("pairs must name at least one (batch, head) pair")
    chosen = [divmod(number, heads) for number in numbers]
    if len(set(chosen)) == total:
        return chosen, f"all {total} (batch, head) pairs"
    listed = ", ".join(str(pair) for pair in chosen)
    return chosen, f"{len(chosen)} of {total} (batch, head) pairs: {listed}"


def _first_last_and_two_random(total: int) -> Sequence[int]:
    if total <= 4:
        return range(total)
    drawn = random.Random(RANDOM_SEED).sample(range(1, total - 1), 2)
    return [0, *sorted(drawn), total - 1]


def _whole_output_problem(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
) -> str | None:
    """What can be said of the whole output without a reference."""
    import torch

    shape = (*q.shape[:3], v.shape[3])
    if tuple(out.shape) != shape:
        return f"out has shape {tuple(out.shape)}, expected {shape}"
    if out.dtype != q.dtype:
        return f"out is {out.dtype}, expected {q.dtype}"
    if not bool(torch.isfinite(out).all()):
        count = int((~torch.isfinite(out)).sum())
        return f"out has {count} values that are NaN or infinite"
    blind = _rows_without_keys(q, k, causal)
    if bool((out[:, :, :blind] != 0).any()):
        return "out is not 0 in rows that see no key"
    if lse is None:
        return None
    if tuple(lse.shape) != tuple(q.shape[:3]):
        return f"lse has shape {tuple(lse.shape)}, expected {tuple(q.shape[:3])}"
    if lse.dtype != torch.float32:
        return f"lse is {lse.dtype}, expected torch.float32"
    if not bool((lse[:, :, :blind] == -torch.inf).all()):
        return "lse is not -inf in rows that see no key"
    if not bool(torch.isfinite(lse[:, :, blind:]).all()):
        return "lse has NaN or infinite values in rows that see keys"
    return None


def _rows_without_keys(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """How many rows, the first ones, see no key."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if seqlen_k == 0:
        return seqlen_q
    return max(0, seqlen_q - seqlen_k) if causal else 0


@dataclass
class _Comparison:
    """Maxima over what has been compared so far."""

    error: float = 0.0
    eager_error: float = 0.0
    largest: float = 0.0
    lse_problem: str | None = None


def _compare(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    chosen: Sequence[Pair],
) -> _Comparison:
    """Walk over groups of pairs and chunks of rows, so that about CHUNK_SCORES scores, and as many
    elements of q, k and v, are held at once (or one pair's inputs and one row's scores)."""
    import torch

    found = _Comparison()
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    inputs = (seqlen_q + seqlen_k) * max(q.shape[3], v.shape[3])
    pairs_at_once = max(1, CHUNK_SCORES // max(1, inputs, seqlen_q * seqlen_k))
    rows_at_once = max(1, CHUNK_SCORES // max(1, pairs_at_once * seqlen_k))
    for first_pair in range(0, len(chosen), pairs_at_once):
        part = torch.tensor(chosen[first_pair : first_pair + pairs_at_once], device=q.device)
        b, h = part.unbind(1)
        keys, values = k[b, h // group], v[b, h // group]
        keys64, values64 = keys.double(), values.double()
        for row in range(0, seqlen_q, rows_at_once):
            rows = slice(row, row + rows_at_once)
            queries = q[b, h, rows]
            offset = seqlen_k - seqlen_q + row if causal else None
            exact, exact_lse = _eager_rows(queries.double(), keys64, values64, offset, scale)
            eager, eager_lse = _eager_rows(queries, keys, values, offset, scale)
            found.largest = _larger(found.largest, exact)
            found.error = _larger(found.error, out[b, h, rows].double() - exact)
            found.eager_error = _larger(found.eager_error, eager.double() - exact)
            if lse is not None and found.lse_problem is None:
                found.lse_problem = _lse_problem(lse[b, h, rows], exact_lse, eager_lse, q.dtype)
    return found


def _larger(so_far: float, values: torch.Tensor) -> float:
    """max(so_far, max |values|), where NaN counts as the largest."""
    if values.numel() == 0:
        return so_far
    largest = float(values.abs().max())
    return largest if math.isnan(largest) else max(so_far, largest)


def _lse_problem(
    lse: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype
) -> str | None:
    import torch

    seen = exact != -torch.inf
    error = (lse[seen].double() - exact[seen]).abs()
    allowed = LSE_TOLERANCE * (1 + exact[seen].abs())
    if dtype == torch.float32:
        lost = _larger(0.0, eager[seen].double() - exact[seen])
        allowed = allowed + ERROR_FACTOR * lost
    excess = error - allowed
    if excess.numel() == 0 or float(excess.max()) <= 0:
        return None
    worst = int(excess.argmax())
    return (
        f"lse error {float(error[worst]):.3g} against float64 is above "
        f"the allowed {float(allowed[worst]):.3g}"
    )


def _eager_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some query rows in the inputs' dtype, and the LSE of its scores.

    Row i sees keys j <= i + offset; None sees all. In float64 this is the reference, in a shorter
    dtype it is what rounding every intermediate to that dtype costs.

    Args:
        q: (..., rows, head_dim); k, v: (..., seqlen_k, head_dim or head_dim_v), heads already
            repeated.

    Returns:
        out (..., rows, head_dim_v), the inputs' dtype; lse (..., rows), float64 for float64 inputs,
        else float32, -inf where no key is seen.
    """
    import torch

    scores = (q @ k.transpose(-1, -2)) * scale
    rows, seqlen_k = scores.shape[-2:]
    if seqlen_k == 0:
        empty = torch.full(scores.shape[:-1], -torch.inf, device=q.device, dtype=torch.float64)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), empty
    blind = 0
    if offset is not None:
        i = torch.arange(rows, device=q.device)[:, None]
        scores.masked_fill_(torch.arange(seqlen_k, device=q.device) > i + offset, -torch.inf)
        blind = min(rows, max(0, -offset))
    probs = scores.softmax(dim=-1)
    # a softmax over no key is 0/0
    probs[..., :blind, :] = 0
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return probs @ v, scores.to(wide).logsumexp(dim=-1)


def poison(nbytes: int, device: torch.device | str = "cuda") -> None:
    """Fill `nbytes` of the caching allocator's free memory with NaN.

    A kernel that leaves part of its output unwritten then shows NaN and not the right answer of an
    earlier call. For CUDA, whose allocator hands the freed block to the next call; on a CPU use
    `poisoned_allocator`.
    """
    import torch

    if nbytes < 0:
        raise ValueError(f"nbytes must be >= 0, got {nbytes}")
    # all bits set is NaN in every floating-point dtype; a large and some small blocks, since the
    # allocator keeps requests up to 1 MiB apart
    sizes = [nbytes, *[2**19] * 8]
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    del blocks


@contextlib.contextmanager
def poisoned_allocator() -> Iterator[None]:
    """While it is entered, torch.empty and its kin return tensors filled with NaN, on any device.

    It turns torch's deterministic mode on (warnings only), which may choose other kernels for a
    backward pass: never time inside, and use `poison` where the path must stay the same.
    """
    import torch

    mode = torch.get_deterministic_debug_mode()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.set_deterministic_debug_mode(mode)
