"""Device functions: one step of online softmax on a score tile in a warpgroup's registers."""

from flashdig.kernels.gluon_api import gl, gluon


@gluon.jit
def thread_sums(x):
    """(rows, keys) -> (rows, 4): sums of what each thread of a row's quad holds.

    An accumulator's row is spread over four threads, two neighbouring keys in eight each. Summing
    inside the threads needs no shuffle; the four sums of a row are added once, at the end.
    """
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, KEYS // 8, 4, 2]), 3), 1)


# the output is rescaled where a row's maximum grew by more than this, in units of log2: until then
# its values are up to 2^8 times as large, which every dtype holds. Exact: P, row sums and LSE use
# the maximum that was kept
KEPT_GROWTH = gl.constexpr(8.0)


@gluon.jit
def online_softmax(
    scores, row_max, row_sums, factor, GUARD: gl.constexpr, LAZY: gl.constexpr = False
):
    """(P, rescale, new row_max, new row_sums) of one tile.

    Args:
        scores: (rows, keys); `factor` times them are scores in units of log2.
        row_max: (rows,), in units of log2; row_sums: (rows, 4), of each thread.
        factor: above zero.
        GUARD: some row may have seen no key yet, so its maximum is -inf.
        LAZY: row_max stays while scores are at most KEPT_GROWTH above it (Zadouri et al. 2026,
            "FlashAttention-4", conditional rescaling); then rescale is 1.
    """
    new_max = gl.maximum(row_max, gl.max(scores, 1) * factor)
    if LAZY:
        new_max = gl.where(new_max <= row_max + KEPT_GROWTH, row_max, new_max)
    shift = new_max
    if GUARD:
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    probs = gl.exp2(scores * factor - shift[:, None])
    rescale = gl.exp2(row_max - shift)
    sums = thread_sums(probs)
    sums_rescale = gl.convert_layout(rescale, gl.SliceLayout(1, sums.type.layout))
    return probs, rescale, new_max, row_sums * sums_rescale[:, None] + sums
