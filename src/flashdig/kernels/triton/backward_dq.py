"""dQ in portable Triton: one program per tile of queries, walking the keys that it sees."""

import triton
import triton.language as tl

from flashdig.kernels.primitives import round_to_tf32
from flashdig.kernels.triton.arguments import UNSPECIALIZED, kernel_name
from flashdig.kernels.triton.recompute import keep_factors, probabilities
from flashdig.kernels.triton.score_terms import LOG2_E
from flashdig.kernels.triton.sequences import (
    key_phases,
    rows_of_program,
    seen_keys,
)


@triton.jit
def _add_key_tiles(
    dq,
    q,
    dout,
    lse,
    delta,
    k_ptr,
    v_ptr,
    bias_ptr,
    stride_kn,
    stride_vn,
    stride_bias_m,
    stride_bias_n,
    alibi_slope,
    seed,
    dropout_threshold,
    dropout_scale,
    sequence,
    head,
    start_m,
    begin,
    end,
    key_begin,
    key_end,
    seqlen_q,
    offset,
    left,
    right,
    score_factor,
    softcap_units,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    NATURAL: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    i = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start_n in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        j = offs_n[None, :]
        k_ptrs = k_ptr + offs_n[:, None] * stride_kn + offs_d[None, :]
        v_ptrs = v_ptr + offs_n[:, None] * stride_vn + offs_dv[None, :]
        k_inside = (offs_d < HEAD_DIM)[None, :]
        v_inside = (offs_dv < HEAD_DIM_V)[None, :]
        if MASKED:
            stored = ((offs_n >= key_begin) & (offs_n < key_end))[:, None]
            k = tl.load(k_ptrs, mask=stored & k_inside, other=0.0)
            v = tl.load(v_ptrs, mask=stored & v_inside, other=0.0)
        elif HEAD_DIM != BLOCK_D or HEAD_DIM_V != BLOCK_DV:
            k = tl.load(k_ptrs, mask=k_inside, other=0.0)
            v = tl.load(v_ptrs, mask=v_inside, other=0.0)
        else:
            k = tl.load(k_ptrs)
            v = tl.load(v_ptrs)
        if INPUT_PRECISION == "tf32":
            k, v = round_to_tf32(k), round_to_tf32(v)

        # [BLOCK_M, BLOCK_D] @ [BLOCK_D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
        products = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        # before the exponentials, so that the tensor cores work while they are taken
        dprobs = tl.dot(dout, tl.trans(v), input_precision=INPUT_PRECISION)
        probs, visible, slope = probabilities(
            products,
            lse[:, None],
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
        dscores = probs * (dprobs - delta[:, None])
        if SOFTCAP:
            dscores *= slope
        if MASKED or BIAS != "none":
            dscores = tl.where(visible, dscores, 0.0)
        if BIAS != "none":  # a key that the bias hides from every row may hold anything
            seen = tl.max(visible.to(tl.int32), 0) > 0
            k = tl.where(seen[:, None], k, 0.0).to(k.dtype)
        if INPUT_PRECISION == "tf32":
            dscores = round_to_tf32(dscores)
        # [BLOCK_M, BLOCK_N] @ [BLOCK_N, BLOCK_D] -> [BLOCK_M, BLOCK_D]
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision=INPUT_PRECISION)
    return dq


@triton.jit(repr=kernel_name("flashdig_backward_dq"), do_not_specialize=UNSPECIALIZED)
def flashdig_backward_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
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
    stride_dqb,
    stride_dqm,
    stride_dqh,
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
    softmax_scale,
    dropout_threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr,
    WIDE: tl.constexpr,
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
    NUM_STAGES: tl.constexpr,
):
    sequence, head, start_m, first_q, first_k, seqlen_q, seqlen_k, statistics = rows_of_program(
        cu_seqlens_q_ptr,
        cu_seqlens_k_ptr,
        seqused_q_ptr,
        seqused_k_ptr,
        batch,
        num_heads,
        seqlen_q,
        seqlen_k,
        BLOCK_M,
        PACKED,
        RIGHT,
    )
    if PACKED:  # noqa: SIM102 - decided when compiling
        if start_m >= seqlen_q:
            return
    lse_ptr += statistics
    delta_ptr += statistics
    head_kv = (head // group_size).to(tl.int64)
    batch_row = sequence.to(tl.int64)
    if PACKED:
        batch_row = batch_row * 0
    if WIDE:
        stride_qm = stride_qm.to(tl.int64)
        stride_kn = stride_kn.to(tl.int64)
        stride_vn = stride_vn.to(tl.int64)
        stride_dom = stride_dom.to(tl.int64)
        stride_dqm = stride_dqm.to(tl.int64)
    first_q = (first_q + start_m).to(tl.int64)
    first_k = first_k.to(tl.int64)
    head_row = head.to(tl.int64)
    q_ptr += (batch_row * stride_qb + head_row * stride_qh + first_q * stride_qm) * UNIT
    k_ptr += (batch_row * stride_kb + head_kv * stride_kh + first_k * stride_kn) * UNIT
    v_ptr += (batch_row * stride_vb + head_kv * stride_vh + first_k * stride_vn) * UNIT
    dout_ptr += (batch_row * stride_dob + head_row * stride_doh + first_q * stride_dom) * UNIT
    dq_ptr += (batch_row * stride_dqb + head_row * stride_dqh + first_q * stride_dqm) * UNIT
    if BIAS != "none":
        bias_ptr += batch_row * stride_bias_b + head_row * stride_bias_h

    UNITS: tl.constexpr = 1.0 if NATURAL else LOG2_E
    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    alibi_slope = 0.0
    if ALIBI:
        alibi_slope = tl.load(slopes_ptr + sequence * stride_slopes_b + head) * UNITS
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    rows = tl.arange(0, BLOCK_M)
    offs_m = start_m + rows
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_inside = offs_m < seqlen_q
    q_inside = row_inside[:, None] & (offs_d < HEAD_DIM)[None, :]
    q_offsets = rows[:, None] * (stride_qm * UNIT) + offs_d[None, :]
    q = tl.load(q_ptr + q_offsets, mask=q_inside, other=0.0)
    dout = tl.load(
        dout_ptr + rows[:, None] * (stride_dom * UNIT) + offs_dv[None, :],
        mask=row_inside[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
        other=0.0,
    ).to(q.dtype)
    if INPUT_PRECISION == "tf32":
        q, dout = round_to_tf32(q), round_to_tf32(dout)
    lse = tl.load(lse_ptr + offs_m, mask=row_inside, other=0.0)
    lse = tl.where(lse == float("-inf"), 0.0, lse) * UNITS
    delta = tl.load(delta_ptr + offs_m, mask=row_inside, other=0.0)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    end_m = tl.minimum(start_m + BLOCK_M, seqlen_q)
    begin, full_begin, full_end, end = key_phases(
        start_m, end_m, seqlen_k, offset, left, right, BLOCK_N, LEFT, RIGHT
    )
    key_begin, key_end = seen_keys(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    for phase in tl.static_range(3):
        if phase != 0 or LEFT:
            phase_begin = begin if phase == 0 else (full_begin if phase == 1 else full_end)
            phase_end = full_begin if phase == 0 else (full_end if phase == 1 else end)
            dq = _add_key_tiles(
                dq,
                q,
                dout,
                lse,
                delta,
                k_ptr,
                v_ptr,
                bias_ptr,
                stride_kn * UNIT,
                stride_vn * UNIT,
                stride_bias_m,
                stride_bias_n,
                alibi_slope,
                seed,
                dropout_threshold,
                dropout_scale,
                sequence,
                head,
                start_m,
                phase_begin,
                phase_end,
                key_begin,
                key_end,
                seqlen_q,
                offset,
                left,
                right,
                score_factor,
                softcap_units,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_M,
                BLOCK_N,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                BIAS,
                NATURAL,
                DROPOUT,
                phase != 1,
                INPUT_PRECISION,
                NUM_STAGES,
            )

    tl.store(
        dq_ptr + rows[:, None] * (stride_dqm * UNIT) + offs_d[None, :],
        (dq * softmax_scale).to(dq_ptr.dtype.element_ty),
        mask=q_inside,
    )
