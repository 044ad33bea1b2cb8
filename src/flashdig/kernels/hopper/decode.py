"""Decoding for Hopper: few query rows attended to a cache's keys, cut into pieces, in one launch.

    producers   a warp plans, claims pieces and copies their Q and K by TMA, another one their V
    consumer    a warpgroup, whose tile holds all queries and heads that share a KV head, and mostly
                empty rows: what decides is how fast keys come, and tensor cores that read K and V
                from shared memory leave the multiprocessor idle otherwise

Where a tile's keys are one piece its result is written at once; else the block that finishes the
last of its pieces joins them. Packed sequences of more queries than a tile holds have several.
"""

from __future__ import annotations

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.columns import (
    blocks_of,
    finished_output,
    new_block_ring,
    new_output,
    new_tiles,
    release_blocks,
    start_output,
    start_scores,
    take_blocks,
    tile_at,
)
from flashdig.kernels.hopper.decode_parts import (
    Results,
    clear_slack,
    join_parts,
    store_part,
    store_whole,
)
from flashdig.kernels.hopper.decode_pieces import (
    NO_PIECE,
    new_mail_of_pieces,
    produce_keys,
    produce_values,
    receive_piece,
)
from flashdig.kernels.hopper.decode_plan import Tiling, place_of_piece
from flashdig.kernels.hopper.forward_producer import ROWS
from flashdig.kernels.hopper.names import attention_name, with_dtype
from flashdig.kernels.hopper.problem import (
    LN_2,
    Terms,
    final_scores,
    key_tiles,
    masked,
    problem_of,
)
from flashdig.kernels.hopper.schedule import Sizes
from flashdig.kernels.hopper.softmax import first_softmax
from flashdig.kernels.hopper.walk import Span, settled, walk
from flashdig.kernels.triton.launch_order import begin_after, end_after


