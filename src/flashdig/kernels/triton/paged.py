"""Device functions: where the keys of a sequence lie in a cache, and which tile of rows sees which.

A cache is dense, (rows, seqlen, heads, dim), or paged, (pages, page_size, heads, dim) with a table
of page numbers. Positions count from the start of a sequence's row or first page. Whatever lengths,
indices and page numbers hold, they are clamped: no address leaves the tensors.

A tile's rows are (query token, query head of the KV head's group) pairs, tokens outside, so that
all the heads that share a key meet it in one tile: row r is token r // GROUP, head r % GROUP.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.sequences import _first_row, sequence_span


@triton.jit
def clamped(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def tile_of_slot(
    slot,
    cu_q_ptr,
    used_q_ptr,
    batch,
    seqlen_q,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
):
    """(sequence, first row of the tile, first token in the packed tensor, tokens of the sequence).

    Packed, seqlen_q is the total, and sequence b owns the slots from cu_seqlens[b] * GROUP //
    BLOCK_M + b on: at least as many as it needs, so the first row may lie beyond the last.
    """
    if PACKED:
        low = 0
        high = batch - 1
        while low < high:
            middle = (low + high + 1) // 2
            first = _first_row(cu_q_ptr, middle, seqlen_q)
            if first * GROUP // BLOCK_M + middle <= slot:
                low = middle
            else:
                high = middle - 1
        sequence = low
        first_slot = _first_row(cu_q_ptr, sequence, seqlen_q) * GROUP // BLOCK_M + sequence
        start_row = (slot - first_slot) * BLOCK_M
        first_q, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    else:
        tiles = tl.cdiv(seqlen_q * GROUP, BLOCK_M)
        sequence = slot // tiles
        start_row = (slot % tiles) * BLOCK_M
        first_q = sequence * 0
        length_q = seqlen_q
    return sequence, start_row, first_q, length_q


@triton.jit
def cached_length(seqlens_ptr, sequence, capacity):
    """Keys in the cache before any are appended."""
    length = capacity
    if seqlens_ptr is not None:
        length = clamped(tl.load(seqlens_ptr + sequence), 0, capacity)
    return length


@triton.jit
def key_extent(
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    sequence,
    seqlen_new,
    capacity,
):
    """(first, end) positions of a sequence's keys, those just appended among them."""
    end = cached_length(seqlens_ptr, sequence, capacity)
    if cu_k_ptr is not None:
        span = tl.load(cu_k_ptr + sequence + 1) - tl.maximum(tl.load(cu_k_ptr + sequence), 0)
        end = tl.minimum(end, tl.maximum(span, 0))
    if cu_new_ptr is not None:  # seqlen_new is the total
        _begin, added = sequence_span(cu_new_ptr, None, sequence, seqlen_new)
        end = tl.minimum(end + added, capacity)
    else:
        end = tl.minimum(end + seqlen_new, capacity)
    first = end * 0
    if leftpad_ptr is not None:
        first = clamped(tl.load(leftpad_ptr + sequence), 0, end)
    return first, end


@triton.jit
def seen_by_tile(
    start_row,
    length_q,
    first,
    end,
    offset,
    left,
    right,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Half-open range of positions that some row of a tile may see; (x, x) when none is."""
    first_token = start_row // GROUP
    end_token = tl.minimum((start_row + BLOCK_M - 1) // GROUP + 1, length_q)
    begin = first
    if LEFT:
        begin = tl.maximum(begin, first_token + offset - left)
    if RIGHT:
        end = tl.minimum(end, end_token + offset + right)
    return begin, tl.maximum(begin, end)


@triton.jit
def cache_row(batch_idx_ptr, sequence, rows):
    """The row of a dense cache that a sequence uses."""
    row = sequence
    if batch_idx_ptr is not None:
        row = clamped(tl.load(batch_idx_ptr + sequence), 0, rows - 1)
    return row


@triton.jit
def page_slots(table_ptr, positions, wanted, num_pages, PAGE_SIZE: tl.constexpr):
    """(page numbers, rows in them) of positions; only the table's entries of wanted ones are read.

    PAGE_SIZE 0 is a dense cache, one page a sequence: page 0 and the position.
    """
    if PAGE_SIZE == 0:
        page = positions * 0
        row = positions
    else:
        page = tl.load(table_ptr + positions // PAGE_SIZE, mask=wanted, other=0)
        page = clamped(page, 0, num_pages - 1)
        row = positions % PAGE_SIZE
    return page.to(tl.int64), row.to(tl.int64)


@triton.jit
def from_fp8(x, FP8: tl.constexpr, dtype: tl.constexpr):
    """A tile of a cache in the dtype that products are made in.

    FP8 "none": as it is. Else x holds bytes: "e4m3" by the instructions of sm_89 and later,
    "e4m3_bits" and "e5m2" by float16's bits, on any chip.
    """
    if FP8 == "e4m3":
        x = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FP8 == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    elif FP8 == "e4m3_bits":
        wide = x.to(tl.uint16)
        # the exponents' biases differ by 8; subnormal numbers come out right as well
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True) * 256.0
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)
    return x.to(dtype)
