"""How a consumer of the Hopper backward's main kernel makes its part of dQ and adds it up. Device
code."""

from flashdig.kernels.gluon_api import gl, gluon, warpgroup_mma

KEYS = gl.constexpr(64)  # of a warpgroup


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
def start_dq(shared, k, parity, CONSUMER: gl.constexpr):
    """A consumer's part of dQ, begun: half of the rows or, where they are 64, of the columns."""
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    COLUMNS: gl.constexpr = shared.k.shape[2] * BLOCK_M // 128
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    ds = shared.dscores.index(parity).permute((1, 0))
    if BLOCK_M == 64:
        k = k.slice(CONSUMER * COLUMNS, COLUMNS, 1)
    else:
        ds = ds.slice(CONSUMER * 64, 64, 0)
    zeros = gl.zeros([64, COLUMNS], gl.float32, layout)
    return warpgroup_mma(ds, k, zeros, use_acc=False, is_async=True)
