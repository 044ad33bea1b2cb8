"""What the warps of the Hopper backward hand to each other, and the producer. Device code.

Between producer and consumers mbarriers tell what is loaded and what is free again. Between the two
consumers hardware barriers do: an arrival there costs one instruction a warp, where Triton gathers
a warpgroup before it arrives at an mbarrier.
"""

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdig.kernels.gluon_api import aggregate, gl, gluon, load_tile, mbarrier
from flashdig.kernels.hopper.backward_numbers import Numbers, new_numbers, send_tile
from flashdig.kernels.hopper.backward_places import columns_of_tile, padded_start
from flashdig.kernels.hopper.backward_scores import row_tiles
from flashdig.kernels.hopper.problem import Problem
from flashdig.kernels.hopper.rows import Rows, load_rows
from flashdig.kernels.hopper.schedule import next_program

# Hardware barriers; Triton takes 0 to 3
MEETING = gl.constexpr(7)
# of dS that is handed over late: + 2 * consumer + parity of the step
WRITTEN = gl.constexpr(8)
READ = gl.constexpr(12)


@aggregate
class Stages:
    """STAGES buffers of rows: tiles of Q and dO, and what belongs to their rows."""

    queries: gl.shared_memory_descriptor
    grads: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, queries, grads, lse, delta, full, empty, STAGES):
        self.queries = queries
        self.grads = grads
        self.lse = lse
        self.delta = delta
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)


