"""Device functions: which sequence a program works on, and which rows and keys meet there.

Packed input is walked without reading lengths back to the host. Sequence b owns the tile slots
from cu_seqlens[b] // BLOCK + b on, which are at least as many as it needs, so a grid of
total // BLOCK + batch programs covers every batch; a program finds its sequence by bisection.
Values of cu_seqlens and seqused are clamped: whatever they hold, no address leaves the tensors.
"""

import triton
import triton.language as tl


@triton.jit
def _first_row(cu_ptr, sequence, total):
    return tl.minimum(tl.maximum(tl.load(cu_ptr + sequence), 0), total)


@triton.jit
def find_sequence(cu_ptr, slot, num_sequences, total, BLOCK: tl.constexpr):
    """The last sequence whose slots begin at or before `slot`."""
    low = 0
    high = num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _first_row(cu_ptr, middle, total) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def first_slot(cu_ptr, sequence, total, BLOCK: tl.constexpr):
    return _first_row(cu_ptr, sequence, total) // BLOCK + sequence


@triton.jit
def sequence_span(cu_ptr, used_ptr, sequence, total):
    """(first row in the packed tensor, rows in use) of a sequence."""
    begin = _first_row(cu_ptr, sequence, total)
    end = tl.maximum(_first_row(cu_ptr, sequence + 1, total), begin)
    length = end - begin
    if used_ptr is not None:
        length = tl.minimum(tl.maximum(tl.load(used_ptr + sequence), 0), length)
    return begin, length


@triton.jit
def rows_of_program(
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
    batch,
    num_heads,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
):
    """`rows_of_slot` of a one-dimensional grid's program."""
    return rows_of_slot(
        tl.program_id(0),
        cu_q_ptr,
        cu_k_ptr,
        used_q_ptr,
        used_k_ptr,
        batch,
        num_heads,
        seqlen_q,
        seqlen_k,
        BLOCK_M,
        PACKED,
        LONGEST_FIRST,
    )


@triton.jit
def rows_of_slot(
    program,
    cu_q_ptr,
    cu_k_ptr,
    used_q_ptr,
    used_k_ptr,
    batch,
    num_heads,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    LONGEST_FIRST: tl.constexpr,
):
    """The tile of rows that number `program` of a one-dimensional grid stands for.

    Packed, seqlen_q and seqlen_k are the totals. LONGEST_FIRST: the last rows, which see most keys
    under causality, come first.

    Returns (sequence, head, start_m, first_q, first_k, seqlen_q, seqlen_k, statistics): start_m is
    relative to the sequence, and beyond seqlen_q where there is nothing to do; first_q and first_k
    are where the sequence begins in packed tensors; `statistics` where its and the head's rows
    begin in the log-sum-exp.
    """
    if PACKED:
        slots = seqlen_q // BLOCK_M + batch
        head = program // slots
        slot = program % slots
        sequence = find_sequence(cu_q_ptr, slot, batch, seqlen_q, BLOCK_M)
        start_m = (slot - first_slot(cu_q_ptr, sequence, seqlen_q, BLOCK_M)) * BLOCK_M
        first_q, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
        first_k, length_k = sequence_span(cu_k_ptr, used_k_ptr, sequence, seqlen_k)
        statistics = head.to(tl.int64) * seqlen_q + first_q
    else:
        slots = tl.cdiv(seqlen_q, BLOCK_M)
        sequence = program // (slots * num_heads)
        head = program // slots % num_heads
        start_m = (program % slots) * BLOCK_M
        if LONGEST_FIRST:
            start_m = (slots - 1) * BLOCK_M - start_m
        first_q = program * 0
        first_k = program * 0
        length_q = seqlen_q
        length_k = seqlen_k
        statistics = (program // slots).to(tl.int64) * seqlen_q
    return sequence, head, start_m, first_q, first_k, length_q, length_k, statistics


@triton.jit
def seen_keys(seqlen_q, seqlen_k, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Half-open range of keys that some query of the sequence may see by position."""
    begin = 0
    end = seqlen_k
    if LEFT:
        begin = tl.maximum(offset - left, 0)
    if RIGHT:
        end = tl.minimum(seqlen_k, seqlen_q + offset + right)
    return begin, end


@triton.jit
def seeing_rows(seqlen_q, seqlen_k, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Half-open range of queries that may see some key by position."""
    begin = 0
    end = seqlen_q
    if seqlen_k == 0:
        end = 0
    if RIGHT:
        begin = tl.maximum(-offset - right, 0)
    if LEFT:
        end = tl.minimum(end, seqlen_k - offset + left)
    return begin, end


@triton.jit
def key_phases(
    start_m,
    end_m,
    seqlen_k,
    offset,
    left,
    right,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Key ranges of a tile of rows: (begin, full_begin, full_end, end), multiples of BLOCK_N but
    for `end`. Every row sees every key of [full_begin, full_end); the rest needs masks."""
    begin = 0
    end = seqlen_k
    full_begin = 0
    full_end = seqlen_k
    if LEFT:
        begin = tl.maximum(start_m + offset - left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(end_m - 1 + offset - left, 0), BLOCK_N) * BLOCK_N
    if RIGHT:
        end = tl.minimum(seqlen_k, end_m + offset + right)
        full_end = tl.minimum(seqlen_k, tl.maximum(start_m + offset + right + 1, 0))
    full_end = full_end // BLOCK_N * BLOCK_N
    full_begin = tl.maximum(tl.minimum(full_begin, full_end), begin)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def row_phases(
    start_n,
    end_n,
    row_begin,
    row_end,
    offset,
    left,
    right,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Row ranges of a tile of keys, as `key_phases`; [row_begin, row_end) are rows seeing keys."""
    begin = row_begin
    end = row_end
    full_begin = row_begin
    full_end = row_end
    if RIGHT:
        begin = tl.maximum(begin, start_n - offset - right)
        full_begin = tl.maximum(full_begin, end_n - 1 - offset - right)
    if LEFT:
        end = tl.minimum(end, end_n - offset + left)
        full_end = tl.minimum(full_end, start_n - offset + left + 1)
    begin = begin // BLOCK_M * BLOCK_M
    full_begin = tl.cdiv(full_begin, BLOCK_M) * BLOCK_M
    full_end = tl.maximum(full_end, 0) // BLOCK_M * BLOCK_M
    full_begin = tl.maximum(tl.minimum(full_begin, full_end), begin)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end
