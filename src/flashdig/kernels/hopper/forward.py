"""Forward attention for Hopper: one producer warp feeds CONSUMERS warpgroups of 64 query rows each.

    producer    fetches tiles of queries (`schedule`); for each, Q, then K and V tiles, right to
                left, into rings of buffers (TMA)
    consumer    S_i = Q K_i^T is issued, then O += P_{i-1} V_{i-1}; the softmax of S_i runs while
                the tensor cores work on both (Shah et al. 2024, "FlashAttention-3", section 3.2)

Each consumer walks the key tiles that its own rows see, or the block's (`walk`), and goes on to the
next tile of queries without the others, as far as the rings reach. With two buffers for Q the first
S of the next tile is issued when the last P V of this one is done, and runs while this one's output
is divided and written.

Tiles that the mask cuts are walked first (and, with a window, last), in loops of their own. Keys
are counted from the first one that some query of the sequence sees to the last; what lies outside,
a neighbouring sequence included, arrives as zeros (`rows`).
"""

from __future__ import annotations

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    wait_for_tile_stores,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.columns import (
    blocks_of,
    finished_output,
    new_block_ring,
    new_block_ring_beside,
    new_output,
    new_tiles,
    release_blocks,
    scaled,
    start_output,
    start_scores,
    store_blocks,
    take_blocks,
    take_blocks_if,
    tile_at,
    to_shared,
)
from flashdig.kernels.hopper.forward_producer import ROWS, produce
from flashdig.kernels.hopper.names import attention_name, with_dtype
from flashdig.kernels.hopper.problem import (
    LN_2,
    LOG2_E,
    Terms,
    final_scores,
    masked,
    problem_of,
)
from flashdig.kernels.hopper.rows import rows_of_queries
from flashdig.kernels.hopper.schedule import (
    NO_TILE,
    Sizes,
    new_mail,
    receive,
)
from flashdig.kernels.hopper.softmax import first_softmax
from flashdig.kernels.hopper.turns import give_first_turn
from flashdig.kernels.hopper.walk import pass_by, settled, span_of, walk
from flashdig.kernels.triton.launch_order import begin_after


@gluon.jit
def consumer_span(
    sizes, place, terms, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
    OWN_WALK: gl.constexpr,
):  # fmt: skip
    """The key tiles of one consumer, of a place that is none (NO_TILE) anything."""
    GROUP: gl.constexpr = sizes.GROUP
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS // GROUP
    OWN_ROWS: gl.constexpr = ROWS // GROUP if OWN_WALK else BLOCK_M
    FIRST_ROW: gl.constexpr = CONSUMER * ROWS if OWN_WALK else 0
    return span_of(
        problem_of(sizes, place, terms, None), place.start_m // GROUP,
        (place.start_m + FIRST_ROW) // GROUP, BLOCK_M, OWN_ROWS, BLOCK_N,
    )  # fmt: skip