@gluon.jit
def _span(problem, piece, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    _, full_first, full_end, _ = key_tiles(problem, piece.start, BLOCK_M, BLOCK_N)
    full_end = gl.minimum(gl.maximum(full_end, piece.first), piece.end)
    full_first = gl.minimum(gl.maximum(full_first, piece.first), full_end)
    zero = piece.first * 0
    return Span(piece.first, full_first, full_end, piece.end, zero, zero)


@gluon.jit
def _consume(
    results, sinks_ptr, q_tiles, q_full, q_empty, keys, values, mail, sizes, terms, lengths, tiling,
    COLUMNS: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = tiling.BLOCK_N
    dtype: gl.constexpr = q_tiles[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows_of_tile = gl.arange(0, ROWS, s_rows) // sizes.GROUP
    rows = rows_of_tile
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    q_read = q_empty.index(0)
    count = 0  # pieces so far
    done = 0  # tiles of keys so far
    if sizes.PACKED:
        clear_slack(results, sizes, lengths)
    piece = receive_piece(mail, 0, sizes)
    while piece.sequence != NO_PIECE:
        problem = problem_of(sizes, place_of_piece(piece, sizes), terms, None)
        span = _span(problem, piece, tiling.TOKENS, BLOCK_N)
        if sizes.PACKED:
            rows = rows_of_tile + piece.start
        mbarrier.wait(q_full.index(0), count & 1)
        started = start_scores(tile_at(q_tiles, 0), take_blocks(keys, done), zeros)
        scores = warpgroup_mma_wait(0, deps=(started,))
        release_blocks(keys, done)
        start_n = (span.end - 1) * BLOCK_N
        scores = masked(final_scores(scores, problem, rows, start_n), problem, rows, start_n)
        probs, row_max, row_sums = first_softmax(scores, problem.exp_factor)
        out = new_output(values.tiles, ROWS)
        o_layout: gl.constexpr = out[0].type.layout
        p = gl.convert_layout(probs.to(dtype), gl.DotOperandLayout(0, o_layout, 2))

        # masked tiles on the right, whole ones, masked ones on the left; step 0 is done
        right_stop = gl.maximum(span.end - span.full_end, 1)
        full_stop = gl.maximum(span.end - span.full_first, 1)
        steps = span.end - span.first
        if problem.RIGHT:
            out, row_max, row_sums, p = walk(
                (out, row_max, row_sums, p), q_tiles, 0, q_read, keys, values, zeros, problem, rows,
                done, 1, right_stop, span, True, False, 0, 0, 0,
            )  # fmt: skip
        p = settled(p)
        out, row_max, row_sums, p = walk(
            (out, row_max, row_sums, p), q_tiles, 0, q_read, keys, values, zeros, problem, rows,
            done, right_stop, full_stop, span, False, False, 0, 0, 0,
        )  # fmt: skip
        if problem.LEFT:
            p = settled(p)
            out, row_max, row_sums, p = walk(
                (out, row_max, row_sums, p), q_tiles, 0, q_read, keys, values, zeros, problem, rows,
                done, full_stop, steps, span, True, False, 0, 0, 0,
            )  # fmt: skip
        mbarrier.arrive(q_read, count=1)
        v = take_blocks(values, done + steps - 1)
        out = finished_output(start_output(p, v, out), p)
        release_blocks(values, done + steps - 1)
        row_max = gl.convert_layout(gl.max(row_max, 1), s_rows)
        row_sum = gl.convert_layout(gl.sum(row_sums, 1), s_rows)
        divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
        lse = (row_max + gl.log2(divisor)) * LN_2
        factor = 1.0 / divisor
        if piece.own == 1:
            store_whole(out, factor, lse, results, piece, sizes, sinks_ptr)
        else:
            last = store_part(out, factor, lse, results, piece, sizes)
            if last:
                join_parts(results, piece, sizes, sinks_ptr, COLUMNS)
        count += 1
        done += steps
        piece = receive_piece(mail, count, sizes)


def kernel_name(specialization):
    c = specialization.constants
    words = {"varlen": c["TILE_ROWS"] > 0, "paged": c["PAGE_SIZE"] > 0}
    made = with_dtype("decode", specialization)
    return attention_name(specialization, made, ROWS.value, words, full="")


@gluon.jit(
    repr=kernel_name,
    do_not_specialize=[
        "batch_size",
        "num_heads",
        "seqlen_q",
        "seqlen_new",
        "capacity",
        "splits",
        "wanted",
        "most_pieces",
        "left",
        "right",
        "score_factor",
        "exp_factor",
        "softcap",
        "stride_table",
        "cache_rows",
        "rows_between",
    ],
)
def flashdig_hopper_decode(
    q_desc,
    q_desc_rest,
    k_desc,
    k_desc_rest,
    v_desc,
    v_desc_rest,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    sinks_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    cu_q_ptr,
    used_q_ptr,
    table_ptr,
    counter_ptr,
    batch_size,
    num_heads,
    seqlen_q,
    seqlen_new,
    capacity,
    splits,
    wanted,
    most_pieces,
    left,
    right,
    score_factor,
    exp_factor,
    softcap,
    stride_table,
    cache_rows,
    rows_between,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    COLUMNS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_ROWS: gl.constexpr,
    MOST_TOKENS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SLOTS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    ORDER: gl.constexpr,
):
    """One block for each multiprocessor.

    Args:
        table_ptr: the page table, or of a cache without pages the rows of sequences.
        seqlen_q: of each sequence; packed, of all.
        TILE_ROWS: of a tile of packed queries; 0: they are not packed, and one tile holds them.
        MOST_TOKENS: longer packed sequences are left out; 0: none is.
        ORDER: see `launch_order`.
    """
    q_descs = blocks_of(q_desc, q_desc_rest)
    k_descs = blocks_of(k_desc, k_desc_rest)
    v_descs = blocks_of(v_desc, v_desc_rest)
    q_tiles = new_tiles(q_descs, 1, ROWS)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(q_full.index(0), count=1)
    mbarrier.init(q_empty.index(0), count=1)
    # as wide as Q: a descriptor of pieces copies fewer columns
    keys = new_block_ring(q_descs, BLOCK_N, STAGES, 1)
    values = new_block_ring(q_descs, BLOCK_N, STAGES, 1)
    PACKED: gl.constexpr = TILE_ROWS > 0
    mail = new_mail_of_pieces(PACKED)
    fence_async_shared()
    begin_after(ORDER)
    sizes = Sizes(
        batch_size, num_heads, seqlen_q, capacity, num_heads, left, right,
        PACKED, GROUP, TOP_LEFT, LEFT, RIGHT, True, PAGE_SIZE,
    )  # fmt: skip
    terms = Terms(score_factor, exp_factor, softcap, num_heads, num_heads, SOFTCAP)
    TOKENS: gl.constexpr = (TILE_ROWS if PACKED else ROWS) // GROUP
    tiling = Tiling(TOKENS, BLOCK_N, MOST_TOKENS, SLOTS)
    rows = (TOKENS + seqlen_q * 0 if PACKED else seqlen_q) * GROUP
    results = Results(out_ptr, lse_ptr, part_ptr, part_lse_ptr, counter_ptr, rows, HEAD_DIM_V)
    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    gl.warp_specialize([
        (_consume, (results, sinks_ptr, q_tiles, q_full, q_empty, keys, values, mail, sizes, terms,
                    (seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, seqlen_new, cu_q_ptr,
                     used_q_ptr), tiling, COLUMNS)),
        (produce_keys, (q_descs, k_descs, q_tiles, q_full, q_empty, keys, mail, sizes, terms,
                        (seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, seqlen_new, cu_q_ptr,
                         used_q_ptr), (table_ptr, stride_table, cache_rows, rows_between),
                        counter_ptr, splits, wanted, most_pieces, tiling, ORDER == "beside")),
        (produce_values, (v_descs, values, mail, sizes,
                          (seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, seqlen_new, cu_q_ptr,
                           used_q_ptr), (table_ptr, stride_table, cache_rows, rows_between))),
    ], [1, 1], [PRODUCER_REGISTERS, PRODUCER_REGISTERS])
    # fmt: on
    end_after(ORDER)
