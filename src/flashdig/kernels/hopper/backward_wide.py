"""Backward attention for Hopper, head_dim above 128: dK and dV have a consumer warpgroup each.

One warpgroup cannot hold both of them. A tile of 64 keys stays, the rows that see it walk by:

    producer     K and V once; then tiles of Q and dO with their log-sum-exp and delta (TMA)
    dV's         S_i^T = K Q_i^T, P_i^T to shared memory, dV += P_i^T dO_i; then the left half of
                 dQ_{i-1} = dS_{i-1} K
    dK's         dP_i^T = V dO_i^T, dS_i^T to shared memory, dK += dS_i^T Q_i, the right half of
                 dQ_i

dV's warpgroup is a step ahead, so that the two seldom wait for each other. dQ is added up in
float32 from registers, as in `backward_main`.
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
from flashdig.kernels.hopper.backward_main import add_registers
from flashdig.kernels.hopper.backward_names import kernel_name
from flashdig.kernels.hopper.backward_places import Grid, columns_of_tile, padded_start
from flashdig.kernels.hopper.backward_scores import hidden, places, row_tiles, scores_of
from flashdig.kernels.hopper.backward_shared import (
    MEETING,
    free_rows,
    new_shared,
    of_sequence_and_head,
    produce,
    wait_for_rows,
)
from flashdig.kernels.hopper.hardware_barriers import arrive_at, meet_at
from flashdig.kernels.hopper.problem import Problem
from flashdig.kernels.hopper.rows import Rows, store_rows

ROWS = gl.constexpr(64)  # of a tile of queries, and keys of a tile
# hardware barriers, + parity of the step: P and dS are handed over in two buffers each
P_WRITTEN = gl.constexpr(8)
P_READ = gl.constexpr(10)
DS_WRITTEN = gl.constexpr(12)
DS_READ = gl.constexpr(14)


@gluon.jit
def _walk_for_dv(
    dv, dq_before, shared, probs_tiles, problem, dq_ptr, start_n, begin, stop,
    step_of_tile_0, MASKED: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Row tiles begin..stop. `dq_before` is where dQ of the step before is added up."""
    dtype: gl.constexpr = shared.k.dtype
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    HALF: gl.constexpr = HEAD_DIM // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    zeros_q = gl.zeros([ROWS, HALF], gl.float32, q_layout)
    for tile in range(begin, stop):
        step = step_of_tile_0 + tile
        parity = step & 1
        # always 0, but not to LLVM, which would keep the descriptors of K in registers
        none = step >> 30
        k = shared.k.index(none)
        stage = wait_for_rows(shared.rows, step)
        q = shared.rows.queries.index(stage).permute((1, 0))
        products_started = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
        lse = shared.rows.lse.index(stage).load(gl.SliceLayout(0, s_layout))
        products = warpgroup_mma_wait(0, deps=(products_started,))
        keys, rows = places(products, tile * ROWS, start_n, True)
        scores, slope = scores_of(products, problem, keys, rows)
        if MASKED:
            scores = hidden(scores, problem, keys, rows)
        probs = gl.exp2(scores * problem.exp_factor - lse[None, :])
        rounded = probs.to(dtype)
        p = gl.convert_layout(rounded, operand)
        if problem.SOFTCAP:  # dS is what the other makes of it
            rounded = (probs * slope).to(dtype)
        if step >= 2:
            meet_at(P_READ + parity)
        probs_tiles.index(parity).store(rounded)
        fence_async_shared()
        arrive_at(P_WRITTEN + parity)
        if WITH_DQ:
            # dQ of the step before; added up while dV is made
            if step > 0:
                meet_at(DS_WRITTEN + parity)
            ds = shared.dscores.index(parity).permute((1, 0))
            k_columns = k.slice(0, HALF, 1)
            dq_started = warpgroup_mma(ds, k_columns, zeros_q, use_acc=False, is_async=True)
        dout = shared.rows.grads.index(stage)
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        if WITH_DQ:
            dq = warpgroup_mma_wait(1, deps=(dq_started,))
            arrive_at(DS_READ + parity)
            add_registers(dq_before, dq)
            dq_before = dq_ptr + 2 * tile * (ROWS * HALF)
        dv, _ = warpgroup_mma_wait(0, deps=(dv_started, p))
        free_rows(shared.rows, step)
    return dv, dq_before


