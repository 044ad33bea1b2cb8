"""Attention over a cache for sequences of different lengths, without knowing them on the host.

For sequences whose queries fit one tile of rows: decoding. The lengths live on the device, so the
device decides, in a small kernel of its own: where they are about equal each sequence is cut as
`decode` would cut it; else the keys of all are cut into pieces of about one size, so that a long
sequence holds no multiprocessor when the others are done. The grid has a program for every piece
that there can be; those beyond the last end at once.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.combine import join_parts, store_rows, with_sink
from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, combine_name, decode_name
from flashdig.kernels.triton.decode_rows import attend_rows
from flashdig.kernels.triton.paged import key_extent, seen_by_tile


@triton.jit
def _keys_of(
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    sequence,
    seqlen_q,
    seqlen_new,
    capacity,
    left,
    right,
    GROUP: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(key_begin, key_end, offset, tiles) of one sequence or a vector of them; at least one tile,
    so that a sequence without keys has a piece, which writes its rows."""
    first, length_k = key_extent(
        seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, sequence, seqlen_new, capacity
    )
    offset = length_k - seqlen_q
    if TOP_LEFT:
        offset = first
    key_begin, key_end = seen_by_tile(
        0, seqlen_q, first, length_k, offset, left, right, GROUP, BLOCK_M, LEFT, RIGHT
    )
    tiles = tl.cdiv(key_end - key_begin // BLOCK_N * BLOCK_N, BLOCK_N)
    tiles = tl.where(key_end > key_begin, tl.maximum(tiles, 1), 1)
    return key_begin, key_end, offset, tiles


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flashdig_plan_pieces(
    plan_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    seqlen_new,
    capacity,
    splits,
    wanted,
    most,
    left,
    right,
    GROUP: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    TAPER: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the plan, int32: each sequence's first piece, its number of pieces, and the sequence of
    each of `most` pieces, -1 behind the last. A program writes one sequence's part."""
    sequence = tl.program_id(0)
    offs_b = tl.arange(0, BLOCK_B)
    _begin, _end, _offset, tiles = _keys_of(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        tl.minimum(offs_b, batch - 1),
        seqlen_q,
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
    tiles = tl.where(offs_b < batch, tiles, 0)
    before = tl.cumsum(tiles.to(tl.int64), 0) - tiles
    total = tl.sum(tiles.to(tl.int64), 0)
    # at most a quarter longer than the mean
    even = tl.max(tiles, 0).to(tl.int64) * batch * 4 <= total * 5
    piece = tl.maximum(tl.cdiv(total * num_heads_kv, wanted), 1).to(tl.int32)
    if TAPER:  # the last ones are short, so that all end at about one time
        half = tl.where(before * 2 >= total, tl.cdiv(piece, 2), piece)
        piece = tl.where(before * 5 >= total * 4, tl.cdiv(piece, 4), half)
    pieces = tl.where(even, tl.minimum(splits, tiles), tl.cdiv(tiles, piece))
    pieces = tl.where(offs_b < batch, pieces, 0)
    own = tl.sum(tl.where(offs_b == sequence, pieces, 0), 0)
    first = tl.sum(tl.where(offs_b < sequence, pieces, 0), 0)
    tl.store(plan_ptr + sequence, first)
    tl.store(plan_ptr + batch + sequence, own)
    owner_ptr = plan_ptr + 2 * batch
    for start in tl.range(first, first + own, BLOCK_B):
        tl.store(owner_ptr + start + offs_b, sequence, mask=start + offs_b < first + own)
    if sequence == batch - 1:
        for start in tl.range(first + own, most, BLOCK_B):
            tl.store(owner_ptr + start + offs_b, -1, mask=start + offs_b < most)


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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    # the heads of a key lie side by side in memory: programs that read them start together
    head_kv = tl.program_id(0) % num_heads_kv
    piece = tl.program_id(0) // num_heads_kv
    sequence = tl.load(plan_ptr + 2 * batch + piece)
    if sequence < 0:
        return
    first_piece = tl.load(plan_ptr + sequence)
    own = tl.load(plan_ptr + batch + sequence)
    key_begin, key_end, offset, tiles = _keys_of(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        sequence,
        seqlen_q,
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
    part_rows = tl.program_id(0).to(tl.int64) * BLOCK_M + rows
    if begin >= end:  # noqa: SIM102
        if own > 1:
            tl.store(part_lse_ptr + part_rows, tl.full([BLOCK_M], float("-inf"), tl.float32))
            return
    ONE_PHASE: tl.constexpr = True
    start_row = 0
    first_q = 0
    length_q = seqlen_q
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
    token = rows // GROUP
    row_inside = token < seqlen_q
    head = head_kv * GROUP + rows % GROUP
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


@triton.jit(repr=combine_name, do_not_specialize=UNSPECIALIZED)
def flashdig_combine_ragged(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    sinks_ptr,
    plan_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    SINKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Join the parts of one row of one (sequence, KV head) pair that lies in several pieces."""
    row = tl.program_id(0) % (seqlen_q * GROUP)
    head_kv = tl.program_id(0) // (seqlen_q * GROUP) % num_heads_kv
    sequence = tl.program_id(0) // (seqlen_q * GROUP) // num_heads_kv
    own = tl.load(plan_ptr + batch + sequence)
    if own == 1:
        return
    first = tl.load(plan_ptr + sequence).to(tl.int64) * num_heads_kv + head_kv
    between = num_heads_kv.to(tl.int64) * BLOCK_M
    first = first * BLOCK_M + row
    out, lse = join_parts(part_ptr, part_lse_ptr, first, between, own, HEAD_DIM_V, BLOCK_DV)
    heads = head_kv * GROUP + row % GROUP + tl.zeros([1], tl.int32)
    if SINKS:
        out, lse = with_sink(out, lse, tl.load(sinks_ptr + heads).to(tl.float32))
    store_rows(
        out,
        lse,
        out_ptr,
        lse_ptr,
        sequence,
        0,
        row // GROUP + tl.zeros([1], tl.int32),
        heads,
        heads >= 0,
        seqlen_q,
        num_heads_kv * GROUP,
        HEAD_DIM_V,
        BLOCK_DV,
        False,
    )
