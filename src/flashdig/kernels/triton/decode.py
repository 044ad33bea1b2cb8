"""Attention of queries over a cache, in portable Triton: split over keys, groups of heads packed.

One program attends a tile of rows to a range of keys. The query heads that share a KV head are rows
of one tile, so keys and values are read once. Where tiles are too few to fill the chip, the keys
are split over programs (Flash-Decoding, Dao et al. 2023): each leaves a float32 part and its
log-sum-exp, and `combine` joins them. With one split the result is written at once.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.combine import store_rows, with_sink
from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, decode_name
from flashdig.kernels.triton.decode_rows import attend_rows
from flashdig.kernels.triton.launch_order import begin_after
from flashdig.kernels.triton.paged import key_extent, seen_by_tile, tile_of_slot


@triton.jit(repr=decode_name("flashdig_decode"), do_not_specialize=UNSPECIALIZED)
def flashdig_decode(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    batch_idx_ptr,
    cu_q_ptr,
    used_q_ptr,
    slopes_ptr,
    sinks_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_table,
    stride_slopes_b,
    batch,
    num_heads_kv,
    seqlen_q,
    seqlen_new,
    capacity,
    cache_rows,
    first_slot,
    slots,
    splits,
    left,
    right,
    score_factor,
    softcap_units,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ALIKE: tl.constexpr,
    PACKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    Q_FP8: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    NATURAL: tl.constexpr,
    SINKS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    SPLIT_SIZE: tl.constexpr,
    ONE_PHASE: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    begin_after(ORDER)
    program = tl.program_id(0)
    # the heads of a key lie side by side in memory: programs that read them start together
    head_kv = program % num_heads_kv
    slot = (program // num_heads_kv) % slots
    split = program // num_heads_kv // slots
    sequence, start_row, first_q, length_q = tile_of_slot(
        slot + first_slot, cu_q_ptr, used_q_ptr, batch, seqlen_q, GROUP, BLOCK_M, PACKED
    )
    if PACKED:  # noqa: SIM102 - decided when compiling
        if start_row >= length_q * GROUP:
            return
    first, length_k = key_extent(
        seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, sequence, seqlen_new, capacity
    )
    offset = length_k - length_q
    if TOP_LEFT:
        offset = first
    key_begin, key_end = seen_by_tile(
        start_row, length_q, first, length_k, offset, left, right, GROUP, BLOCK_M, LEFT, RIGHT
    )
    begin = key_begin // BLOCK_N * BLOCK_N
    end = key_end
    if SPLIT and SPLIT_SIZE > 0:
        begin = tl.maximum(begin, split * SPLIT_SIZE)
        end = tl.minimum(end, (split + 1) * SPLIT_SIZE)
    elif SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), splits) * BLOCK_N
        begin = begin + split * share
        end = tl.minimum(end, begin + share)

    rows = start_row + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    row_inside = token < length_q
    head = head_kv * GROUP + rows % GROUP
    part = ((split * slots + slot).to(tl.int64) * num_heads_kv + head_kv) * BLOCK_M
    part_rows = part + tl.arange(0, BLOCK_M)
    if SPLIT:  # noqa: SIM102
        if begin >= end:
            tl.store(part_lse_ptr + part_rows, tl.full([BLOCK_M], float("-inf"), tl.float32))
            return

    out, lse = attend_rows(
        q_ptr,
        k_ptr,
        v_ptr,
        table_ptr,
        batch_idx_ptr,
        slopes_ptr,
        q_descale_ptr,
        k_descale_ptr,
        v_descale_ptr,
        stride_qb,
        stride_qm,
        stride_qh,
        stride_kb,
        stride_kn,
        stride_kh,
        stride_vb,
        stride_vn,
        stride_vh,
        stride_table,
        stride_slopes_b,
        num_heads_kv,
        cache_rows,
        sequence,
        head_kv,
        start_row,
        first_q,
        length_q,
        begin,
        end,
        key_begin,
        key_end,
        offset,
        left,
        right,
        score_factor,
        softcap_units,
        HEAD_DIM,
        HEAD_DIM_V,
        BLOCK_D,
        TAIL_D,
        BLOCK_DV,
        GROUP,
        UNIT,
        ALIKE,
        PACKED,
        PAGE_SIZE,
        FP8,
        Q_FP8,
        LEFT,
        RIGHT,
        SOFTCAP,
        ALIBI,
        NATURAL,
        INPUT_PRECISION,
        ONE_PHASE,
        BLOCK_M,
        BLOCK_N,
        NUM_STAGES,
    )
    offs_dv = tl.arange(0, BLOCK_DV)
    if SPLIT:
        tl.store(part_lse_ptr + part_rows, lse)
        pointers = part_ptr + part_rows[:, None] * BLOCK_DV + offs_dv[None, :]
        tl.store(pointers, out, mask=row_inside[:, None])
    else:
        if SINKS:
            sink = tl.load(sinks_ptr + head, mask=row_inside, other=0.0).to(tl.float32)
            out, lse = with_sink(out, lse, sink)
        store_rows(
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
            num_heads_kv * GROUP,
            HEAD_DIM_V,
            BLOCK_DV,
            PACKED,
        )