@gluon.jit
def _make_dv(
    dv_desc, dq_ptr, slopes_ptr, shared, probs_tiles, problem, grid, batch, head_kv,
    start_n, key_rows, padded_row, WITH_DQ: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    first, full_first, full_end, end = row_tiles(problem, start_n, ROWS, ROWS)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, d_layout)
    dq_before = start_n
    if WITH_DQ:
        dq_before = dq_ptr
        # before the first step: dS of zeros, added where the first tile's will be
        shared.dscores.index(0).store(gl.zeros([ROWS, ROWS], dtype, s_layout))
        fence_async_shared()
        head = head_kv * grid.group_size
        dq_before += padded_start(grid, batch, head, padded_row) * HEAD_DIM
        dq_before += 2 * first * (ROWS * HALF)
    mbarrier.wait(shared.kv_full, 0)
    done = first * 0
    for member in range(grid.group_size):
        head = head_kv * grid.group_size + member
        dq_head = dq_ptr
        if WITH_DQ:
            dq_head += padded_start(grid, batch, head, padded_row) * HEAD_DIM
        of_head = problem
        if problem.ALIBI:
            slope = gl.load(slopes_ptr + head)
            of_head = of_sequence_and_head(
                problem, problem.seqlen_q, problem.seqlen_k, problem.offset, slope
            )
        # rows cut by the diagonal, whole ones, rows cut on the window's left side
        dv, dq_before = _walk_for_dv(
            dv, dq_before, shared, probs_tiles, of_head, dq_head, start_n, first,
            full_first, done - first, True, WITH_DQ,
        )  # fmt: skip
        dv, dq_before = _walk_for_dv(
            dv, dq_before, shared, probs_tiles, of_head, dq_head, start_n, full_first,
            full_end, done - first, False, WITH_DQ,
        )  # fmt: skip
        if problem.LEFT:
            dv, dq_before = _walk_for_dv(
                dv, dq_before, shared, probs_tiles, of_head, dq_head, start_n, full_end,
                end, done - first, True, WITH_DQ,
            )  # fmt: skip
        done += end - first
    if WITH_DQ:
        meet_at(DS_WRITTEN + (done & 1))
        ds = shared.dscores.index(done & 1).permute((1, 0))
        zeros_q = gl.zeros([ROWS, HALF], gl.float32, q_layout)
        k_columns = shared.k.index(0).slice(0, HALF, 1)
        dq_started = warpgroup_mma(ds, k_columns, zeros_q, use_acc=False, is_async=True)
        dq = warpgroup_mma_wait(0, deps=(dq_started,))
        add_registers(dq_before, dq)
    # take up what was told last, of steps that never come
    if done >= 2:
        meet_at(P_READ + (done & 1))
    meet_at(P_READ + ((done + 1) & 1))
    # through V's buffer, which nothing reads any more
    meet_at(MEETING)
    shared.v.index(0).store(dv.to(dtype))
    fence_async_shared()
    store_rows(dv_desc, key_rows, start_n, 0, shared.v.index(0))
    wait_for_tile_stores(0)


@gluon.jit
def _make_dk(
    dk_desc, dq_ptr, shared, probs_tiles, problem, grid, batch, head_kv, start_n, key_rows,
    padded_row, softmax_scale, WITH_DQ: gl.constexpr,
):  # fmt: skip
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    HALF: gl.constexpr = HEAD_DIM // 2
    dtype: gl.constexpr = shared.k.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    first, _full_first, _full_end, end = row_tiles(problem, start_n, ROWS, ROWS)
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, d_layout)
    zeros = gl.zeros([ROWS, ROWS], gl.float32, s_layout)
    zeros_q = gl.zeros([ROWS, HALF], gl.float32, q_layout)
    mbarrier.wait(shared.kv_full, 0)
    steps = end - first
    for step in range(grid.group_size * steps):
        head = head_kv * grid.group_size + step // steps
        tile = first + step % steps
        parity = step & 1
        none = step >> 30
        stage = wait_for_rows(shared.rows, step)
        dout = shared.rows.grads.index(stage).permute((1, 0))
        v = shared.v.index(none)
        dprobs_started = warpgroup_mma(v, dout, zeros, use_acc=False, is_async=True)
        delta = shared.rows.delta.index(stage).load(gl.SliceLayout(0, s_layout))
        meet_at(P_WRITTEN + parity)
        probs = probs_tiles.index(parity).load(s_layout).to(gl.float32)
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_started,))
        rounded = (probs * (dprobs - delta[None, :])).to(dtype)
        ds = gl.convert_layout(rounded, operand)
        arrive_at(P_READ + parity)
        if WITH_DQ:
            # after the zeros of the other's start
            if step > 0:
                meet_at(DS_READ + (parity ^ 1))
            shared.dscores.index(parity ^ 1).store(rounded)
            fence_async_shared()
            arrive_at(DS_WRITTEN + (parity ^ 1))
            ds_rows = shared.dscores.index(parity ^ 1).permute((1, 0))
            k_columns = shared.k.index(none).slice(HALF, HALF, 1)
            dq_started = warpgroup_mma(ds_rows, k_columns, zeros_q, use_acc=False, is_async=True)
        q = shared.rows.queries.index(stage)
        dk_started = warpgroup_mma(ds, q, dk, is_async=True)
        if WITH_DQ:
            dq = warpgroup_mma_wait(1, deps=(dq_started,))
            dq_head = dq_ptr + padded_start(grid, batch, head, padded_row) * HEAD_DIM
            add_registers(dq_head + (2 * tile + 1) * (ROWS * HALF), dq)
        dk, _ = warpgroup_mma_wait(0, deps=(dk_started, ds))
        free_rows(shared.rows, step)
    if WITH_DQ:
        meet_at(DS_READ + ((grid.group_size * steps + 1) & 1))
    # through K's buffer, which nothing reads any more
    meet_at(MEETING)
    shared.k.index(0).store((dk * softmax_scale).to(dtype))
    fence_async_shared()
    store_rows(dk_desc, key_rows, start_n, 0, shared.k.index(0))
    wait_for_tile_stores(0)


