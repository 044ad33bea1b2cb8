"""Forward attention for Hopper: one producer warp feeds CONSUMERS warpgroups of 64 query rows each.

    producer    Q once; then K and V tiles, right to left, into rings of STAGES buffers (TMA)
    consumer    S_i = Q K_i^T is issued, then O += P_{i-1} V_{i-1}; the softmax of S_i runs while
                the tensor cores work on both (Shah et al. 2024, "FlashAttention-3", section 3.2)

Tiles that the mask cuts are walked first (and, with a window, last), in loops of their own. Key
rows past the sequence arrive as zeros: a descriptor has one dimension for each of batch, head, row
and column, so that nothing of a neighbouring sequence is ever loaded.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

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
from flashdig.kernels.hopper.softmax import online_softmax, thread_sums

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup's tile


@gluon.jit
def _key_tiles(
    start_m,
    end_m,
    seqlen_k,
    offset,
    left,
    right,
    BLOCK_N: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    """Tile numbers (first, full_first, full_end, end): every row of [start_m, end_m) sees whole
    the tiles of [full_first, full_end); `end` is above `first`, so that a loop has its first."""
    first = 0
    end = gl.cdiv(seqlen_k, BLOCK_N)
    full_first = 0
    full_end = seqlen_k // BLOCK_N
    if RIGHT:
        end = gl.cdiv(gl.minimum(seqlen_k, gl.maximum(end_m + offset + right, 0)), BLOCK_N)
        seen_by_all = gl.minimum(seqlen_k, gl.maximum(start_m + offset + right + 1, 0))
        full_end = seen_by_all // BLOCK_N
    if LEFT:
        first = gl.minimum(gl.maximum(start_m + offset - left, 0), seqlen_k - 1) // BLOCK_N
        full_first = gl.cdiv(gl.maximum(end_m - 1 + offset - left, 0), BLOCK_N)
    end = gl.maximum(end, first + 1)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    full_first = gl.minimum(gl.maximum(full_first, first), full_end)
    return first, full_first, full_end, end


@gluon.jit
def _produce(
    q_desc,
    k_desc,
    v_desc,
    q_smem,
    k_smem,
    v_smem,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    batch,
    head,
    head_kv,
    start_m,
    first,
    end,
    CONSUMERS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    for c in gl.static_range(CONSUMERS):
        mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
        tile = q_smem.index(c)._reinterpret(q_desc.dtype, q_desc.block_type.shape, q_desc.layout)
        load_tile(q_desc, [batch, head, start_m + c * ROWS, 0], q_full.index(c), tile)
    for i in range(end - first):
        start_n = (end - 1 - i) * BLOCK_N
        stage = i % STAGES
        phase = (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        k = k_smem.index(stage)._reinterpret(k_desc.dtype, k_desc.block_type.shape, k_desc.layout)
        load_tile(k_desc, [batch, head_kv, start_n, 0], k_full.index(stage), k)
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        v = v_smem.index(stage)._reinterpret(v_desc.dtype, v_desc.block_type.shape, v_desc.layout)
        load_tile(v_desc, [batch, head_kv, start_n, 0], v_full.index(stage), v)


@gluon.jit
def _masked(
    scores, rows, start_n, seqlen_k, offset, left, right, LEFT: gl.constexpr, RIGHT: gl.constexpr
):
    """Scores with -inf where a row does not see a key."""
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    keys = start_n + gl.arange(0, scores.shape[1], columns)
    # the largest key that a row sees; a comparison against the lengths comes for free
    visible = keys[None, :] < seqlen_k
    if RIGHT:
        last = gl.minimum(rows + (offset + right), seqlen_k - 1)
        visible = keys[None, :] <= last[:, None]
    if LEFT:
        visible = visible & (keys[None, :] >= (rows + (offset - left))[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _steps(
    out,
    row_max,
    row_sums,
    p,
    q,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    zeros,
    rows,
    i_begin,
    i_end,
    end,
    seqlen_k,
    offset,
    left,
    right,
    score_factor,
    exp_factor,
    softcap,
    slope,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Tiles i_begin..i_end of the walk; tile i is key tile end - 1 - i. P V lags one tile."""
    p_layout: gl.constexpr = p.type.layout
    out_rows: gl.constexpr = gl.SliceLayout(1, out.type.layout)
    for i in range(i_begin, i_end):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        before = (i - 1) % STAGES
        phase_before = ((i - 1) // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        scores_started = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        mbarrier.wait(v_full.index(before), phase_before)
        out_started = warpgroup_mma(p, v_smem.index(before), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores_started,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        start_n = (end - 1 - i) * BLOCK_N
        scores = _final_scores(
            scores, rows, start_n, offset, score_factor, softcap, slope, SOFTCAP, ALIBI
        )
        if MASKED:
            scores = _masked(scores, rows, start_n, seqlen_k, offset, left, right, LEFT, RIGHT)
        probs, rescale, row_max, row_sums = online_softmax(
            scores, row_max, row_sums, exp_factor, MASKED
        )
        p_next = gl.convert_layout(probs.to(p.dtype), p_layout)
        out, _ = warpgroup_mma_wait(0, deps=(out_started, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        p = p_next
        out = out * gl.convert_layout(rescale, out_rows)[:, None]
    return out, row_max, row_sums, p


@gluon.jit
def _settled(p):
    """p, unchanged: pairs of its elements are bound to registers here. A loop that takes p from
    another loop would else take it apart and put it together again in every step."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2
    )


@gluon.jit
def _final_scores(
    products,
    rows,
    start_n,
    offset,
    score_factor,
    softcap,
    slope,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """Products turned into what `exp_factor` makes log2 scores of: themselves where there is
    neither softcap nor ALiBi."""
    scores = products
    if SOFTCAP:
        # tanh, exact at both ends
        scores = 1.0 - 2.0 / (1.0 + gl.exp2(products * (score_factor * (2.0 * LOG2_E))))
        scores = scores * softcap
    if ALIBI:
        if not SOFTCAP:
            scores = products * score_factor
        columns: gl.constexpr = gl.SliceLayout(0, products.type.layout)
        keys = start_n + gl.arange(0, products.shape[1], columns)
        distance = gl.abs((rows + offset)[:, None] - keys[None, :]).to(gl.float32)
        scores = scores - slope * distance
    return scores


@gluon.jit
def _consume(
    out_desc,
    lse_ptr,
    slopes_ptr,
    sinks_ptr,
    q_smem,
    k_smem,
    v_smem,
    q_full,
    k_full,
    k_empty,
    v_full,
    v_empty,
    batch,
    head,
    num_heads,
    start_m,
    seqlen_q,
    seqlen_k,
    first,
    full_first,
    full_end,
    end,
    offset,
    left,
    right,
    score_factor,
    exp_factor,
    softcap,
    stride_slopes_b,
    CONSUMER: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
):
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)

    rows = start_m + CONSUMER * ROWS + gl.arange(0, ROWS, s_rows)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    out = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
    row_sums = thread_sums(zeros)
    row_max = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    slope = 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + batch * stride_slopes_b + head)
    q = q_smem.index(CONSUMER)

    # the first tile: nothing to multiply with V yet
    mbarrier.wait(q_full.index(CONSUMER), 0)
    mbarrier.wait(k_full.index(0), 0)
    scores_started = warpgroup_mma(
        q, k_smem.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True
    )
    scores = warpgroup_mma_wait(0, deps=(scores_started,))
    mbarrier.arrive(k_empty.index(0), count=1)
    start_n = (end - 1) * BLOCK_N
    scores = _final_scores(
        scores, rows, start_n, offset, score_factor, softcap, slope, SOFTCAP, ALIBI
    )
    scores = _masked(scores, rows, start_n, seqlen_k, offset, left, right, LEFT, RIGHT)
    probs, _, row_max, row_sums = online_softmax(scores, row_max, row_sums, exp_factor, True)
    p = gl.convert_layout(probs.to(dtype), p_layout)

    # masked tiles on the right, whole ones, masked ones on the left; tile 0 is done
    right_end = gl.maximum(end - full_end, 1)
    full_stop = gl.maximum(end - full_first, 1)
    if RIGHT:
        out, row_max, row_sums, p = _steps(
            out,
            row_max,
            row_sums,
            p,
            q,
            k_smem,
            v_smem,
            k_full,
            k_empty,
            v_full,
            v_empty,
            zeros,
            rows,
            1,
            right_end,
            end,
            seqlen_k,
            offset,
            left,
            right,
            score_factor,
            exp_factor,
            softcap,
            slope,
            BLOCK_N,
            STAGES,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            True,
        )
        p = _settled(p)
    out, row_max, row_sums, p = _steps(
        out,
        row_max,
        row_sums,
        p,
        q,
        k_smem,
        v_smem,
        k_full,
        k_empty,
        v_full,
        v_empty,
        zeros,
        rows,
        right_end,
        full_stop,
        end,
        seqlen_k,
        offset,
        left,
        right,
        score_factor,
        exp_factor,
        softcap,
        slope,
        BLOCK_N,
        STAGES,
        LEFT,
        RIGHT,
        SOFTCAP,
        ALIBI,
        False,
    )
    if LEFT:
        p = _settled(p)
        out, row_max, row_sums, p = _steps(
            out,
            row_max,
            row_sums,
            p,
            q,
            k_smem,
            v_smem,
            k_full,
            k_empty,
            v_full,
            v_empty,
            zeros,
            rows,
            full_stop,
            end - first,
            end,
            seqlen_k,
            offset,
            left,
            right,
            score_factor,
            exp_factor,
            softcap,
            slope,
            BLOCK_N,
            STAGES,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            True,
        )

    last = end - first - 1
    mbarrier.wait(v_full.index(last % STAGES), (last // STAGES) & 1)
    out_started = warpgroup_mma(p, v_smem.index(last % STAGES), out, is_async=True)
    row_sum = gl.convert_layout(gl.sum(row_sums, 1), s_rows)
    if SINKS:
        sink = gl.load(sinks_ptr + head).to(gl.float32) * LOG2_E
        with_sink = gl.maximum(row_max, sink)
        shift = gl.where(with_sink == float("-inf"), 0.0, with_sink)
        rescale = gl.exp2(row_max - shift)
        row_sum = row_sum * rescale + gl.exp2(sink - shift)
        row_max = with_sink
    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    lse = (row_max + gl.log2(divisor)) * LN_2
    factor = 1.0 / divisor
    if SINKS:
        factor = factor * rescale
    lse_row = (batch.to(gl.int64) * num_heads + head) * seqlen_q
    gl.store(lse_ptr + lse_row + rows, lse, mask=rows < seqlen_q)
    out, _ = warpgroup_mma_wait(0, deps=(out_started, p))
    out = out * gl.convert_layout(factor, o_rows)[:, None]

    # through Q's buffer, which nothing reads any more; rows past seqlen_q are not written
    tile = q_smem.index(CONSUMER)
    tile.store(out.to(dtype))
    fence_async_shared()
    tile4 = tile._reinterpret(dtype, out_desc.block_type.shape, out_desc.layout)
    store_tile(out_desc, [batch, head, start_m + CONSUMER * ROWS, 0], tile4)
    wait_for_tile_stores(0)


def _name(specialization):
    c = specialization.constants
    dtype = "bf16" if "bf16" in specialization.signature["q_desc"] else "fp16"
    mask = "window" if c["LEFT"] else "causal" if c["RIGHT"] else "full"
    tile = f"m{64 * c['CONSUMERS']}n{c['BLOCK_N']}"
    return f"flashdig_hopper_forward_{dtype}_d{c['HEAD_DIM']}_{tile}_{mask}"


@gluon.jit(
    repr=_name,
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
    ALIBI: gl.constexpr,
    SINKS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    tile_kv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, HEAD_DIM], tile_q)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_kv)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_DIM], tile_kv)
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], barriers)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barriers)
    for c in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(c), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=CONSUMERS)
        mbarrier.init(v_empty.index(stage), count=CONSUMERS)
    fence_async_shared()

    # `heads_together` heads share the L2 cache; within them the longest rows come first
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
    program = gl.program_id(0)
    section = program // (tiles_m * heads_together)
    inside = program % (tiles_m * heads_together)
    section_heads = gl.minimum(heads_together, batch_size * num_heads - section * heads_together)
    batch_head = section * heads_together + inside % section_heads
    batch = batch_head // num_heads
    head = batch_head % num_heads
    head_kv = head // group_size
    start_m = (tiles_m - 1 - inside // section_heads) * BLOCK_M

    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    end_m = gl.minimum(start_m + BLOCK_M, seqlen_q)
    first, full_first, full_end, end = _key_tiles(
        start_m, end_m, seqlen_k, offset, left, right, BLOCK_N, LEFT, RIGHT
    )
    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        out_desc,
                        lse_ptr,
                        slopes_ptr,
                        sinks_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        num_heads,
                        start_m,
                        seqlen_q,
                        seqlen_k,
                        first,
                        full_first,
                        full_end,
                        end,
                        offset,
                        left,
                        right,
                        score_factor,
                        exp_factor,
                        softcap,
                        stride_slopes_b,
                        0,
                        BLOCK_N,
                        HEAD_DIM,
                        STAGES,
                        LEFT,
                        RIGHT,
                        SOFTCAP,
                        ALIBI,
                        SINKS,
                    ),
                ),
                (
                    _consume,
                    (
                        out_desc,
                        lse_ptr,
                        slopes_ptr,
                        sinks_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        num_heads,
                        start_m,
                        seqlen_q,
                        seqlen_k,
                        first,
                        full_first,
                        full_end,
                        end,
                        offset,
                        left,
                        right,
                        score_factor,
                        exp_factor,
                        softcap,
                        stride_slopes_b,
                        1,
                        BLOCK_N,
                        HEAD_DIM,
                        STAGES,
                        LEFT,
                        RIGHT,
                        SOFTCAP,
                        ALIBI,
                        SINKS,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        head_kv,
                        start_m,
                        first,
                        end,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consume,
                    (
                        out_desc,
                        lse_ptr,
                        slopes_ptr,
                        sinks_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        num_heads,
                        start_m,
                        seqlen_q,
                        seqlen_k,
                        first,
                        full_first,
                        full_end,
                        end,
                        offset,
                        left,
                        right,
                        score_factor,
                        exp_factor,
                        softcap,
                        stride_slopes_b,
                        0,
                        BLOCK_N,
                        HEAD_DIM,
                        STAGES,
                        LEFT,
                        RIGHT,
                        SOFTCAP,
                        ALIBI,
                        SINKS,
                    ),
                ),
                (
                    _consume,
                    (
                        out_desc,
                        lse_ptr,
                        slopes_ptr,
                        sinks_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        num_heads,
                        start_m,
                        seqlen_q,
                        seqlen_k,
                        first,
                        full_first,
                        full_end,
                        end,
                        offset,
                        left,
                        right,
                        score_factor,
                        exp_factor,
                        softcap,
                        stride_slopes_b,
                        1,
                        BLOCK_N,
                        HEAD_DIM,
                        STAGES,
                        LEFT,
                        RIGHT,
                        SOFTCAP,
                        ALIBI,
                        SINKS,
                    ),
                ),
                (
                    _consume,
                    (
                        out_desc,
                        lse_ptr,
                        slopes_ptr,
                        sinks_ptr,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        num_heads,
                        start_m,
                        seqlen_q,
                        seqlen_k,
                        first,
                        full_first,
                        full_end,
                        end,
                        offset,
                        left,
                        right,
                        score_factor,
                        exp_factor,
                        softcap,
                        stride_slopes_b,
                        2,
                        BLOCK_N,
                        HEAD_DIM,
                        STAGES,
                        LEFT,
                        RIGHT,
                        SOFTCAP,
                        ALIBI,
                        SINKS,
                    ),
                ),
                (
                    _produce,
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        q_smem,
                        k_smem,
                        v_smem,
                        q_full,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        batch,
                        head,
                        head_kv,
                        start_m,
                        first,
                        end,
                        CONSUMERS,
                        BLOCK_N,
                        STAGES,
                    ),
                ),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )


# head_dim -> (consumer warpgroups, keys of a tile, buffers of K and of V, registers of a consumer)
TILES = {64: (3, 128, 2, 160), 128: (2, 128, 2, 240), 256: (2, 64, 2, 240)}
# bytes of K and V that may share the L2 cache between the rows of one causal section
L2_BYTES = 32 * 2**20


def hopper_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    tiles: tuple[int, int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of `flashdig_hopper_forward`.

    Args:
        q, k, v: dense (batch, seqlen, heads, head_dim), float16 or bfloat16, one head_dim of
            `TILES`, strides and addresses that TMA can take; no size is zero.
        softmax_scale: above zero.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        tiles: an entry other than that of `TILES`.

    Returns: out as q, and lse (batch, num_heads, seqlen_q) in float32.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    consumers, block_n, stages, registers = tiles or TILES[head_dim]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, num_heads, seqlen_q), dtype=torch.float32, device=q.device)
    scaled = softcap > 0.0 or alibi_slopes is not None
    score_factor = softmax_scale / softcap if softcap > 0.0 else softmax_scale
    together = 1
    if window_right >= 0:
        head_bytes = 2 * seqlen_k * head_dim * k.element_size()
        together = max(1, min(batch * num_heads, L2_BYTES // head_bytes))
    tiles_m = triton.cdiv(seqlen_q, 64 * consumers)
    flashdig_hopper_forward[(tiles_m * batch * num_heads,)](
        _tiles_of(q, 64),
        _tiles_of(k, block_n),
        _tiles_of(v, block_n),
        _tiles_of(out, 64),
        lse,
        alibi_slopes,
        sinks,
        batch,
        num_heads,
        num_heads // num_heads_kv,
        seqlen_q,
        seqlen_k,
        together,
        max(window_left, 0),
        max(window_right, 0),
        score_factor,
        LOG2_E.value if scaled else softmax_scale * LOG2_E.value,
        softcap,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        HEAD_DIM=head_dim,
        CONSUMERS=consumers,
        BLOCK_N=block_n,
        STAGES=stages,
        REGISTERS=registers,
        TOP_LEFT=top_left,
        LEFT=window_left >= 0,
        RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0.0,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        num_warps=4,
    )
    return out, lse


def _tiles_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, seqlen, head_dim) that copies tiles of rows."""
    block = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    seen = x.transpose(1, 2)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block, layout)
