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
# scores (and output values) over all heads up to which "auto" compares the whole problem
WHOLE_PROBLEM_LIMIT = 2**27
# scores held at once, 34 MB in float64
CHUNK_SCORES = 2**22
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
        rms_error: root of the mean square of out - reference over what was checked, where asked.
    """

    ok: bool
    error: float | None
    budget: float | None
    reason: str
    checked: str
    rms_error: float | None = None


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
    """Judge one attention output (and LSE); for several of one problem, make the reference once
    with `float64_reference` and use its `check`.

    Args:
        out: (batch, num_heads, seqlen_q, head_dim_v), q's dtype.
        lse: (batch, num_heads, seqlen_q), natural logarithm, float32.
        q, k, v, causal, softmax_scale, pairs: as for `float64_reference`.
    """
    reference = float64_reference(q, k, v, causal=causal, softmax_scale=softmax_scale, pairs=pairs)
    return reference.check(out, lse)


@dataclass(frozen=True)
class Reference:
    """What an output of one problem is compared with, computed once for any number of outputs.

    Attributes:
        shape: of the output, (batch, num_heads, seqlen_q, head_dim_v).
        dtype: of the output.
        rows_without_keys: the first rows, which see no key.
        b, h: indices of the compared (batch, head) pairs.
        out: (pairs, seqlen_q, head_dim_v), float64.
        lse: (pairs, seqlen_q), float64.
        eager_error, eager_lse_error: largest errors of `naive_rounded` and of its scores' LSE; the
            latter for float32 only, 0 for other dtypes.
        checked: the pairs in words.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    rows_without_keys: int
    b: torch.Tensor
    h: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    eager_error: float
    eager_lse_error: float
    checked: str

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> GateResult:
        """Judge an output (and its LSE).

        Over the whole output: shape, dtype, finite values, exact zeros (LSE -inf) in rows that see
        no key. On the compared pairs: the error of the output against the budget, and of the LSE
        against 1e-4 * (1 + |lse|). For float32 inputs twice eager attention's LSE error is added,
        so that torch's TF32 setting is allowed for.
        """
        problem = self._whole_output_problem(out, lse)
        if problem is not None:
            return GateResult(False, None, None, problem, self.checked)
        largest = _largest(self.out)
        if not math.isfinite(largest):
            reason = "the float64 reference is not finite: q, k or v holds NaN or infinite values"
            return GateResult(False, None, None, reason, self.checked)
        error = _largest(out[self.b, self.h].double() - self.out)
        budget = ERROR_FACTOR * self.eager_error + ERROR_FLOOR
        if not math.isfinite(budget):
            budget = OVERFLOW_ALLOWANCE * largest
        reason = "ok"
        if error > budget:
            reason = f"error {error:.3g} against float64 is above the allowed {budget:.3g}"
        elif lse is not None:
            reason = self._lse_problem(lse) or "ok"
        return GateResult(reason == "ok", error, budget, reason, self.checked)

    def _whole_output_problem(self, out: torch.Tensor, lse: torch.Tensor | None) -> str | None:
        """What can be said of the whole output without a reference."""
        import torch

        if tuple(out.shape) != self.shape:
            return f"out has shape {tuple(out.shape)}, expected {self.shape}"
        if out.dtype != self.dtype:
            return f"out is {out.dtype}, expected {self.dtype}"
        if not bool(torch.isfinite(out).all()):
            count = int((~torch.isfinite(out)).sum())
            return f"out has {count} values that are NaN or infinite"
        blind = self.rows_without_keys
        if bool((out[:, :, :blind] != 0).any()):
            return "out is not 0 in rows that see no key"
        if lse is None:
            return None
        if tuple(lse.shape) != self.shape[:3]:
            return f"lse has shape {tuple(lse.shape)}, expected {self.shape[:3]}"
        if lse.dtype != torch.float32:
            return f"lse is {lse.dtype}, expected torch.float32"
        if not bool((lse[:, :, :blind] == -torch.inf).all()):
            return "lse is not -inf in rows that see no key"
        if not bool(torch.isfinite(lse[:, :, blind:]).all()):
            return "lse has NaN or infinite values in rows that see keys"
        return None

    def _lse_problem(self, lse: torch.Tensor) -> str | None:
        exact = self.lse[:, self.rows_without_keys :]
        if exact.numel() == 0:
            return None
        error = (lse[self.b, self.h, self.rows_without_keys :].double() - exact).abs()
        allowed = LSE_TOLERANCE * (1 + exact.abs()) + ERROR_FACTOR * self.eager_lse_error
        worst = int((error - allowed).argmax())
        found, limit = float(error.flatten()[worst]), float(allowed.flatten()[worst])
        if found <= limit:
            return None
        return f"lse error {found:.3g} against float64 is above the allowed {limit:.3g}"


