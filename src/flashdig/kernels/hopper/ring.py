"""Shared memory through which a producer warp hands tiles to consumer warpgroups. Device code."""

from flashdig.kernels.gluon_api import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    reinterpreted,
)


@aggregate
class Ring:
    """STAGES buffers of tiles, each with a barrier for "full" and one for "empty"."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)


@gluon.jit
def new_ring(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, ROWS, COLUMNS], layout)
    return ring_of(tiles, STAGES, CONSUMERS)


@gluon.jit
def ring_of(tiles, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A ring of buffers that are there."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=CONSUMERS)
    return Ring(tiles, full, empty, STAGES)


@gluon.jit
def ring_beside(tiles, ring):
    """A ring of buffers that are freed with those of `ring`: number n of both at once."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [ring.STAGES, 1], barrier)
    for stage in gl.static_range(ring.STAGES):
        mbarrier.init(full.index(stage), count=1)
    return Ring(tiles, full, ring.empty, ring.STAGES)


@gluon.jit
def leave_out(ring, step):
    """Producer: number `step` has no tile; its buffer must be empty."""
    mbarrier.arrive(ring.full.index(step % ring.STAGES), count=1)


@gluon.jit
def as_block_of(tile, desc):
    """A (rows, columns) tile as the descriptor's (1, 1, rows, columns)."""
    return reinterpreted(tile, desc.dtype, desc.block_type.shape, desc.layout)


@gluon.jit
def wait_until_empty(ring, step):
    """Producer: the barrier of tile number `step`'s buffer, once nobody reads the buffer."""
    stage = step % ring.STAGES
    mbarrier.wait(ring.empty.index(stage), ((step // ring.STAGES) & 1) ^ 1)
    return ring.full.index(stage)


@gluon.jit
def take(ring, step):
    """Consumer: tile number `step`, once it is there."""
    stage = step % ring.STAGES
    mbarrier.wait(ring.full.index(stage), (step // ring.STAGES) & 1)
    return ring.tiles.index(stage)


@gluon.jit
def release(ring, step):
    """Consumer: tile number `step` is read; call once a warpgroup."""
    mbarrier.arrive(ring.empty.index(step % ring.STAGES), count=1)
