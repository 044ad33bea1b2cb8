"""The Hopper backward as `flashdig::attention_backward` calls it, and what it does not serve.

Rows that see no key and keys that no row sees are cut off before a kernel runs: what they hold
shows nowhere, and their gradients are zeros.
"""

from __future__ import annotations

import torch

from flashdig.dispatch import Request
from flashdig.kernels.hopper.backward_launch import TILES, Call, hopper_backward
from flashdig.kernels.hopper.descriptors import taken_by_tma
from flashdig.kernels.triton.backward import _dsinks
from flashdig.problem import AttentionProblem

Wanted = tuple[bool, bool, bool, bool, bool]


def reasons_against(problem: AttentionProblem, request: Request) -> list[str]:
    """Why the kernels cannot serve a problem that the Hopper forward serves; empty if they can."""
    reasons = []
    sizes = ", ".join(map(str, TILES))
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size not in TILES:
            reasons.append(f"{name} must be one of {sizes}, not {size}")
    if problem.head_dim != problem.head_dim_v:
        reasons.append("head_dim_v must equal head_dim")
    for name, asked in (
        ("packed input", problem.packed),
        ("bias", problem.bias != "none"),
        ("dropout", problem.dropout),
    ):
        if asked:
            reasons.append(f"no {name}")
    return reasons


def live_ranges(
    seqlen_q: int, seqlen_k: int, offset: int, left: int, right: int
) -> tuple[int, int, int, int]:
    """(first row, end, first key, end): rows that see some key, and keys that some row sees.

    Args:
        left, right: keys seen on each side of the diagonal; -1 is unlimited.

    Inside, every row sees a key and every key is seen.
    """
    row, row_end, key, key_end = 0, seqlen_q, 0, seqlen_k
    if right >= 0:
        row = min(max(0, -offset - right), seqlen_q)
    if left >= 0:
        row_end = max(row, min(seqlen_q, seqlen_k - offset + left))
        key = min(max(0, row + offset - left), seqlen_k)
    if right >= 0:
        key_end = max(key, min(seqlen_k, row_end + offset + right))
    if row == row_end:
        key_end = key
    return row, row_end, key, key_end


def attention_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    wanted: Wanted,
    deterministic: bool | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of the Hopper forward; arguments and results are those of the portable
    `flashdig.kernels.triton.backward.attention_backward`, of dense input without bias and dropout.

    Args:
        deterministic: dQ comes from a kernel of its own, and every gradient is the same bits in
            every run; None follows `torch.use_deterministic_algorithms`.

    Raises ValueError for a bias, for dropout, for packed input and for other head_dims.
    """
    if bias is not None or dropout_p > 0.0 or cu_seqlens_q is not None:
        raise ValueError("the Hopper backward takes no bias, no dropout_p and no cu_seqlens")
    if q.shape[-1] not in TILES or v.shape[-1] != q.shape[-1]:
        sizes = ", ".join(map(str, TILES))
        raise ValueError(
            f"the Hopper backward takes a head_dim of q, k and v of {sizes}, "
            f"not {q.shape[-1]} and {v.shape[-1]}"
        )
    seqlen_q, seqlen_k = q.shape[1], k.shape[1]
    offset = 0 if top_left else seqlen_k - seqlen_q
    row, row_end, key, key_end = live_ranges(seqlen_q, seqlen_k, offset, window_left, window_right)
    whole = (row, row_end, key, key_end) == (0, seqlen_q, 0, seqlen_k)
    rows, keys = slice(row, row_end), slice(key, key_end)
    make = torch.empty if whole else torch.zeros
    want_q, want_k, want_v, _, want_sinks = wanted
    want_keys = want_k or want_v
    dq = make(q.shape, dtype=q.dtype, device=q.device) if want_q else None
    dk = make(k.shape, dtype=k.dtype, device=k.device) if want_keys else None
    dv = make(v.shape, dtype=v.dtype, device=v.device) if want_keys else None
    delta = None
    sign = 1.0
    if not (softmax_scale > 0.0 or softcap > 0.0 or alibi_slopes is not None):
        # scores reach log2 by a factor above zero
        sign, softmax_scale = float(-(softmax_scale < 0.0)), abs(softmax_scale) or 1.0
        q = q * sign
    if row_end > row and 0 not in (q.numel(), k.numel()):
        if deterministic is None:
            deterministic = torch.are_deterministic_algorithms_enabled()
        call = Call(
            taken_by_tma(torch.zeros_like(out) if grad_out is None else grad_out)[:, rows],
            None if grad_lse is None else grad_lse[:, :, rows],
            taken_by_tma(q)[:, rows],
            taken_by_tma(k)[:, keys],
            taken_by_tma(v)[:, keys],
            alibi_slopes,
            taken_by_tma(out)[:, rows],
            lse[:, :, rows].contiguous(),
            softmax_scale=softmax_scale,
            softcap=softcap,
            window_left=window_left,
            window_right=window_right,
            offset=offset + row - key,
        )
        delta = hopper_backward(
            call,
            None if dq is None else dq[:, rows],
            None if dk is None else dk[:, keys],
            None if dv is None else dv[:, keys],
            dq_apart=deterministic,
        )
    if dq is not None and sign != 1.0:
        dq *= sign
    dsinks = None
    if want_sinks and sinks is not None:
        # rows that see nothing know the sink by their log-sum-exp alone
        of_rows = torch.zeros_like(lse) if grad_lse is None else -grad_lse.float()
        if delta is not None:
            of_rows[:, :, rows] = delta
        dsinks = _dsinks(sinks, lse, of_rows)
    return dq, dk if want_k else None, dv if want_v else None, None, dsinks
