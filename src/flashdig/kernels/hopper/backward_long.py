"""How consumers of the Hopper backward's main kernel walk a tile of keys where those are long: one
buffer of K and V, and three of rows.

As in `backward_main`, but dQ of a tile's last step is made at its end and gradients leave through
the buffers of dS. At head_dim 128 a third buffer of rows is worth more there than K and V in time.
It is a walk of its own since the place of every instruction counts: the same steps out of the other
walk take 1 to 8 % longer.
"""

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpreted,
    wait_for_tile_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.backward_places import padded_start
from flashdig.kernels.hopper.backward_scores import hidden, places, row_tiles, scores_of
from flashdig.kernels.hopper.backward_shared import (
    MEETING,
    READ,
    WRITTEN,
    free_rows,
    of_sequence_and_head,
    wait_for_rows,
)
from flashdig.kernels.hopper.backward_sums import KEYS, add_registers, start_dq
from flashdig.kernels.hopper.hardware_barriers import arrive_at, meet_at
from flashdig.kernels.hopper.rows import Rows, store_rows


@gluon.jit
def _walk(
    state, shared, problem, dq_ptr, start_n, begin, stop, step_of_tile_0,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Row tiles begin..stop; dQ of the step before is added up at `dq_before` of the state."""
    dk, dv, dq_before = state
    dtype: gl.constexpr = shared.k.dtype
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    HALF: gl.constexpr = HEAD_DIM * BLOCK_M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    stages = shared.rows
    for tile in range(begin, stop):
        step = step_of_tile_0 + tile
        # always 0, but not to LLVM, which would keep the descriptors of K and V in registers
        none = step >> 30
        k = shared.k.index(none).slice(CONSUMER * KEYS, KEYS, 0)
        v = shared.v.index(none).slice(CONSUMER * KEYS, KEYS, 0)
        stage = wait_for_rows(stages, step)
        q = stages.queries.index(stage)
        dout = stages.grads.index(stage)

        products_started = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
        lse = stages.lse.index(stage).load(row_layout)
        dprobs_started = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(1, deps=(products_started,))
        keys, rows = places(products, tile * BLOCK_M, start_n + CONSUMER * KEYS, True)
        scores, slope = scores_of(products, problem, keys, rows)
        if MASKED:
            scores = hidden(scores, problem, keys, rows)
        probs = gl.exp2(scores * problem.exp_factor - lse[None, :])
        p = gl.convert_layout(probs.to(dtype), operand)
        if problem.SOFTCAP:
            probs = probs * slope
        delta = stages.delta.index(stage).load(row_layout)
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_started,))
        dscores = probs * (dprobs - delta[None, :])
        ds_half = dscores.to(dtype)
        ds = gl.convert_layout(ds_half, operand)

        parity = step & 1
        meet_at(READ + 2 * (1 - CONSUMER) + parity)
        shared.dscores.index(parity).slice(CONSUMER * KEYS, KEYS, 0).store(ds_half)
        fence_async_shared()
        arrive_at(WRITTEN + 2 * CONSUMER + parity)
        parity = parity ^ 1
        meet_at(WRITTEN + 2 * (1 - CONSUMER) + parity)
        dq_started = start_dq(shared, shared.k.index(none), parity, CONSUMER)
        dv, _ = warpgroup_mma_wait(1, deps=(dv_started, p))
        dk_started = warpgroup_mma(ds, q, dk, is_async=True)
        dq = warpgroup_mma_wait(1, deps=(dq_started,))
        dq_now = dq_ptr + (2 * tile + CONSUMER) * HALF
        arrive_at(READ + 2 * CONSUMER + parity)
        add_registers(dq_before, dq)
        dq_before = dq_now
        dk, _ = warpgroup_mma_wait(0, deps=(dk_started, ds))
        free_rows(stages, step)
    return dk, dv, dq_before


@gluon.jit
def _store_half(desc, x, staging, key_rows, row):
    """Start writing one consumer's keys of a gradient through shared memory."""
    staging.store(x.to(staging.dtype))
    fence_async_shared()
    store_rows(desc, key_rows, row, 0, staging)


@gluon.jit
def make_columns_long(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, shared, problem, grid, batch, head_kv, start_n, first_q,
    seqlen_q, first_k, seqlen_k, offset, padded_row, walks, done, softmax_scale,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """dK and dV of a consumer's half of a tile of keys; `done` steps of the rings, afterwards."""
    dtype: gl.constexpr = shared.k.dtype
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, d_layout)
    dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, d_layout)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
    first, full_first, full_end, end = row_tiles(of_sequence, start_n, BLOCK_M, BLOCK_N)
    mbarrier.wait(shared.kv_full, walks & 1)
    # dS of zeros stands before the first step, added where the first tile's will be
    fresh = padded_start(grid, batch, head_kv * grid.group_size, padded_row)
    dq_before = dq_ptr + fresh * HEAD_DIM + (2 * first + CONSUMER) * (HEAD_DIM * BLOCK_M // 2)
    parity = (done & 1) ^ 1
    shared.dscores.index(parity).slice(CONSUMER * KEYS, KEYS, 0).store(zeros.to(dtype))
    fence_async_shared()
    arrive_at(WRITTEN + 2 * CONSUMER + parity)
    arrive_at(READ + 2 * CONSUMER + (parity ^ 1))
    state = (dk, dv, dq_before)
    for member in range(grid.group_size):
        head = head_kv * grid.group_size + member
        of_head = of_sequence
        if problem.ALIBI:
            slope = gl.load(slopes_ptr + head)
            of_head = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope)
        dq_head = dq_ptr + padded_start(grid, batch, head, padded_row) * HEAD_DIM
        step_of_tile_0 = done - first
        # rows cut on the right or whose keys end, whole ones, rows cut on the window's left side
        state = _walk(
            state, shared, of_head, dq_head, start_n, first, full_first, step_of_tile_0, CONSUMER,
            True,
        )  # fmt: skip
        state = _walk(
            state, shared, of_head, dq_head, start_n, full_first, full_end, step_of_tile_0,
            CONSUMER, False,
        )  # fmt: skip
        if problem.LEFT:
            state = _walk(
                state, shared, of_head, dq_head, start_n, full_end, end, step_of_tile_0, CONSUMER,
                True,
            )  # fmt: skip
        done += end - first
    dk, dv, dq_before = state
    parity = (done & 1) ^ 1
    meet_at(WRITTEN + 2 * (1 - CONSUMER) + parity)
    meet_at(READ + 2 * (1 - CONSUMER) + (parity ^ 1))
    dq = warpgroup_mma_wait(0, deps=(start_dq(shared, shared.k.index(0), parity, CONSUMER),))
    add_registers(dq_before, dq)
    mbarrier.arrive(shared.kv_empty, count=1)

    # gradients leave through the buffers of dS, of which each consumer takes a half for itself
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    staging = reinterpreted(shared.dscores, dtype, [2, KEYS, HEAD_DIM], half).index(CONSUMER)
    key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
    row = start_n + CONSUMER * KEYS
    meet_at(MEETING)
    _store_half(dv_desc, dv, staging, key_rows, row)
    wait_for_tile_stores(0)
    _store_half(dk_desc, dk * softmax_scale, staging, key_rows, row)
    wait_for_tile_stores(0)
    meet_at(MEETING)
    return done
