"""Columns of V^T and of the output in the fp8 forward: their ring, P V, and P as its operand.

Device code.
"""

from __future__ import annotations

from flashdig.kernels.gluon_api import (
    gl,
    gluon,
    load_tile,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashdig.kernels.hopper.columns import (
    BlockRing,
    tile_at,
)
from flashdig.kernels.hopper.forward import (
    ROWS,
)
from flashdig.kernels.hopper.fp8_values import FIRST_SECTION, SECTIONS
from flashdig.kernels.hopper.ring import as_block_of, ring_beside, ring_of, wait_until_empty


@gluon.jit
def new_value_ring(
    descs, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr, keys,
    JOINT: gl.constexpr,
):  # fmt: skip
    if len(descs) == 1:
        tiles = (value_buffers(descs[0], STAGES, BLOCK_N),)
    else:
        tiles = (
            value_buffers(descs[0], STAGES, BLOCK_N),
            value_buffers(descs[1], STAGES, BLOCK_N),
        )
    ring = ring_beside(tiles[0], keys.ring) if JOINT else ring_of(tiles[0], STAGES, CONSUMERS)
    return BlockRing(ring, tiles)


@gluon.jit
def value_buffers(desc, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    COLUMNS: gl.constexpr = desc.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, BLOCK_N], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [STAGES, COLUMNS, BLOCK_N], layout)


@gluon.jit
def put_values(values, step, descs, batch, head_kv, key):
    """Producer: start copying V^T of a tile of keys, once its buffer is empty."""
    full = wait_until_empty(values.ring, step)
    tile = tile_at(values.tiles, step % values.ring.STAGES)
    if len(descs) == 1:
        mbarrier.expect(full, descs[0].block_type.nbytes)
        load_tile(descs[0], (batch, head_kv, 0, key), full, as_block_of(tile[0], descs[0]))
    else:
        mbarrier.expect(full, descs[0].block_type.nbytes + descs[1].block_type.nbytes)
        load_tile(descs[0], (batch, head_kv, 0, key), full, as_block_of(tile[0], descs[0]))
        rest = tile[0].shape[0]
        load_tile(descs[1], (batch, head_kv, rest, key), full, as_block_of(tile[1], descs[1]))


@gluon.jit
def start_output(p, v, out):
    """out += P V, begun; v are tiles of V^T."""
    if len(out) == 1:
        started = (warpgroup_mma(p, v[0].permute((1, 0)), out[0], is_async=True),)
    else:
        started = (
            warpgroup_mma(p, v[0].permute((1, 0)), out[0], is_async=True),
            warpgroup_mma(p, v[1].permute((1, 0)), out[1], is_async=True),
        )
    return started


@gluon.jit
def finished_output(started, PENDING: gl.constexpr = 0):
    """`columns.finished_output` without P: named there, it would be copied between the products,
    which ptxas would then run one after the other. ptxas itself keeps registers of operands until
    the wait."""
    if len(started) == 1:
        out = (warpgroup_mma_wait(PENDING, deps=(started[0],)),)
    else:
        first, rest = warpgroup_mma_wait(PENDING, deps=(started[0], started[1]))
        out = (first, rest)
    return out


@gluon.jit
def zeros(COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 32])
    return gl.zeros([ROWS, COLUMNS], gl.float32, layout)


@gluon.jit
def new_output(tiles):
    """Accumulators of zeros, as wide as the tiles' columns of V."""
    if len(tiles) == 1:
        out = (zeros(tiles[0].shape[1]),)
    else:
        out = (zeros(tiles[0].shape[1]), zeros(tiles[1].shape[1]))
    return out


# four values to e4m3, in one register; all four results name it, and one is taken
_ROUND = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $5, $4; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $7, $6; mov.b32 $0, {low, high}; "
    "mov.b32 $1, $0; mov.b32 $2, $0; mov.b32 $3, $0; }"
)


@gluon.jit
def first(a, b):
    return a


@gluon.jit
def joined(probs, out):
    """P in e4m3, four keys a number: int32 (rows, keys / 4), what a thread holds of an operand A.

    Loops would take values of 8 bits apart and join them again in every step, and Triton's wait
    for products does not hold them. Call it behind the wait for the products before: ptxas runs
    products one after the other whose operands are written meanwhile.
    """
    N: gl.constexpr = probs.shape[1]
    layout: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 4)
    groups = gl.reshape(probs, [ROWS, N // 16, 2, 4, 2])
    permuted = gl.reshape(gl.permute(groups, (0, 1, 3, 2, 4)), [ROWS, N])
    words = gl.inline_asm_elementwise(
        _ROUND, "=&r,=r,=r,=r,f,f,f,f", [gl.convert_layout(permuted, layout)], dtype=gl.int32,
        is_pure=False, pack=4,
    )  # fmt: skip
    return gl.reduce(gl.reshape(words, [ROWS, N // 4, 4]), 2, first)


@gluon.jit
def as_operand(p, out):
    """What `joined` returned as operand A of the product that adds to `out`, keys in the order of
    `fp8_values`. No instruction: four elements share a register before and after. Impure, so that
    it is not moved between products, which ptxas would then run one after the other."""
    layout: gl.constexpr = gl.DotOperandLayout(0, out.type.layout, 4)
    WORDS: gl.constexpr = p.shape[1]
    fours = gl.reshape(gl.zeros([ROWS, 4 * WORDS], gl.int32, layout), [ROWS, WORDS, 4])
    of_words: gl.constexpr = gl.SliceLayout(2, fours.type.layout)
    four = gl.broadcast(gl.expand_dims(gl.convert_layout(p, of_words), 2), fours)[0]
    bytes_ = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.reshape(four, [ROWS, 4 * WORDS])],
        dtype=gl.float8e4nv, is_pure=False, pack=4,
    )  # fmt: skip
    return gl.convert_layout(bytes_, layout)


# returns when another kernel's count has come so far; acquires what was written before it
_ACQUIRE = gl.constexpr("ld.acquire.gpu.global.u32 $0, [$1];")


@gluon.jit
def _acquired(count_ptr):
    return gl.inline_asm_elementwise(
        _ACQUIRE, "=r,l", [count_ptr], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_values(counter_ptr, section, items):
    """Producer: until `items` of a section of V^T are written; TMA may then read them."""
    count_ptr = counter_ptr + FIRST_SECTION + section
    while _acquired(count_ptr) < items:
        pass
    # the writes were the generic proxy's, the reads are the async proxy's
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r,r", [section], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def clear_counts(counter_ptr):
    """Producer: as `schedule.clear_counter`, with the counts of V^T's sections."""
    if gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        numbers = gl.arange(0, SECTIONS, layout)
        gl.store(counter_ptr + FIRST_SECTION + numbers, 0)
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
