"""Forward attention in fp8 (e4m3) for Hopper: `forward` with operands of 8 bits.

What differs from 16 bits:

    V             arrives by columns (`fp8_values`), its keys in the order of P's registers
    P             is rounded to e4m3, 2^8 times as large: e4m3 ends at 448, and small
                  probabilities keep more of their bits. Row sums are of what was not rounded; the
                  factor leaves the output by the division
    descales      of Q and K join the factor of the scores, that of V the division

FlashAttention-3 (Shah et al. 2024, section 3.3) has the same scheme, with V transposed in shared
memory.
"""

from __future__ import annotations

from triton.language.extra.cuda import gdc_wait

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
    leave_out_blocks,
    new_block_ring,
    new_tiles,
    put_blocks,
    release_blocks,
    scaled,
    scaled_if_needed,
    start_scores,
    store_blocks,
    take_blocks,
    tile_at,
    to_shared,
)
from flashdig.kernels.hopper.forward import (
    ROWS,
    consumer_span,
    first_scores,
    row_statistics,
)
from flashdig.kernels.hopper.forward_producer import put_queries
from flashdig.kernels.hopper.fp8_columns import (
    as_operand,
    clear_counts,
    finished_output,
    joined,
    new_output,
    new_value_ring,
    put_values,
    start_output,
    wait_for_values,
)
from flashdig.kernels.hopper.fp8_softmax import P_FACTOR, online_softmax
from flashdig.kernels.hopper.names import attention_name
from flashdig.kernels.hopper.problem import Terms, final_scores, key_tiles, masked, problem_of
from flashdig.kernels.hopper.rows import Rows, rows_of_queries
from flashdig.kernels.hopper.schedule import (
    NO_TILE,
    Sizes,
    new_mail,
    next_program,
    place_of,
    receive,
    send,
    send_end,
)
from flashdig.kernels.hopper.softmax import thread_sums
from flashdig.kernels.hopper.walk import pass_by
from flashdig.kernels.triton.sequences import first_slot


@gluon.jit
def _descale(factors_ptr, place, sizes, terms):
    """The factor of a tile's KV head."""
    factor = terms.exp_factor * 0.0 + 1.0
    if factors_ptr is not None:
        heads_kv = sizes.num_heads
        head_kv = place.head
        if sizes.GROUP == 1:
            heads_kv = heads_kv // terms.group_size
            head_kv = head_kv // terms.group_size
        # a place without a tile is somewhere inside as well
        factor = gl.load(factors_ptr + place.batch * heads_kv + head_kv)
    return factor


@gluon.jit
def _terms_of(terms, factor, ALIBI: gl.constexpr):
    """The call's terms with a tile's factor of scores: a factor of 0 must not meet -inf."""
    score_factor = terms.score_factor
    exp_factor = terms.exp_factor
    if terms.SOFTCAP or ALIBI:
        score_factor = score_factor * factor
    else:
        exp_factor = gl.maximum(exp_factor * factor, 1e-30)
    return Terms(
        score_factor, exp_factor, terms.softcap, terms.group_size, terms.slopes_stride,
        terms.SOFTCAP,
    )  # fmt: skip


