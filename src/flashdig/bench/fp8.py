"""Tensors in 8 bits: what a factor for each sequence and KV head makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def quantised(
    x: torch.Tensor, num_heads_kv: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / factor in an 8-bit dtype, and the factor that brings the largest of a (sequence, KV head)
    to the end of the dtype's range.

    Args:
        x: (batch, seqlen, num_heads, ...) of q, k or v; query heads of one KV head share a factor.

    Returns: the quantised x, and float32 (batch, num_heads_kv); the factor of zeros is 1.
    """
    import torch

    groups = x.float().unflatten(2, (num_heads_kv, -1))
    largest = groups.abs().amax(dim=(1, 3, 4))
    descale = torch.where(largest > 0, largest / torch.finfo(dtype).max, 1.0)
    return (groups / descale[:, None, :, None, None]).flatten(2, 3).to(dtype), descale


def quantised_sequences(
    x: torch.Tensor, num_heads_kv: int, lengths: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantised` of packed sequences, (tokens, num_heads, ...)."""
    import torch

    made = [quantised(rows[None], num_heads_kv, dtype) for rows in x.split(list(lengths))]
    rows, descales = zip(*made, strict=True)
    # torch.cat does not take 8 bits everywhere
    whole = torch.cat([one[0].view(torch.uint8) for one in rows]).view(dtype)
    return whole, torch.cat(descales)
