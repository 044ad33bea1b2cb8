"""Tiles in one or two column blocks: shapes are powers of two, so 96 is 64 + 32, 192 is 128 + 64.

Device code. A tile, an accumulator and a descriptor are tuples of one or two members each.
"""

from flashdig.kernels.gluon_api import (
    aggregate,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.ring import (
    Ring,
    leave_out,
    release,
    ring_beside,
    ring_of,
    take,
    wait_until_empty,
)
from flashdig.kernels.hopper.rows import load_rows, store_rows
from flashdig.kernels.hopper.softmax import spread


@aggregate
class BlockRing:
    """A ring whose tiles have one or two column blocks; the barriers are those of `ring`."""

    ring: Ring
    tiles: gl.tuple

    @gluon.constexpr_function
    def __init__(self, ring, tiles):
        self.ring = ring
        self.tiles = tiles


@gluon.jit
def blocks_of(first, rest):
    """(first,) or (first, rest); rest None is nothing."""
    return (first,) if rest is None else (first, rest)


@gluon.jit
def _buffers(desc, COUNT: gl.constexpr, ROWS: gl.constexpr):
    COLUMNS: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [COUNT, ROWS, COLUMNS], layout)


@gluon.jit
def new_tiles(descs, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """Shared memory for COUNT tiles of what the descriptors copy."""
    if len(descs) == 1:
        tiles = (_buffers(descs[0], COUNT, ROWS),)
    else:
        tiles = (_buffers(descs[0], COUNT, ROWS), _buffers(descs[1], COUNT, ROWS))
    return tiles


@gluon.jit
def tile_at(tiles, index):
    if len(tiles) == 1:
        tile = (tiles[0].index(index),)
    else:
        tile = (tiles[0].index(index), tiles[1].index(index))
    return tile


@gluon.jit
def new_block_ring(descs, ROWS: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Buffers for tiles of ROWS rows of what the descriptors copy."""
    tiles = new_tiles(descs, STAGES, ROWS)
    return BlockRing(ring_of(tiles[0], STAGES, CONSUMERS), tiles)


@gluon.jit
def new_block_ring_beside(descs, ROWS: gl.constexpr, ring):
    """Buffers that are freed with those of `ring`."""
    tiles = new_tiles(descs, ring.ring.STAGES, ROWS)
    return BlockRing(ring_beside(tiles[0], ring.ring), tiles)


@gluon.jit
def leave_out_blocks(ring, step):
    """Producer: number `step` has no tile; its buffer must be empty."""
    leave_out(ring.ring, step)


@gluon.jit
def put_blocks(ring, step, descs, rows, row):
    """Producer: start copying tile number `step` of a walk, once its buffer is empty."""
    full = wait_until_empty(ring.ring, step)
    load_blocks(descs, rows, row, full, tile_at(ring.tiles, step % ring.ring.STAGES))


@gluon.jit
def take_blocks(ring, step):
    """Consumer: tile number `step`, once it is there."""
    take(ring.ring, step)
    return tile_at(ring.tiles, step % ring.ring.STAGES)


@gluon.jit
def take_blocks_if(there, ring, step):
    """`take_blocks`, without the waiting where `there` is false."""
    stage = step % ring.ring.STAGES
    mbarrier.wait(ring.ring.full.index(stage), (step // ring.ring.STAGES) & 1, pred=there)
    return tile_at(ring.tiles, stage)


@gluon.jit
def release_blocks(ring, step):
    """Consumer: tile number `step` is read; call once a warpgroup."""
    release(ring.ring, step)


@gluon.jit
def load_blocks(descs, rows, row, barrier, tile):
    """Start copying a tile from `row` on; `barrier` will know all its bytes."""
    if len(descs) == 1:
        mbarrier.expect(barrier, descs[0].block_type.nbytes)
        load_rows(descs[0], rows, row, 0, barrier, tile[0])
    else:
        mbarrier.expect(barrier, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
        load_rows(descs[0], rows, row, 0, barrier, tile[0])
        load_rows(descs[1], rows, row, tile[0].shape[1], barrier, tile[1])


@gluon.jit
def store_blocks(descs, rows, row, tile):
    """Start writing a tile from `row` on."""
    store_rows(descs[0], rows, row, 0, tile[0])
    if len(descs) == 2:
        store_rows(descs[1], rows, row, tile[0].shape[1], tile[1])


@gluon.jit
def start_scores(q, k, zeros):
    """Q K^T, begun: q and k are tiles."""
    scores = warpgroup_mma(q[0], k[0].permute((1, 0)), zeros, use_acc=False, is_async=True)
    if len(q) == 2:
        scores = warpgroup_mma(q[1], k[1].permute((1, 0)), scores, is_async=True)
    return scores


@gluon.jit
def start_output(p, v, out):
    """out += P V, begun; as many products as out has blocks."""
    if len(out) == 1:
        started = (warpgroup_mma(p, v[0], out[0], is_async=True),)
    else:
        started = (
            warpgroup_mma(p, v[0], out[0], is_async=True),
            warpgroup_mma(p, v[1], out[1], is_async=True),
        )
    return started


@gluon.jit
def finished_output(started, p, PENDING: gl.constexpr = 0):
    """The accumulators once their products are done; p is held until then. PENDING: products that
    were begun later and may go on."""
    if len(started) == 1:
        first, _ = warpgroup_mma_wait(PENDING, deps=(started[0], p))
        out = (first,)
    else:
        first, rest, _ = warpgroup_mma_wait(PENDING, deps=(started[0], started[1], p))
        out = (first, rest)
    return out


@gluon.jit
def new_output(tiles, ROWS: gl.constexpr):
    """Accumulators of zeros, as wide as the tiles' blocks."""
    if len(tiles) == 1:
        out = (_zeros(ROWS, tiles[0].shape[2]),)
    else:
        out = (_zeros(ROWS, tiles[0].shape[2]), _zeros(ROWS, tiles[1].shape[2]))
    return out


@gluon.jit
def _zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def scaled(out, factor):
    """out times a factor for each row."""
    if len(out) == 1:
        product = (_scaled(out[0], factor),)
    else:
        product = (_scaled(out[0], factor), _scaled(out[1], factor))
    return product


@gluon.jit
def _scaled(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.constexpr_function
def _rescale_text(count):
    """PTX of `count` accumulators times their factors, jumped over where a warp's factors are 1.

    Operands: results, accumulators, factors. Two rows alternate by pairs in a thread's elements.
    """
    factor = 2 * count
    lines = ["{", ".reg .pred other;", ".reg .pred any;"]
    lines.append(f"setp.neu.f32 other, ${factor}, 0f3F800000;")
    lines.append(f"setp.neu.or.f32 other, ${factor + 2}, 0f3F800000, other;")
    lines.append("vote.sync.any.pred any, other, 0xffffffff;")
    lines += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines.append("@!any bra KEPT;")
    lines += [f"mul.f32 ${i}, ${i}, ${factor + i};" for i in range(count)]
    return " ".join([*lines, "KEPT:", "}"])


@gluon.constexpr_function
def _rescale_operands(count):
    return ",".join(["=&f"] * count + ["f"] * (2 * count))


@gluon.jit
def scaled_if_needed(out, factor):
    """`scaled`, without the products where no row of a warp has a factor other than 1.

    factor: (rows,), or (rows, 4) as `softmax` has it.
    """
    if len(out) == 1:
        product = (_scaled_if_needed(out[0], factor),)
    else:
        product = (_scaled_if_needed(out[0], factor), _scaled_if_needed(out[1], factor))
    return product


@gluon.jit
def _scaled_if_needed(x, factor):
    COUNT: gl.constexpr = x.shape[0] * x.shape[1] // 128
    TEXT: gl.constexpr = _rescale_text(COUNT)
    OPERANDS: gl.constexpr = _rescale_operands(COUNT)
    if len(factor.shape) == 2:
        factors = spread(factor, x)
    else:
        rows = gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]
        factors = gl.convert_layout(gl.broadcast(x, rows)[1], x.type.layout)
    return gl.inline_asm_elementwise(
        TEXT, OPERANDS, [x, factors], dtype=gl.float32, is_pure=True, pack=COUNT
    )


@gluon.jit
def to_shared(out, tile):
    """The accumulators, rounded to the tile's dtype."""
    tile[0].store(out[0].to(tile[0].dtype))
    if len(out) == 2:
        tile[1].store(out[1].to(tile[1].dtype))
