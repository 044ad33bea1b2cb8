"""dQ alone for Hopper: one tile of rows stays, the keys that it sees walk by.

    producer    Q and dO once; then K and V tiles, left to right, into rings of buffers (TMA)
    consumers   two warpgroups of 64 rows keep dQ in registers: dP_i = dO V_i^T is issued;
                P_i = exp(S_i - lse) meanwhile; then S_{i+1} = Q K_{i+1}^T and dQ += dS_i K_i

Beside a main kernel that makes dK and dV only, it gives the same bits in every run: nothing is
added up in memory. The price is that S and dP are computed twice: 7 products instead of 5.
"""

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    wait_for_tile_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.backward_names import kernel_name
from flashdig.kernels.hopper.backward_places import live_rows_of_program
from flashdig.kernels.hopper.backward_scores import hidden, places, scores_of
from flashdig.kernels.hopper.problem import Problem, key_tiles
from flashdig.kernels.hopper.ring import new_ring, release, take, wait_until_empty
from flashdig.kernels.hopper.rows import Rows, load_rows, rows_in_sections, store_rows

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def _put(ring, step, desc, key_rows, row):
    full = wait_until_empty(ring, step)
    mbarrier.expect(full, desc.block_type.nbytes)
    load_rows(desc, key_rows, row, 0, full, ring.tiles.index(step % ring.STAGES))


@gluon.jit
def _produce(
    q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, rows_full, key_ring, value_ring,
    query_rows, key_rows, start_m, first, end,
):  # fmt: skip
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    for c in gl.static_range(2):
        full = rows_full.index(c)
        mbarrier.expect(full, q_desc.block_type.nbytes + dout_desc.block_type.nbytes)
        load_rows(q_desc, query_rows, start_m + c * ROWS, 0, full, q_smem.index(c))
        load_rows(dout_desc, query_rows, start_m + c * ROWS, 0, full, dout_smem.index(c))
    for step in range(end - first):
        _put(key_ring, step, k_desc, key_rows, (first + step) * BLOCK_N)
        _put(value_ring, step, v_desc, key_rows, (first + step) * BLOCK_N)


@gluon.jit
def _start_scores(q, q_tile, k, zeros):
    """S of a tile of keys, begun. `q` is Q, or in registers its left half: at head_dim 256 both
    operands of S and of dP would be more than shared memory gives."""
    COLUMNS: gl.constexpr = q.shape[1]
    left = k.slice(0, COLUMNS, 1).permute((1, 0))
    started = warpgroup_mma(q, left, zeros, use_acc=False, is_async=True)
    if q_tile.shape[1] > COLUMNS:
        right = k.slice(COLUMNS, COLUMNS, 1).permute((1, 0))
        started = warpgroup_mma(q_tile.slice(COLUMNS, COLUMNS, 1), right, started, is_async=True)
    return started


