"""Device function: one tile of the backward pass, computed anew from the saved log-sum-exp.

The tile may be (rows, keys) or, TRANSPOSED, (keys, rows). dS = P * (dropout(dO V^T) - delta) in
which delta is rowsum(dO * O) less the log-sum-exp's own gradient (Dao 2023, section 3.1.2).
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.score_terms import exp_units, final_scores, keep_tile


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
    scores, visible, slope = final_scores(
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
        LEFT,
        RIGHT,
        SOFTCAP,
        ALIBI,
        BIAS,
        NATURAL,
        MASKED,
    )
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
    keep = keep_tile(
        seed, dropout_threshold, sequence, head, start_m, start_n, BLOCK_M, BLOCK_N, TRANSPOSED
    )
    return tl.where(keep, dropout_scale, 0.0)
