"""Forward attention for Hopper: one producer warp feeds CONSUMERS warpgroups of 64 query rows each.

    producer    Q once; then K and V tiles, right to left, into rings of buffers (TMA)
    consumer    S_i = Q K_i^T is issued, then O += P_{i-1} V_{i-1}; the softmax of S_i runs while
                the tensor cores work on both (Shah et al. 2024, "FlashAttention-3", section 3.2)

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
    load_blocks,
    new_block_ring,
    new_output,
    new_tiles,
    put_blocks,
    release_blocks,
    same_blocks,
    scaled,
    start_output,
    start_scores,
    store_blocks,
    take_blocks,
    tile_at,
    to_shared,
)
from flashdig.kernels.hopper.problem import LOG2_E, Problem, final_scores, key_tiles, masked
from flashdig.kernels.hopper.rows import Rows, rows_in_sections
from flashdig.kernels.hopper.softmax import online_softmax, thread_sums
from flashdig.kernels.triton.sequences import rows_of_program, seen_keys

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup's tile


@gluon.jit
def _produce(q_descs, k_descs, v_descs, q_tiles, q_full, keys, values, at, start_m, first, end):
    query_rows, key_rows = at
    CONSUMERS: gl.constexpr = q_tiles[0].shape[0]
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    for c in gl.static_range(CONSUMERS):
        tile = tile_at(q_tiles, c)
        load_blocks(q_descs, query_rows, start_m + c * ROWS, q_full.index(c), tile)
    for step in range(end - first):
        start_n = (end - 1 - step) * BLOCK_N
        put_blocks(keys, step, k_descs, key_rows, start_n)
        put_blocks(values, step, v_descs, key_rows, start_n)


@gluon.jit
def _settled(p):
    """p, unchanged: pairs of its elements are bound to registers here. A loop that takes p from
    another loop would else take it apart and put it together again in every step."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _walk(state, q, keys, values, zeros, problem, rows, begin, stop, end, MASKED: gl.constexpr):
    """Steps begin..stop of the walk; step i meets key tile end - 1 - i. P V lags one step."""
    out, row_max, row_sums, p = state
    BLOCK_N: gl.constexpr = zeros.shape[1]
    for step in range(begin, stop):
        k = take_blocks(keys, step)
        scores_started = start_scores(q, k, zeros)
        v = take_blocks(values, step - 1)
        out_started = start_output(p, v, out)
        scores = warpgroup_mma_wait(len(out), deps=(scores_started,))
        release_blocks(keys, step)
        start_n = (end - 1 - step) * BLOCK_N
        scores = final_scores(scores, problem, rows, start_n)
        if MASKED:
            scores = masked(scores, problem, rows, start_n)
        probs, rescale, row_max, row_sums = online_softmax(
            scores, row_max, row_sums, problem.exp_factor, MASKED
        )
        p_next = gl.convert_layout(probs.to(p.dtype), p.type.layout)
        out = finished_output(out_started, p)
        release_blocks(values, step - 1)
        p = p_next
        out = scaled(out, rescale)
    return out, row_max, row_sums, p


