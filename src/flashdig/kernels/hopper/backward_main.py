"""Backward attention for Hopper: one tile of keys stays, the rows that see it walk by.

    producer    K and V once; then tiles of Q and dO with their log-sum-exp and delta (TMA)
    consumers   two warpgroups own half of the keys each and keep dK and dV in registers:
                S_i^T = K Q_i^T and dP_i^T = V dO_i^T are issued; P_i^T = exp(S_i^T - lse) while
                dP^T runs; dV += P_i^T dO_i while dS_i^T = P_i^T (dP_i^T - delta) goes to shared
                memory; then dQ_i = dS_i K and dK += dS_i^T Q_i

P^T and dS^T feed dV and dK from registers (Shah et al. 2024, "FlashAttention-3"). AHEAD, S^T of the
next step is issued with dQ and dK of this one. LATE, dQ of a step is made in the next one, so that
the consumers need not be at the same place at once to exchange dS; that of a tile's last step is
made in the next tile's first. dQ is added up in float32 by vector reductions straight from
registers, in the order of the registers: `backward_pre_post` puts the rows together again. Heads
that share K and V add up in registers.

A block walks several tiles of keys. With two buffers of K and V, those of the next one arrive while
one is walked, and its gradients leave through its buffer of V while the next one's first products
run. LONG, each tile is walked by `backward_long`.
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
from flashdig.kernels.hopper.backward_long import make_columns_long
from flashdig.kernels.hopper.backward_names import kernel_name
from flashdig.kernels.hopper.backward_numbers import following_tile
from flashdig.kernels.hopper.backward_places import Grid, columns_of_tile, padded_start
from flashdig.kernels.hopper.backward_scores import (
    hidden_transposed,
    places,
    row_tiles,
    scores_of,
)
from flashdig.kernels.hopper.backward_shared import (
    MEETING,
    READ,
    WRITTEN,
    free_rows,
    new_shared,
    of_sequence_and_head,
    produce,
    wait_for_rows,
)
from flashdig.kernels.hopper.backward_stores import store_gradients
from flashdig.kernels.hopper.backward_sums import KEYS, add_registers, start_dq
from flashdig.kernels.hopper.hardware_barriers import arrive_at, meet_after, meet_at
from flashdig.kernels.hopper.problem import Problem
from flashdig.kernels.hopper.rows import Rows


@gluon.jit
def _walk(
    state, shared, problem, dq_ptr, half_0, slot, start_n, begin, stop, step_of_tile_0, last_step,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    """Row tiles begin..stop with K and V of `slot`; AHEAD, S^T of the first is in `state`, as is
    that of the next at the end; LATE, dQ of the step before is added to the half of a tile that is
    number `half_before` there, and `slot_before` has its K. half_0: that half of tile 0."""
    dk, dv, products, half_before, slot_before = state
    dtype: gl.constexpr = shared.k.dtype
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    HALF: gl.constexpr = HEAD_DIM * BLOCK_M // 2
    s_layout: gl.constexpr = products.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    # statistics are loaded while products run, and dQ starts before dV is done, where there are
    # registers for it
    EARLY: gl.constexpr = BLOCK_M == 64 and not AHEAD
    stages = shared.rows
    for tile in range(begin, stop):
        step = step_of_tile_0 + tile
        # always 0, but not to LLVM, which would keep the descriptors of K and V in registers
        none = step >> 30
        k = shared.k.index(slot + none).slice(CONSUMER * KEYS, KEYS, 0)
        v = shared.v.index(slot + none).slice(CONSUMER * KEYS, KEYS, 0)
        stage = step % stages.STAGES if AHEAD else wait_for_rows(stages, step)
        q = stages.queries.index(stage)
        dout = stages.grads.index(stage)

        if not AHEAD:
            products_started = warpgroup_mma(
                k, q.permute((1, 0)), zeros, use_acc=False, is_async=True
            )
        if EARLY:
            lse = stages.lse.index(stage).load(row_layout)
        dprobs_started = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if not AHEAD:
            products = warpgroup_mma_wait(1, deps=(products_started,))
        if not EARLY:
            lse = stages.lse.index(stage).load(row_layout)
        keys, rows = places(products, tile * BLOCK_M, start_n + CONSUMER * KEYS, True)
        scores, slope = scores_of(products, problem, keys, rows)
        if MASKED:
            scores = hidden_transposed(scores, problem, tile * BLOCK_M, start_n + CONSUMER * KEYS)
        probs = gl.exp2(scores * problem.exp_factor - lse[None, :])
        p = gl.convert_layout(probs.to(dtype), operand)
        if problem.SOFTCAP:
            probs = probs * slope
        if EARLY:
            delta = stages.delta.index(stage).load(row_layout)
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_started,))
        if not EARLY:
            delta = stages.delta.index(stage).load(row_layout)
        dscores = probs * (dprobs - delta[None, :])
        ds_half = dscores.to(dtype)
        ds = gl.convert_layout(ds_half, operand)

        if WITH_DQ:
            parity = step & 1
            if LATE:
                # behind dS: ptxas would wait before it, at 128 rows in the midst of it
                if BLOCK_M == 64:
                    meet_after(ds_half, READ + 2 * (1 - CONSUMER) + parity, none)
                else:
                    meet_at(READ + 2 * (1 - CONSUMER) + parity)
            shared.dscores.index(parity).slice(CONSUMER * KEYS, KEYS, 0).store(ds_half)
            fence_async_shared()
            if LATE:
                arrive_at(WRITTEN + 2 * CONSUMER + parity)
            else:
                meet_at(MEETING)
            if not EARLY:
                dv, _ = warpgroup_mma_wait(0, deps=(dv_started, p))
            if AHEAD:
                stage_next = wait_for_rows(stages, gl.minimum(step + 1, last_step))
                q_next = stages.queries.index(stage_next).permute((1, 0))
                products_started = warpgroup_mma(k, q_next, zeros, use_acc=False, is_async=True)
            k_of_dq = shared.k.index(slot + none)
            if LATE:
                parity = parity ^ 1
                meet_at(WRITTEN + 2 * (1 - CONSUMER) + parity)
                k_of_dq = shared.k.index(slot_before + none)
            dq_started = start_dq(shared, k_of_dq, parity, CONSUMER)
            if EARLY:
                dv, _ = warpgroup_mma_wait(1, deps=(dv_started, p))
            dk_started = warpgroup_mma(ds, q, dk, is_async=True)
            if not AHEAD:
                dq = warpgroup_mma_wait(1, deps=(dq_started,))
            else:
                products, dq = warpgroup_mma_wait(1, deps=(products_started, dq_started))
            half_now = half_0 + 2 * tile
            if LATE:
                arrive_at(READ + 2 * CONSUMER + parity)
                add_registers(dq_ptr + half_before.to(gl.int64) * HALF, dq)
                half_before = half_now
                slot_before = slot
            else:
                add_registers(dq_ptr + half_now.to(gl.int64) * HALF, dq)
        else:
            if AHEAD:
                stage_next = wait_for_rows(stages, gl.minimum(step + 1, last_step))
                q_next = stages.queries.index(stage_next).permute((1, 0))
                products_started = warpgroup_mma(k, q_next, zeros, use_acc=False, is_async=True)
            dk_started = warpgroup_mma(ds, q, dk, is_async=True)
            if not AHEAD:
                dv, _ = warpgroup_mma_wait(1, deps=(dv_started, p))
            else:
                dv, _, products = warpgroup_mma_wait(1, deps=(dv_started, p, products_started))
        dk, _ = warpgroup_mma_wait(0, deps=(dk_started, ds))
        free_rows(stages, step)
    return dk, dv, products, half_before, slot_before


@gluon.jit
def _stand_zeros(
    shared, zeros, done, grid, batch, head_kv, padded_row, first,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Before a first step, LATE: dS of zeros stands where that of a step before would; the number
    of the half tile of rows, tile `first` of the head, to which they are added."""
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    parity = (done & 1) ^ 1
    ds = shared.dscores.index(parity).slice(CONSUMER * KEYS, KEYS, 0)
    ds.store(zeros.to(shared.dscores.dtype))
    fence_async_shared()
    arrive_at(WRITTEN + 2 * CONSUMER + parity)
    arrive_at(READ + 2 * CONSUMER + (parity ^ 1))
    padded = padded_start(grid, batch, head_kv * grid.group_size, padded_row)
    return (padded // (BLOCK_M // 2)).to(gl.int32) + 2 * first + CONSUMER


@gluon.jit
def _add_last_dq(shared, dq_ptr, half_before, slot_before, done, CONSUMER: gl.constexpr):
    """After a last step, LATE: dQ of it."""
    HALF: gl.constexpr = shared.k.shape[2] * shared.dscores.shape[2] // 2
    parity = (done & 1) ^ 1
    meet_at(WRITTEN + 2 * (1 - CONSUMER) + parity)
    meet_at(READ + 2 * (1 - CONSUMER) + (parity ^ 1))
    dq_started = start_dq(shared, shared.k.index(slot_before), parity, CONSUMER)
    dq = warpgroup_mma_wait(0, deps=(dq_started,))
    add_registers(dq_ptr + half_before.to(gl.int64) * HALF, dq)


@gluon.jit
def _make_columns(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, shared, problem, grid, batch, head_kv, start_n, first_q,
    seqlen_q, first_k, seqlen_k, offset, padded_row, walks, done, half_before, slot_before,
    softmax_scale,
    CONSUMER: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """dK and dV of a consumer's half of a tile of keys, of which `walks` went before; LATE, with
    two buffers of K, dQ of the last step is left to the next tile: see `_walk`.

    Returns: steps of the rings so far, half_before, slot_before.
    """
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dk = gl.zeros([KEYS, HEAD_DIM], gl.float32, d_layout)
    dv = gl.zeros([KEYS, HEAD_DIM], gl.float32, d_layout)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    products = zeros
    of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
    first, full_first, full_end, end = row_tiles(of_sequence, start_n, BLOCK_M, BLOCK_N)
    KEY_TILES: gl.constexpr = shared.k.shape[0]
    slot = walks % KEY_TILES
    if KEY_TILES == 1:
        mbarrier.wait(shared.kv_full, walks & 1)
    else:  # the buffers of the tile before are free when this one's first rows are
        mbarrier.wait(shared.kv_full.index(slot), (walks // 2) & 1)
        wait_for_tile_stores(0)
    if AHEAD:
        k = shared.k.index(slot).slice(CONSUMER * KEYS, KEYS, 0)
        q = shared.rows.queries.index(wait_for_rows(shared.rows, done)).permute((1, 0))
        products_started = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products_started,))
    last_step = done + grid.group_size * (end - first) - 1
    if LATE:
        if KEY_TILES == 1:
            half_before = _stand_zeros(
                shared, zeros, done, grid, batch, head_kv, padded_row, first, CONSUMER
            )
        else:  # noqa: PLR5501 - decided when compiling
            if walks == 0:
                half_before = _stand_zeros(
                    shared, zeros, done, grid, batch, head_kv, padded_row, first, CONSUMER
                )
    state = (dk, dv, products, half_before, slot_before)
    for member in range(grid.group_size):
        head = head_kv * grid.group_size + member
        of_head = of_sequence
        if problem.ALIBI:
            slope = gl.load(slopes_ptr + head)
            of_head = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope)
        padded = padded_start(grid, batch, head, padded_row)
        half_0 = (padded // (BLOCK_M // 2)).to(gl.int32) + CONSUMER
        step_of_tile_0 = done - first
        # rows cut by the diagonal, whole ones, rows cut on the window's left side
        state = _walk(
            state, shared, of_head, dq_ptr, half_0, slot, start_n, first, full_first,
            step_of_tile_0, last_step, CONSUMER, True, WITH_DQ, AHEAD, LATE,
        )  # fmt: skip
        state = _walk(
            state, shared, of_head, dq_ptr, half_0, slot, start_n, full_first, full_end,
            step_of_tile_0, last_step, CONSUMER, False, WITH_DQ, AHEAD, LATE,
        )  # fmt: skip
        if problem.LEFT:
            state = _walk(
                state, shared, of_head, dq_ptr, half_0, slot, start_n, full_end, end,
                step_of_tile_0, last_step, CONSUMER, True, WITH_DQ, AHEAD, LATE,
            )  # fmt: skip
        done += end - first
    dk, dv, _, half_before, slot_before = state
    if KEY_TILES == 1:
        if LATE:
            _add_last_dq(shared, dq_ptr, half_before, slot_before, done, CONSUMER)
        mbarrier.arrive(shared.kv_empty, count=1)
    key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
    row = start_n + CONSUMER * KEYS
    dk *= softmax_scale
    store_gradients(dk_desc, dv_desc, dk, dv, shared, slot, key_rows, row, CONSUMER)
    return done, half_before, slot_before


@gluon.jit
def _consume(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, shared,
    problem, grid, stride_slopes_b, softmax_scale,
    CONSUMER: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr, LATE: gl.constexpr,
    LONG: gl.constexpr,
):  # fmt: skip
    """All tiles of keys of a block, half of each."""
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    tile = gl.program_id(0)
    count = tile * 0  # tiles of keys so far
    walks = tile * 0  # of them, those that are there
    done = tile * 0  # tiles of rows so far
    slot_before = tile * 0
    half_before = tile * 0
    while tile < grid.tiles:
        batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row = (
            columns_of_tile(
                grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_N
            )
        )
        slopes_of_batch = slopes_ptr
        if problem.ALIBI:
            slopes_of_batch += batch * stride_slopes_b
        if start_n < seqlen_k:
            if LONG:
                done = make_columns_long(
                    dk_desc, dv_desc, dq_ptr, slopes_of_batch, shared, problem, grid, batch,
                    head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row,
                    walks, done, softmax_scale, CONSUMER,
                )  # fmt: skip
            else:
                done, half_before, slot_before = _make_columns(
                    dk_desc, dv_desc, dq_ptr, slopes_of_batch, shared, problem, grid, batch,
                    head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row,
                    walks, done, half_before, slot_before, softmax_scale, CONSUMER, WITH_DQ, AHEAD,
                    LATE,
                )  # fmt: skip
            walks += 1
        tile = following_tile(shared.numbers, count, tile)
        count += 1
    if LATE and shared.k.shape[0] == 2:  # noqa: SIM102 - decided when compiling
        if walks > 0:
            _add_last_dq(shared, dq_ptr, half_before, slot_before, done, CONSUMER)
    if not LONG:
        wait_for_tile_stores(0)


def _name(specialization):
    c = specialization.constants
    made = "backward" if c["WITH_DQ"] else "backward_dkdv"
    return kernel_name(specialization, made, f"m{c['BLOCK_M']}n{2 * KEYS.value}")


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
def flashdig_hopper_backward(
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    PACKED: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WITH_DQ: gl.constexpr,
    AHEAD: gl.constexpr,
    LATE: gl.constexpr,
    COUNTED: gl.constexpr,
    KEY_TILES: gl.constexpr,
    LONG: gl.constexpr,
):
    BLOCK_N: gl.constexpr = 2 * KEYS
    shared = new_shared(q_desc, lse_desc, BLOCK_M, BLOCK_N, HEAD_DIM, STAGES, COUNTED, KEY_TILES)
    fence_async_shared()

    num_heads_kv = num_heads // group_size
    tiles_n = gl.cdiv(seqlen_k, BLOCK_N)
    tiles = batch_size * num_heads_kv * tiles_n
    if PACKED:  # slots that are enough wherever the sequences begin
        tiles_n = seqlen_k // BLOCK_N + batch_size
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
                    seqused_q_ptr, seqused_k_ptr, shared, problem, grid, stride_slopes_b,
                    softmax_scale, 0, WITH_DQ, AHEAD, LATE, LONG)),
        (_consume, (dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_q_ptr, seqused_k_ptr, shared, problem, grid, stride_slopes_b,
                    softmax_scale, 1, WITH_DQ, AHEAD, LATE, LONG)),
        (produce, (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_seqlens_q_ptr,
                   cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, counter_ptr, shared,
                   problem, grid)),
    ], [4, 1], [240, 24])
    # fmt: on
