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


@gluon.constexpr_function
def _text_after(values, elements, outputs):
    """`meet_at`'s text, whose number waits for all of `values` registers: shifted by four bits the
    number is 0, which ptxas does not know."""
    first = outputs
    number = f"${first + values}"
    lines = ["{ .reg .b32 all, zero;", f"mov.b32 all, ${first};"]
    lines += [f"or.b32 all, all, ${first + i};" for i in range(1, values)]
    lines += [f"shr.s32 zero, {number}, 4;", "and.b32 all, all, zero;"]
    lines += [f"add.s32 all, all, {number};", "bar.sync all, 256;"]
    lines += [f"mov.b32 ${i}, 0;" for i in range(outputs)]
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _constraints_after(values, elements, outputs):
    return ",".join(["=r"] * outputs + ["r"] * (values + elements))


@gluon.jit
def meet_after(x, number, none):
    """`meet_at`, but not before the 16-bit tile x is computed, which ptxas would put behind it.

    none: 0, unknown to the compilers.
    """
    ELEMENTS: gl.constexpr = x.shape[0] * x.shape[1] // 128
    TEXT: gl.constexpr = _text_after(ELEMENTS // 2, ELEMENTS, ELEMENTS // 4)
    CONSTRAINTS: gl.constexpr = _constraints_after(ELEMENTS // 2, ELEMENTS, ELEMENTS // 4)
    numbers = gl.full(x.shape, 0, gl.int32, x.type.layout) + (number + none * 16)
    gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [x, numbers], dtype=gl.int8, is_pure=False, pack=ELEMENTS
    )