@gluon.jit
def _consume(
    out_descs,
    lse_ptr,
    sinks_ptr,
    q_tiles,
    out_tiles,
    q_full,
    keys,
    values,
    problem,
    query_rows,
    group_size,
    start_m,
    tiles,
    CONSUMER: gl.constexpr,
):
    first, full_first, full_end, end = tiles
    GROUP: gl.constexpr = query_rows.GROUP
    dtype: gl.constexpr = q_tiles[0].dtype
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)

    start_row = start_m + CONSUMER * ROWS
    tile_rows = gl.arange(0, ROWS, s_rows)
    rows = start_row // GROUP + tile_rows // GROUP
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    out = new_output(values.tiles, ROWS)
    o_layout: gl.constexpr = out[0].type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    q = tile_at(q_tiles, CONSUMER)

    # the first tile: nothing to multiply with V yet
    mbarrier.wait(q_full.index(CONSUMER), 0)
    scores_started = start_scores(q, take_blocks(keys, 0), zeros)
    scores = warpgroup_mma_wait(0, deps=(scores_started,))
    release_blocks(keys, 0)
    start_n = (end - 1) * BLOCK_N
    scores = masked(final_scores(scores, problem, rows, start_n), problem, rows, start_n)
    probs, _, row_max, row_sums = online_softmax(
        scores, row_max, thread_sums(zeros), problem.exp_factor, True
    )
    p = gl.convert_layout(probs.to(dtype), p_layout)

    # masked tiles on the right, whole ones, masked ones on the left; step 0 is done
    right_stop = gl.maximum(end - full_end, 1)
    full_stop = gl.maximum(end - full_first, 1)
    steps = end - first
    if problem.RIGHT:
        out, row_max, row_sums, p = _walk(
            (out, row_max, row_sums, p),
            q, keys, values, zeros, problem, rows, 1, right_stop, end, True,
        )  # fmt: skip
        p = _settled(p)
    out, row_max, row_sums, p = _walk(
        (out, row_max, row_sums, p),
        q, keys, values, zeros, problem, rows, right_stop, full_stop, end, False,
    )  # fmt: skip
    if problem.LEFT:
        p = _settled(p)
        out, row_max, row_sums, p = _walk(
            (out, row_max, row_sums, p),
            q, keys, values, zeros, problem, rows, full_stop, steps, end, True,
        )  # fmt: skip

    v = take_blocks(values, steps - 1)
    out_started = start_output(p, v, out)
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), s_rows)
    divisor_factor = gl.full([ROWS], 1.0, gl.float32, s_rows)
    group_head = tile_rows % GROUP
    known = (rows < problem.seqlen_q) & (group_head < group_size)
    if sinks_ptr is not None:
        if GROUP > 1:
            sink = gl.load(sinks_ptr + group_head, mask=known, other=0.0).to(gl.float32) * LOG2_E
        else:
            sink = gl.load(sinks_ptr).to(gl.float32) * LOG2_E
        with_sink = gl.maximum(row_max, sink)
        shift = gl.where(with_sink == float("-inf"), 0.0, with_sink)
        divisor_factor = gl.exp2(row_max - shift)
        row_sum = row_sum * divisor_factor + gl.exp2(sink - shift)
        row_max = with_sink
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse_ptrs = lse_ptr + rows
    if GROUP > 1:
        lse_ptrs += group_head * problem.seqlen_q
    gl.store(lse_ptrs, (row_max + gl.log2(divisor)) * LN_2, mask=known)
    out = scaled(finished_output(out_started, p), divisor_factor / divisor)

    # rows past the last one are not written
    out_tile = tile_at(out_tiles, CONSUMER)
    to_shared(out, out_tile)
    fence_async_shared()
    store_blocks(out_descs, query_rows, start_row, out_tile)
    wait_for_tile_stores(0)


