"""The Hopper backward as `flashdig::attention_backward` calls it, and what it does not serve.

Rows that see no key and keys that no row sees are cut off before anything is multiplied: what they
hold shows nowhere, and their gradients are zeros. Dense input is cut here, packed input by the
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flashdig.kernels.hopper.backward_launch import Call, Launches, hopper_backward
from flashdig.kernels.hopper.backward_tiles import TILES
from flashdig.kernels.hopper.descriptors import taken_by_tma
from flashdig.kernels.launch import allocation
from flashdig.kernels.plans import Plan
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton import backward as portable
from flashdig.kernels.triton.arguments import prepared

Wanted = portable.Wanted
# a TMA coordinate has 32 bits: rows of all heads, padded to whole tiles
MAX_ROWS = 2**31 - 1


def reasons_against(
    head_dim: int, head_dim_v: int, *, bias: bool = False, dropout: bool = False
) -> list[str]:
    """Why these kernels do not make the gradients of a call of the Hopper forward; empty: they do.

    The portable backward makes those of the others.
    """
    reasons = []
    for name, size in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if size > max(TILES) or size % 8:
            reasons.append(f"{name} must be a multiple of 8 up to {max(TILES)}, not {size}")
    if bias:
        reasons.append("no bias")
    if dropout:
        reasons.append("no dropout")
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
    `flashdig.kernels.triton.backward.attention_backward`, which serves what `reasons_against` names
    and whatever is empty.

    Args:
        deterministic: dQ comes from a kernel of its own, and every gradient is the same bits in
            every run; None follows `torch.use_deterministic_algorithms`.
    """
    packed = cu_seqlens_q is not None
    if not _is_served(q, k, v, bias, dropout_p, cu_seqlens_q):
        return portable.attention_backward(
            grad_out, grad_lse, q, k, v, bias, alibi_slopes, sinks, dropout_seed, cu_seqlens_q,
            cu_seqlens_k, seqused_q, seqused_k, out, lse,
            softmax_scale=softmax_scale, softcap=softcap, dropout_p=dropout_p,
            window_left=window_left, window_right=window_right, top_left=top_left,
            allow_tf32=allow_tf32, wanted=wanted,
        )  # fmt: skip
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    seqlen_q, seqlen_k = q.shape[-3], k.shape[-3]
    offset = 0 if top_left else seqlen_k - seqlen_q
    row, row_end, key, key_end = 0, seqlen_q, 0, seqlen_k
    if not packed:
        row, row_end, key, key_end = live_ranges(
            seqlen_q, seqlen_k, offset, window_left, window_right
        )
    rows, keys = slice(row, row_end), slice(key, key_end)
    whole = (row, row_end, key, key_end) == (0, seqlen_q, 0, seqlen_k)
    make = torch.empty if whole and not packed else torch.zeros
    want_q, want_k, want_v, _, want_sinks = wanted
    dq = make(q.shape, dtype=q.dtype, device=q.device) if want_q else None
    dk = make(k.shape, dtype=k.dtype, device=k.device) if want_k or want_v else None
    dv = make(v.shape, dtype=v.dtype, device=v.device) if want_k or want_v else None
    delta = None
    if want_sinks and sinks is not None:
        delta = _sinks_delta(lse, grad_lse)
    sign = 1.0
    if not (softmax_scale > 0.0 or softcap > 0.0 or alibi_slopes is not None):
        # scores reach log2 by a factor above zero
        sign, softmax_scale = float(-(softmax_scale < 0.0)), abs(softmax_scale) or 1.0
        q = q * sign
    if alibi_slopes is not None and alibi_slopes.stride(-1) != 1:
        alibi_slopes = alibi_slopes.contiguous()
    if row_end > row:
        live_delta = None if delta is None else delta[..., rows].contiguous()
        call = Call(
            taken_by_tma(torch.zeros_like(out) if grad_out is None else grad_out)[..., rows, :, :],
            None if grad_lse is None else grad_lse[..., rows],
            taken_by_tma(q)[..., rows, :, :],
            taken_by_tma(k)[..., keys, :, :],
            taken_by_tma(v)[..., keys, :, :],
            alibi_slopes,
            taken_by_tma(out)[..., rows, :, :],
            lse[..., rows].contiguous(),
            softmax_scale=softmax_scale,
            softcap=softcap,
            window_left=window_left,
            window_right=window_right,
            offset=offset + row - key,
            top_left=top_left,
            cu_seqlens_q=_vector(cu_seqlens_q),
            cu_seqlens_k=_vector(cu_seqlens_k),
            seqused_q=_vector(seqused_q),
            seqused_k=_vector(seqused_k),
        )
        hopper_backward(
            call,
            None if dq is None else dq[..., rows, :, :],
            None if dk is None else dk[..., keys, :, :],
            None if dv is None else dv[..., keys, :, :],
            live_delta,
            dq_apart=True if deterministic else None,
        )
        if delta is not None:
            delta[..., rows] = live_delta
    if dq is not None and sign != 1.0:
        dq *= sign
    dsinks = None if delta is None else portable._dsinks(sinks, lse, delta)
    return dq, dk if want_k else None, dv if want_v else None, None, dsinks