@gluon.jit
def first_scores(
    place, q_tiles, q_full, keys, zeros, count, done, CONSUMER: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
):  # fmt: skip
    """S of a tile's first keys, begun; of anything where no tile is left."""
    there = place.start_m != NO_TILE
    buffer = CONSUMER * Q_BUFFERS + count % Q_BUFFERS
    mbarrier.wait(q_full.index(buffer), (count // Q_BUFFERS) & 1, pred=there)
    k = take_blocks_if(there, keys, done)
    return start_scores(tile_at(q_tiles, buffer), k, zeros)


@gluon.jit
def _consume(
    out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values,
    mail, sizes, terms, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, OWN_OUTPUT: gl.constexpr,
    TAKE_TURNS: gl.constexpr, OWN_WALK: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    Q_BUFFERS: gl.constexpr = q_tiles[0].shape[0] // CONSUMERS
    AHEAD: gl.constexpr = Q_BUFFERS > 1
    TURNS: gl.constexpr = CONSUMERS if TAKE_TURNS else 0
    # with two buffers Q is not waited for: freed once a tile, not in a step
    EARLY: gl.constexpr = OWN_OUTPUT and not AHEAD
    GROUP: gl.constexpr = sizes.GROUP
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    dtype: gl.constexpr = q_tiles[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile_rows = gl.arange(0, ROWS, s_rows)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    count = 0  # tiles of queries so far
    done = 0  # tiles of keys so far
    if TURNS > 0:
        give_first_turn(CONSUMER, CONSUMERS)
    place = receive(mail, 0, sizes)
    scores = zeros
    if AHEAD:
        span = consumer_span(sizes, place, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK)
        done = gl.where(place.start_m != NO_TILE, span.before, 0)
        pass_by(keys, values, 0, done, CONSUMER, TURNS, JOINT)
        started = first_scores(
            place, q_tiles, q_full, keys, zeros, count, done, CONSUMER, Q_BUFFERS
        )
        scores = warpgroup_mma_wait(0, deps=(started,))
    while place.start_m != NO_TILE:
        span = consumer_span(sizes, place, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK)
        if not AHEAD:
            pass_by(keys, values, done, span.before, CONSUMER, TURNS, JOINT)
            done += span.before
            started = first_scores(
                place, q_tiles, q_full, keys, zeros, count, done, CONSUMER, Q_BUFFERS
            )
            scores = warpgroup_mma_wait(0, deps=(started,))
        release_blocks(keys, done)
        buffer = CONSUMER * Q_BUFFERS + count % Q_BUFFERS
        q_read = q_empty.index(buffer)
        problem = problem_of(sizes, place, terms, slopes_ptr)
        start_row = place.start_m + CONSUMER * ROWS
        rows = start_row // GROUP + tile_rows // GROUP

        # the first tile: nothing to multiply with V yet
        start_n = (span.end - 1) * BLOCK_N
        scores = final_scores(scores, problem, rows, start_n)
        if problem.RIGHT or problem.LEFT:  # noqa: SIM114 - constants, unlike what follows
            scores = masked(scores, problem, rows, start_n)
        elif span.full_end < span.end:
            scores = masked(scores, problem, rows, start_n)
        probs, row_max, row_sums = first_softmax(scores, problem.exp_factor)
        out = new_output(values.tiles, ROWS)
        o_layout: gl.constexpr = out[0].type.layout
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
        p = gl.convert_layout(probs.to(dtype), p_layout)

        # masked tiles on the right, whole ones, masked ones on the left; step 0 is done
        right_stop = gl.maximum(span.end - span.full_end, 1)
        full_stop = gl.maximum(span.end - span.full_first, 1)
        steps = span.end - span.first
        if problem.RIGHT:
            out, row_max, row_sums, p = walk(
                (out, row_max, row_sums, p), q_tiles, buffer, q_read, keys, values, zeros, problem,
                rows, done, 1, right_stop, span, True, EARLY, CONSUMER, TURNS, JOINT,
            )  # fmt: skip
        p = settled(p)
        out, row_max, row_sums, p = walk(
            (out, row_max, row_sums, p), q_tiles, buffer, q_read, keys, values, zeros, problem,
            rows, done, right_stop, full_stop, span, False, EARLY, CONSUMER, TURNS, JOINT,
        )  # fmt: skip
        if problem.LEFT:
            p = settled(p)
            out, row_max, row_sums, p = walk(
                (out, row_max, row_sums, p), q_tiles, buffer, q_read, keys, values, zeros, problem,
                rows, done, full_stop, steps, span, True, EARLY, CONSUMER, TURNS, JOINT,
            )  # fmt: skip
        if EARLY:
            mbarrier.arrive(q_read, count=1, pred=steps == 1)
        elif OWN_OUTPUT:
            mbarrier.arrive(q_read, count=1)

        v = take_blocks(values, done + steps - 1 + JOINT)
        out_started = start_output(p, v, out)
        row_max = gl.convert_layout(gl.max(row_max, 1), s_rows)
        factor = row_statistics(
            row_max, row_sums, rows, tile_rows, place, sizes, terms, lse_ptr, sinks_ptr
        )
        out = finished_output(out_started, p)
        release_blocks(values, done + steps - 1 + JOINT)
        pass_by(keys, values, done + steps + JOINT, span.after, CONSUMER, TURNS, JOINT)
        # the producer sends the next place when all keys of this one are on their way
        following = receive(mail, count + 1, sizes)
        next_done = done + steps + JOINT + span.after
        if AHEAD:
            next_span = consumer_span(
                sizes, following, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK
            )
            unseen = gl.where(following.start_m != NO_TILE, next_span.before, 0)
            pass_by(keys, values, next_done, unseen, CONSUMER, TURNS, JOINT)
            next_done += unseen
            started = first_scores(
                following, q_tiles, q_full, keys, zeros, count + 1, next_done, CONSUMER, Q_BUFFERS
            )
        out = scaled(out, factor)

        # rows past the last one are not written
        if OWN_OUTPUT:
            out_tile = tile_at(out_tiles, CONSUMER)
            wait_for_tile_stores(0)
        else:
            out_tile = tile_at(out_tiles, buffer)
        to_shared(out, out_tile)
        fence_async_shared()
        store_blocks(out_descs, rows_of_queries(place, sizes), start_row, out_tile)
        if not OWN_OUTPUT:
            wait_for_tile_stores(0)
            mbarrier.arrive(q_read, count=1)
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=(started,))
        count += 1
        done = next_done
        place = following
    wait_for_tile_stores(0)


@gluon.jit
def row_statistics(row_max, row_sums, rows, tile_rows, place, sizes, terms, lse_ptr, sinks_ptr):
    """Writes the log-sum-exp; returns what the output is multiplied with."""
    GROUP: gl.constexpr = sizes.GROUP
    s_rows: gl.constexpr = row_max.type.layout
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), s_rows)
    divisor_factor = gl.full([ROWS], 1.0, gl.float32, s_rows)
    group_head = tile_rows % GROUP
    known = (rows < place.seqlen_q) & (group_head < terms.group_size)
    head = place.head
    heads = sizes.num_heads
    if GROUP > 1:
        head = place.head * terms.group_size
        heads = sizes.num_heads * terms.group_size
    if sinks_ptr is not None:
        if GROUP > 1:
            sinks = gl.load(sinks_ptr + head + group_head, mask=known, other=0.0)
            sink = sinks.to(gl.float32) * LOG2_E
        else:
            sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        with_sink = gl.maximum(row_max, sink)
        shift = gl.where(with_sink == float("-inf"), 0.0, with_sink)
        divisor_factor = gl.exp2(row_max - shift)
        row_sum = row_sum * divisor_factor + gl.exp2(sink - shift)
        row_max = with_sink
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    # (batch, head, row), or (head, row of all sequences)
    if sizes.PACKED:
        before = head.to(gl.int64) * sizes.seqlen_q + place.first_q
    else:
        before = (place.batch * heads + head).to(gl.int64) * sizes.seqlen_q
    lse_ptrs = lse_ptr + before + rows
    if GROUP > 1:
        lse_ptrs += group_head * sizes.seqlen_q
    gl.store(lse_ptrs, (row_max + gl.log2(divisor)) * LN_2, mask=known)
    return divisor_factor / divisor


def kernel_name(specialization):
    c = specialization.constants
    words = {
        "varlen": c["PACKED"],
        "paged": c["PAGE_SIZE"] > 0,
        "cache": c["LISTED"] and c["PAGE_SIZE"] == 0,
        "grouped": c["GROUP"] > 1,
    }
    made = with_dtype("forward", specialization)
    return attention_name(specialization, made, ROWS.value * c["CONSUMERS"], words)


@gluon.jit(
    repr=kernel_name,
    do_not_specialize=[
        "batch_size",
        "num_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "heads_together",
        "left",
        "right",
        "score_factor",
        "exp_factor",
        "softcap",
        "stride_slopes_b",
        "stride_table",
        "num_pages",
        "page_rows",
        "tiles",
    ],
)
def flashdig_hopper_forward(
    q_desc,
    q_desc_rest,
    k_desc,
    k_desc_rest,
    v_desc,
    v_desc_rest,
    out_desc,
    out_desc_rest,
    lse_ptr,
    slopes_ptr,
    sinks_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    table_ptr,
    counter_ptr,
    batch_size,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    heads_together,
    left,
    right,
    score_factor,
    exp_factor,
    softcap,
    stride_slopes_b,
    stride_table,
    num_pages,
    page_rows,
    tiles,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    VALUE_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    OWN_OUTPUT: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
    OWN_WALK: gl.constexpr,
    JOINT: gl.constexpr,
    PACKED: gl.constexpr,
    GROUP: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    LISTED: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    ORDER: gl.constexpr,
):
    """ORDER: see `launch_order`."""
    begin_after(ORDER)
    q_descs = blocks_of(q_desc, q_desc_rest)
    k_descs = blocks_of(k_desc, k_desc_rest)
    v_descs = blocks_of(v_desc, v_desc_rest)
    out_descs = blocks_of(out_desc, out_desc_rest)
    q_tiles = new_tiles(q_descs, CONSUMERS * Q_BUFFERS, ROWS)
    # without memory of its own the output goes through Q's, which nothing reads any more then
    out_tiles = new_tiles(out_descs, CONSUMERS, ROWS) if OWN_OUTPUT else q_tiles
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * Q_BUFFERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * Q_BUFFERS, 1], barrier)
    for n in gl.static_range(CONSUMERS * Q_BUFFERS):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=1)
    # as wide as Q and O: a descriptor of pages copies fewer columns
    keys = new_block_ring(q_descs, BLOCK_N, STAGES, CONSUMERS)
    if JOINT:
        values = new_block_ring_beside(out_descs, BLOCK_N, keys)
    else:
        values = new_block_ring(out_descs, BLOCK_N, VALUE_STAGES, CONSUMERS)
    mail = new_mail(CONSUMERS)
    fence_async_shared()
    sizes = Sizes(
        batch_size, num_heads, seqlen_q, seqlen_k, heads_together, left, right,
        PACKED, GROUP, TOP_LEFT, LEFT, RIGHT, LISTED, PAGE_SIZE,
    )  # fmt: skip
    terms = Terms(score_factor, exp_factor, softcap, group_size, stride_slopes_b, SOFTCAP)

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full,
                        q_empty, keys, values, mail, sizes, terms, 0, CONSUMERS, OWN_OUTPUT,
                        TAKE_TURNS, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full,
                        q_empty, keys, values, mail, sizes, terms, 1, CONSUMERS, OWN_OUTPUT,
                        TAKE_TURNS, OWN_WALK, JOINT)),
            (produce, (q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail,
                       sizes, terms, (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                       seqused_k_ptr), (table_ptr, stride_table, num_pages, page_rows), counter_ptr,
                       tiles, CONSUMERS, JOINT)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full,
                        q_empty, keys, values, mail, sizes, terms, 0, CONSUMERS, OWN_OUTPUT,
                        TAKE_TURNS, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full,
                        q_empty, keys, values, mail, sizes, terms, 1, CONSUMERS, OWN_OUTPUT,
                        TAKE_TURNS, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_tiles, out_tiles, q_full,
                        q_empty, keys, values, mail, sizes, terms, 2, CONSUMERS, OWN_OUTPUT,
                        TAKE_TURNS, OWN_WALK, JOINT)),
            (produce, (q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail,
                       sizes, terms, (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                       seqused_k_ptr), (table_ptr, stride_table, num_pages, page_rows), counter_ptr,
                       tiles, CONSUMERS, JOINT)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
