"""Backward attention for Hopper: one tile of keys stays, the rows that see it walk by.

    producer    K and V once; then tiles of Q and dO with their log-sum-exp and delta (TMA)
    consumers   two warpgroups own half of the keys each and keep dK and dV in registers:
                dP_i^T = V dO_i^T is issued; P_i^T = exp(S_i^T - lse) meanwhile; dV += P_i^T dO_i;
                dS_i^T = P_i^T (dP_i^T - delta) goes to shared memory while S_{i+1}^T = K Q_{i+1}^T
                runs; then dQ_i = dS_i K and dK += dS_i^T Q_i

P^T and dS^T feed dV and dK from registers (Shah et al. 2024, "FlashAttention-3"); S^T runs a step
ahead, so that the tensor cores have work during the exponentials and the exchange of dS. dQ is
added up in float32 by vector reductions straight from registers, in the order of the registers:
`backward_pre_post` puts the rows together again. Heads that share K and V add up in registers.
"""

from flashdig.kernels.gluon_api import (
    aggregate,
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    reinterpreted,
    wait_for_tile_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.backward_names import kernel_name
from flashdig.kernels.hopper.backward_places import Grid, columns_of_tile, padded_start
from flashdig.kernels.hopper.backward_scores import hidden, places, row_tiles, scores_of
from flashdig.kernels.hopper.problem import Problem
from flashdig.kernels.hopper.ring import Ring, new_ring, release, take, wait_until_empty
from flashdig.kernels.hopper.rows import Rows, load_rows, store_rows

KEYS = gl.constexpr(64)  # of a warpgroup


@aggregate
class Shared:
    """What the warps hand to each other.

    Attributes:
        k, v: (1, BLOCK_N, HEAD_DIM); kv_full, kv_empty: their barriers.
        queries, grads: rings of Q and of dO.
        lse, delta: (STAGES, BLOCK_M), beside the rings' tiles.
        dscores: (2, BLOCK_N, BLOCK_M): dS^T of this step and of the last.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    queries: Ring
    grads: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    dscores: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, k, v, kv_full, kv_empty, queries, grads, lse, delta, dscores):
        self.k = k
        self.v = v
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.queries = queries
        self.grads = grads
        self.lse = lse
        self.delta = delta
        self.dscores = dscores


@gluon.jit
def _put_rows(ring, statistics, step, desc, statistics_desc, query_rows, row, statistics_row):
    """Producer: a tile of rows and its row statistics under one barrier."""
    stage = step % ring.STAGES
    full = wait_until_empty(ring, step)
    mbarrier.expect(full, desc.block_type.nbytes + statistics_desc.block_type.nbytes)
    load_tile(statistics_desc, [statistics_row], full, statistics.index(stage))
    load_rows(desc, query_rows, row, 0, full, ring.tiles.index(stage))


@gluon.jit
def produce(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_q_ptr, cu_k_ptr, used_q_ptr,
    used_k_ptr, shared, problem, grid,
):  # fmt: skip
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    walks = gl.program_id(0) * 0
    done = walks
    for tile in range(gl.program_id(0), grid.tiles, gl.num_programs(0)):
        batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row = (
            columns_of_tile(
                grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_N
            )
        )
        if start_n < seqlen_k:
            of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
            first, _, _, end = row_tiles(of_sequence, start_n, BLOCK_M, BLOCK_N)
            key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
            full = shared.kv_full
            mbarrier.wait(shared.kv_empty, (walks & 1) ^ 1)
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_rows(k_desc, key_rows, start_n, 0, full, shared.k.index(0))
            load_rows(v_desc, key_rows, start_n, 0, full, shared.v.index(0))
            for member in range(grid.group_size):
                head = head_kv * grid.group_size + member
                query_rows = Rows(batch, head, first_q, seqlen_q, grid.PACKED, 1)
                # a descriptor's coordinates have 32 bits, and so many rows a tensor
                statistics = padded_start(grid, batch, head, padded_row).to(gl.int32)
                for row_tile in range(first, end):
                    row = row_tile * BLOCK_M
                    _put_rows(
                        shared.queries, shared.lse, done, q_desc, lse_desc, query_rows, row,
                        statistics + row,
                    )  # fmt: skip
                    _put_rows(
                        shared.grads, shared.delta, done, dout_desc, delta_desc, query_rows, row,
                        statistics + row,
                    )  # fmt: skip
                    done += 1
            walks += 1


@gluon.jit
def consumers_meet():
    """All threads of both consumers wait for each other, at a hardware barrier of their own."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    gl.inline_asm_elementwise(
        "bar.sync 8, 256; mov.b32 $0, $1;",  # Triton numbers its own from 0
        "=r,r",
        [gl.arange(0, 128, layout)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def add_registers(pointer, x):
    """Add an accumulator (64, columns) to memory in the order of its registers.

    A thread holds four values of every eight columns: they are neighbours in memory, and so are
    the threads of a warp. Element [columns // 8, 128 threads, 4] of memory.
    """
    COLUMNS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 8, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    # row = 16 warp + 8 half + lane // 4, column = 8 eight + 2 (lane % 4) + one
    x = gl.reshape(x, [4, 2, 8, COLUMNS // 8, 4, 2])
    x = gl.permute(x, [0, 2, 4, 3, 1, 5])
    x = gl.convert_layout(gl.reshape(x, [128, COLUMNS // 8, 4]), layout, assert_trivial=True)
    by_eight: gl.constexpr = gl.SliceLayout(2, layout)
    thread = gl.arange(0, 128, gl.SliceLayout(1, by_eight))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, by_eight))
    value = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    place = (thread[:, None] * 4 + eight[None, :] * 512)[:, :, None]
    gl.atomic_add(pointer + (place + value[None, None, :]), x, sem="relaxed")


@gluon.jit
def _walk(
    state, shared, problem, dq_ptr, start_n, begin, stop, step_of_tile_0, last_step,
    CONSUMER: gl.constexpr, MASKED: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Row tiles begin..stop; S^T of the first is in `state`, as is that of the next at the end."""
    dk, dv, products = state
    dtype: gl.constexpr = shared.k.dtype
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    s_layout: gl.constexpr = products.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, s_layout)
    # of dQ a consumer makes half of the rows or, where they are 64, half of the columns
    DQ_COLUMNS: gl.constexpr = HEAD_DIM * BLOCK_M // 128
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLUMNS, 16])
    zeros_q = gl.zeros([64, DQ_COLUMNS], gl.float32, q_layout)
    for tile in range(begin, stop):
        step = step_of_tile_0 + tile
        stage = step % shared.queries.STAGES
        # always 0, but not to LLVM, which would keep the descriptors of K and V in registers
        none = step >> 30
        k = shared.k.index(none).slice(CONSUMER * KEYS, KEYS, 0)
        v = shared.v.index(none).slice(CONSUMER * KEYS, KEYS, 0)

        if not AHEAD:
            q_now = take(shared.queries, step).permute((1, 0))
            products_started = warpgroup_mma(k, q_now, zeros, use_acc=False, is_async=True)
        dout = take(shared.grads, step)
        dprobs_started = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if not AHEAD:
            products = warpgroup_mma_wait(1, deps=(products_started,))
        lse = shared.lse.index(stage).load(row_layout)
        keys, rows = places(products, tile * BLOCK_M, start_n + CONSUMER * KEYS, True)
        scores, slope = scores_of(products, problem, keys, rows)
        if MASKED:
            scores = hidden(scores, problem, keys, rows)
        probs = gl.exp2(scores * problem.exp_factor - lse[None, :])
        p = gl.convert_layout(probs.to(dtype), operand)
        if problem.SOFTCAP:
            probs = probs * slope
        dv_started = warpgroup_mma(p, dout, dv, is_async=True)
        dprobs = warpgroup_mma_wait(1, deps=(dprobs_started,))
        delta = shared.delta.index(step % shared.grads.STAGES).load(row_layout)
        dscores = probs * (dprobs - delta[None, :])
        ds_half = dscores.to(dtype)
        ds = gl.convert_layout(ds_half, operand)

        if AHEAD and not WITH_DQ:
            q_next = take(shared.queries, gl.minimum(step + 1, last_step)).permute((1, 0))
            products_started = warpgroup_mma(k, q_next, zeros, use_acc=False, is_async=True)
        q = shared.queries.tiles.index(stage)
        if WITH_DQ:
            exchange = shared.dscores.index(step & 1)
            exchange.slice(CONSUMER * KEYS, KEYS, 0).store(ds_half)
            fence_async_shared()
            consumers_meet()
            dv, _ = warpgroup_mma_wait(0, deps=(dv_started, p))
            release(shared.grads, step)
            if AHEAD:
                q_next = take(shared.queries, gl.minimum(step + 1, last_step)).permute((1, 0))
                products_started = warpgroup_mma(k, q_next, zeros, use_acc=False, is_async=True)
            if BLOCK_M == 64:
                ds_rows = exchange.permute((1, 0))
                k_columns = shared.k.index(none).slice(CONSUMER * DQ_COLUMNS, DQ_COLUMNS, 1)
            else:
                ds_rows = exchange.permute((1, 0)).slice(CONSUMER * 64, 64, 0)
                k_columns = shared.k.index(none)
            dq_started = warpgroup_mma(ds_rows, k_columns, zeros_q, use_acc=False, is_async=True)
            dk_started = warpgroup_mma(ds, q, dk, is_async=True)
            if not AHEAD:
                dq = warpgroup_mma_wait(1, deps=(dq_started,))
            else:
                products, dq = warpgroup_mma_wait(1, deps=(products_started, dq_started))
            half = 64 * DQ_COLUMNS
            add_registers(dq_ptr + (2 * tile + CONSUMER) * half, dq)
        else:
            dk_started = warpgroup_mma(ds, q, dk, is_async=True)
            if not AHEAD:
                dv, _ = warpgroup_mma_wait(1, deps=(dv_started, p))
            else:
                dv, _, products = warpgroup_mma_wait(1, deps=(dv_started, p, products_started))
            release(shared.grads, step)
        dk, _ = warpgroup_mma_wait(0, deps=(dk_started, ds))
        release(shared.queries, step)
    return dk, dv, products


@gluon.jit
def of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope):
    """The problem of one sequence and head."""
    return Problem(
        seqlen_q, seqlen_k, offset, problem.left, problem.right, problem.score_factor,
        problem.exp_factor, problem.softcap, slope,
        problem.LEFT, problem.RIGHT, problem.SOFTCAP, problem.ALIBI,
    )  # fmt: skip


@gluon.jit
def _store_half(desc, x, staging, key_rows, row):
    """Start writing one consumer's keys of a gradient through shared memory."""
    staging.store(x.to(staging.dtype))
    fence_async_shared()
    store_rows(desc, key_rows, row, 0, staging)


@gluon.jit
def _make_columns(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, shared, problem, grid, batch, head_kv, start_n, first_q,
    seqlen_q, first_k, seqlen_k, offset, padded_row, walks, done, softmax_scale,
    CONSUMER: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr,
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
    products = zeros
    of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
    first, full_first, full_end, end = row_tiles(of_sequence, start_n, BLOCK_M, BLOCK_N)
    mbarrier.wait(shared.kv_full, walks & 1)
    if AHEAD:
        k = shared.k.index(0).slice(CONSUMER * KEYS, KEYS, 0)
        q = take(shared.queries, done).permute((1, 0))
        products_started = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products_started,))
    last_step = done + grid.group_size * (end - first) - 1
    for member in range(grid.group_size):
        head = head_kv * grid.group_size + member
        of_head = of_sequence
        if problem.ALIBI:
            slope = gl.load(slopes_ptr + head)
            of_head = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope)
        dq_head = dq_ptr
        if WITH_DQ:
            dq_head += padded_start(grid, batch, head, padded_row) * HEAD_DIM
        step_of_tile_0 = done - first
        # rows cut by the diagonal, whole ones, rows cut on the window's left side
        dk, dv, products = _walk(
            (dk, dv, products), shared, of_head, dq_head, start_n, first, full_first,
            step_of_tile_0, last_step, CONSUMER, True, WITH_DQ, AHEAD,
        )  # fmt: skip
        dk, dv, products = _walk(
            (dk, dv, products), shared, of_head, dq_head, start_n, full_first, full_end,
            step_of_tile_0, last_step, CONSUMER, False, WITH_DQ, AHEAD,
        )  # fmt: skip
        if problem.LEFT:
            dk, dv, products = _walk(
                (dk, dv, products), shared, of_head, dq_head, start_n, full_end, end,
                step_of_tile_0, last_step, CONSUMER, True, WITH_DQ, AHEAD,
            )  # fmt: skip
        done += end - first
    mbarrier.arrive(shared.kv_empty, count=1)

    # gradients leave through the buffers of dS, of which each consumer takes a part for itself
    HALVES: gl.constexpr = 4 * BLOCK_M // HEAD_DIM
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    staging = reinterpreted(shared.dscores, dtype, [HALVES, KEYS, HEAD_DIM], half)
    key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
    row = start_n + CONSUMER * KEYS
    consumers_meet()
    _store_half(dv_desc, dv, staging.index(CONSUMER), key_rows, row)
    if HALVES == 2:
        wait_for_tile_stores(0)
        own = staging.index(CONSUMER)
    else:
        own = staging.index(2 + CONSUMER)
    _store_half(dk_desc, dk * softmax_scale, own, key_rows, row)
    wait_for_tile_stores(0)
    consumers_meet()
    return done


@gluon.jit
def _consume(
    dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, shared,
    problem, grid, stride_slopes_b, softmax_scale,
    CONSUMER: gl.constexpr, WITH_DQ: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    walks = gl.program_id(0) * 0
    done = walks
    for tile in range(gl.program_id(0), grid.tiles, gl.num_programs(0)):
        batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row = (
            columns_of_tile(
                grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_N
            )
        )
        slopes_of_batch = slopes_ptr
        if problem.ALIBI:
            slopes_of_batch += batch * stride_slopes_b
        if start_n < seqlen_k:
            done = _make_columns(
                dk_desc, dv_desc, dq_ptr, slopes_of_batch, shared, problem, grid, batch, head_kv,
                start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row, walks, done,
                softmax_scale, CONSUMER, WITH_DQ, AHEAD,
            )  # fmt: skip
            walks += 1


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
):
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_N: gl.constexpr = 2 * KEYS
    tile_kv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    tile_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    statistics: gl.constexpr = lse_desc.layout
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    mbarrier.init(kv_empty, count=2)
    shared = Shared(
        gl.allocate_shared_memory(dtype, [1, BLOCK_N, HEAD_DIM], tile_kv),
        gl.allocate_shared_memory(dtype, [1, BLOCK_N, HEAD_DIM], tile_kv),
        kv_full,
        kv_empty,
        new_ring(dtype, BLOCK_M, HEAD_DIM, STAGES, 2),
        new_ring(dtype, BLOCK_M, HEAD_DIM, STAGES, 2),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], tile_ds),
    )
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
                    softmax_scale, 0, WITH_DQ, AHEAD)),
        (_consume, (dk_desc, dv_desc, dq_ptr, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr,
                    seqused_q_ptr, seqused_k_ptr, shared, problem, grid, stride_slopes_b,
                    softmax_scale, 1, WITH_DQ, AHEAD)),
        (produce, (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_seqlens_q_ptr,
                    cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, shared, problem, grid)),
    ], [4, 1], [240, 24])
    # fmt: on
