"""Joining the parts that programs left of a tile of rows, in float32, and writing rows.

Parts lie as tiles of rows: what a program makes it writes in one piece. The program that is the
last to write its part of a tile joins them all, so no second kernel has to start. A part that saw
no key has log-sum-exp -inf and is not read. The sum goes over the parts in their order, in groups
of a fixed size, so that neither who joins them nor parts without keys change a bit of it.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.score_terms import LN_2, LOG2_E

# numbers of the parts that a program holds at once: few, since its registers are for the attention
HELD = tl.constexpr(2048)


@triton.jit
def with_sink(out, lse, sink):
    """Rows of attention with their sinks' logits (natural units) in the softmax."""
    largest = tl.maximum(lse, sink)
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    kept = tl.exp2((lse - shift) * LOG2_E)
    total = kept + tl.exp2((sink - shift) * LOG2_E)
    total = tl.where(largest == float("-inf"), 1.0, total)
    return out * (kept / total)[:, None], largest + tl.log2(total) * LN_2


@triton.jit
def store_part(
    out,
    lse,
    part_ptr,
    part_lse_ptr,
    first,
    row_inside,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Leave a tile of rows as rows `first` and following of the parts; only those in use."""
    rows = first + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(part_lse_ptr + rows, lse, mask=row_inside)
    seen = row_inside & (lse != float("-inf"))  # NaN too: it must show
    tl.store(part_ptr + rows[:, None] * BLOCK_DV + offs_dv[None, :], out, mask=seen[:, None])


@triton.jit
def is_last(arrived_ptr, parts):
    """Whether all other programs of `parts` have written theirs, which can then be read.

    Each of them asks once. The counter starts at 0 and ends there.
    """
    tl.debug_barrier()  # the whole program has written before its number is counted
    last = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu") == parts - 1
    if last:
        tl.store(arrived_ptr, 0)
    return last


@triton.jit
def join_parts(
    part_ptr,
    part_lse_ptr,
    first,
    between,
    count,
    ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(out [ROWS, BLOCK_DV], lse [ROWS]) of rows whose parts lie `between` rows apart.

    Row r's parts are rows first + r, first + r + between, ... Rows that nobody wrote hold anything.
    """
    PARTS: tl.constexpr = HELD // (ROWS * BLOCK_DV) if HELD > ROWS * BLOCK_DV else 1
    offs_s = tl.arange(0, PARTS)
    offs_dv = tl.arange(0, BLOCK_DV)
    rows = first + tl.arange(0, ROWS)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for s in tl.range(0, count, PARTS):
        places = rows[None, :] + ((s + offs_s) * between)[:, None]
        there = (s + offs_s < count)[:, None]
        lses = tl.load(part_lse_ptr + places, mask=there, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lses, 0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for s in tl.range(0, count, PARTS):
        places = rows[None, :] + ((s + offs_s) * between)[:, None]
        there = (s + offs_s < count)[:, None]
        lses = tl.load(part_lse_ptr + places, mask=there, other=float("-inf"))
        weights = tl.exp2((lses - shift[None, :]) * LOG2_E)
        read = lses != float("-inf")  # NaN is read: it must show
        parts = tl.load(
            part_ptr + places[:, :, None] * BLOCK_DV + offs_dv[None, None, :],
            mask=read[:, :, None] & (offs_dv < HEAD_DIM_V)[None, None, :],
            other=0.0,
        )
        total += tl.sum(weights, 0)
        out += tl.sum(parts * weights[:, :, None], 0)
    total = tl.where(total == 0.0, 1.0, total)
    return out / total[:, None], largest + tl.log2(total) * LN_2


@triton.jit
def finish_rows(
    out,
    lse,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    sequence,
    start_row,
    first_q,
    length_q,
    seqlen_q,
    head_kv,
    num_heads_kv,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PACKED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Add the sinks to whole rows of a tile and write them: out (.., token, head, head_dim_v) is
    contiguous, and so is lse."""
    rows = start_row + tl.arange(0, ROWS)
    token = rows // GROUP
    inside = token < length_q
    head = head_kv * GROUP + rows % GROUP
    if SINKS:
        sink = tl.load(sinks_ptr + head, mask=inside, other=0.0).to(tl.float32)
        out, lse = with_sink(out, lse, sink)
    num_heads = num_heads_kv * GROUP
    row = sequence.to(tl.int64) * seqlen_q + token
    statistics = (sequence.to(tl.int64) * num_heads + head) * seqlen_q + token
    if PACKED:
        row = (first_q + token).to(tl.int64)
        statistics = head.to(tl.int64) * seqlen_q + row
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(
        out_ptr + ((row * num_heads + head) * HEAD_DIM_V)[:, None] + offs_dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
    )
    tl.store(lse_ptr + statistics, lse, mask=inside)


@triton.jit
def join_tile(
    part_ptr,
    part_lse_ptr,
    first,
    between,
    count,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    sequence,
    start_row,
    first_q,
    length_q,
    seqlen_q,
    head_kv,
    num_heads_kv,
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PACKED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of a tile's rows and write them, ROWS at a time: as `join_parts` and
    `finish_rows`."""
    in_use = tl.minimum(length_q * GROUP - start_row, BLOCK_M)
    for row in tl.range(0, in_use, ROWS):
        out, lse = join_parts(
            part_ptr, part_lse_ptr, first + row, between, count, ROWS, HEAD_DIM_V, BLOCK_DV
        )
        finish_rows(
            out,
            lse,
            out_ptr,
            lse_ptr,
            sinks_ptr,
            sequence,
            start_row + row,
            first_q,
            length_q,
            seqlen_q,
            head_kv,
            num_heads_kv,
            ROWS,
            GROUP,
            HEAD_DIM_V,
            BLOCK_DV,
            PACKED,
            SINKS,
        )