def float64_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    pairs: Pairs = "auto",
) -> Reference:
    """Exact attention in float64, and what eager attention loses, on the tensors' own device.

    "auto" takes every (batch, head) pair when the problem has at most 2^27 scores (and output
    values), else the first, the last and two random ones. Memory beyond the result is bounded:
    about 2^22 scores, or one row's, are held at once.

    Args:
        q, k, v: as for `naive_rounded`.
        causal: aligned to the bottom right: row i sees keys j <= i + seqlen_k - seqlen_q.
        softmax_scale: default head_dim ** -0.5.
        pairs: "auto", "all", or the (batch, head) pairs to compare.

    Raises:
        ValueError: q, k, v do not fit each other, or a pair does not exist.
    """
    import torch

    _require_attention_inputs(q, k, v)
    chosen, checked = _choose_pairs(q, k, v, pairs)
    scale = _scale(q, softmax_scale)
    b, h = torch.tensor(chosen, dtype=torch.long, device=q.device).reshape(-1, 2).unbind(1)
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1] if k.shape[1] else 1
    exact_out = torch.zeros(len(chosen), seqlen_q, v.shape[3], dtype=torch.float64, device=q.device)
    exact_lse = torch.zeros(len(chosen), seqlen_q, dtype=torch.float64, device=q.device)
    eager_error = eager_lse_error = 0.0
    inputs = (seqlen_q + seqlen_k) * max(q.shape[3], v.shape[3])
    pairs_at_once = max(1, CHUNK_SCORES // max(1, inputs, seqlen_q * seqlen_k))
    rows_at_once = max(1, CHUNK_SCORES // max(1, pairs_at_once * seqlen_k))
    for first in range(0, len(chosen), pairs_at_once):
        part = slice(first, first + pairs_at_once)
        keys, values = k[b[part], h[part] // group], v[b[part], h[part] // group]
        keys64, values64 = keys.double(), values.double()
        for row in range(0, seqlen_q, rows_at_once):
            rows = slice(row, min(row + rows_at_once, seqlen_q))
            offset = seqlen_k - seqlen_q + row if causal else None
            # keys that none of these rows sees cost nothing
            seen = seqlen_k if offset is None else max(0, min(seqlen_k, rows.stop - row + offset))
            queries = q[b[part], h[part], rows]
            out, lse = _exact_rows(
                queries.double(), keys64[:, :seen], values64[:, :seen], offset, scale
            )
            eager, eager_lse = _eager_rows(queries, keys[:, :seen], values[:, :seen], offset, scale)
            exact_out[part, rows], exact_lse[part, rows] = out, lse
            eager_error = _larger(eager_error, eager.double() - out)
            if eager_lse is not None:
                sees = lse != -torch.inf
                eager_lse_error = _larger(eager_lse_error, eager_lse[sees].double() - lse[sees])
    return Reference(
        shape=(*q.shape[:3], v.shape[3]),
        dtype=q.dtype,
        rows_without_keys=_rows_without_keys(q, k, causal),
        b=b,
        h=h,
        out=exact_out,
        lse=exact_lse,
        eager_error=eager_error,
        eager_lse_error=eager_lse_error,
        checked=checked,
    )


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


def _choose_pairs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pairs: Pairs
) -> tuple[list[Pair], str]:
    batch, heads = q.shape[:2]
    total = batch * heads
    numbers: Sequence[int]
    if isinstance(pairs, str):
        if pairs not in ("auto", "all"):
            raise ValueError(f"pairs must be 'auto', 'all' or (batch, head) pairs, got {pairs!r}")
        whole = total * q.shape[2] * max(k.shape[2], v.shape[3]) <= WHOLE_PROBLEM_LIMIT
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


def _rows_without_keys(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
    """How many rows, the first ones, see no key."""
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]
    if seqlen_k == 0:
        return seqlen_q
    return max(0, seqlen_q - seqlen_k) if causal else 0


def _largest(values: torch.Tensor) -> float:
    """max |values|, NaN if any is NaN; 0 of nothing."""
    return float(values.abs().max()) if values.numel() else 0.0


def _larger(so_far: float, values: torch.Tensor) -> float:
    """max(so_far, max |values|), where NaN counts as the largest and stays."""
    largest = _largest(values)
    return largest if math.isnan(largest) else max(so_far, largest)


def _hide(scores: torch.Tensor, offset: int | None) -> int:
    """Set scores (..., rows, keys) of keys j > i + offset to -inf in place; returns how many rows,
    the first ones, see no key."""
    import torch

    rows, keys = scores.shape[-2:]
    if keys == 0:
        return rows
    if offset is None:
        return 0
    i = torch.arange(rows, device=scores.device)[:, None]
    j = torch.arange(keys, device=scores.device)
    scores.masked_fill_(j > i + offset, -torch.inf)
    return min(rows, max(0, -offset))


def _exact_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some query rows in float64: out (..., rows, head_dim_v) and lse (..., rows).

    q is (..., rows, head_dim), k and v (..., keys, head_dim or head_dim_v) with a head each; row i
    sees keys j <= i + offset, or all.
    """
    import torch

    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    blind = _hide(scores, offset)
    if blind == scores.shape[-2]:
        nothing = torch.full(q.shape[:-1], -torch.inf, dtype=q.dtype, device=q.device)
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), nothing
    row_max = scores.amax(dim=-1, keepdim=True)
    # -inf - -inf is no number
    row_max[..., :blind, :] = 0
    probs = scores.sub_(row_max).exp_()
    row_sum = probs.sum(dim=-1, keepdim=True)
    out = (probs @ v).div_(row_sum)
    out[..., :blind, :] = 0
    return out, (row_max + row_sum.log()).squeeze(-1)


def _eager_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offset: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same as anyone writes it in PyTorch, rounding every intermediate to the inputs' dtype.
    The LSE is of float32 inputs only, elsewhere None."""
    import torch

    scores = _matmul_rounded(q, k.transpose(-1, -2)) * scale
    blind = _hide(scores, offset)
    probs = scores.softmax(dim=-1)
    # a softmax over no key is 0/0
    probs[..., :blind, :] = 0
    out = _matmul_rounded(probs, v)
    return out, scores.logsumexp(dim=-1) if q.dtype == torch.float32 else None


def _matmul_rounded(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b, summed in float32 at least and rounded to a's dtype.

    GPUs do so by themselves; on CPUs without 16-bit arithmetic torch's own 16-bit product gives the
    same at a tenth of the speed.
    """
    if a.device.type == "cpu" and a.element_size() == 2:
        return (a.float() @ b.float()).to(a.dtype)
    return a @ b


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
        # use_deterministic_algorithms would do the same, and import Inductor: two seconds
        torch.set_deterministic_debug_mode("warn")
        settings.fill_uninitialized_memory = True
        try:
            yield
        finally:
            settings.fill_uninitialized_memory = fill
            torch.set_deterministic_debug_mode(mode)