@aggregate
class Shared:
    """What the warps hand to each other.

    Attributes:
        k, v: (KEY_TILES, BLOCK_N, HEAD_DIM): of this tile of keys and, where there are two, of the
            next; kv_full: their barriers; kv_empty: the barrier where there is one.
        rows: of BLOCK_M rows each.
        dscores: (2, BLOCK_N, BLOCK_M): dS^T of this step and of the last.
        numbers: of tiles of keys.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    rows: Stages
    dscores: gl.shared_memory_descriptor
    numbers: Numbers

    @gluon.constexpr_function
    def __init__(self, k, v, kv_full, kv_empty, rows, dscores, numbers):
        self.k = k
        self.v = v
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.rows = rows
        self.dscores = dscores
        self.numbers = numbers


@gluon.jit
def new_shared(
    q_desc, lse_desc, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr, COUNTED: gl.constexpr, KEY_TILES: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    statistics: gl.constexpr = lse_desc.layout
    tile_kv: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], dtype)
    tile_q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, HEAD_DIM], dtype)
    tile_ds: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    if KEY_TILES == 1:
        kv_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
        kv_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
        mbarrier.init(kv_full, count=1)
        mbarrier.init(kv_empty, count=2)
    else:
        kv_full = gl.allocate_shared_memory(gl.int64, [KEY_TILES, 1], barrier)
        kv_empty = kv_full
        for slot in gl.static_range(KEY_TILES):
            mbarrier.init(kv_full.index(slot), count=1)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    numbers = new_numbers(kv_full, COUNTED)
    rows = Stages(
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], tile_q),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, HEAD_DIM], tile_q),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], statistics),
        full,
        empty,
        STAGES,
    )
    return Shared(
        gl.allocate_shared_memory(dtype, [KEY_TILES, BLOCK_N, HEAD_DIM], tile_kv),
        gl.allocate_shared_memory(dtype, [KEY_TILES, BLOCK_N, HEAD_DIM], tile_kv),
        kv_full,
        kv_empty,
        rows,
        gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], tile_ds),
        numbers,
    )


@gluon.jit
def wait_for_rows(rows, step):
    """Consumer: the stage of step number `step`, once its rows are there."""
    stage = step % rows.STAGES
    mbarrier.wait(rows.full.index(stage), (step // rows.STAGES) & 1)
    return stage


@gluon.jit
def free_rows(rows, step):
    """Consumer: the rows of a step are read; once a step."""
    mbarrier.arrive(rows.empty.index(step % rows.STAGES), count=1)


@gluon.jit
def _put_rows(
    rows, step, q_desc, dout_desc, lse_desc, delta_desc, query_rows, row, statistics_row
):  # fmt: skip
    stage = step % rows.STAGES
    mbarrier.wait(rows.empty.index(stage), ((step // rows.STAGES) & 1) ^ 1)
    full = rows.full.index(stage)
    mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
    load_tile(lse_desc, [statistics_row], full, rows.lse.index(stage))
    load_rows(q_desc, query_rows, row, 0, full, rows.queries.index(stage))
    load_rows(dout_desc, query_rows, row, 0, full, rows.grads.index(stage))
    load_tile(delta_desc, [statistics_row], full, rows.delta.index(stage))


@gluon.jit
def produce(
    q_desc, dout_desc, k_desc, v_desc, lse_desc, delta_desc, cu_q_ptr, cu_k_ptr, used_q_ptr,
    used_k_ptr, counter_ptr, shared, problem, grid,
):  # fmt: skip
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    BLOCK_N: gl.constexpr = shared.k.shape[1]
    KEY_TILES: gl.constexpr = shared.k.shape[0]
    STAGES: gl.constexpr = shared.rows.STAGES
    tile = gl.program_id(0)
    count = tile * 0  # tiles of keys so far
    walks = tile * 0  # of them, those that are there
    done = tile * 0  # tiles of rows so far
    first_before = tile * 0  # of them, the first of the last tile of keys
    while tile < grid.tiles:
        following = tile + gl.num_programs(0)
        batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row = (
            columns_of_tile(
                grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_N
            )
        )
        if start_n < seqlen_k:
            of_sequence = of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, problem.slope)
            first, _, _, end = row_tiles(of_sequence, start_n, BLOCK_M, BLOCK_N)
            key_rows = Rows(batch, head_kv, first_k, seqlen_k, grid.PACKED, 1)
            slot = walks % KEY_TILES
            full = shared.kv_full
            if KEY_TILES == 1:
                mbarrier.wait(shared.kv_empty, (walks & 1) ^ 1)
            else:
                full = shared.kv_full.index(slot)
                # The tile before last is read, and its gradients have left, when the first rows of
                # the last one are read: known where rows in their place have been loaded
                unknown = (walks > 1) & (first_before + STAGES >= done)
                read = shared.rows.empty.index(first_before % STAGES)
                mbarrier.wait(read, (first_before // STAGES) & 1, pred=unknown)
                first_before = done
            mbarrier.expect(full, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
            load_rows(k_desc, key_rows, start_n, 0, full, shared.k.index(slot))
            load_rows(v_desc, key_rows, start_n, 0, full, shared.v.index(slot))
            if walks == 0:  # statistics, zeros and the counter are of the kernel before
                gdc_wait()
            last = done + grid.group_size * (end - first) - 1
            for member in range(grid.group_size):
                head = head_kv * grid.group_size + member
                query_rows = Rows(batch, head, first_q, seqlen_q, grid.PACKED, 1)
                # a descriptor's coordinates have 32 bits, and so many rows a tensor
                statistics = padded_start(grid, batch, head, padded_row).to(gl.int32)
                for row_tile in range(first, end):
                    row = row_tile * BLOCK_M
                    if shared.numbers.COUNTED:  # noqa: SIM102 - decided when compiling
                        # as late as possible: a claimed tile waits until this one is done
                        if done == last:
                            following = next_program(counter_ptr)
                            send_tile(shared.numbers, count, following)
                    _put_rows(
                        shared.rows, done, q_desc, dout_desc, lse_desc, delta_desc, query_rows,
                        row, statistics + row,
                    )  # fmt: skip
                    done += 1
            walks += 1
        elif shared.numbers.COUNTED:
            if walks == 0:
                gdc_wait()
            following = next_program(counter_ptr)
            send_tile(shared.numbers, count, following)
        count += 1
        tile = following
    if walks == 0:
        gdc_wait()
    gdc_launch_dependents()


@gluon.jit
def of_sequence_and_head(problem, seqlen_q, seqlen_k, offset, slope):
    """The problem of one sequence and head."""
    return Problem(
        seqlen_q, seqlen_k, offset, problem.left, problem.right, problem.score_factor,
        problem.exp_factor, problem.softcap, slope,
        problem.LEFT, problem.RIGHT, problem.SOFTCAP, problem.ALIBI,
    )  # fmt: skip
