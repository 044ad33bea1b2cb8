"""delta = rowsum(dO * O) - dLSE, the term that every tile of the backward pass shares."""

import triton
import triton.language as tl

BLOCK_M = 64


def _name(specialization):
    c = specialization.constants
    dtype = specialization.signature["dout_ptr"].removeprefix("*")
    return f"flashdig_backward_delta_{dtype}_v{c['HEAD_DIM_V']}"


@triton.jit(
    repr=_name,
    do_not_specialize=[
        *(f"stride_{x}{d}" for x in ("o", "do") for d in "bmh"),
        *(f"stride_dl{d}" for d in "bhm"),
        "num_heads",
        "seqlen_q",
    ],
)
def flashdig_backward_delta(
    out_ptr,
    dout_ptr,
    dlse_ptr,
    delta_ptr,
    stride_ob,
    stride_om,
    stride_oh,
    stride_dob,
    stride_dom,
    stride_doh,
    stride_dlb,
    stride_dlh,
    stride_dlm,
    num_heads,
    seqlen_q,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    slots = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    batch = (program // (slots * num_heads)).to(tl.int64)
    head = (program // slots % num_heads).to(tl.int64)
    offs_m = (program % slots) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_dv = tl.arange(0, BLOCK_DV)
    row_inside = offs_m < seqlen_q
    inside = row_inside[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
    rows = offs_m.to(tl.int64)
    out_rows = (batch * stride_ob + head * stride_oh + rows * stride_om) * UNIT
    dout_rows = (batch * stride_dob + head * stride_doh + rows * stride_dom) * UNIT
    out = tl.load(out_ptr + out_rows[:, None] + offs_dv[None, :], mask=inside, other=0.0)
    dout = tl.load(dout_ptr + dout_rows[:, None] + offs_dv[None, :], mask=inside, other=0.0)
    out, dout = out.to(tl.float32), dout.to(tl.float32)
    # the output of a row without keys is 0 whatever its gradient holds
    delta = tl.sum(tl.where(out == 0.0, 0.0, out * dout), 1)
    if dlse_ptr is not None:
        dlse_rows = batch * stride_dlb + head * stride_dlh + rows * stride_dlm
        delta -= tl.load(dlse_ptr + dlse_rows, mask=row_inside, other=0.0)
    tl.store(
        delta_ptr + (program // slots).to(tl.int64) * seqlen_q + offs_m, delta, mask=row_inside
    )
