"""A tile of query rows attended to a range of a cache's keys: what every decode kernel does.

What no row of a tile sees is never loaded: neither keys nor entries of the page table.
"""

import triton
import triton.language as tl

from flashdig.kernels.primitives import round_to_tf32
from flashdig.kernels.triton.paged import cache_row, from_fp8, page_slots
from flashdig.kernels.triton.score_terms import LN_2, LOG2_E, exp_units, final_scores


@triton.jit
def _attend(
    out,
    row_max,
    row_sum,
    q,
    q_tail,
    k_ptr,
    v_ptr,
    table_ptr,
    stride_kp,
    stride_kn,
    stride_vp,
    stride_vn,
    num_pages,
    alibi_slope,
    i,
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
    TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UNIT: tl.constexpr,
    ALIKE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    NATURAL: tl.constexpr,
    MASKED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)
    offs_dv = tl.arange(0, BLOCK_DV)
    for start_n in tl.range(begin, end, BLOCK_N, num_stages=NUM_STAGES):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        stored = (offs_n >= key_begin) & (offs_n < key_end)
        page, row = page_slots(table_ptr, offs_n, stored, num_pages, PAGE_SIZE)
        # multiplied last: a product of 32-bit numbers is one instruction
        k_rows = (page * stride_kp + row * stride_kn) * UNIT
        v_rows = k_rows
        if not ALIKE:
            v_rows = (page * stride_vp + row * stride_vn) * UNIT
        k_ptrs = k_ptr + k_rows[:, None] + offs_d[None, :]
        v_ptrs = v_ptr + v_rows[:, None] + offs_dv[None, :]
        if MASKED and BLOCK_D <= HEAD_DIM:
            k = tl.load(k_ptrs, mask=stored[:, None], other=0)
        elif MASKED:
            k = tl.load(k_ptrs, mask=stored[:, None] & (offs_d < HEAD_DIM)[None, :], other=0)
        elif BLOCK_D <= HEAD_DIM:
            k = tl.load(k_ptrs)
        else:
            k = tl.load(k_ptrs, mask=(offs_d < HEAD_DIM)[None, :], other=0)
        k = from_fp8(k, FP8, q.dtype)
        if INPUT_PRECISION == "tf32":
            k = round_to_tf32(k)
        # [BLOCK_M, BLOCK_D] @ [BLOCK_D, BLOCK_N] -> [BLOCK_M, BLOCK_N]
        products = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION)
        if TAIL_D > 0:
            offs_t = tl.arange(0, TAIL_D)
            k_ptrs = k_ptr + k_rows[:, None]
            inside = stored[:, None] & (BLOCK_D + offs_t < HEAD_DIM)[None, :]
            k_tail = tl.load(k_ptrs + (BLOCK_D + offs_t)[None, :], mask=inside, other=0)
            k_tail = from_fp8(k_tail, FP8, q.dtype)
            if INPUT_PRECISION == "tf32":
                k_tail = round_to_tf32(k_tail)
            products = tl.dot(q_tail, tl.trans(k_tail), products, input_precision=INPUT_PRECISION)
        scores, visible, _slope = final_scores(
            products,
            i,
            offs_n[None, :],
            None,
            0,
            0,
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
            "none",
            NATURAL,
            MASKED,
        )
        if MASKED:
            scores = tl.where(visible & (offs_n >= key_begin)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = new_max
        if MASKED:
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows without keys so far
        probs = exp_units(scores - shift[:, None], NATURAL)
        rescale = exp_units(row_max - shift, NATURAL)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max
        out = out * rescale[:, None]
        if MASKED and BLOCK_DV == HEAD_DIM_V:
            v = tl.load(v_ptrs, mask=stored[:, None], other=0)
        elif MASKED:
            v = tl.load(v_ptrs, mask=stored[:, None] & (offs_dv < HEAD_DIM_V)[None, :], other=0)
        elif BLOCK_DV == HEAD_DIM_V:
            v = tl.load(v_ptrs)
        else:
            v = tl.load(v_ptrs, mask=(offs_dv < HEAD_DIM_V)[None, :], other=0)
        v = from_fp8(v, FP8, q.dtype)
        if INPUT_PRECISION == "tf32":
            probs, v = round_to_tf32(probs), round_to_tf32(v)
        # [BLOCK_M, BLOCK_N] @ [BLOCK_N, BLOCK_DV] -> [BLOCK_M, BLOCK_DV]
        out = tl.dot(probs.to(v.dtype), v, out, input_precision=INPUT_PRECISION)
    return out, row_max, row_sum


@triton.jit
def attend_rows(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    batch_idx_ptr,
    slopes_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    stride_qb,
    stride_qm,
    stride_qh,
    stride_kb,
    stride_kn,
    stride_kh,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_table,
    stride_slopes_b,
    num_heads_kv,
    cache_rows,
    sequence,
    head_kv,
    start_row,
    first_q,
    length_q,
    begin,
    end,
    key_begin,
    key_end,
    offset,
    left,
    right,
    score_factor,
    softcap_units,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    GROUP: tl.constexpr,
    UNIT: tl.constexpr,
    ALIKE: tl.constexpr,
    PACKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    Q_FP8: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    NATURAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    ONE_PHASE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """A tile of rows over the keys from begin to end: (out, lse) in float32, rows of the tile.

    `begin` is a multiple of BLOCK_N; keys outside key_begin to key_end are not touched.
    """
    rows = start_row + tl.arange(0, BLOCK_M)
    token = rows // GROUP
    row_inside = token < length_q
    head = head_kv * GROUP + rows % GROUP
    UNITS: tl.constexpr = 1.0 if NATURAL else LOG2_E
    batch_row = sequence.to(tl.int64)
    q_row = batch_row
    if PACKED:
        q_row = batch_row * 0
    q_rows = (first_q + token).to(tl.int64) * stride_qm + head.to(tl.int64) * stride_qh
    q_rows = (q_rows + q_row * stride_qb) * UNIT
    offs_d = tl.arange(0, BLOCK_D)
    inside = row_inside[:, None] & (offs_d < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + q_rows[:, None] + offs_d[None, :], mask=inside, other=0)
    q = from_fp8(q, Q_FP8, tl.float16 if Q_FP8 != "none" else q.dtype)
    if INPUT_PRECISION == "tf32":
        q = round_to_tf32(q)
    q_tail = q
    if TAIL_D > 0:
        offs_t = BLOCK_D + tl.arange(0, TAIL_D)
        inside = row_inside[:, None] & (offs_t < HEAD_DIM)[None, :]
        q_tail = tl.load(q_ptr + q_rows[:, None] + offs_t[None, :], mask=inside, other=0)
        q_tail = from_fp8(q_tail, Q_FP8, tl.float16 if Q_FP8 != "none" else q_tail.dtype)
        if INPUT_PRECISION == "tf32":
            q_tail = round_to_tf32(q_tail)
    alibi_slope = 0.0
    if ALIBI:
        slopes = tl.load(slopes_ptr + sequence * stride_slopes_b + head, mask=row_inside, other=0.0)
        alibi_slope = (slopes * UNITS)[:, None]
    per_head = batch_row * num_heads_kv + head_kv
    if q_descale_ptr is not None:
        score_factor *= tl.load(q_descale_ptr + per_head)
    if k_descale_ptr is not None:
        score_factor *= tl.load(k_descale_ptr + per_head)

    row_in_cache = cache_row(batch_idx_ptr, sequence, cache_rows).to(tl.int64)
    if PAGE_SIZE > 0:
        table_ptr += batch_row * stride_table
        row_in_cache = row_in_cache * 0
    k_ptr += (row_in_cache * stride_kb + head_kv.to(tl.int64) * stride_kh) * UNIT
    v_ptr += (row_in_cache * stride_vb + head_kv.to(tl.int64) * stride_vh) * UNIT

    out = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    # keys that every row sees: the others need masks
    full_begin = end
    full_end = end
    if not ONE_PHASE:
        full_begin = begin + tl.where(begin < key_begin, BLOCK_N, 0)
        last = tl.minimum(end, key_end)
        if LEFT:
            last_token = tl.minimum((start_row + BLOCK_M - 1) // GROUP, length_q - 1)
            full_begin = tl.maximum(full_begin, last_token + offset - left)
        if RIGHT:
            last = tl.minimum(last, start_row // GROUP + offset + right + 1)
        full_begin = tl.minimum(begin + tl.cdiv(full_begin - begin, BLOCK_N) * BLOCK_N, end)
        full_end = full_begin + tl.maximum(last - full_begin, 0) // BLOCK_N * BLOCK_N
    for phase in tl.static_range(3):
        if phase == 0 or not ONE_PHASE:
            phase_begin = begin if phase == 0 else (full_begin if phase == 1 else full_end)
            phase_end = full_begin if phase == 0 else (full_end if phase == 1 else end)
            out, row_max, row_sum = _attend(
                out,
                row_max,
                row_sum,
                q,
                q_tail,
                k_ptr,
                v_ptr,
                table_ptr,
                stride_kb.to(tl.int64),
                stride_kn.to(tl.int64),
                stride_vb.to(tl.int64),
                stride_vn.to(tl.int64),
                cache_rows,
                alibi_slope,
                token[:, None],
                phase_begin,
                phase_end,
                key_begin,
                key_end,
                length_q,
                offset,
                left,
                right,
                score_factor,
                softcap_units,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                TAIL_D,
                BLOCK_DV,
                BLOCK_N,
                UNIT,
                ALIKE,
                PAGE_SIZE,
                FP8,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                NATURAL,
                phase != 1,
                INPUT_PRECISION,
                NUM_STAGES,
            )

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    factor = 1.0 / divisor
    if v_descale_ptr is not None:
        factor *= tl.load(v_descale_ptr + per_head)
    out = out * factor[:, None]
    lse = row_max + tl.log2(divisor) * LN_2 if NATURAL else (row_max + tl.log2(divisor)) * LN_2
    return out, lse
