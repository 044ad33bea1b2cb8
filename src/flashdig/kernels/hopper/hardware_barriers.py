"""Hardware barriers between two warpgroups, of the 16 that a block has. Device code.

An arrival costs one instruction a warp, where Triton gathers a warpgroup before it arrives at an
mbarrier. Triton takes the first few, one for each partition.
"""

from flashdig.kernels.gluon_api import gl, gluon


@gluon.constexpr_function
def _text(instruction):
    return f"{instruction} $1, 256; mov.b32 $0, $1;"


@gluon.jit
def _at_barrier(instruction: gl.constexpr, number):
    TEXT: gl.constexpr = _text(instruction)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # one number a thread, so that the text stands there once
    numbers = gl.full([128], 0, gl.int32, layout) + number
    gl.inline_asm_elementwise(TEXT, "=r,r", [numbers], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def meet_at(number):
    """Both warpgroups' 256 threads: wait until all have arrived."""
    _at_barrier("bar.sync", number)


@gluon.jit
def arrive_at(number):
    """One warpgroup's half of `meet_at`, without waiting."""
    _at_barrier("bar.arrive", number)
