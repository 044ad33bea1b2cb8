"""Where the sequences of packed input lie, and the check of the values that say so."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Packing:
    """int32 tensors; shapes as in `flashdig.attention_varlen`."""

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    page_table: torch.Tensor | None


def values_are_checked(device_type: str) -> bool:
    """Whether the values of lengths and page tables on such a device are read and checked.

    On the CPU they always are, elsewhere with FLASHDIG_CHECK=1, which costs a synchronisation. A
    graph that torch.compile makes does not check them; there as everywhere they are clamped.
    """
    if torch.compiler.is_compiling():
        return False
    return device_type == "cpu" or os.environ.get("FLASHDIG_CHECK") == "1"


def check_values(
    packing: Packing,
    total_q: int,
    k_shape: Sequence[int],
    max_seqlens: tuple[int | None, int | None],
) -> None:
    """Raise ValueError, naming the argument, for lengths or page numbers outside the tensors.

    Args:
        total_q: rows of q.
        k_shape: (total_k, ...), or with a page table (num_pages, page_size, ...).
        max_seqlens: the caller's longest lengths of queries and keys, None where unknown.
    """
    total_k = k_shape[0] if packing.page_table is None else None
    _used_lengths("q", packing.cu_seqlens_q, packing.seqused_q, total_q, max_seqlens[0])
    used_k = _used_lengths("k", packing.cu_seqlens_k, packing.seqused_k, total_k, max_seqlens[1])
    if packing.page_table is not None:
        _check_pages(packing.page_table, used_k, num_pages=k_shape[0], page_size=k_shape[1])


def _used_lengths(
    side: str,
    cu_seqlens: torch.Tensor,
    seqused: torch.Tensor | None,
    total: int | None,
    max_seqlen: int | None,
) -> list[int]:
    """The lengths in use of one side's sequences, all checked."""
    offsets = cu_seqlens.tolist()
    if offsets[0] < 0 or (total is not None and offsets[-1] > total):
        raise ValueError(
            f"cu_seqlens_{side} must lie between 0 and total_{side} = {total}, got "
            f"{offsets[0]} at the start and {offsets[-1]} at the end"
        )
    lengths = [end - start for start, end in itertools.pairwise(offsets)]
    for b, length in enumerate(lengths):
        if length < 0:
            raise ValueError(
                f"cu_seqlens_{side} must not decrease, but sequence {b} goes from {offsets[b]} "
                f"to {offsets[b + 1]}"
            )
    if seqused is not None:
        for b, (used, length) in enumerate(zip(seqused.tolist(), lengths, strict=True)):
            if not 0 <= used <= length:
                raise ValueError(
                    f"seqused_{side} must lie between 0 and the length of its sequence, but "
                    f"sequence {b} has length {length} and uses {used}"
                )
        lengths = seqused.tolist()
    if max_seqlen is not None and max(lengths, default=0) > max_seqlen:
        raise ValueError(
            f"max_seqlen_{side} must be at least the longest sequence's {max(lengths)}, "
            f"got {max_seqlen}"
        )
    return lengths


def _check_pages(
    page_table: torch.Tensor, lengths: list[int], *, num_pages: int, page_size: int
) -> None:
    """Every page that a sequence reads is there; entries behind its last page may hold anything."""
    max_pages = page_table.shape[1]
    for b, (length, pages) in enumerate(zip(lengths, page_table.tolist(), strict=True)):
        if length > max_pages * page_size:
            raise ValueError(
                f"page_table has {max_pages} pages of {page_size} keys a sequence, too few for "
                f"sequence {b} of length {length}"
            )
        read = pages[: -(-length // page_size)] if length else []
        for page in read:
            if not 0 <= page < num_pages:
                raise ValueError(
                    f"page_table must hold page numbers between 0 and {num_pages - 1}, "
                    f"got {page} for sequence {b}"
                )
