"""Online softmax of the fp8 forward. Device code.

P of a row's maximum is exactly 2^8, so the largest P is never off.
"""

import struct

from flashdig.kernels.gluon_api import gl, gluon
from flashdig.kernels.hopper.softmax import thread_sums


def _hex(x: float) -> str:
    """PTX's way to write a float32."""
    return f"0f{struct.unpack('<I', struct.pack('<f', x))[0]:08X}"


# powers of 2 from -_REACH to _REACH are made; what lies beyond ends there
_REACH = 120
_HALF, _WHOLE_REACH, _OF_REACH = _hex(0.5), _hex(2.0 * _REACH), _hex(0.5 / _REACH)
_TO_WHOLE = _hex(1.5 * 2.0**23)  # added, it leaves no fraction
# of 2^x between -1/2 and 1/2, within 0.0018 of it, times 2^-_REACH
_SQUARE, _LINEAR, _CONSTANT = (_hex(x * 2.0**-_REACH) for x in (0.23842768, 0.70344865, 1.00044327))

# P of a row's maximum is 2^8: e4m3 ends at 448
P_BITS = gl.constexpr(8.0)
P_FACTOR = gl.constexpr(2.0**8)


@gluon.constexpr_function
def _powers_text(count, every):
    """PTX: 2^(score * factor - shift) of `count` elements of a thread, one of `every` by
    multiplications.

    Operands: results; scores, shifts, factor. Two rows alternate by pairs.
    """
    score, shift, factor = count, 2 * count, 3 * count
    lines = ["{", ".reg .f32 y, t, f, p, small, x<2>, n<2>; .reg .b32 e, q;"]
    lines.append(f"mul.f32 small, ${factor}, {_OF_REACH};")
    for row in (0, 1):
        lines.append(f"neg.f32 x{row}, ${shift + 2 * row};")
        lines.append(f"fma.rn.f32 n{row}, x{row}, {_OF_REACH}, {_HALF};")
    for i in range(count):
        row = i // 2 % 2
        if i % every == every - 1:
            # y from 0 to 1 for -_REACH to _REACH; t its whole part, f the rest
            lines.append(f"fma.rn.sat.f32 y, ${score + i}, small, n{row};")
            lines.append(f"fma.rn.f32 t, y, {_WHOLE_REACH}, {_TO_WHOLE};")
            lines.append(f"sub.f32 f, {_TO_WHOLE}, t;")
            lines.append(f"fma.rn.f32 f, y, {_WHOLE_REACH}, f;")
            lines.append(f"fma.rn.f32 p, f, {_SQUARE}, {_LINEAR};")
            lines.append(f"fma.rn.f32 p, p, f, {_CONSTANT};")
            lines.append("mov.b32 e, t; shl.b32 e, e, 23; mov.b32 q, p;")
            lines.append(f"add.u32 q, q, e; mov.b32 ${i}, q;")
        else:
            lines.append(f"fma.rn.f32 y, ${score + i}, ${factor}, x{row};")
            lines.append(f"ex2.approx.ftz.f32 ${i}, y;")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _powers_operands(count):
    return ",".join(["=&f"] * count + ["f"] * (3 * count))


@gluon.jit
def powers(scores, shift, factor, EVERY: gl.constexpr):
    """2^(scores * factor - shift).

    Args:
        shift: (rows,).
        EVERY: one element of so many is made by multiplications, since the unit that makes powers
            takes as long for one as they do for eight (Zadouri et al. 2026, "FlashAttention-4",
            after Cody and Waite); 0: none. Its relative error, below 0.0018, is small beside what
            rounding to e4m3 costs.
    """
    if EVERY == 0:
        probs = gl.exp2(scores * factor - shift[:, None])
    else:
        COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
        TEXT: gl.constexpr = _powers_text(COUNT, EVERY)
        OPERANDS: gl.constexpr = _powers_operands(COUNT)
        shifts = gl.convert_layout(gl.broadcast(scores, shift[:, None])[1], scores.type.layout)
        probs = gl.inline_asm_elementwise(
            TEXT, OPERANDS, [scores, shifts, factor], dtype=gl.float32, is_pure=True, pack=COUNT
        )
    return probs


@gluon.jit
def online_softmax(
    scores, row_max, row_sums, factor, GUARD: gl.constexpr, EVERY: gl.constexpr
):  # fmt: skip
    """(P, rescale, new row_max, new row_sums) of a tile.

    Args:
        scores: (rows, keys); `factor`, above zero, times them are scores in units of log2.
        row_max: (rows,), in units of log2; -inf where a row has seen no key.
        row_sums: (rows, 4), see `softmax.thread_sums`.
        GUARD: a row may see none of the tile's keys and of those before.

    Returns: P as scores; rescale is what earlier outputs are multiplied with.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    shift = new_max
    if GUARD:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    probs = powers(scores, shift - P_BITS, factor, 0 if GUARD else EVERY)
    rescale = gl.exp2(row_max - shift)
    sums = thread_sums(probs)
    sums_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))
    return probs, rescale, new_max, row_sums * sums_rescale[:, None] + sums