def plan_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *others: torch.Tensor,
    wanted: Wanted,
    deterministic: bool | None = None,
    **numbers: Any,
) -> Plan | None:
    """The plan of `attention_backward`'s arguments; see `flashdig.kernels.launch`. Calls in which
    rows or keys are cut off have none."""
    *tensors, out, lse = others
    call = prepared(*tensors, **numbers)
    q, k, v = call.q, call.k, call.v
    if not _is_served(q, k, v, call.bias, call.dropout_p, call.cu_seqlens_q):
        return portable.plan_backward(grad_out, grad_lse, *others, wanted=wanted, **numbers)
    if grad_out is None or call.copies(tensors) or not lse.is_contiguous():
        return None
    if any(taken_by_tma(x) is not x for x in (grad_out, q, k, v, out)):
        return None
    if not (call.softmax_scale > 0.0 or call.softcap > 0.0 or call.alibi_slopes is not None):
        return None
    offset = 0 if call.top_left else call.seqlen_k - call.seqlen_q
    if not call.packed:
        sides = (call.window_left, call.window_right)
        ranges = live_ranges(call.seqlen_q, call.seqlen_k, offset, *sides)
        if ranges != (0, call.seqlen_q, 0, call.seqlen_k):
            return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    launched = Call(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        call.alibi_slopes,
        out,
        lse,
        softmax_scale=call.softmax_scale,
        softcap=call.softcap,
        window_left=call.window_left,
        window_right=call.window_right,
        offset=offset,
        top_left=call.top_left,
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqused_q=call.seqused_q,
        seqused_k=call.seqused_k,
    )
    return _BackwardPlan(launched, wanted, dq_apart=True if deterministic else None)


class _BackwardPlan:
    """Allocates the gradients of one kind of call and launches what writes them. Plain calls can be
    replayed, see `flashdig.kernels.replay`."""

    counts = False

    def __init__(self, call: Call, wanted: Wanted, *, dq_apart: bool | None) -> None:
        self._wanted = wanted
        self._packed = call.packed
        made = (wanted[0], wanted[1] or wanted[2], wanted[1] or wanted[2])
        self._make = [
            allocation(x.shape, x.dtype, x.device) if make else _nothing
            for x, make in zip((call.q, call.k, call.v), made, strict=True)
        ]
        shapes = [
            torch.empty(x.shape, dtype=x.dtype, device="meta") if make else None
            for x, make in zip((call.q, call.k, call.v), made, strict=True)
        ]
        self._launches = Launches(call, *shapes, dq_apart=dq_apart)
        self.makes: tuple[Callable[[], Any], ...] = ()
        if all(wanted[:3]) and not wanted[4] and not call.packed:
            self.makes = (*self._make, self._launches.make_buffer)

    def __call__(
        self,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        dropout_seed: torch.Tensor | None,
        *others: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        *lengths, out, lse = others
        gradients = [make() for make in self._make]
        if self._packed:  # some rows belong to no program
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
        delta = None
        if self._wanted[4] and sinks is not None:
            delta = _sinks_delta(lse, grad_lse)
        self._launches(
            grad_out, grad_lse, q, k, v, alibi_slopes, lengths, out, lse, *gradients, delta
        )
        dq, dk, dv = gradients
        _, want_k, want_v, _, _ = self._wanted
        dsinks = None if delta is None else portable._dsinks(sinks, lse, delta)
        return dq, dk if want_k else None, dv if want_v else None, None, dsinks

    def launches(
        self, tensors: tuple[torch.Tensor | None, ...], made: Sequence[torch.Tensor]
    ) -> Steps:
        grad_out, grad_lse, q, k, v, _, alibi_slopes, _, _, *lengths, out, lse = tensors
        *gradients, buffer = made
        return self._launches.steps(
            buffer, grad_out, grad_lse, q, k, v, alibi_slopes, lengths, out, lse, *gradients
        )


def _nothing() -> None:
    return None


def _sinks_delta(lse: torch.Tensor, grad_lse: torch.Tensor | None) -> torch.Tensor:
    """Where the kernels write rowsum(dO * O) - dLSE of live rows: rows that see nothing know the
    sink by their log-sum-exp alone."""
    delta = torch.zeros_like(lse) if grad_lse is None else -grad_lse.float()
    return delta.contiguous()


def _is_served(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    cu_seqlens_q: torch.Tensor | None,
) -> bool:
    """False: the portable backward makes the gradients."""
    refused = reasons_against(
        q.shape[-1], v.shape[-1], bias=bias is not None, dropout=dropout_p > 0.0
    )
    rows_of_all = q.shape[:-1].numel() + 128 * q.shape[-2] * (
        q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0]
    )
    return not (refused or 0 in (q.numel(), k.numel()) or rows_of_all > MAX_ROWS)


def _vector(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
