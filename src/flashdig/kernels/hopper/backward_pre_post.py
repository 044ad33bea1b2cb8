"""What stands before and after the Hopper backward's main kernel: row statistics, and dQ's rows.

Before: delta = rowsum(dO * O) - dLSE and the log-sum-exp in units of log2, both padded to whole
tiles of rows, and zeros where dQ will be added up. After: dQ from float32 in the order of the main
kernel's registers to rows of the input's dtype, scaled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashdig.kernels.gluon_api import gl, gluon
from flashdig.kernels.hopper.backward_places import live_rows_of_program
from flashdig.kernels.hopper.problem import LOG2_E


def _preprocess_name(specialization):
    dtype = specialization.signature["dout_ptr"].removeprefix("*")
    return f"flashdig_hopper_backward_preprocess_{dtype}_v{specialization.constants['HEAD_DIM_V']}"


@triton.jit(
    repr=_preprocess_name,
    do_not_specialize=[
        *(f"stride_{x}{d}" for x in ("o", "do", "dl") for d in "bhm"),
        "batch_size",
        "num_heads",
        "seqlen_q",
        "seqlen_k",
        "padded_q",
        "left",
        "right",
    ],
)
def flashdig_hopper_backward_preprocess(
    out_ptr,
    dout_ptr,
    lse_ptr,
    dlse_ptr,
    lse_log2_ptr,
    delta_ptr,
    delta_rows_ptr,
    dq_ptr,
    counter_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_dlb,
    stride_dlh,
    stride_dlm,
    batch_size,
    num_heads,
    seqlen_q,
    seqlen_k,
    padded_q,
    left,
    right,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    gdc_launch_dependents()
    if counter_ptr is not None:
        counters = counter_ptr + tl.arange(0, 2)
        tl.store(counters, 0, mask=tl.program_id(0) == 0)
    if PACKED:
        _, head, start_m, padded, first_q, seqlen, _, _, _ = live_rows_of_program(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, batch_size,
            num_heads, seqlen_q, seqlen_k, left, right, BLOCK_M, TOP_LEFT, LEFT, RIGHT,
        )  # fmt: skip
        if start_m >= seqlen:
            return
        batch = head.to(tl.int64) * 0
        batch_head = head.to(tl.int64)
    else:
        tiles = padded_q // BLOCK_M
        program = tl.program_id(0)
        batch_head = (program // tiles).to(tl.int64)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        start_m = (program % tiles) * BLOCK_M
        padded = start_m
        first_q = start_m * 0
        seqlen = seqlen_q
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_inside = offs_m < seqlen
    inside = row_inside[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    rows = (first_q + offs_m).to(tl.int64)
    out_rows = (batch * stride_ob + head * stride_oh + rows * stride_om) * UNIT
    dout_rows = (batch * stride_dob + head * stride_doh + rows * stride_dom) * UNIT
    out = tl.load(out_ptr + out_rows[:, None] + offs_dv[None, :], mask=inside, other=0.0)
    dout = tl.load(dout_ptr + dout_rows[:, None] + offs_dv[None, :], mask=inside, other=0.0)
    lse_rows = batch_head * seqlen_q + rows
    lse = tl.load(lse_ptr + lse_rows, mask=row_inside, other=float("-inf"))
    padded_row = batch_head * padded_q + padded
    if dq_ptr is not None:
        tl.store(dq_ptr + padded_row * HEAD_DIM + tl.arange(0, BLOCK_M * HEAD_DIM), 0.0)
    out, dout = out.to(tl.float32), dout.to(tl.float32)
    # the output of a row without keys is 0 whatever its gradient holds
    delta = tl.sum(tl.where(out == 0.0, 0.0, out * dout), 1)
    if dlse_ptr is not None:
        dlse_rows = batch * stride_dlb + head * stride_dlh + rows * stride_dlm
        delta -= tl.load(dlse_ptr + dlse_rows, mask=row_inside, other=0.0)
    if delta_rows_ptr is not None:
        tl.store(delta_rows_ptr + lse_rows, delta, mask=row_inside)
    # rows that see nothing, and rows past the sequence: probabilities 0
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2_E)
    tl.store(lse_log2_ptr + padded_row + tl.arange(0, BLOCK_M), lse)
    tl.store(delta_ptr + padded_row + tl.arange(0, BLOCK_M), delta)


def _postprocess_name(specialization):
    c = specialization.constants
    dtype = specialization.signature["out_ptr"].removeprefix("*")
    return f"flashdig_hopper_backward_postprocess_{dtype}_d{c['HEAD_DIM']}"


@gluon.jit(
    repr=_postprocess_name,
    do_not_specialize=[
        *(f"stride_{d}" for d in "bmh"),
        "batch_size",
        "num_heads",
        "seqlen_q",
        "seqlen_k",
        "padded_q",
        "left",
        "right",
        "softmax_scale",
    ],
)
def flashdig_hopper_backward_postprocess(
    sums_ptr,
    out_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    stride_b,
    stride_m,
    stride_h,
    batch_size,
    num_heads,
    seqlen_q,
    seqlen_k,
    padded_q,
    left,
    right,
    softmax_scale,
    HEAD_DIM: gl.constexpr,
    COLUMNS_OF_DQ: gl.constexpr,
    BLOCK_M: gl.constexpr,
    UNIT: gl.constexpr,
    PACKED: gl.constexpr,
    TOP_LEFT: gl.constexpr,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
):
    gdc_wait()
    # a tile is two halves, each as `add_registers` of `backward_main` leaves it
    ROWS: gl.constexpr = 128 if PACKED else BLOCK_M
    COLUMNS: gl.constexpr = HEAD_DIM * BLOCK_M // 128
    if PACKED:
        _, head, start_m, padded, first_q, seqlen, _, _, _ = live_rows_of_program(
            cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr, batch_size,
            num_heads, seqlen_q, seqlen_k, left, right, ROWS, TOP_LEFT, LEFT, RIGHT,
        )  # fmt: skip
        if start_m >= seqlen:
            return
        batch = head.to(gl.int64) * 0
        batch_head = head.to(gl.int64)
    else:
        tiles = gl.cdiv(seqlen_q, ROWS)
        program = gl.program_id(0)
        batch_head = (program // tiles).to(gl.int64)
        batch = batch_head // num_heads
        head = batch_head % num_heads
        start_m = (program % tiles) * ROWS
        padded = start_m
        first_q = start_m * 0
        seqlen = seqlen_q
    read: gl.constexpr = gl.BlockedLayout([1, COLUMNS // 8, 4], [32, 1, 1], [4, 1, 1], [2, 1, 0])
    by_eight: gl.constexpr = gl.SliceLayout(2, read)
    thread = gl.arange(0, 128, gl.SliceLayout(1, by_eight))
    eight = gl.arange(0, COLUMNS // 8, gl.SliceLayout(0, by_eight))
    value = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, read)))
    place = (thread[:, None] * 4 + eight[None, :] * 512)[:, :, None] + value[None, None, :]
    lanes: gl.constexpr = COLUMNS // 8
    written: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    rows = gl.arange(0, 64, gl.SliceLayout(1, written))
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, written))
    out_ptr += (batch * stride_b + head * stride_h) * UNIT
    sums_ptr += (batch_head * padded_q + padded) * HEAD_DIM
    for half in gl.static_range(2 * ROWS // BLOCK_M):
        x = gl.load(sums_ptr + half * 64 * COLUMNS + place) * softmax_scale
        x = gl.reshape(x.to(out_ptr.dtype.element_ty), [4, 8, 4, COLUMNS // 8, 2, 2])
        x = gl.reshape(gl.permute(x, [0, 4, 1, 3, 2, 5]), [64, COLUMNS])
        x = gl.convert_layout(x, written)
        row = start_m + rows + (half // 2) * BLOCK_M
        column = columns
        if BLOCK_M == 64:
            column += (half % 2) * COLUMNS
        else:
            row += (half % 2) * 64
        to = (first_q + row).to(gl.int64)[:, None] * (stride_m * UNIT) + column[None, :]
        gl.store(out_ptr + to, x, mask=(row < seqlen)[:, None] & (column < COLUMNS_OF_DQ)[None, :])
