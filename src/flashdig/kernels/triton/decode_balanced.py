"""Attention over a cache with the keys of all sequences dealt out evenly to resident programs.

For sequences whose queries fit one tile of rows: decoding. Where `decode` gives each sequence the
same number of programs, here every program walks the same number of key tiles, whatever the
lengths: the tiles of all (sequence, KV head) pairs stand in a row, and program c of C takes the
tiles from c * total // C on, over as many pairs as they span (stream-K: Osama et al. 2023).

A pair that lies in one program is written at once. Else each of its programs leaves a part: in its
second place the pair that it begins and does not end, in its first the one that it continues.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.combine import (
    PARTS_AT_ONCE,
    launch_the_next,
    store_rows,
    wait_for_the_last,
    with_sink,
)
from flashdig.kernels.triton.decode import attend_rows
from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED, combine_name, decode_name
from flashdig.kernels.triton.paged import key_extent, seen_by_tile
from flashdig.kernels.triton.score_terms import LN_2, LOG2_E


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
    so that a sequence without keys has a program that writes its rows."""
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


@triton.jit
def _all_tiles(
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    batch,
    seqlen_q,
    seqlen_new,
    capacity,
    left,
    right,
    GROUP: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(tiles of each sequence, their running sum, the whole sum), of one KV head."""
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
    return tiles, tl.cumsum(tiles, 0), tl.sum(tiles, 0)


@triton.jit
def _program_of(tile, total, programs):
    """The program that walks a tile: the last whose first tile is not behind it."""
    return (((tile + 1).to(tl.int64) * programs - 1) // total).to(tl.int32)


@triton.jit(repr=decode_name("flashdig_decode_balanced"), do_not_specialize=UNSPECIALIZED)
def flashdig_decode_balanced(
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
    programs,
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
    EARLY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    if EARLY:
        launch_the_next()
    program = tl.program_id(0)
    tiles, ends, of_head = _all_tiles(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        batch,
        seqlen_q,
        seqlen_new,
        capacity,
        left,
        right,
        GROUP,
        TOP_LEFT,
        LEFT,
        RIGHT,
        BLOCK_B,
        BLOCK_M,
        BLOCK_N,
    )
    total = of_head * num_heads_kv
    programs = tl.minimum(programs, total)  # each has a tile
    if program >= programs:
        return
    ONE_PHASE: tl.constexpr = True
    start_row = 0
    first_q = 0
    length_q = seqlen_q
    offs_b = tl.arange(0, BLOCK_B)
    rows = tl.arange(0, BLOCK_M)
    token = rows // GROUP
    row_inside = token < seqlen_q
    offs_dv = tl.arange(0, BLOCK_DV)
    tile = (program.to(tl.int64) * total // programs).to(tl.int32)
    last = ((program + 1).to(tl.int64) * total // programs).to(tl.int32)
    while tile < last:
        sequence = tl.sum((ends * num_heads_kv <= tile).to(tl.int32), 0)
        own = tl.sum(tl.where(offs_b == sequence, tiles, 0), 0)
        before = tl.sum(tl.where(offs_b == sequence, ends - tiles, 0), 0)
        inside = tile - before * num_heads_kv
        head_kv = inside // own
        skipped = inside - head_kv * own
        taken = tl.minimum(last - tile, own - skipped)
        key_begin, key_end, offset, _tiles = _keys_of(
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
        begin = (key_begin // BLOCK_N + skipped) * BLOCK_N
        end = tl.minimum(begin + taken * BLOCK_N, key_end)
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
        head = head_kv * GROUP + rows % GROUP
        if taken == own:
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
        else:
            place = 2 * program + (skipped == 0).to(tl.int32)
            part_rows = place.to(tl.int64) * BLOCK_M + rows
            tl.store(part_lse_ptr + part_rows, lse)
            tl.store(part_ptr + part_rows[:, None] * BLOCK_DV + offs_dv[None, :], out)
        tile += taken


@triton.jit(repr=combine_name, do_not_specialize=UNSPECIALIZED)
def flashdig_combine_balanced(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    sinks_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    seqlen_new,
    capacity,
    programs,
    left,
    right,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SINKS: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Join the parts of one row of one (sequence, KV head) pair that several programs walked."""
    row = tl.program_id(0) % (seqlen_q * GROUP)
    head_kv = tl.program_id(0) // (seqlen_q * GROUP) % num_heads_kv
    sequence = tl.program_id(0) // (seqlen_q * GROUP) // num_heads_kv
    tiles, ends, of_head = _all_tiles(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        batch,
        seqlen_q,
        seqlen_new,
        capacity,
        left,
        right,
        GROUP,
        TOP_LEFT,
        LEFT,
        RIGHT,
        BLOCK_B,
        BLOCK_M,
        BLOCK_N,
    )
    offs_b = tl.arange(0, BLOCK_B)
    own = tl.sum(tl.where(offs_b == sequence, tiles, 0), 0)
    before = tl.sum(tl.where(offs_b == sequence, ends - tiles, 0), 0)
    total = of_head * num_heads_kv
    programs = tl.minimum(programs, total)
    tile = before * num_heads_kv + head_kv * own
    first = _program_of(tile, total, programs)
    last = _program_of(tile + own - 1, total, programs)
    if EARLY:
        wait_for_the_last()
    if first == last:
        return
    offs_p = tl.arange(0, PARTS_AT_ONCE)
    offs_dv = tl.arange(0, BLOCK_DV)
    # program `first` left its part in its second place, the others in their first one
    largest = tl.full([1], float("-inf"), tl.float32)
    for start in tl.range(first, last + 1, PARTS_AT_ONCE):
        program = start + offs_p
        parts = (2 * program + (program == first).to(tl.int32)).to(tl.int64) * BLOCK_M + row
        lses = tl.load(part_lse_ptr + parts, mask=program <= last, other=float("-inf"))
        largest = tl.maximum(largest, tl.max(lses, 0))
    shift = tl.where(largest == float("-inf"), 0.0, largest)
    sums = tl.zeros([1], tl.float32)
    out = tl.zeros([1, BLOCK_DV], tl.float32)
    for start in tl.range(first, last + 1, PARTS_AT_ONCE):
        program = start + offs_p
        parts = (2 * program + (program == first).to(tl.int32)).to(tl.int64) * BLOCK_M + row
        lses = tl.load(part_lse_ptr + parts, mask=program <= last, other=float("-inf"))
        weights = tl.exp2((lses - shift) * LOG2_E)
        read = (lses != float("-inf"))[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        values = tl.load(
            part_ptr + parts[:, None] * BLOCK_DV + offs_dv[None, :], mask=read, other=0.0
        )
        sums += tl.sum(weights, 0)
        out += tl.sum(values * weights[:, None], 0)[None, :]
    sums = tl.where(sums == 0.0, 1.0, sums)
    out = out / sums[:, None]
    lse = largest + tl.log2(sums) * LN_2
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
