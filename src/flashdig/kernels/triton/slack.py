"""Results of packed input in rows that belong to no sequence: out is 0 there, the LSE -inf.

Only these rows are written: filling all of `out` beforehand would cost as much memory traffic as
the attention kernel's own results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashdig.kernels.launch import Launch
from flashdig.kernels.triton.sequences import sequence_span

BLOCK_ROWS = 64
BLOCK_COLUMNS = 128


@triton.jit(do_not_specialize=["batch", "total", "num_heads", "width"])
def flashdig_clear_slack(
    out_ptr,
    lse_ptr,
    cu_seqlens_ptr,
    seqused_ptr,
    batch,
    total,
    num_heads,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    # the last sequence that begins at or before the row: by bisection, for each row
    low = row * 0
    high = low + (batch - 1)
    span = batch
    while span > 1:
        middle = (low + high + 1) // 2
        begin = tl.load(cu_seqlens_ptr + middle)
        before = begin <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, tl.maximum(middle - 1, low))
        span = (span + 1) // 2
    begin, length = sequence_span(cu_seqlens_ptr, seqused_ptr, low, total)
    slack = ((row < begin) | (row >= begin + length)) & (row < total)
    if tl.max(slack.to(tl.int32), 0) > 0:
        lse_ptrs = lse_ptr + row
        for _ in range(num_heads):
            tl.store(lse_ptrs, float("-inf"), mask=slack)
            lse_ptrs += total
        out_ptrs = out_ptr + row.to(tl.int64)[:, None] * width
        for start in range(0, width, BLOCK_N):
            column = start + tl.arange(0, BLOCK_N)[None, :]
            zeros = tl.zeros([BLOCK_M, BLOCK_N], out_ptr.dtype.element_ty)
            tl.store(out_ptrs + column, zeros, mask=slack[:, None] & (column < width))


def clearing(batch: int, total: int, num_heads: int, head_dim_v: int) -> Launch:
    """The launch that clears the slack rows of out (total, num_heads, head_dim_v) and lse
    (num_heads, total): called with (out, lse, cu_seqlens, seqused or None)."""
    return Launch(
        flashdig_clear_slack,
        triton.cdiv(total, BLOCK_ROWS),
        {
            "batch": batch,
            "total": total,
            "num_heads": num_heads,
            "width": num_heads * head_dim_v,
            "BLOCK_M": BLOCK_ROWS,
            "BLOCK_N": BLOCK_COLUMNS,
        },
        num_warps=4,
    )
