"""FlashAttention-2's `S_dmask`: the probabilities of a call, negative where dropout dropped them.

It takes O(seqlen_q * seqlen_k) memory and two more calls: for looking at dropout, not for training.
All of it is attention over values that are unit vectors, whose output rows are the rows of the
probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashdig.api import attention, attention_varlen
from flashdig.facades.arguments import sequence_and_position


@contextmanager
def draw_kept(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again behind: the device's generator is put back."""
    if device.type == "cuda":
        devices = [torch.cuda.current_device() if device.index is None else device.index]
    else:
        devices = []
    with torch.no_grad(), torch.random.fork_rng(devices):
        yield


def dense_kept(q: torch.Tensor, k: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """Which pairs the next call with `dropout_p` keeps: (batch, seqlen_q, num_heads, seqlen_k)."""
    units = torch.eye(k.shape[1], device=q.device).expand(q.shape[0], -1, -1)[:, :, None]
    # equal scores make every probability 1 / seqlen_k, so a zero is a dropped one
    q, k = (torch.zeros(*shape, 1, device=q.device) for shape in (q.shape[:3], units.shape[:3]))
    with draw_kept(q.device):
        out: Any = attention(q, k, units, dropout_p=dropout_p)
    kept: torch.Tensor = out > 0
    return kept


@torch.no_grad()
def dense_mask(
    q: torch.Tensor, k: torch.Tensor, kept: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    """S_dmask, (batch, num_heads, seqlen_q, seqlen_k), of the call with these options.

    Each row is its probabilities over the largest of them, in the dtype of q.
    """
    units = torch.eye(k.shape[1], dtype=k.dtype, device=k.device)[:, None].expand(
        k.shape[0], -1, k.shape[2], -1
    )
    probabilities: Any = attention(q, k, units, **_without_dropout(options, q))
    return _signed(probabilities, kept, q.dtype).transpose(1, 2)


def packed_kept(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    dropout_p: float,
) -> torch.Tensor:
    """Which pairs the next call keeps, by key position: (total_q, num_heads, max_seqlen_k).

    Args: lengths are cu_seqlens_q, cu_seqlens_k, max_seqlen_q and max_seqlen_k.
    """
    units = _unit_by_position(lengths[1], k.shape[0], lengths[3], torch.float32)
    q, k = (torch.zeros(*shape, 1, device=q.device) for shape in (q.shape[:2], units.shape[:2]))
    with draw_kept(q.device):
        out: Any = attention_varlen(q, k, units, *lengths, dropout_p=dropout_p)
    kept: torch.Tensor = out > 0
    return kept


@torch.no_grad()
def packed_mask(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    kept: torch.Tensor,
    options: dict[str, Any],
) -> torch.Tensor:
    """S_dmask, (batch, num_heads, max_seqlen_q, max_seqlen_k), 0 behind the end of a sequence."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    units = _unit_by_position(cu_seqlens_k, k.shape[0], max_seqlen_k, k.dtype)
    units = units.expand(-1, k.shape[1], -1)
    probabilities: Any = attention_varlen(q, k, units, *lengths, **_without_dropout(options, q))
    rows = _signed(probabilities, kept, q.dtype)
    batch = cu_seqlens_q.shape[0] - 1
    mask = rows.new_zeros(batch, max_seqlen_q, q.shape[1], max_seqlen_k)
    sequence, position = sequence_and_position(cu_seqlens_q, q.shape[0])
    used = (position >= 0) & (position < max_seqlen_q) & (sequence < batch)
    mask[sequence[used], position[used]] = rows[used]
    return mask.transpose(1, 2)


def _without_dropout(options: dict[str, Any], q: torch.Tensor) -> dict[str, Any]:
    # rounded once, after the division by the largest
    precise = torch.promote_types(q.dtype, torch.float32)
    return {**options, "dropout_p": 0.0, "out_dtype": precise}


def _signed(probabilities: torch.Tensor, kept: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    largest = probabilities.amax(dim=-1, keepdim=True)
    relative = torch.where(largest > 0, probabilities / largest, 0.0)
    return torch.where(kept, relative, -relative).to(dtype)


def _unit_by_position(
    cu_seqlens: torch.Tensor, total: int, max_seqlen: int, dtype: torch.dtype
) -> torch.Tensor:
    """(total, 1, max_seqlen): row r is the unit vector of its position in its sequence."""
    _, position = sequence_and_position(cu_seqlens, total)
    units = position[:, None] == torch.arange(max_seqlen, device=cu_seqlens.device)
    return units[:, None].to(dtype)