def kernel_name(specialization):
    c = specialization.constants
    dtype = "bf16" if "bf16" in specialization.signature["q_desc"] else "fp16"
    head_dim = f"d{c['HEAD_DIM']}"
    if c["HEAD_DIM_V"] != c["HEAD_DIM"]:
        head_dim += f"v{c['HEAD_DIM_V']}"
    parts = [f"flashdig_hopper_forward_{dtype}_{head_dim}_m{64 * c['CONSUMERS']}n{c['BLOCK_N']}"]
    parts.append("window" if c["LEFT"] else "causal" if c["RIGHT"] else "full")
    for there, word in (
        (c["PACKED"], "varlen"),
        (c["GROUP"] > 1, "grouped"),
        (c["SOFTCAP"], "softcap"),
        (specialization.signature["slopes_ptr"] != "constexpr", "alibi"),
        (specialization.signature["sinks_ptr"] != "constexpr", "sinks"),
    ):
        if there:
            parts.append(word)
    return "_".join(parts)


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
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    PACKED: gl.constexpr,
    GROUP: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    q_descs = blocks_of(q_desc, q_desc_rest)
    k_descs = blocks_of(k_desc, k_desc_rest)
    v_descs = blocks_of(v_desc, v_desc_rest)
    out_descs = blocks_of(out_desc, out_desc_rest)
    q_tiles = new_tiles(q_descs, CONSUMERS, ROWS)
    if same_blocks(q_descs, out_descs):
        out_tiles = q_tiles  # nothing reads Q any more when the output is there
    else:
        out_tiles = new_tiles(out_descs, CONSUMERS, ROWS)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    keys = new_block_ring(k_descs, BLOCK_N, STAGES, CONSUMERS)
    values = new_block_ring(v_descs, BLOCK_N, STAGES, CONSUMERS)
    fence_async_shared()

    if PACKED:
        batch, head, start_m, first_q, first_k, seqlen_q, seqlen_k, statistics = rows_of_program(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr,
            batch_size, num_heads, seqlen_q, seqlen_k, BLOCK_M, True, RIGHT,
        )  # fmt: skip
        if start_m >= seqlen_q:
            return
    else:
        batch, head, start_m = rows_in_sections(
            batch_size, num_heads, seqlen_q * GROUP, heads_together, BLOCK_M
        )
        first_q = start_m * 0
        first_k = start_m * 0
        statistics = (batch * num_heads + head).to(gl.int64) * seqlen_q
        if GROUP > 1:
            statistics = (batch * num_heads + head) * group_size.to(gl.int64) * seqlen_q
    head_kv = head if GROUP > 1 else head // group_size
    lse_ptr += statistics
    if sinks_ptr is not None:
        sinks_ptr += head * group_size if GROUP > 1 else head

    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    # nothing is loaded but the keys that some query sees
    key_begin, key_end = seen_keys(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    seqlen_k = key_end - key_begin
    offset -= key_begin
    query_rows = Rows(batch, head, first_q, seqlen_q, PACKED, GROUP)
    key_rows = Rows(batch, head_kv, first_k + key_begin, seqlen_k, PACKED, 1)
    ALIBI: gl.constexpr = slopes_ptr is not None
    slope = score_factor * 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + batch * stride_slopes_b + head)
    problem = Problem(
        seqlen_q, seqlen_k, offset, left, right, score_factor, exp_factor, softcap, slope,
        LEFT, RIGHT, SOFTCAP, ALIBI,
    )  # fmt: skip
    first, full_first, full_end, end = key_tiles(
        problem, start_m // GROUP, BLOCK_M // GROUP, BLOCK_N
    )

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, sinks_ptr, q_tiles, out_tiles, q_full, keys, values,
                        problem, query_rows, group_size, start_m,
                        (first, full_first, full_end, end), 0)),
            (_consume, (out_descs, lse_ptr, sinks_ptr, q_tiles, out_tiles, q_full, keys, values,
                        problem, query_rows, group_size, start_m,
                        (first, full_first, full_end, end), 1)),
            (_produce, (q_descs, k_descs, v_descs, q_tiles, q_full, keys, values,
                        (query_rows, key_rows), start_m, first, end)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (out_descs, lse_ptr, sinks_ptr, q_tiles, out_tiles, q_full, keys, values,
                        problem, query_rows, group_size, start_m,
                        (first, full_first, full_end, end), 0)),
            (_consume, (out_descs, lse_ptr, sinks_ptr, q_tiles, out_tiles, q_full, keys, values,
                        problem, query_rows, group_size, start_m,
                        (first, full_first, full_end, end), 1)),
            (_consume, (out_descs, lse_ptr, sinks_ptr, q_tiles, out_tiles, q_full, keys, values,
                        problem, query_rows, group_size, start_m,
                        (first, full_first, full_end, end), 2)),
            (_produce, (q_descs, k_descs, v_descs, q_tiles, q_full, keys, values,
                        (query_rows, key_rows), start_m, first, end)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
