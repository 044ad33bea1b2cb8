"""Forward attention for Hopper: one producer warp feeds CONSUMERS warpgroups of 64 query rows each.

    producer    Q once; then K and V tiles, right to left, into rings of buffers (TMA)
    consumer    S_i = Q K_i^T is issued, then O += P_{i-1} V_{i-1}; the softmax of S_i runs while
                the tensor cores work on both (Shah et al. 2024, "FlashAttention-3", section 3.2)

Tiles that the mask cuts are walked first (and, with a window, last), in loops of their own. Key
rows past the sequence arrive as zeros: a descriptor has one dimension for each of batch, head, row
and column, so that nothing of a neighbouring sequence is ever loaded.
"""

from __future__ import annotations

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    store_tile,
    wait_for_tile_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.problem import LOG2_E, Problem, final_scores, key_tiles, masked
from flashdig.kernels.hopper.ring import as_block_of, new_ring, put, release, take
from flashdig.kernels.hopper.softmax import online_softmax, thread_sums

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup's tile


@gluon.jit
def _produce(q_desc, k_desc, v_desc, q_smem, q_full, keys, values, at, start_m, first, end):
    batch, head, head_kv = at
    CONSUMERS: gl.constexpr = q_smem.shape[0]
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[2]
    for c in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tile = as_block_of(q_smem.index(c), q_desc)
        load_tile(q_desc, [batch, head, start_m + c * ROWS, 0], q_full.index(c), tile)
    for step in range(end - first):
        start_n = (end - 1 - step) * BLOCK_N
        put(keys, step, k_desc, batch, head_kv, start_n)
        put(values, step, v_desc, batch, head_kv, start_n)


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
    out_rows: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    BLOCK_N: gl.constexpr = zeros.shape[1]
    for step in range(begin, stop):
        k = take(keys, step).permute((1, 0))
        scores_started = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        v = take(values, step - 1)
        out_started = warpgroup_mma(p, v, out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores_started,))
        release(keys, step)
        start_n = (end - 1 - step) * BLOCK_N
        scores = final_scores(scores, problem, rows, start_n)
        if MASKED:
            scores = masked(scores, problem, rows, start_n)
        probs, rescale, row_max, row_sums = online_softmax(
            scores, row_max, row_sums, problem.exp_factor, MASKED
        )
        p_next = gl.convert_layout(probs.to(p.dtype), p.type.layout)
        out, _ = warpgroup_mma_wait(0, deps=(out_started, p))
        release(values, step - 1)
        p = p_next
        out = out * gl.convert_layout(rescale, out_rows)[:, None]
    return out, row_max, row_sums, p


@gluon.jit
def _consume(
    out_desc,
    lse_ptr,
    sinks_ptr,
    q_smem,
    q_full,
    keys,
    values,
    problem,
    at,
    start_m,
    tiles,
    CONSUMER: gl.constexpr,
):
    batch, head, _ = at
    first, full_first, full_end, end = tiles
    dtype: gl.constexpr = q_smem.dtype
    BLOCK_N: gl.constexpr = keys.tiles.shape[1]
    HEAD_DIM: gl.constexpr = values.tiles.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    rows = start_m + CONSUMER * ROWS + gl.arange(0, ROWS, s_rows)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    q = q_smem.index(CONSUMER)

    # the first tile: nothing to multiply with V yet
    mbarrier.wait(q_full.index(CONSUMER), 0)
    k = take(keys, 0).permute((1, 0))
    scores_started = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores_started,))
    release(keys, 0)
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

    v = take(values, steps - 1)
    out_started = warpgroup_mma(p, v, out, is_async=True)
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), s_rows)
    divisor_factor = gl.full([ROWS], 1.0, gl.float32, s_rows)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        with_sink = gl.maximum(row_max, sink)
        shift = gl.where(with_sink == float("-inf"), 0.0, with_sink)
        divisor_factor = gl.exp2(row_max - shift)
        row_sum = row_sum * divisor_factor + gl.exp2(sink - shift)
        row_max = with_sink
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    gl.store(lse_ptr + rows, (row_max + gl.log2(divisor)) * LN_2, mask=rows < problem.seqlen_q)
    factor = divisor_factor / divisor
    out, _ = warpgroup_mma_wait(0, deps=(out_started, p))
    out = out * gl.convert_layout(factor, o_rows)[:, None]

    # through Q's buffer, which nothing reads any more; rows past seqlen_q are not written
    q.store(out.to(dtype))
    fence_async_shared()
    row = start_m + CONSUMER * ROWS
    store_tile(out_desc, [batch, head, row, 0], as_block_of(q, out_desc))
    wait_for_tile_stores(0)


