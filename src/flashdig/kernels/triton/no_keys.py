"""Results of a call whose tensors hold no key at all: no kernel runs."""

from __future__ import annotations

import torch

from flashdig.kernels.triton.arguments import Call


def without_keys(call: Call, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """out 0; lse -inf, or in rows of a sequence the sink's logit."""
    device = call.q.device
    out = torch.zeros(call.out_shape, dtype=dtype, device=device)
    lse = torch.full(call.lse_shape, float("-inf"), device=device)
    if call.sinks is None or lse.numel() == 0:
        return out, lse
    if call.cu_seqlens_q is None:
        return out, lse.copy_(call.sinks.float()[:, None])
    if call.batch:
        inside = _rows_in_use(call.cu_seqlens_q, call.seqused_q, call.seqlen_q)
        lse = torch.where(inside, call.sinks.float()[:, None], lse)
    return out, lse


def _rows_in_use(
    cu_seqlens: torch.Tensor, seqused: torch.Tensor | None, total: int
) -> torch.Tensor:
    """Which rows of a packed tensor belong to a sequence, (total,) bool; nothing is read back."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    sequence = sequence.clamp(max=cu_seqlens.shape[0] - 2)
    begin, end = cu_seqlens[sequence], cu_seqlens[sequence + 1]
    if seqused is not None:
        end = torch.minimum(end, begin + seqused[sequence])
    return (row >= begin) & (row < end)
