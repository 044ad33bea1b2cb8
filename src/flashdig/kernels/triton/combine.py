"""Joining the parts that programs left of a row of attention, in float32.

Parts lie as tiles, (split, slot, KV head, row of the tile). A part that saw no key has log-sum-exp
-inf and counts for nothing. The sum goes over the parts in their order, in groups of a fixed size,
so that parts without keys change no bit of it. Little is computed here, but a step waits for it:
log-sum-exps and parts are asked for at once.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, combine_name
from flashdig.kernels.triton.launch_order import begin_after
from flashdig.kernels.triton.paged import tile_of_slot
from flashdig.kernels.triton.score_terms import LN_2, LOG2_E

HELD = tl.constexpr(4096)  # float32 of parts that a program of four warps holds at once


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
    row_inside,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    HELD: tl.constexpr,
):
    """(out [ROWS, BLOCK_DV], lse [ROWS]): a row's parts are rows first [ROWS], first + between, ..
    of what the programs left; HELD float32 of them are asked for at once."""
    AT_ONCE: tl.constexpr = max(4, min(32, HELD // (BLOCK_DV * ROWS)))
    offs_s = tl.arange(0, AT_ONCE)
    offs_dv = tl.arange(0, BLOCK_DV)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for s in tl.range(0, count, AT_ONCE):
        places = first[:, None] + (s + offs_s)[None, :] * between
        inside = row_inside[:, None] & (s + offs_s < count)[None, :]
        lses = tl.load(part_lse_ptr + places, mask=inside, other=float("-inf"))
        parts = tl.load(
            part_ptr + places[:, :, None] * BLOCK_DV + offs_dv[None, None, :],
            mask=inside[:, :, None] & (offs_dv < HEAD_DIM_V)[None, None, :],
            other=0.0,
        )
        # nobody wrote a part without keys; NaN counts: it must show
        parts = tl.where((lses != float("-inf"))[:, :, None], parts, 0.0)
        new_largest = tl.maximum(largest, tl.max(lses, 1))
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2((lses - shift[:, None]) * LOG2_E)
        rescale = tl.exp2((largest - shift) * LOG2_E)
        total = total * rescale + tl.sum(weights, 1)
        out = out * rescale[:, None] + tl.sum(parts * weights[:, :, None], 1)
        largest = new_largest
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
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    begin_after(ORDER)
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
    only = tl.zeros([1], tl.int32)
    first = (slot.to(tl.int64) * num_heads_kv + head_kv) * BLOCK_M + row_of_tile + only
    between = slots.to(tl.int64) * num_heads_kv * BLOCK_M
    out, lse = join_parts(
        part_ptr, part_lse_ptr, first, between, splits, only == 0, HEAD_DIM_V, BLOCK_DV, 1, HELD
    )
    heads = head_kv * GROUP + row % GROUP + only
    if SINKS:
        out, lse = with_sink(out, lse, tl.load(sinks_ptr + heads).to(tl.float32))
    store_rows(
        out,
        lse,
        out_ptr,
        lse_ptr,
        sequence,
        first_q,
        row // GROUP + only,
        heads,
        heads >= 0,
        seqlen_q,
        num_heads_kv * GROUP,
        HEAD_DIM_V,
        BLOCK_DV,
        PACKED,
    )
