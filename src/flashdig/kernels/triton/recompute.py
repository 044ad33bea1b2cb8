"""Device function: one tile of the backward pass, computed anew from the saved log-sum-exp.

The tile may be (rows, keys) or, TRANSPOSED, (keys, rows). dS = P * (dropout(dO V^T) - delta) in
which delta is rowsum(dO * O) less the log-sum-exp's own gradient (Dao 2023, section 3.1.2).
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.score_terms import (
    LOG2_E,
    capped,
    exp_units,
    keep_tile,
    keep_tile_transposed,
    load_bias,
    plus_alibi,
    position_visible,
)


@triton.jit
def probabilities(
    products,
    lse,
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
    """(P, visible, d score / d scaled product) of a tile; lse, in units, broadcasts to it."""
    scores, slope = capped(products, score_factor, softcap_units, SOFTCAP)
    if ALIBI:
        scores = plus_alibi(scores, alibi_slope, i, j, offset)
    visible = (i < seqlen_q) & (j < key_end)
    if BIAS != "none":
        bias = load_bias(bias_ptr, i, j, stride_bias_m, stride_bias_n, visible)
        if BIAS == "bool":
            visible = visible & (bias != 0)
        else:
            bias = bias.to(tl.float32)
            if not NATURAL:
                bias *= LOG2_E
            visible = visible & (bias != float("-inf"))
            scores += bias
    if MASKED:
        visible = visible & position_visible(i, j, offset, left, right, LEFT, RIGHT)
    probs = exp_units(scores - lse, NATURAL)
    if MASKED or BIAS != "none":
        probs = tl.where(visible, probs, 0.0)
    return probs, visible, slope


@triton.jit
def keep_factors(
    seed,
    dropout_threshold,
    dropout_scale,
    sequence,
    head,
    start_m,
    start_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """dropout_scale for pairs that dropout keeps, 0 for the others."""
    if TRANSPOSED:
        keep = keep_tile_transposed(
            seed, dropout_threshold, sequence, head, start_m, start_n, BLOCK_M, BLOCK_N
        )
    else:
        keep = keep_tile(
            seed, dropout_threshold, sequence, head, start_m, start_n, BLOCK_M, BLOCK_N
        )
    return tl.where(keep, dropout_scale, 0.0)