@gluon.jit
def _walk(
    state, q, q_smem, dout_smem, lse, delta, key_ring, value_ring, problem, start_m, first, begin,
    stop, last_step, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Key tiles begin..stop; S of the first is in `state`, as is that of the next at the end."""
    dq, products = state
    dtype: gl.constexpr = key_ring.tiles.dtype
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    s_layout: gl.constexpr = products.type.layout
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    for tile in range(begin, stop):
        step = tile - first
        # CONSUMER, but not to LLVM, which would keep the descriptors in registers
        consumer = CONSUMER + (tile >> 30)
        q_tile = q_smem.index(consumer)
        dout = dout_smem.index(consumer)
        v = take(value_ring, step).permute((1, 0))
        dprobs_started = warpgroup_mma(dout, v, zeros, use_acc=False, is_async=True)
        keys, rows = places(products, start_m, tile * BLOCK_N, False)
        scores, slope = scores_of(products, problem, keys, rows)
        if MASKED:
            scores = hidden(scores, problem, keys, rows)
        probs = gl.exp2(scores * problem.exp_factor - lse[:, None])
        if problem.SOFTCAP:
            probs = probs * slope
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_started,))
        release(value_ring, step)
        ds = gl.convert_layout((probs * (dprobs - delta[:, None])).to(dtype), operand)
        k_next = take(key_ring, gl.minimum(step + 1, last_step))
        products_started = _start_scores(q, q_tile, k_next, zeros)
        k = key_ring.tiles.index(step % key_ring.STAGES)
        dq_started = warpgroup_mma(ds, k, dq, is_async=True)
        products, dq, _ = warpgroup_mma_wait(0, deps=(products_started, dq_started, ds))
        release(key_ring, step)
    return dq, products


@gluon.jit
def _consume(
    dq_desc, lse_ptr, delta_ptr, q_smem, dout_smem, rows_full, key_ring, value_ring, problem,
    query_rows, start_m, tiles, softmax_scale, CONSUMER: gl.constexpr,
):  # fmt: skip
    first, full_first, full_end, end = tiles
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = key_ring.tiles.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    start_m += CONSUMER * ROWS
    rows = CONSUMER * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    lse = gl.load(lse_ptr + rows)
    delta = gl.load(delta_ptr + rows)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, d_layout)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    q_tile = q_smem.index(CONSUMER)

    mbarrier.wait(rows_full.index(CONSUMER), 0)
    q = q_tile
    if HEAD_DIM == 256:
        q = q_tile.slice(0, HEAD_DIM // 2, 1).load(gl.DotOperandLayout(0, s_layout, 2))
    products_started = _start_scores(q, q_tile, take(key_ring, 0), zeros)
    products = warpgroup_mma_wait(0, deps=(products_started,))
    last_step = end - first - 1
    # keys cut on the window's left side, whole ones, keys cut by the diagonal or the end
    if problem.LEFT:
        dq, products = _walk(
            (dq, products), q, q_smem, dout_smem, lse, delta, key_ring, value_ring, problem,
            start_m, first, first, full_first, last_step, CONSUMER, True,
        )  # fmt: skip
    dq, products = _walk(
        (dq, products), q, q_smem, dout_smem, lse, delta, key_ring, value_ring, problem, start_m,
        first, full_first, full_end, last_step, CONSUMER, False,
    )  # fmt: skip
    dq, products = _walk(
        (dq, products), q, q_smem, dout_smem, lse, delta, key_ring, value_ring, problem, start_m,
        first, full_end, end, last_step, CONSUMER, True,
    )  # fmt: skip

    # through Q's buffer, which nothing reads any more; rows past seqlen_q are not written
    q_tile.store((dq * softmax_scale).to(q_tile.dtype))
    fence_async_shared()
    store_rows(dq_desc, query_rows, start_m, 0, q_tile)
    wait_for_tile_stores(0)


def _name(specialization):
    block_n = specialization.constants["BLOCK_N"]
    return kernel_name(specialization, "backward_dq", f"m128n{block_n}")


@gluon.jit(
    repr=_name,
    do_not_specialize=[
        "batch_size",
        "num_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "padded_q",
        "offset",
        "heads_together",
        "left",
        "right",
        "score_factor",
        "exp_factor",
        "softcap",
        "softmax_scale",
        "stride_slopes_b",
    ],
)
def flashdig_hopper_backward_dq(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    dq_desc,
    lse_ptr,
    delta_ptr,
    slopes_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    batch_size,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    padded_q,
    offset,
    heads_together,
    left,
    right,
    score_factor,
    exp_factor,
    softcap,
    softmax_scale,
    stride_slopes_b,
    HEAD_DIM: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    STAGES_V: gl.constexpr,
    PACKED: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = 2 * ROWS
    tile_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], tile_q)
    dout_smem = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], tile_q)
    rows_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for c in gl.static_range(2):
        mbarrier.init(rows_full.index(c), count=1)
    key_ring = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES, 2)
    value_ring = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES_V, 2)
    fence_async_shared()

    if PACKED:
        batch, head, start_m, padded, first_q, seqlen_q, first_k, seqlen_k, offset = (
            live_rows_of_program(
                cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, batch_size,
                num_heads, seqlen_q, seqlen_k, left, right, BLOCK_M, TOP_LEFT, LEFT, RIGHT,
            )
        )  # fmt: skip
        if start_m >= seqlen_q:
            return
        statistics = head.to(gl.int64) * padded_q + padded
    else:
        batch, head, start_m = rows_in_sections(
            batch_size, num_heads, seqlen_q, heads_together, BLOCK_M
        )
        first_q = start_m * 0
        first_k = start_m * 0
        statistics = (batch * num_heads + head).to(gl.int64) * padded_q + start_m
    lse_ptr += statistics
    delta_ptr += statistics
    query_rows = Rows(batch, head, first_q, seqlen_q, PACKED, 1)
    key_rows = Rows(batch, head // group_size, first_k, seqlen_k, PACKED, 1)
    ALIBI: gl.constexpr = slopes_ptr is not None
    slope = score_factor * 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + batch * stride_slopes_b + head)
    problem = Problem(
        seqlen_q, seqlen_k, offset, left, right, score_factor, exp_factor, softcap, slope,
        LEFT, RIGHT, SOFTCAP, ALIBI,
    )  # fmt: skip
    first, full_first, full_end, end = key_tiles(problem, start_m, BLOCK_M, BLOCK_N)

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    gl.warp_specialize([
        (_consume, (dq_desc, lse_ptr, delta_ptr, q_smem, dout_smem, rows_full, key_ring,
                    value_ring, problem, query_rows, start_m,
                    (first, full_first, full_end, end), softmax_scale, 0)),
        (_consume, (dq_desc, lse_ptr, delta_ptr, q_smem, dout_smem, rows_full, key_ring,
                    value_ring, problem, query_rows, start_m,
                    (first, full_first, full_end, end), softmax_scale, 1)),
        (_produce, (q_desc, dout_desc, k_desc, v_desc, q_smem, dout_smem, rows_full, key_ring,
                    value_ring, query_rows, key_rows, start_m, first, end)),
    ], [4, 1], [240, 24])
    # fmt: on
