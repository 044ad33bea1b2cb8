"""Joining the parts that programs left of a row of attention, in float32.

Parts lie as tiles, (split, slot, KV head, row of the tile): what a program makes it writes in one
piece. A part that saw no key has log-sum-exp -inf and is not read. The sum goes over the parts in
their order, in groups of a fixed size, so that parts without keys change no bit of it.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, combine_name
from flashdig.kernels.triton.paged import tile_of_slot
from flashdig.kernels.triton.score_terms import LN_2, LOG2_E

PARTS_AT_ONCE = tl.constexpr(16)


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
def store_rows(
    out,
    lse,
    out_ptr,
    lse_ptr,
    sequence,
    first_q,
    token,
    head,
    row_inside,
    seqlen_q,
    num_heads,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Write rows of the result: out (.., token, head, head_dim_v) is contiguous, and so is lse."""
    row = sequence.to(tl.int64) * seqlen_q + token
    statistics = (sequence.to(tl.int64) * num_heads + head) * seqlen_q + token
    if PACKED:
        row = (first_q + token).to(tl.int64)
        statistics = head.to(tl.int64) * seqlen_q + row
    offs_dv = tl.arange(0, BLOCK_DV)
    tl.store(
        out_ptr + ((row * num_heads + head) * HEAD_DIM_V)[:, None] + offs_dv[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=row_inside[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
    )
    tl.store(lse_ptr + statistics, lse, mask=row_inside)


@triton.jit
def join_parts(
    part_ptr,
    part_lse_ptr,
    first,
    between,
    count,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """(out [1, BLOCK_DV], lse [1]) of one row: its parts are rows first, first + between, ..."""
    offs_s = tl.arange(0, PARTS_AT_ONCE)
    offs_dv = tl.arange(0, BLOCK_DV)
    largest = tl.full([1], float("-inf"), tl.float32)
    for s in tl.range(0, count, PARTS_AT_ONCE):
        rows = first + (s + offs_s) * between
        lses = tl.load(part_lse_ptr + rows, mask=s + offs_s < count, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lses, 0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([1], tl.float32)
    out = tl.zeros([1, BLOCK_DV], tl.float32)
    for s in tl.range(0, count, PARTS_AT_ONCE):
        rows = first + (s + offs_s) * between
        lses = tl.load(part_lse_ptr + rows, mask=s + offs_s < count, other=float("-inf"))
        weights = tl.exp2((lses - shift) * LOG2_E)
        read = lses != float("-inf")  # NaN is read: it must show
        parts = tl.load(
            part_ptr + rows[:, None] * BLOCK_DV + offs_dv[None, :],
            mask=read[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
            other=0.0,
        )
        total += tl.sum(weights, 0)
        out += tl.sum(parts * weights[:, None], 0)[None, :]
    total = tl.where(total == 0.0, 1.0, total)
    return out / total[:, None], largest + tl.log2(total) * LN_2


@triton.jit(repr=combine_name, do_not_specialize=UNSPECIALIZED)
def flashdig_combine(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    cu_q_ptr,
    used_q_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    first_slot,
    slots,
    splits,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0)
    head_kv = program % num_heads_kv
    slot = (program // num_heads_kv) % slots
    row_of_tile = program // num_heads_kv // slots
    sequence, start_row, first_q, length_q = tile_of_slot(
        slot + first_slot, cu_q_ptr, used_q_ptr, batch, seqlen_q, GROUP, BLOCK_M, PACKED
    )
    row = start_row + row_of_tile
    if row >= length_q * GROUP:
        return
    first = (slot.to(tl.int64) * num_heads_kv + head_kv) * BLOCK_M + row_of_tile
    between = slots.to(tl.int64) * num_heads_kv * BLOCK_M
    out, lse = join_parts(part_ptr, part_lse_ptr, first, between, splits, HEAD_DIM_V, BLOCK_DV)
    heads = head_kv * GROUP + row % GROUP + tl.zeros([1], tl.int32)
    if SINKS:
        out, lse = with_sink(out, lse, tl.load(sinks_ptr + heads).to(tl.float32))
    store_rows(
        out,
        lse,
        out_ptr,
        lse_ptr,
        sequence,
        first_q,
        row // GROUP + tl.zeros([1], tl.int32),
        heads,
        heads >= 0,
        seqlen_q,
        num_heads_kv * GROUP,
        HEAD_DIM_V,
        BLOCK_DV,
        PACKED,
    )
