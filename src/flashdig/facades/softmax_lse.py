"""FlashAttention-2's `softmax_lse` from flashdig's lse, where their conventions differ.

Rows that see no key have +inf. Causal ALiBi adds slope * j to the score of key j, which makes the
same probabilities as flashdig's -slope * distance but an lse larger by slope * (i + seqlen_k -
seqlen_q). A window to the left keeps the distance (`csrc/flash_attn/src/alibi.h`).
"""

from __future__ import annotations

import math
from typing import Any

import torch

from flashdig.facades.arguments import sequence_and_position


def dense_lse(lse: torch.Tensor, seqlen_k: int, options: dict[str, Any]) -> torch.Tensor:
    """softmax_lse, (batch, num_heads, seqlen_q), of the dense call with these options of ours."""
    return cached_lse(lse, seqlen_k, seqlen_k, options)


def packed_lse(
    lse: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int | None,
    options: dict[str, Any],
) -> torch.Tensor:
    """softmax_lse, (num_heads, total_q), of the packed call with these options of ours."""
    slopes = _slopes_by_key(options, max_seqlen_k, lse.dtype)
    if slopes is not None:
        sequence, position = sequence_and_position(cu_seqlens_q, lse.shape[-1])
        batch = cu_seqlens_q.shape[0] - 1
        sequence = sequence.clamp(max=batch - 1)  # rows of no sequence: what they get is not read
        offset = (cu_seqlens_k.diff() - cu_seqlens_q.diff())[sequence]
        of_row = slopes.expand(batch, -1)[sequence].T
        lse = lse + of_row * (position + offset)
    return _inf_for_dead_rows(lse)


def cached_lse(
    lse: torch.Tensor, seqlens_k: torch.Tensor | int, capacity: int, options: dict[str, Any]
) -> torch.Tensor:
    """softmax_lse, (batch, num_heads, seqlen_q), of a call over a cache whose sequences have
    `seqlens_k` (batch,) keys and room for `capacity`."""
    slopes = _slopes_by_key(options, capacity, lse.dtype)
    if slopes is not None:
        seqlen_q = lse.shape[-1]
        if isinstance(seqlens_k, torch.Tensor):
            seqlens_k = seqlens_k[:, None, None]
        diagonal = torch.arange(seqlen_q, device=lse.device) + (seqlens_k - seqlen_q)
        lse = lse + slopes[..., None] * diagonal
    return _inf_for_dead_rows(lse)


def _slopes_by_key(
    options: dict[str, Any], seqlen_k: int | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The slopes of a call whose original adds slope * j; None where it takes the distance."""
    left, right = options["window"]
    if left is not None and seqlen_k is not None and left >= seqlen_k:
        left = None  # as the original reads a window that hides nothing
    slopes: torch.Tensor | None = options["alibi_slopes"]
    if slopes is None or left is not None or not (options["causal"] or right == 0):
        return None
    return slopes.to(dtype)


def _inf_for_dead_rows(lse: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isneginf(lse), math.inf, lse)
