"""Device functions: what happens to q.k on its way to a score, and dropout.

Scores are kept in units of log2, so that exp2 needs no factor; float32 ones are NATURAL, since a
change of units rounds the log-sum-exp once more. `units` gives how many units a natural one is.
Tiles may be (rows, keys) or (keys, rows): `i` and `j` are the row and key indices, shaped to
broadcast to the tile.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp_units(x, NATURAL: tl.constexpr):
    """e to the power of x, which is in the kernel's units."""
    if NATURAL:
        x = x * LOG2_E
    return tl.exp2(x)


@triton.jit
def capped(products, score_factor, softcap_units, SOFTCAP: tl.constexpr):
    """(scores in the kernel's units, their derivative by the scaled product in those units).

    score_factor is softmax_scale in units, or softmax_scale / softcap with a softcap.
    """
    slope = products
    scores = products * score_factor
    if SOFTCAP:
        # tanh and its derivative from exp(-2|x|): nothing overflows, and near the cap, where tanh
        # is 1 but for rounding, the derivative keeps its digits
        z = tl.exp2(tl.abs(scores) * (-2.0 * LOG2_E))
        inverse = 1.0 / (1.0 + z)
        t = (1.0 - z) * inverse
        slope = 4.0 * z * inverse * inverse
        scores = tl.where(scores < 0.0, -t, t) * softcap_units
    return scores, slope


@triton.jit
def final_scores(
    products,
    i,
    j,
    bias_ptr,
    stride_bias_m,
    stride_bias_n,
    alibi_slope,
    seqlen_q,
    key_end,
    offset,
    left,
    right,
    score_factor,
    softcap_units,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(scores, visible, d score / d scaled product) of a tile of q.k, for forward and backward.

    Hidden scores are not replaced: only with MASKED or a bias is there anything hidden.
    """
    scores, slope = capped(products, score_factor, softcap_units, SOFTCAP)
    if ALIBI:
        scores -= alibi_slope * tl.abs(i + offset - j).to(tl.float32)
    visible = (i < seqlen_q) & (j < key_end)
    if BIAS != "none":
        offsets = i.to(tl.int64) * stride_bias_m + j.to(tl.int64) * stride_bias_n
        bias = tl.load(bias_ptr + offsets, mask=visible, other=0)
        if BIAS == "bool":
            visible = visible & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            if not NATURAL:
                bias *= LOG2_E
            visible = visible & (bias != float("-inf"))
            scores += bias
    if MASKED:
        if LEFT:
            visible = visible & (j >= i + offset - left)
        if RIGHT:
            visible = visible & (j <= i + offset + right)
    return scores, visible, slope


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
    TRANSPOSED: tl.constexpr,
):
    """Bool tile, (rows, keys) or TRANSPOSED: the pairs that dropout keeps.

    `flashdig.kernels.philox` defines them: four keys share a counter.
    """
    if TRANSPOSED:
        i = start_m + tl.arange(0, BLOCK_M)[None, :]
        quad = start_n // 4 + tl.arange(0, BLOCK_N // 4)[:, None]
    else:
        i = start_m + tl.arange(0, BLOCK_M)[:, None]
        quad = start_n // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zero = i * 0 + quad * 0
    word0, word1, word2, word3 = tl.philox(
        seed, quad + zero, i + zero, head.to(tl.int32) + zero, sequence.to(tl.int32) + zero
    )
    # [.., x, y] is word 2x + y
    words = tl.join(tl.join(word0, word2), tl.join(word1, word3))
    if TRANSPOSED:
        words = tl.reshape(tl.permute(words, [0, 2, 3, 1]), [BLOCK_N, BLOCK_M])
    else:
        words = tl.reshape(words, [BLOCK_M, BLOCK_N])
    return words >= threshold.to(tl.uint32, bitcast=True)
