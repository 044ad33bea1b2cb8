"""Online softmax on a warpgroup's score tiles. Device code.

A thread holds two rows of a tile, eight apart: pairs of neighbouring keys of one and of the other
in turn. Four threads share a row. What is kept for a row is (rows, 4), a number in each of them.
"""

from flashdig.kernels.gluon_api import gl, gluon


@gluon.jit
def _by_thread(x):
    """(rows, keys) -> (rows, pairs of a thread, 4, 2)."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])


@gluon.jit
def thread_sums(x):
    """(rows, keys) -> (rows, 4): sums of what each thread of a row's four holds.

    Summing inside the threads needs no shuffle; the four sums of a row are added once, at the end.
    """
    return gl.sum(gl.sum(_by_thread(x), 3), 1)


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def _thread_firsts(x):
    """(rows, keys) -> (rows, 4): the first that each thread holds of a row. No instruction."""
    return gl.reduce(gl.reduce(_by_thread(x), 3, _first), 1, _first)


@gluon.jit
def of_threads(x, sums):
    """(rows,) -> (rows, 4), as `sums`."""
    rows = gl.convert_layout(x, gl.SliceLayout(1, sums.type.layout))
    return gl.broadcast(sums, rows[:, None])[1]


@gluon.jit
def spread(x, tile):
    """(rows, 4) -> as `tile`, (rows, keys): every element of a row what its thread has of x."""
    ROWS: gl.constexpr = tile.shape[0]
    COLUMNS: gl.constexpr = tile.shape[1]
    firsts = gl.convert_layout(x, _thread_firsts(tile).type.layout)
    pairs = gl.expand_dims(gl.expand_dims(firsts, 1), 3)
    wide = gl.broadcast(pairs, _by_thread(tile))[0]
    return gl.convert_layout(gl.reshape(wide, [ROWS, COLUMNS]), tile.type.layout)


@gluon.jit
def first_softmax(scores, factor):
    """(P, row_max, row_sums) of the first tile of a walk; a row may see none of its keys.

    Args:
        scores: (rows, keys); `factor`, above zero, times them are scores in units of log2.

    Returns: P as scores; row_max in units of log2 and row_sums, both (rows, 4).
    """
    row_max = gl.max(scores, 1) * factor
    shift = gl.where(row_max == float("-inf"), 0.0, row_max)
    probs = gl.exp2(scores * factor - shift[:, None])
    sums = thread_sums(probs)
    return probs, of_threads(row_max, sums), sums


# A row's maximum stays until what a thread holds of a tile's row sums to more than this: until
# then no P is above it, which every dtype holds. Exact: P, row sums and LSE use the maximum that
# was kept. NaN, the sums of a row that has seen no key, is above it
_LARGEST_SUM = "0f43800000"  # 2^8


@gluon.constexpr_function
def _next_text(count, bfloat16):
    """PTX that passes P, row_max and a tile's sums on, with rescale 1, in a warp whose sums are
    small, and makes all four anew from the scores in any other.

    Operands, for `count` elements of a thread: P by pairs, row_max, sums and rescale; then scores,
    P by pairs, row_max, sums, factor. Two rows alternate by pairs.
    """
    half = count // 2
    sizes = {"p": half, "max": count, "sum": count, "rescale": count}
    sizes |= {"score": count, "old_p": half, "old_max": count, "old_sum": count, "factor": count}
    place, begin = {}, 0
    for name, size in sizes.items():
        place[name] = begin
        begin += size

    def at(name, index=0):
        return f"${place[name] + index}"

    rows = (0, 1)
    lines = ["{", ".reg .pred some;", ".reg .f32 m<2>, t<2>, r<2>, s<2>, z<2>, a, b;"]
    lines.append(f"setp.gtu.f32 some, {at('old_sum')}, {_LARGEST_SUM};")
    lines.append(f"setp.gtu.or.f32 some, {at('old_sum', 2)}, {_LARGEST_SUM}, some;")
    lines.append("vote.sync.any.pred some, some, 0xffffffff;")
    lines += [f"mov.b32 {at('p', i)}, {at('old_p', i)};" for i in range(half)]
    for row in rows:
        lines.append(f"mov.f32 m{row}, {at('old_max', 2 * row)};")
        lines.append(f"mov.f32 t{row}, {at('old_sum', 2 * row)};")
        lines.append(f"mov.f32 r{row}, 0f3F800000;")
    lines.append("@!some bra KEPT;")
    lines += [f"mov.f32 z{row}, {at('score', 2 * row)};" for row in rows]
    for i in range(count):
        row = i // 2 % 2
        lines.append(f"max.f32 z{row}, z{row}, {at('score', i)};")
    for row in rows:
        for distance in (1, 2):
            lines.append(f"shfl.sync.bfly.b32 a, z{row}, {distance}, 0x1f, 0xffffffff;")
            lines.append(f"max.f32 z{row}, z{row}, a;")
        lines.append(f"mul.f32 z{row}, z{row}, {at('factor')};")
        lines.append(f"max.f32 z{row}, z{row}, m{row};")
        # the shift, negative; 0 where the row has seen no key
        lines.append(f"setp.eq.f32 some, z{row}, 0fFF800000;")
        lines.append(f"neg.f32 s{row}, z{row};")
        lines.append(f"selp.f32 s{row}, 0f00000000, s{row}, some;")
        lines.append(f"add.f32 r{row}, m{row}, s{row};")
        lines.append(f"ex2.approx.ftz.f32 r{row}, r{row};")
        lines.append(f"mov.f32 m{row}, z{row};")
        lines.append(f"mov.f32 t{row}, 0f00000000;")
    pair = "cvt.rn.bf16x2.f32" if bfloat16 else "cvt.rn.f16x2.f32"
    for i in range(half):
        row = i % 2
        for name, element in (("a", 2 * i), ("b", 2 * i + 1)):
            lines.append(f"fma.rn.f32 {name}, {at('score', element)}, {at('factor')}, s{row};")
            lines.append(f"ex2.approx.ftz.f32 {name}, {name};")
            lines.append(f"add.f32 t{row}, t{row}, {name};")
        lines.append(f"{pair} {at('p', i)}, b, a;")
    lines.append("KEPT:")
    for i in range(count):
        row = i // 2 % 2
        lines += [f"mov.f32 {at('max', i)}, m{row};", f"mov.f32 {at('sum', i)}, t{row};"]
        lines.append(f"mov.f32 {at('rescale', i)}, r{row};")
    return " ".join([*lines, "}"])


@gluon.constexpr_function
def _next_operands(count):
    half = count // 2
    results = ["=&r"] * half + ["=&f"] * (3 * count)
    return ",".join([*results, *["f"] * count, *["r"] * half, *["f"] * (3 * count)])


@gluon.jit
def next_softmax(scores, row_max, row_sums, factor, dtype: gl.constexpr):
    """(P, rescale, new row_max, new row_sums) of a tile that is not the first.

    Exponentials with the maximum so far need not wait for the tile's own, which is hardly ever
    needed: a warp in which some sum is large makes its exponentials again (after Zadouri et al.
    2026, "FlashAttention-4", conditional rescaling; there the maximum itself decides).

    Args:
        scores: (rows, keys); `factor`, above zero, times them are scores in units of log2.
        row_max, row_sums: (rows, 4), as `first_softmax` returns them.

    Returns: P of `dtype`, rounded; rescale (rows, 4): what earlier outputs are multiplied with.
    """
    COUNT: gl.constexpr = scores.shape[0] * scores.shape[1] // 128
    TEXT: gl.constexpr = _next_text(COUNT, dtype == gl.bfloat16)
    OPERANDS: gl.constexpr = _next_operands(COUNT)
    wide_max = spread(row_max, scores)
    probs = gl.exp2(scores * factor - wide_max)
    wide_sums = spread(thread_sums(probs), scores)
    p = probs.to(dtype)
    # a tuple with a constant in it is none of dtypes
    if dtype == gl.bfloat16:
        p, new_max, sums, rescale = gl.inline_asm_elementwise(
            TEXT, OPERANDS, [scores, p, wide_max, wide_sums, factor],
            dtype=(gl.bfloat16, gl.float32, gl.float32, gl.float32), is_pure=True, pack=COUNT,
        )  # fmt: skip
    else:
        p, new_max, sums, rescale = gl.inline_asm_elementwise(
            TEXT, OPERANDS, [scores, p, wide_max, wide_sums, factor],
            dtype=(gl.float16, gl.float32, gl.float32, gl.float32), is_pure=True, pack=COUNT,
        )  # fmt: skip
    layout: gl.constexpr = row_sums.type.layout
    new_max = gl.convert_layout(_thread_firsts(new_max), layout)
    sums = gl.convert_layout(_thread_firsts(sums), layout)
    rescale = gl.convert_layout(_thread_firsts(rescale), layout)
    return p, rescale, new_max, row_sums * rescale + sums
