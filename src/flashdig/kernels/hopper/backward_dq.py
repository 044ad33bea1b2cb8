"""dQ alone for Hopper: one tile of rows stays, the keys that it sees walk by.

    producer    Q and dO with their statistics; then K and V tiles, left to right, into rings of
                buffers (TMA)
    consumers   two warpgroups of 64 rows keep dQ in registers: dP_i = dO V_i^T is issued;
                P_i = exp(S_i - lse) meanwhile; then S_{i+1} = Q K_{i+1}^T and dQ += dS_i K_i

Beside a main kernel that makes dK and dV only, it gives the same bits in every run: nothing is
added up in memory. The price is that S and dP are computed twice: 7 products instead of 5; what it
saves are float32 sums of dQ, which short sequences move more often than their inputs.

With two buffers for rows a block makes several tiles: the rows of the next one arrive while one is
made, S of its first keys is computed in the last step, and dQ leaves through Q's buffer meanwhile.
"""

from triton.language.extra.cuda import gdc_wait

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    load_tile,
    mbarrier,
    wait_for_tile_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.backward_names import kernel_name
from flashdig.kernels.hopper.backward_numbers import (
    following_tile,
    new_numbers,
    send_tile,
)
from flashdig.kernels.hopper.backward_places import Grid, live_rows_of_tile
from flashdig.kernels.hopper.backward_scores import hidden, places, scores_of
from flashdig.kernels.hopper.backward_shared import Stages, of_sequence_and_head
from flashdig.kernels.hopper.problem import Problem, key_tiles
from flashdig.kernels.hopper.ring import leave_out, new_ring, release, take, wait_until_empty
from flashdig.kernels.hopper.rows import Rows, load_rows, store_rows, tile_in_sections
from flashdig.kernels.hopper.schedule import next_program

ROWS = gl.constexpr(64)  # of a warpgroup


