"""Attention over a cache for sequences of different lengths, in the pieces of a plan, and the
joining of its parts. `decode_plan` makes the plan."""

import triton
import triton.language as tl

from flashdig.kernels.triton.combine import join_parts, store_rows, with_sink
from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, combine_name, decode_name
from flashdig.kernels.triton.decode_plan import COUNTERS, SLOT_FIELDS, keys_of_tile
from flashdig.kernels.triton.decode_rows import attend_rows
from flashdig.kernels.triton.launch_order import begin_after, end_after
from flashdig.kernels.triton.sequences import sequence_span


@triton.jit
def _attend_piece(
    piece,
    head_kv,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    plan_ptr,
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
    slots,
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
    ONE_PHASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Attention of one KV head over one piece of the keys."""
    slot = tl.load(plan_ptr + slots * SLOT_FIELDS + COUNTERS + piece)
    first_piece = tl.load(plan_ptr + slot * SLOT_FIELDS)
    own = tl.load(plan_ptr + slot * SLOT_FIELDS + 1)
    sequence = tl.load(plan_ptr + slot * SLOT_FIELDS + 2)
    start_row = tl.load(plan_ptr + slot * SLOT_FIELDS + 3)
    first_q = 0
    length_q = seqlen_q
    if PACKED:
        first_q, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    key_begin, key_end, offset, tiles = keys_of_tile(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        sequence,
        start_row,
        length_q,
        seqlen_new,
        capacity,
        left,
        right,
        GROUP,
        TOP_LEFT,
        LEFT,
        RIGHT,
        BLOCK_M,
        BLOCK_N,
    )
    share = tl.cdiv(tiles, own)
    begin = (key_begin // BLOCK_N + (piece - first_piece) * share) * BLOCK_N
    end = tl.minimum(begin + share * BLOCK_N, key_end)
    rows = tl.arange(0, BLOCK_M)
    part_rows = (piece.to(tl.int64) * num_heads_kv + head_kv) * BLOCK_M + rows
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
    token = (start_row + rows) // GROUP
    row_inside = token < length_q
    head = head_kv * GROUP + (start_row + rows) % GROUP
    if own > 1:
        offs_dv = tl.arange(0, BLOCK_DV)
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


@triton.jit(repr=decode_name("flashdig_decode_ragged"), do_not_specialize=UNSPECIALIZED)
def flashdig_decode_ragged(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    plan_ptr,
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
    slots,
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
    ONE_PHASE: tl.constexpr,
    LOOP: tl.constexpr,
    BACKWARDS: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A program takes one piece, or (LOOP) one after another while any is left.

    BACKWARDS: the last pieces come first. ORDER: see `launch_order`.
    """
    begin_after(ORDER)
    counters_ptr = plan_ptr + slots * SLOT_FIELDS
    pieces = tl.load(counters_ptr)
    units = pieces * num_heads_kv
    unit = tl.program_id(0)
    while unit < units:
        # the heads of a key lie side by side in memory: programs that read them start together
        head_kv = unit % num_heads_kv
        piece = unit // num_heads_kv
        if BACKWARDS:
            piece = pieces - 1 - piece
        _attend_piece(
            piece,
            head_kv,
            q_ptr,
            k_ptr,
            v_ptr,
            out_ptr,
            lse_ptr,
            part_ptr,
            part_lse_ptr,
            plan_ptr,
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
            slots,
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
            TOP_LEFT,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            NATURAL,
            SINKS,
            INPUT_PRECISION,
            SPLIT,
            ONE_PHASE,
            BLOCK_M,
            BLOCK_N,
            NUM_STAGES,
        )
        unit = units
        if LOOP:
            unit = tl.num_programs(0) + tl.atomic_add(counters_ptr + 1, 1, sem="relaxed")
    end_after(ORDER)


@triton.jit(repr=combine_name, do_not_specialize=UNSPECIALIZED)
def flashdig_combine_ragged(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    plan_ptr,
    cu_q_ptr,
    used_q_ptr,
    num_heads_kv,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    SINKS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    HELD: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Join the parts of the rows of a slot and KV head whose keys lie in several pieces, ROWS at a
    time. At most TILE_ROWS of a tile's rows are queries, and SHARES programs share them."""
    begin_after(ORDER)
    share = tl.program_id(0) % SHARES
    head_kv = tl.program_id(0) // SHARES % num_heads_kv
    fields_ptr = plan_ptr + tl.program_id(0) // SHARES // num_heads_kv * SLOT_FIELDS
    own = tl.load(fields_ptr + 1)
    if own <= 1:
        return
    first_piece = tl.load(fields_ptr).to(tl.int64)
    sequence = tl.load(fields_ptr + 2)
    start_row = tl.load(fields_ptr + 3)
    first_q = 0
    length_q = seqlen_q
    if PACKED:
        first_q, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    between = num_heads_kv.to(tl.int64) * BLOCK_M
    end = tl.minimum((share + 1) * (TILE_ROWS // SHARES), length_q * GROUP - start_row)
    for start in tl.range(share * (TILE_ROWS // SHARES), end, ROWS):
        rows = start + tl.arange(0, ROWS)
        row = start_row + rows
        token = row // GROUP
        row_inside = token < length_q
        first = (first_piece * num_heads_kv + head_kv) * BLOCK_M + rows
        out, lse = join_parts(
            part_ptr,
            part_lse_ptr,
            first,
            between,
            own,
            row_inside,
            HEAD_DIM_V,
            BLOCK_DV,
            ROWS,
            HELD,
        )
        heads = head_kv * GROUP + row % GROUP
        if SINKS:
            sink = tl.load(sinks_ptr + heads, mask=row_inside, other=0.0).to(tl.float32)
            out, lse = with_sink(out, lse, sink)
        store_rows(
            out,
            lse,
            out_ptr,
            lse_ptr,
            sequence,
            first_q,
            token,
            heads,
            row_inside,
            seqlen_q,
            num_heads_kv * GROUP,
            HEAD_DIM_V,
            BLOCK_DV,
            PACKED,
        )
