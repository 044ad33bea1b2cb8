"""The gradient of a float bias in portable Triton, summed over the dimensions it is broadcast in.

One program makes one tile of the gradient, or a part of one: it walks the (batch, head, row tile,
key tile) that the tile stands for and computes dS anew. Parts are added by torch afterwards, so the
order is fixed and the bits are the same in every run. Dense input only.
"""

import triton
import triton.language as tl

from flashdig.kernels.primitives import round_to_tf32
from flashdig.kernels.triton.arguments import UNSPECIALIZED, kernel_name
from flashdig.kernels.triton.recompute import keep_factors, probabilities
from flashdig.kernels.triton.score_terms import LOG2_E
from flashdig.kernels.triton.sequences import key_phases, seen_keys

# what the tiles of Q, K, V and dO may take together: fits the shared memory of every chip
OPERAND_BYTES = 64 * 1024


def block_size(width: int, itemsize: int) -> int:
    """Rows and keys of a tile, for operands of `width` columns of `itemsize` bytes."""
    return max(16, min(64, OPERAND_BYTES // (4 * width * itemsize)))


@triton.jit(
    repr=kernel_name("flashdig_backward_bias"),
    do_not_specialize=[*UNSPECIALIZED, "bias_batch", "bias_heads", "parts"],
)
def flashdig_backward_bias(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dbias_ptr,
    bias_ptr,
    slopes_ptr,
    sinks_ptr,
    seed_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_bias_b,
    stride_bias_h,
    stride_bias_m,
    stride_bias_n,
    stride_slopes_b,
    batch,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    left,
    right,
    score_factor,
    softcap_units,
    dropout_threshold,
    dropout_scale,
    bias_batch,
    bias_heads,
    parts,
    ROWS_SHARED: tl.constexpr,
    KEYS_SHARED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row_tiles = tl.cdiv(seqlen_q, BLOCK_M)
    key_tiles = tl.cdiv(seqlen_k, BLOCK_N)
    out_row_tiles = row_tiles
    out_key_tiles = key_tiles
    walked_rows = row_tiles // row_tiles
    walked_keys = walked_rows
    if ROWS_SHARED:
        out_row_tiles, walked_rows = walked_rows, row_tiles
    if KEYS_SHARED:
        out_key_tiles, walked_keys = walked_keys, key_tiles
    walked_batch = batch // bias_batch
    walked_heads = num_heads // bias_heads

    program = tl.program_id(0)
    out_n = program % out_key_tiles
    out_m = program // out_key_tiles % out_row_tiles
    matrix = program // (out_key_tiles * out_row_tiles) % (bias_batch * bias_heads)
    part = program // (out_key_tiles * out_row_tiles * bias_batch * bias_heads)
    out_head = matrix % bias_heads
    out_batch = matrix // bias_heads

    UNITS: tl.constexpr = 1.0 if NATURAL else LOG2_E
    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    key_begin, key_end = seen_keys(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)

    # step = ((batch, head), row tile, key tile), those that this tile of the gradient stands for
    steps = walked_batch * walked_heads * walked_rows * walked_keys
    for step in range(part, steps, parts):
        start_n = (out_n + step % walked_keys) * BLOCK_N
        start_m = (out_m + step // walked_keys % walked_rows) * BLOCK_M
        pair = step // (walked_keys * walked_rows)
        head = out_head + pair % walked_heads
        sequence = out_batch + pair // walked_heads
        end_m = tl.minimum(start_m + BLOCK_M, seqlen_q)
        begin, _full_begin, _full_end, end = key_phases(
            start_m, end_m, seqlen_k, offset, left, right, BLOCK_N, LEFT, RIGHT
        )
        if (start_n >= begin) & (start_n < end):
            batch_row = sequence.to(tl.int64)
            head_row = head.to(tl.int64)
            head_kv = (head // group_size).to(tl.int64)
            offs_m = start_m + tl.arange(0, BLOCK_M)
            offs_n = start_n + tl.arange(0, BLOCK_N)
            rows = offs_m.to(tl.int64)[:, None]
            keys = offs_n.to(tl.int64)[:, None]
            row_inside = offs_m < seqlen_q
            stored = ((offs_n >= key_begin) & (offs_n < key_end))[:, None]
            d_inside = (offs_d < HEAD_DIM)[None, :]
            dv_inside = (offs_dv < HEAD_DIM_V)[None, :]
            q_base = (batch_row * stride_qb + head_row * stride_qh + rows * stride_qm) * UNIT
            k_base = (batch_row * stride_kb + head_kv * stride_kh + keys * stride_kn) * UNIT
            v_base = (batch_row * stride_vb + head_kv * stride_vh + keys * stride_vn) * UNIT
            do_base = (batch_row * stride_dob + head_row * stride_doh + rows * stride_dom) * UNIT
            q = tl.load(
                q_ptr + q_base + offs_d[None, :], mask=row_inside[:, None] & d_inside, other=0.0
            )
            dout = tl.load(
                dout_ptr + do_base + offs_dv[None, :],
                mask=row_inside[:, None] & dv_inside,
                other=0.0,
            ).to(q.dtype)
            k = tl.load(k_ptr + k_base + offs_d[None, :], mask=stored & d_inside, other=0.0)
            v = tl.load(v_ptr + v_base + offs_dv[None, :], mask=stored & dv_inside, other=0.0)
            if INPUT_PRECISION == "tf32":
                q, k = round_to_tf32(q), round_to_tf32(k)
                v, dout = round_to_tf32(v), round_to_tf32(dout)
            row_statistics = (batch_row * num_heads + head_row) * seqlen_q + offs_m
            lse = tl.load(lse_ptr + row_statistics, mask=row_inside, other=0.0)
            lse = tl.where(lse == float("-inf"), 0.0, lse) * UNITS
            delta = tl.load(delta_ptr + row_statistics, mask=row_inside, other=0.0)
            alibi_slope = 0.0
            if ALIBI:
                alibi_slope = tl.load(slopes_ptr + sequence * stride_slopes_b + head) * UNITS
            products = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
            probs, visible, _slope = probabilities(
                products,
                lse[:, None],
                offs_m[:, None],
                offs_n[None, :],
                bias_ptr + batch_row * stride_bias_b + head_row * stride_bias_h,
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
                True,
            )
            dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
            if DROPOUT:
                dprobs *= keep_factors(
                    seed,
                    dropout_threshold,
                    dropout_scale,
                    sequence,
                    head,
                    start_m,
                    start_n,
                    BLOCK_M,
                    BLOCK_N,
                    False,
                )
            total += tl.where(visible, probs * (dprobs - delta[:, None]), 0.0)

    # dbias (parts, bias_batch, bias_heads, rows or 1, keys or 1), contiguous
    out_rows = seqlen_q
    out_keys = seqlen_k
    if ROWS_SHARED:
        out_rows = seqlen_q // seqlen_q
    if KEYS_SHARED:
        out_keys = seqlen_k // seqlen_k
    plane = (part * bias_batch * bias_heads + matrix).to(tl.int64) * out_rows
    offs_m = out_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = out_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if ROWS_SHARED and KEYS_SHARED:
        tl.store(dbias_ptr + plane, tl.sum(tl.sum(total, 1), 0))
    elif ROWS_SHARED:
        tl.store(dbias_ptr + plane * out_keys + offs_n, tl.sum(total, 0), mask=offs_n < seqlen_k)
    elif KEYS_SHARED:
        tl.store(dbias_ptr + plane + offs_m, tl.sum(total, 1), mask=offs_m < seqlen_q)
    else:
        offsets = (plane + offs_m[:, None]) * out_keys + offs_n[None, :]
        inside = (offs_m < seqlen_q)[:, None] & (offs_n < seqlen_k)[None, :]
        tl.store(dbias_ptr + offsets, total, mask=inside)