@gluon.jit
def _new_rows(q_desc, lse_desc, HEAD_DIM: gl.constexpr, SLOTS: gl.constexpr):
    """SLOTS buffers of rows for each of two consumers, one consumer's after the other's."""
    dtype: gl.constexpr = q_desc.dtype
    tile_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], barrier)
    for slot in gl.static_range(2 * SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    return Stages(
        gl.allocate_shared_memory(dtype, [2 * SLOTS, ROWS, HEAD_DIM], tile_q),
        gl.allocate_shared_memory(dtype, [2 * SLOTS, ROWS, HEAD_DIM], tile_q),
        gl.allocate_shared_memory(gl.float32, [2 * SLOTS, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2 * SLOTS, ROWS], lse_desc.layout),
        full,
        empty,
        SLOTS,
    )


@gluon.jit
def _rows_of_tile(
    grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_M: gl.constexpr
):
    """A tile of rows: (batch, head, start_m, first_q, seqlen_q, first_k, seqlen_k, offset,
    statistics), the last its first row in padded buffers; start_m is past the last row where there
    is nothing to do."""
    num_heads = grid.num_heads_kv * grid.group_size
    if grid.PACKED:
        batch, head, start_m, padded, first_q, seqlen_q, first_k, seqlen_k, offset = (
            live_rows_of_tile(
                tile, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, grid.batch_size, num_heads,
                problem.seqlen_q, problem.seqlen_k, problem.left, problem.right, BLOCK_M,
                grid.TOP_LEFT, problem.LEFT, problem.RIGHT,
            )
        )  # fmt: skip
        statistics = head * grid.padded_q + padded
    else:
        batch, head, start_m = tile_in_sections(
            tile, grid.batch_size, num_heads, problem.seqlen_q, grid.heads_together, BLOCK_M
        )
        first_q = tile * 0
        first_k = first_q
        seqlen_q = problem.seqlen_q
        seqlen_k = problem.seqlen_k
        offset = problem.offset
        statistics = (batch * num_heads + head) * grid.padded_q + start_m
    # a descriptor's coordinates have 32 bits, and so many rows a tensor
    return (
        batch, head, start_m, first_q, seqlen_q, first_k, seqlen_k, offset,
        statistics.to(gl.int32),
    )  # fmt: skip


@gluon.jit
def _put(ring, step, desc, key_rows, row):
    full = wait_until_empty(ring, step)
    mbarrier.expect(full, desc.block_type.nbytes)
    load_rows(desc, key_rows, row, 0, full, ring.tiles.index(step % ring.STAGES))


@gluon.jit
def _put_rows(rows, walks, q_desc, dout_desc, lse_desc, delta_desc, query_rows, row, statistics):
    for c in gl.static_range(2):
        slot = c * rows.STAGES + walks % rows.STAGES
        mbarrier.wait(rows.empty.index(slot), ((walks // rows.STAGES) & 1) ^ 1)
        full = rows.full.index(slot)
        mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
        load_rows(q_desc, query_rows, row + c * ROWS, 0, full, rows.queries.index(slot))
        load_rows(dout_desc, query_rows, row + c * ROWS, 0, full, rows.grads.index(slot))
        load_tile(lse_desc, [statistics + c * ROWS], full, rows.lse.index(slot))
        load_tile(delta_desc, [statistics + c * ROWS], full, rows.delta.index(slot))


@gluon.jit
def _produce(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_q_ptr, cu_k_ptr, used_q_ptr,
    used_k_ptr, counter_ptr, rows, numbers, key_ring, value_ring, problem, grid,
):  # fmt: skip
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    BLOCK_M: gl.constexpr = 2 * ROWS
    tile = gl.program_id(0)
    told = tile * 0  # tiles that the consumers were told
    walks = tile * 0  # tiles that are there
    done = tile * 0  # tiles of keys so far
    while tile < grid.tiles:
        following = tile + gl.num_programs(0)
        batch, head, start_m, first_q, seqlen_q, first_k, seqlen_k, offset, statistics = (
            _rows_of_tile(grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_M)
        )
        if start_m < seqlen_q:
            of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
            first, _, _, end = key_tiles(of_sequence, start_m, BLOCK_M, BLOCK_N)
            query_rows = Rows(batch, head, first_q, seqlen_q, grid.PACKED, 1)
            key_rows = Rows(batch, head // grid.group_size, first_k, seqlen_k, grid.PACKED, 1)
            if numbers.COUNTED:  # noqa: SIM102 - decided when compiling
                # of tiles that are not there nothing is told: the consumers, which compute S of
                # the next one ahead, would not read it
                if tile != gl.program_id(0):
                    send_tile(numbers, told, tile)
                    told += 1
            _put_rows(
                rows, walks, q_desc, dout_desc, lse_desc, delta_desc, query_rows, start_m,
                statistics,
            )  # fmt: skip
            for number in range(first, end):
                if numbers.COUNTED:  # noqa: SIM102 - decided when compiling
                    # as late as possible: a claimed tile waits until this one is done
                    if number == end - 1:
                        following = next_program(counter_ptr)
                _put(key_ring, done, k_desc, key_rows, number * BLOCK_N)
                _put(value_ring, done, v_desc, key_rows, number * BLOCK_N)
                done += 1
            walks += 1
        elif numbers.COUNTED:
            following = next_program(counter_ptr)
        tile = following
    if numbers.COUNTED:
        send_tile(numbers, told, tile)
    if rows.STAGES == 2:  # what the last step computes ahead is of nothing
        wait_until_empty(key_ring, done)
        leave_out(key_ring, done)
        for c in gl.static_range(2):
            mbarrier.arrive(rows.full.index(c * 2 + walks % 2), count=1)
    # it may have begun before the kernel ahead ended; what follows must not
    gdc_wait()


@gluon.jit
def _take_rows(rows, walks, CONSUMER: gl.constexpr):
    """The slot of tile number `walks`, once its rows are there."""
    slot = CONSUMER * rows.STAGES + walks % rows.STAGES
    mbarrier.wait(rows.full.index(slot), (walks // rows.STAGES) & 1)
    return slot


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
    state, q, rows, walks, lse, delta, key_ring, value_ring, problem, start_m, begin, stop,
    step_of_tile_0, last_step, CONSUMER: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Key tiles begin..stop; S of the first is in `state`, as is that of the next at the end, with
    two slots that of the next tile of rows."""
    dq, products = state
    dtype: gl.constexpr = key_ring.tiles.dtype
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    operand: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    s_layout: gl.constexpr = products.type.layout
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    for tile in range(begin, stop):
        step = step_of_tile_0 + tile
        # always 0, but not to LLVM, which would keep the descriptors in registers
        none = tile >> 30
        slot = CONSUMER * rows.STAGES + walks % rows.STAGES + none
        v = take(value_ring, step).permute((1, 0))
        dprobs_started = warpgroup_mma(
            rows.grads.index(slot), v, zeros, use_acc=False, is_async=True
        )
        keys, queries = places(products, start_m, tile * BLOCK_N, False)
        scores, slope = scores_of(products, problem, keys, queries)
        if MASKED:
            scores = hidden(scores, problem, keys, queries)
        probs = gl.exp2(scores * problem.exp_factor - lse[:, None])
        if problem.SOFTCAP:
            probs = probs * slope
        dprobs = warpgroup_mma_wait(0, deps=(dprobs_started,))
        release(value_ring, step)
        ds = gl.convert_layout((probs * (dprobs - delta[:, None])).to(dtype), operand)
        if rows.STAGES == 2:
            k_next = take(key_ring, step + 1)
            next_slot = _take_rows(rows, walks + (step == last_step).to(gl.int32), CONSUMER)
            q_tile = rows.queries.index(next_slot)
            products_started = _start_scores(q_tile, q_tile, k_next, zeros)
        else:
            k_next = take(key_ring, gl.minimum(step + 1, last_step))
            products_started = _start_scores(q, rows.queries.index(slot), k_next, zeros)
        k = key_ring.tiles.index(step % key_ring.STAGES)
        dq_started = warpgroup_mma(ds, k, dq, is_async=True)
        products, dq, _ = warpgroup_mma_wait(0, deps=(products_started, dq_started, ds))
        release(key_ring, step)
    return dq, products


@gluon.jit
def _make_rows(
    products, dq_desc, rows, walks, done, key_ring, value_ring, problem, query_rows, start_m,
    softmax_scale, CONSUMER: gl.constexpr,
):  # fmt: skip
    """dQ of a consumer's half of a tile: (S that is computed ahead, steps of the rings so far)."""
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    HEAD_DIM: gl.constexpr = key_ring.tiles.shape[2]
    s_layout: gl.constexpr = products.type.layout
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    first, full_first, full_end, end = key_tiles(problem, start_m, 2 * ROWS, BLOCK_N)
    slot = _take_rows(rows, walks, CONSUMER)
    q_tile = rows.queries.index(slot)
    q = q_tile
    if rows.STAGES == 1:
        if HEAD_DIM == 256:
            q = q_tile.slice(0, HEAD_DIM // 2, 1).load(gl.DotOperandLayout(0, s_layout, 2))
        zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
        products_started = _start_scores(q, q_tile, take(key_ring, done), zeros)
    lse = rows.lse.index(slot).load(gl.SliceLayout(1, s_layout))
    delta = rows.delta.index(slot).load(gl.SliceLayout(1, s_layout))
    if rows.STAGES == 1:
        products = warpgroup_mma_wait(0, deps=(products_started,))
    else:  # noqa: PLR5501 - decided when compiling
        if walks > 0:  # dQ before has left its rows' buffer
            wait_for_tile_stores(0)
            mbarrier.arrive(rows.empty.index(CONSUMER * 2 + (walks + 1) % 2), count=1)
    dq = gl.zeros([ROWS, HEAD_DIM], gl.float32, d_layout)
    start_m += CONSUMER * ROWS
    step_of_tile_0 = done - first
    last_step = step_of_tile_0 + end - 1
    # keys cut on the window's left side, whole ones, keys cut by the diagonal or the end
    if problem.LEFT:
        dq, products = _walk(
            (dq, products), q, rows, walks, lse, delta, key_ring, value_ring, problem, start_m,
            first, full_first, step_of_tile_0, last_step, CONSUMER, True,
        )  # fmt: skip
    dq, products = _walk(
        (dq, products), q, rows, walks, lse, delta, key_ring, value_ring, problem, start_m,
        full_first, full_end, step_of_tile_0, last_step, CONSUMER, False,
    )  # fmt: skip
    dq, products = _walk(
        (dq, products), q, rows, walks, lse, delta, key_ring, value_ring, problem, start_m,
        full_end, end, step_of_tile_0, last_step, CONSUMER, True,
    )  # fmt: skip

    # through Q's buffer, which nothing reads any more; rows past seqlen_q are not written
    q_tile.store((dq * softmax_scale).to(q_tile.dtype))
    fence_async_shared()
    store_rows(dq_desc, query_rows, start_m, 0, q_tile)
    return products, done + end - first


@gluon.jit
def _consume(
    dq_desc, slopes_ptr, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, rows, numbers, key_ring,
    value_ring, problem, grid, stride_slopes_b, softmax_scale, CONSUMER: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = key_ring.tiles.shape[1]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout)
    products = zeros
    tile = gl.program_id(0)
    told = tile * 0
    walks = tile * 0
    done = tile * 0
    if rows.STAGES == 2:  # of the first rows that there are, or of nothing
        q_tile = rows.queries.index(_take_rows(rows, walks, CONSUMER))
        products_started = _start_scores(q_tile, q_tile, take(key_ring, done), zeros)
        products = warpgroup_mma_wait(0, deps=(products_started,))
    while tile < grid.tiles:
        batch, head, start_m, first_q, seqlen_q, _, seqlen_k, offset, _ = _rows_of_tile(
            grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, 2 * ROWS
        )
        if start_m < seqlen_q:
            slope = problem.slope
            if problem.ALIBI:
                slope = gl.load(slopes_ptr + batch * stride_slopes_b + head)
            of_head = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope)
            query_rows = Rows(batch, head, first_q, seqlen_q, grid.PACKED, 1)
            products, done = _make_rows(
                products, dq_desc, rows, walks, done, key_ring, value_ring, of_head, query_rows,
                start_m, softmax_scale, CONSUMER,
            )  # fmt: skip
            walks += 1
        tile = following_tile(numbers, told, tile)
        told += 1
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
    lse_desc,
    delta_desc,
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
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    STAGES_V: gl.constexpr,
    SLOTS: gl.constexpr,
    COUNTED: gl.constexpr,
    PACKED: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    BLOCK_M: gl.constexpr = 2 * ROWS
    rows = _new_rows(q_desc, lse_desc, HEAD_DIM, SLOTS)
    numbers = new_numbers(rows.full, COUNTED)
    key_ring = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES, 2)
    value_ring = new_ring(dtype, BLOCK_N, HEAD_DIM, STAGES_V, 2)
    fence_async_shared()

    tiles_m = gl.cdiv(seqlen_q, BLOCK_M)
    tiles = batch_size * num_heads * tiles_m
    if PACKED:  # slots that are enough wherever the sequences begin
        tiles_m = seqlen_q // BLOCK_M + batch_size
        tiles = num_heads * tiles_m
    grid = Grid(
        tiles, tiles_m, batch_size, num_heads // group_size, group_size, heads_together, padded_q,
        PACKED, TOP_LEFT,
    )  # fmt: skip
    problem = Problem(
        seqlen_q, seqlen_k, offset, left, right, score_factor, exp_factor, softcap,
        score_factor * 0.0, LEFT, RIGHT, SOFTCAP, slopes_ptr is not None,
    )  # fmt: skip
    # of two in the buffer, the second; the main kernel has the first
    if COUNTED:
        counter_ptr += 1

    # the tuples stand inside the calls: bound to a name, their constants would become tensors
    # fmt: off
    gl.warp_specialize([
        (_consume, (dq_desc, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                    seqused_k_ptr, rows, numbers, key_ring, value_ring, problem, grid,
                    stride_slopes_b, softmax_scale, 0)),
        (_consume, (dq_desc, slopes_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr,
                    seqused_k_ptr, rows, numbers, key_ring, value_ring, problem, grid,
                    stride_slopes_b, softmax_scale, 1)),
        (_produce, (q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_seqlens_q_ptr,
                    cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, counter_ptr, rows, numbers,
                    key_ring, value_ring, problem, grid)),
    ], [4, 1], [240, 24])
    # fmt: on