@gluon.jit
def _produce(
    q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail, sizes, terms,
    lengths, counter_ptr, tiles, section_heads, unit_heads, unit_items, CONSUMERS: gl.constexpr,
    VALUE_SLOT: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    GROUP: gl.constexpr = sizes.GROUP
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    program = gl.program_id(0)
    turned = program * 0 - 1  # the last section of V^T that was waited for
    count = 0  # tiles of queries so far
    done = 0  # tiles of keys so far
    while program < tiles:
        following = program
        place = place_of(sizes, program, lengths, BLOCK_M)
        if place.start_m < place.seqlen_q * GROUP:
            send(mail, count, place, sizes)
            problem = problem_of(sizes, place, terms, None)
            first, _, _, end = key_tiles(problem, place.start_m // GROUP, BLOCK_M // GROUP, BLOCK_N)
            head_kv = place.head if GROUP > 1 else place.head // terms.group_size
            key_rows = Rows(place.batch, head_kv, place.first_k, place.seqlen_k, sizes.PACKED, 1)
            value_batch = place.batch
            first_value = place.start_m * 0
            if sizes.PACKED:
                value_batch = place.start_m * 0
                first_value = VALUE_SLOT * first_slot(
                    lengths[1], place.batch, sizes.seqlen_k, VALUE_SLOT
                )
            # the first keys before Q, whose memory the tile before frees last
            put_blocks(keys, done, k_descs, key_rows, (end - 1) * BLOCK_N)
            put_queries(q_descs, q_tiles, q_full, q_empty, place, sizes, count, CONSUMERS)
            heads_kv = sizes.num_heads if GROUP > 1 else sizes.num_heads // terms.group_size
            section = (value_batch * heads_kv + head_kv) // section_heads
            steps = end - first
            for step in range(steps):
                # late, so that no tile waits for a block that still walks a long one
                if step == steps - 1:
                    following = next_program(counter_ptr)
                start_n = (end - 1 - step) * BLOCK_N
                if step > 0:
                    put_blocks(keys, done + step, k_descs, key_rows, start_n)
                if section != turned:  # V^T is of the kernel before
                    heads = heads_kv if sizes.PACKED else sizes.batch_size * heads_kv
                    units = gl.minimum(section_heads, heads - section * section_heads) // unit_heads
                    wait_for_values(counter_ptr, section, units * unit_items)
                    turned = section
                if JOINT and step == 0:
                    leave_out_blocks(values, done)
                put_values(
                    values, done + step + JOINT, v_descs, value_batch, head_kv,
                    first_value + start_n,
                )  # fmt: skip
            if JOINT:
                leave_out_blocks(keys, done + steps)
            count += 1
            done += steps + JOINT
        else:
            following = next_program(counter_ptr)
        program = following
    gdc_wait()  # else a kernel after this one might begin before the one that turns V ends
    send_end(mail, count, sizes)
    clear_counts(counter_ptr)


@gluon.jit
def _walk(
    state, q_tiles, buffer, keys, values, zeros, problem, rows, done, begin, stop, end,
    MASKED: gl.constexpr, EVERY: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """Steps begin..stop of the walk; step i meets key tile end - 1 - i. P V lags one step."""
    out, row_max, row_sums, p = state
    BLOCK_N: gl.constexpr = zeros.shape[1]
    for step in range(begin, stop):
        # its registers must be named before the first product of the step is issued
        operand = as_operand(p, out[0])
        k = take_blocks(keys, done + step)
        # a view of its own in every step, as in `walk`
        q = tile_at(q_tiles, buffer + (step >> 30))
        scores_started = start_scores(q, k, zeros)
        v = take_blocks(values, done + step - 1 + JOINT)
        out_started = start_output(operand, v, out)
        scores = warpgroup_mma_wait(len(out), deps=(scores_started,))
        if not JOINT:
            release_blocks(keys, done + step)
        start_n = (end - 1 - step) * BLOCK_N
        scores = final_scores(scores, problem, rows, start_n)
        if MASKED:
            scores = masked(scores, problem, rows, start_n)
        probs, rescale, row_max, row_sums = online_softmax(
            scores, row_max, row_sums, problem.exp_factor, MASKED, EVERY
        )
        out = finished_output(out_started)
        release_blocks(values, done + step - 1 + JOINT)
        p = joined(probs, out[0])
        out = scaled_if_needed(out, rescale)
    return out, row_max, row_sums, p


@gluon.jit
def _consume(
    out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr, v_descale_ptr,
    q_tiles, out_tiles, q_full, q_empty, keys, values, mail, sizes, terms,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, EVERY: gl.constexpr,
    OWN_WALK: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    Q_BUFFERS: gl.constexpr = q_tiles[0].shape[0] // CONSUMERS
    AHEAD: gl.constexpr = Q_BUFFERS > 1
    GROUP: gl.constexpr = sizes.GROUP
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    tile_rows = gl.arange(0, ROWS, s_rows)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    count = 0  # tiles of queries so far
    done = 0  # tiles of keys so far
    place = receive(mail, 0, sizes)
    scores = zeros
    if AHEAD:
        span = consumer_span(sizes, place, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK)
        if OWN_WALK:
            done = gl.where(place.start_m != NO_TILE, span.before, 0)
            pass_by(keys, values, 0, done, CONSUMER, 0, JOINT)
        started = first_scores(
            place, q_tiles, q_full, keys, zeros, count, done, CONSUMER, Q_BUFFERS
        )
        scores = warpgroup_mma_wait(0, deps=(started,))
    while place.start_m != NO_TILE:
        span = consumer_span(sizes, place, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK)
        if not AHEAD:
            if OWN_WALK:
                pass_by(keys, values, done, span.before, CONSUMER, 0, JOINT)
                done += span.before
            started = first_scores(
                place, q_tiles, q_full, keys, zeros, count, done, CONSUMER, Q_BUFFERS
            )
        descale = _descale(q_descale_ptr, place, sizes, terms) * _descale(
            k_descale_ptr, place, sizes, terms
        )
        v_descale = _descale(v_descale_ptr, place, sizes, terms)
        tile_terms = _terms_of(terms, descale, slopes_ptr is not None)
        if not AHEAD:
            scores = warpgroup_mma_wait(0, deps=(started,))
        release_blocks(keys, done)
        buffer = CONSUMER * Q_BUFFERS + count % Q_BUFFERS
        problem = problem_of(sizes, place, tile_terms, slopes_ptr)
        start_row = place.start_m + CONSUMER * ROWS
        rows = start_row // GROUP + tile_rows // GROUP

        # the first tile: nothing to multiply with V yet
        start_n = (span.end - 1) * BLOCK_N
        scores = masked(final_scores(scores, problem, rows, start_n), problem, rows, start_n)
        no_max = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
        probs, _, row_max, row_sums = online_softmax(
            scores, no_max, thread_sums(zeros), problem.exp_factor, True, 0
        )
        out = new_output(values.tiles)
        p = joined(probs, out[0])

        # masked tiles on the right, whole ones, masked ones on the left; step 0 is done. Tiles on
        # the left that other consumers see are walked as well: none may pass before the last P V
        steps = span.end - span.first
        if OWN_WALK:
            steps += span.after
        right_stop = gl.maximum(span.end - span.full_end, 1)
        full_stop = steps
        if problem.LEFT:
            full_stop = gl.maximum(span.end - span.full_first, 1)
        if problem.RIGHT:
            out, row_max, row_sums, p = _walk(
                (out, row_max, row_sums, p), q_tiles, buffer, keys, values, zeros, problem, rows,
                done, 1, right_stop, span.end, True, EVERY, JOINT,
            )  # fmt: skip
        out, row_max, row_sums, p = _walk(
            (out, row_max, row_sums, p), q_tiles, buffer, keys, values, zeros, problem, rows,
            done, right_stop, full_stop, span.end, False, EVERY, JOINT,
        )  # fmt: skip
        if problem.LEFT:
            out, row_max, row_sums, p = _walk(
                (out, row_max, row_sums, p), q_tiles, buffer, keys, values, zeros, problem, rows,
                done, full_stop, steps, span.end, True, EVERY, JOINT,
            )  # fmt: skip
        mbarrier.arrive(q_empty.index(buffer), count=1)

        v = take_blocks(values, done + steps - 1 + JOINT)
        out_started = start_output(as_operand(p, out[0]), v, out)
        following = receive(mail, count + 1, sizes)
        next_done = done + steps + JOINT
        if AHEAD:
            if OWN_WALK:
                next_span = consumer_span(
                    sizes, following, terms, CONSUMER, CONSUMERS, BLOCK_N, OWN_WALK
                )
                unseen = gl.where(following.start_m != NO_TILE, next_span.before, 0)
                pass_by(keys, values, next_done, unseen, CONSUMER, 0, JOINT)
                next_done += unseen
            started = first_scores(
                following, q_tiles, q_full, keys, zeros, count + 1, next_done, CONSUMER, Q_BUFFERS
            )
        factor = row_statistics(
            row_max, row_sums / P_FACTOR, rows, tile_rows, place, sizes, terms, lse_ptr, sinks_ptr
        ) * (v_descale / P_FACTOR)
        out = finished_output(out_started, len(q_tiles) if AHEAD else 0)
        release_blocks(values, done + steps - 1 + JOINT)
        out = scaled(out, factor)

        # rows past the last one are not written
        out_tile = tile_at(out_tiles, CONSUMER)
        wait_for_tile_stores(0)
        to_shared(out, out_tile)
        fence_async_shared()
        store_blocks(out_descs, rows_of_queries(place, sizes), start_row, out_tile)
        if AHEAD:
            scores = warpgroup_mma_wait(0, deps=(started,))
        count += 1
        done = next_done
        place = following
    wait_for_tile_stores(0)


def kernel_name(specialization):
    c = specialization.constants
    words = {"varlen": c["PACKED"], "grouped": c["GROUP"] > 1}
    return attention_name(specialization, "forward_e4m3", ROWS.value * c["CONSUMERS"], words)


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
        "tiles",
        "section_heads",
        "unit_heads",
        "unit_items",
    ],
)
def flashdig_hopper_fp8_forward(
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
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
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
    tiles,
    section_heads,
    unit_heads,
    unit_items,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    VALUE_SLOT: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    EVERY: gl.constexpr,
    OWN_WALK: gl.constexpr,
    JOINT: gl.constexpr,
    PACKED: gl.constexpr,
    GROUP: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    q_descs = blocks_of(q_desc, q_desc_rest)
    k_descs = blocks_of(k_desc, k_desc_rest)
    v_descs = blocks_of(v_desc, v_desc_rest)
    out_descs = blocks_of(out_desc, out_desc_rest)
    q_tiles = new_tiles(q_descs, CONSUMERS * Q_BUFFERS, ROWS)
    out_tiles = new_tiles(out_descs, CONSUMERS, ROWS)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS * Q_BUFFERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * Q_BUFFERS, 1], barrier)
    for n in gl.static_range(CONSUMERS * Q_BUFFERS):
        mbarrier.init(q_full.index(n), count=1)
        mbarrier.init(q_empty.index(n), count=1)
    keys = new_block_ring(k_descs, BLOCK_N, STAGES, CONSUMERS)
    values = new_value_ring(v_descs, BLOCK_N, STAGES, CONSUMERS, keys, JOINT)
    mail = new_mail(CONSUMERS)
    fence_async_shared()
    sizes = Sizes(
        batch_size, num_heads, seqlen_q, seqlen_k, heads_together, left, right,
        PACKED, GROUP, TOP_LEFT, LEFT, RIGHT,
    )  # fmt: skip
    terms = Terms(score_factor, exp_factor, softcap, group_size, stride_slopes_b, SOFTCAP)

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                        v_descale_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, 0, CONSUMERS, EVERY, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                        v_descale_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, 1, CONSUMERS, EVERY, OWN_WALK, JOINT)),
            (_produce, (q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                        seqused_k_ptr), counter_ptr, tiles, section_heads, unit_heads, unit_items,
                        CONSUMERS, VALUE_SLOT, JOINT)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                        v_descale_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, 0, CONSUMERS, EVERY, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                        v_descale_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, 1, CONSUMERS, EVERY, OWN_WALK, JOINT)),
            (_consume, (out_descs, lse_ptr, slopes_ptr, sinks_ptr, q_descale_ptr, k_descale_ptr,
                        v_descale_ptr, q_tiles, out_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, 2, CONSUMERS, EVERY, OWN_WALK, JOINT)),
            (_produce, (q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail,
                        sizes, terms, (cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                        seqused_k_ptr), counter_ptr, tiles, section_heads, unit_heads, unit_items,
                        CONSUMERS, VALUE_SLOT, JOINT)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