@gluon.jit
def _consume(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, shared,
    probs_tiles, problem, grid, stride_slopes_b, softmax_scale,
    FOR_DV: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    batch, head_kv, start_n, _first_q, seqlen_q, first_k, seqlen_k, offset, padded_row = (
        columns_of_tile(
            grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, gl.program_id(0), ROWS
        )
    )
    of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
    key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
    if start_n < seqlen_k:
        if FOR_DV:
            if problem.ALIBI:
                slopes_ptr += batch * stride_slopes_b
            _make_dv(
                dv_desc, dq_ptr, slopes_ptr, shared, probs_tiles, of_sequence, grid,
                batch, head_kv, start_n, key_rows, padded_row, WITH_DQ,
            )  # fmt: skip
        else:
            _make_dk(
                dk_desc, dq_ptr, shared, probs_tiles, of_sequence, grid, batch, head_kv,
                start_n, key_rows, padded_row, softmax_scale, WITH_DQ,
            )  # fmt: skip


def _name(specialization):
    c = specialization.constants
    made = "backward" if c["WITH_DQ"] else "backward_dkdv"
    return kernel_name(specialization, made, "m64n64")


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
def flashdig_hopper_backward_wide(
    q_desc,
    dout_desc,
    k_desc,
    v_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    dq_ptr,
    slopes_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    counter_ptr,
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
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WITH_DQ: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    tile_p: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, ROWS], dtype)
    probs_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, ROWS], tile_p)
    shared = new_shared(q_desc, lse_desc, ROWS, ROWS, HEAD_DIM, STAGES, False, 1)
    fence_async_shared()

    num_heads_kv = num_heads // group_size
    tiles_n = gl.cdiv(seqlen_k, ROWS)
    tiles = batch_size * num_heads_kv * tiles_n
    if PACKED:  # slots that are enough wherever the sequences begin
        tiles_n = seqlen_k // ROWS + batch_size
        tiles = num_heads_kv * tiles_n
    grid = Grid(
        tiles, tiles_n, batch_size, num_heads_kv, group_size, heads_together, padded_q,
        PACKED, TOP_LEFT,
    )  # fmt: skip
    problem = Problem(
        seqlen_q, seqlen_k, offset, left, right, score_factor, exp_factor, softcap,
        score_factor * 0.0, LEFT, RIGHT, SOFTCAP, slopes_ptr is not None,
    )  # fmt: skip

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    gl.warp_specialize([
        (_consume, (dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_q_ptr, seqused_k_ptr, shared, probs_tiles, problem, grid,
                    stride_slopes_b, softmax_scale, True, WITH_DQ)),
        (_consume, (dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_q_ptr, seqused_k_ptr, shared, probs_tiles, problem, grid,
                    stride_slopes_b, softmax_scale, False, WITH_DQ)),
        (produce, (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_seqlens_q_ptr,
                   cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, counter_ptr, shared, problem,
                   grid)),
    ], [4, 1], [240, 24])
    # fmt: on