def kernel_name(specialization):
    c = specialization.constants
    dtype = "bf16" if "bf16" in specialization.signature["q_desc"] else "fp16"
    mask = "window" if c["LEFT"] else "causal" if c["RIGHT"] else "full"
    tile = f"m{64 * c['CONSUMERS']}n{c['BLOCK_N']}"
    return f"flashdig_hopper_forward_{dtype}_d{c['HEAD_DIM']}_{tile}_{mask}"


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
    k_desc,
    v_desc,
    out_desc,
    lse_ptr,
    slopes_ptr,
    sinks_ptr,
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
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    tile_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], tile_q)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    keys = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS)
    values = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES, CONSUMERS)
    fence_async_shared()

    # `heads_together` heads share the L2 cache; within them the longest rows come first
    tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
    program = gl.program_id(0)
    section = program // (tiles_m * heads_together)
    inside = program % (tiles_m * heads_together)
    section_heads = gl.minimum(heads_together, batch_size * num_heads - section * heads_together)
    batch_head = section * heads_together + inside % section_heads
    batch = batch_head // num_heads
    head = batch_head % num_heads
    start_m = (tiles_m - 1 - inside // section_heads) * BLOCK_M
    lse_ptr += batch_head.to(gl.int64) * seqlen_q

    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    ALIBI: gl.constexpr = slopes_ptr is not None
    slope = score_factor * 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + batch * stride_slopes_b + head)
    problem = Problem(
        seqlen_q, seqlen_k, offset, left, right, score_factor, exp_factor, softcap, slope,
        LEFT, RIGHT, SOFTCAP, ALIBI,
    )  # fmt: skip
    first, full_first, full_end, end = key_tiles(problem, start_m, BLOCK_M, BLOCK_N)
    at = (batch, head, head // group_size)

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    if CONSUMERS == 2:
        gl.warp_specialize([
            (_consume, (out_desc, lse_ptr, sinks_ptr, q_smem, q_full, keys, values, problem, at,
                        start_m, (first, full_first, full_end, end), 0)),
            (_consume, (out_desc, lse_ptr, sinks_ptr, q_smem, q_full, keys, values, problem, at,
                        start_m, (first, full_first, full_end, end), 1)),
            (_produce, (q_desc, k_desc, v_desc, q_smem, q_full, keys, values, at, start_m, first,
                        end)),
        ], [4, 1], [REGISTERS, 24])
    else:
        gl.warp_specialize([
            (_consume, (out_desc, lse_ptr, sinks_ptr, q_smem, q_full, keys, values, problem, at,
                        start_m, (first, full_first, full_end, end), 0)),
            (_consume, (out_desc, lse_ptr, sinks_ptr, q_smem, q_full, keys, values, problem, at,
                        start_m, (first, full_first, full_end, end), 1)),
            (_consume, (out_desc, lse_ptr, sinks_ptr, q_smem, q_full, keys, values, problem, at,
                        start_m, (first, full_first, full_end, end), 2)),
            (_produce, (q_desc, k_desc, v_desc, q_smem, q_full, keys, values, at, start_m, first,
                        end)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])
    # fmt: on
