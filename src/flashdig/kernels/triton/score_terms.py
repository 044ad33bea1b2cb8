"""Device functions: what happens to q.k on its way to a score, and dropout.

Scores are kept in units of log2, so that exp2 needs no factor. Tiles may be (rows, keys) or
(keys, rows): `i` and `j` are the row and key indices, shaped to broadcast to the tile.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tanh(x):
    # exact at both ends: exp2 gives inf or 0 there
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))


@triton.jit
def capped(products, score_factor, softcap_log2, SOFTCAP: tl.constexpr):
    """(scores in log2, their derivative by the scaled product over log2 e).

    score_factor is softmax_scale * log2 e, or softmax_scale / softcap with a softcap.
    """
    slope = products
    scores = products * score_factor
    if SOFTCAP:
        t = tanh(scores)
        slope = 1.0 - t * t
        scores = t * softcap_log2
    return scores, slope


@triton.jit
def position_visible(i, j, offset, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Bool tile: the window and causality let row i see key j; the lengths are not checked."""
    visible = (i >= 0) & (j >= 0)
    if LEFT:
        visible = visible & (j >= i + offset - left)
    if RIGHT:
        visible = visible & (j <= i + offset + right)
    return visible


@triton.jit
def load_bias(bias_ptr, i, j, stride_m, stride_n, inside):
    offsets = i.to(tl.int64) * stride_m + j.to(tl.int64) * stride_n
    return tl.load(bias_ptr + offsets, mask=inside, other=0)


@triton.jit
def plus_alibi(scores, slope_log2, i, j, offset):
    return scores - slope_log2 * tl.abs(i + offset - j).to(tl.float32)


@triton.jit
def keep_tile(
    seed,
    threshold,
    sequence,
    head,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bool (BLOCK_M, BLOCK_N): the pairs that dropout keeps; see `flashdig.kernels.philox`."""
    i = start_m + tl.arange(0, BLOCK_M)[:, None]
    quad = start_n // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    word0, word1, word2, word3 = tl.philox(
        seed, quad + zero, i + zero, head.to(tl.int32) + zero, sequence.to(tl.int32) + zero
    )
    # [.., x, y] is word 2x + y
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    return tl.reshape(words, [BLOCK_M, BLOCK_N]) >= threshold.to(tl.uint32, bitcast=True)


@triton.jit
def keep_tile_transposed(
    seed,
    threshold,
    sequence,
    head,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Bool (BLOCK_N, BLOCK_M): `keep_tile`, transposed."""
    i = start_m + tl.arange(0, BLOCK_M)[None, :]
    quad = start_n // 4 + tl.arange(0, BLOCK_N // 4)[:, None]
    zero = tl.zeros([BLOCK_N // 4, BLOCK_M], tl.int32)
    word0, word1, word2, word3 = tl.philox(
        seed, quad + zero, i + zero, head.to(tl.int32) + zero, sequence.to(tl.int32) + zero
    )
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    words = tl.permute(words, [0, 2, 3, 1])
    return tl.reshape(words, [BLOCK_N, BLOCK_M]) >= threshold.to(tl.uint32, bitcast=True)
