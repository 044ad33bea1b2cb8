"""dK and dV in portable Triton: one program per tile of keys of a KV head, walking the rows of
every query head that shares it, so that their gradients add up in registers, in float32."""

import triton
import triton.language as tl

from flashdig.kernels.primitives import round_to_tf32
from flashdig.kernels.triton.arguments import UNSPECIALIZED, kernel_name
from flashdig.kernels.triton.recompute import keep_factors, probabilities
from flashdig.kernels.triton.score_terms import LOG2_E
from flashdig.kernels.triton.sequences import (
    find_sequence,
    first_slot,
    row_phases,
    seeing_rows,
    sequence_span,
)


@triton.jit
def _add_row_tiles(
    dk,
    dv,
    k,
    v,
    q_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    bias_ptr,
    stride_qm,
    stride_dom,
    stride_bias_m,
    stride_bias_n,
    alibi_slope,
    seed,
    dropout_threshold,
    dropout_scale,
    sequence,
    head,
    start_n,
    begin,
    tiles,
    tiles_before,
    skipped,
    row_begin,
    row_end,
    seqlen_q,
    seqlen_k,
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
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    UNITS: tl.constexpr = 1.0 if NATURAL else LOG2_E
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    j = start_n + tl.arange(0, BLOCK_N)[:, None]
    for tile in tl.range(0, tiles, num_stages=NUM_STAGES):
        start_m = begin + tile * BLOCK_M
        if MASKED:  # tiles on both sides of the unmasked ones
            start_m = tl.where(tile < tiles_before, start_m, start_m + skipped)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        i = offs_m[None, :]
        q_ptrs = q_ptr + offs_m[:, None] * stride_qm + offs_d[None, :]
        dout_ptrs = dout_ptr + offs_m[:, None] * stride_dom + offs_dv[None, :]
        q_inside = (offs_d < HEAD_DIM)[None, :]
        dout_inside = (offs_dv < HEAD_DIM_V)[None, :]
        if MASKED:  # rows that see no key may hold anything
            alive = (offs_m >= row_begin) & (offs_m < row_end)
            q = tl.load(q_ptrs, mask=alive[:, None] & q_inside, other=0.0)
            dout = tl.load(dout_ptrs, mask=alive[:, None] & dout_inside, other=0.0)
            lse = tl.load(lse_ptr + offs_m, mask=alive, other=0.0)
            delta = tl.load(delta_ptr + offs_m, mask=alive, other=0.0)
        else:
            if HEAD_DIM != BLOCK_D or HEAD_DIM_V != BLOCK_DV:
                q = tl.load(q_ptrs, mask=q_inside, other=0.0)
                dout = tl.load(dout_ptrs, mask=dout_inside, other=0.0)
            else:
                q = tl.load(q_ptrs)
                dout = tl.load(dout_ptrs)
            lse = tl.load(lse_ptr + offs_m)
            delta = tl.load(delta_ptr + offs_m)
        dout = dout.to(k.dtype)
        if BIAS != "none":
            lse = tl.where(lse == float("-inf"), 0.0, lse)
        if INPUT_PRECISION == "tf32":
            q, dout = round_to_tf32(q), round_to_tf32(dout)

        # [BLOCK_N, BLOCK_D] @ [BLOCK_D, BLOCK_M] -> [BLOCK_N, BLOCK_M]
        products = tl.dot(k, tl.trans(q), input_precision=INPUT_PRECISION)
        if WANT_DK:  # before the exponentials, so that the tensor cores work while they are taken
            dprobs = tl.dot(v, tl.trans(dout), input_precision=INPUT_PRECISION)
        probs, visible, slope = probabilities(
            products,
            (lse * UNITS)[None, :],
            i,
            j,
            bias_ptr,
            stride_bias_m,
            stride_bias_n,
            alibi_slope,
            seqlen_q,
            seqlen_k,
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
        if BIAS != "none":  # a row that the bias leaves no key here may hold anything
            live = tl.max(visible.to(tl.int32), 0) > 0
            q = tl.where(live[:, None], q, 0.0).to(q.dtype)
            dout = tl.where(live[:, None], dout, 0.0).to(dout.dtype)
        kept = probs
        if DROPOUT:
            factors = keep_factors(
                seed,
                dropout_threshold,
                dropout_scale,
                sequence,
                head,
                start_m,
                start_n,
                BLOCK_M,
                BLOCK_N,
                True,
            )
            kept = probs * factors
            if WANT_DK:
                dprobs *= factors
        if WANT_DV:
            if INPUT_PRECISION == "tf32":
                kept = round_to_tf32(kept)
            # [BLOCK_N, BLOCK_M] @ [BLOCK_M, BLOCK_DV] -> [BLOCK_N, BLOCK_DV]
            dv = tl.dot(kept.to(dout.dtype), dout, dv, input_precision=INPUT_PRECISION)
        if WANT_DK:
            dscores = probs * (dprobs - delta[None, :])
            if SOFTCAP:
                dscores *= slope
            if MASKED or BIAS != "none":
                dscores = tl.where(visible, dscores, 0.0)
            if INPUT_PRECISION == "tf32":
                dscores = round_to_tf32(dscores)
            dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision=INPUT_PRECISION)
    return dk, dv


@triton.jit(repr=kernel_name("flashdig_backward_dkdv"), do_not_specialize=UNSPECIALIZED)
def flashdig_backward_dkdv(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    stride_dkb,
    stride_dkn,
    stride_dkh,
    stride_dvb,
    stride_dvn,
    stride_dvh,
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
    WANT_DK: tl.constexpr,
    WANT_DV: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    num_heads_kv = num_heads // group_size
    total_q = seqlen_q
    if PACKED:
        # seqlen_q and seqlen_k are the totals
        total_k = seqlen_k
        slots = total_k // BLOCK_N + batch
        head_kv = program // slots
        slot = program % slots
        sequence = find_sequence(cu_seqlens_k_ptr, slot, batch, total_k, BLOCK_N)
        start_n = (slot - first_slot(cu_seqlens_k_ptr, sequence, total_k, BLOCK_N)) * BLOCK_N
        first_q, seqlen_q = sequence_span(cu_seqlens_q_ptr, seqused_q_ptr, sequence, total_q)
        first_k, seqlen_k = sequence_span(cu_seqlens_k_ptr, seqused_k_ptr, sequence, total_k)
        if start_n >= seqlen_k:
            return
    else:
        slots = tl.cdiv(seqlen_k, BLOCK_N)
        sequence = program // (slots * num_heads_kv)
        head_kv = program // slots % num_heads_kv
        start_n = (program % slots) * BLOCK_N
        first_q = program * 0
        first_k = program * 0
    kv_head = head_kv.to(tl.int64)
    batch_row = sequence.to(tl.int64)
    if PACKED:
        batch_row = batch_row * 0
    if WIDE:
        stride_qm = stride_qm.to(tl.int64)
        stride_kn = stride_kn.to(tl.int64)
        stride_vn = stride_vn.to(tl.int64)
        stride_dom = stride_dom.to(tl.int64)
        stride_dkn = stride_dkn.to(tl.int64)
        stride_dvn = stride_dvn.to(tl.int64)
    first_q = first_q.to(tl.int64)
    first_k = (first_k + start_n).to(tl.int64)
    q_ptr += (batch_row * stride_qb + first_q * stride_qm) * UNIT
    dout_ptr += (batch_row * stride_dob + first_q * stride_dom) * UNIT
    k_ptr += (batch_row * stride_kb + kv_head * stride_kh + first_k * stride_kn) * UNIT
    v_ptr += (batch_row * stride_vb + kv_head * stride_vh + first_k * stride_vn) * UNIT
    dk_ptr += (batch_row * stride_dkb + kv_head * stride_dkh + first_k * stride_dkn) * UNIT
    dv_ptr += (batch_row * stride_dvb + kv_head * stride_dvh + first_k * stride_dvn) * UNIT

    UNITS: tl.constexpr = 1.0 if NATURAL else LOG2_E
    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    seed = 0
    if DROPOUT:
        seed = tl.load(seed_ptr)

    columns = tl.arange(0, BLOCK_N)
    offs_n = start_n + columns
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    k_inside = (offs_n < seqlen_k)[:, None] & (offs_d < HEAD_DIM)[None, :]
    v_inside = (offs_n < seqlen_k)[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    k = tl.load(
        k_ptr + columns[:, None] * (stride_kn * UNIT) + offs_d[None, :], mask=k_inside, other=0.0
    )
    v = tl.load(
        v_ptr + columns[:, None] * (stride_vn * UNIT) + offs_dv[None, :], mask=v_inside, other=0.0
    )
    if INPUT_PRECISION == "tf32":
        k, v = round_to_tf32(k), round_to_tf32(v)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    end_n = tl.minimum(start_n + BLOCK_N, seqlen_k)
    row_begin, row_end = seeing_rows(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    begin, full_begin, full_end, end = row_phases(
        start_n, end_n, row_begin, row_end, offset, left, right, BLOCK_M, LEFT, RIGHT
    )
    tiles_before = (full_begin - begin) // BLOCK_M
    full_tiles = (full_end - full_begin) // BLOCK_M
    tiles_after = tl.maximum(tl.cdiv(end - full_end, BLOCK_M), 0)
    for member in range(0, group_size):
        head = head_kv * group_size + member
        head_row = head.to(tl.int64)
        if PACKED:
            row_statistics = head_row * total_q + first_q
        else:
            row_statistics = (batch_row * num_heads + head_row) * total_q
        head_bias_ptr = bias_ptr
        if BIAS != "none":
            head_bias_ptr = bias_ptr + batch_row * stride_bias_b + head_row * stride_bias_h
        alibi_slope = 0.0
        if ALIBI:
            alibi_slope = tl.load(slopes_ptr + sequence * stride_slopes_b + head) * UNITS
        for masked in tl.static_range(2):
            dk, dv = _add_row_tiles(
                dk,
                dv,
                k,
                v,
                q_ptr + head_row * stride_qh * UNIT,
                dout_ptr + head_row * stride_doh * UNIT,
                lse_ptr + row_statistics,
                delta_ptr + row_statistics,
                head_bias_ptr,
                stride_qm * UNIT,
                stride_dom * UNIT,
                stride_bias_m,
                stride_bias_n,
                alibi_slope,
                seed,
                dropout_threshold,
                dropout_scale,
                sequence,
                head,
                start_n,
                begin if masked else full_begin,
                tiles_before + tiles_after if masked else full_tiles,
                tiles_before,
                full_end - full_begin,
                row_begin,
                row_end,
                seqlen_q,
                seqlen_k,
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
                masked == 1,
                INPUT_PRECISION,
                WANT_DK,
                WANT_DV,
                1 if masked else NUM_STAGES,
            )

    if WANT_DK:
        tl.store(
            dk_ptr + columns[:, None] * (stride_dkn * UNIT) + offs_d[None, :],
            (dk * softmax_scale).to(dk_ptr.dtype.element_ty),
            mask=k_inside,
        )
    if WANT_DV:
        tl.store(
            dv_ptr + columns[:, None] * (stride_dvn * UNIT) + offs_dv[None, :],
            dv.to(dv_ptr.dtype.element_ty),
            mask=v_inside,
        )
