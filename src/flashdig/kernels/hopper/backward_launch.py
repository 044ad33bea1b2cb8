"""From tensors to the launches of the Hopper backward: live rows and keys, descriptors, buffers."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashdig.kernels.gluon_api import gl
from flashdig.kernels.hopper.backward_main import flashdig_hopper_backward
from flashdig.kernels.hopper.backward_pre_post import (
    flashdig_hopper_backward_postprocess,
    flashdig_hopper_backward_preprocess,
)

LOG2_E = 1.4426950408889634
BLOCK_N = 128
# head_dim -> (rows of a tile, buffers of Q and of dO)
TILES = {64: (128, 2, 1), 128: (64, 2, 1)}
# bytes of Q, dO and float32 dQ that may share the L2 cache between the columns of one section
L2_BYTES = 32 * 2**20
PREPROCESS_ROWS = 32


def hopper_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    offset: int,
    tiles: tuple[int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv and delta of dense input in which every row sees a key and every key a row.

    Args:
        grad_out, q, k, v, out: (batch, seqlen, heads, head_dim), float16 or bfloat16, one head_dim
            of `TILES`, strides and addresses that TMA can take; no size is zero.
        lse: (batch, num_heads, seqlen_q), float32, contiguous; grad_lse: the same shape or None.
        softmax_scale: above zero.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        offset: key position that lies on the diagonal of query row 0.
        tiles: an entry other than that of `TILES`.

    Returns: gradients as their inputs, and delta (batch, num_heads, seqlen_q) in float32.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    block_m, stages, ahead = tiles or TILES[head_dim]
    tiles_m = triton.cdiv(seqlen_q, block_m)
    padded_q = tiles_m * block_m
    statistics = torch.empty((2, batch, num_heads, padded_q), dtype=torch.float32, device=q.device)
    lse_log2, delta = statistics
    sums = torch.empty((batch, num_heads, padded_q, head_dim), dtype=torch.float32, device=q.device)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk = torch.empty_like(k, memory_format=torch.contiguous_format)
    dv = torch.empty_like(v, memory_format=torch.contiguous_format)

    unit = 8
    dlse_strides = grad_lse.stride() if grad_lse is not None else (0, 0, 0)
    flashdig_hopper_backward_preprocess[(padded_q // PREPROCESS_ROWS * batch * num_heads,)](
        out,
        grad_out,
        lse,
        grad_lse,
        lse_log2,
        delta,
        sums,
        *(s // unit for s in out.stride()[:3]),
        *(s // unit for s in grad_out.stride()[:3]),
        *dlse_strides,
        num_heads,
        seqlen_q,
        padded_q,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim,
        BLOCK_DV=triton.next_power_of_2(head_dim),
        UNIT=unit,
        BLOCK_M=PREPROCESS_ROWS,
        num_warps=4,
    )

    scaled = softcap > 0.0 or alibi_slopes is not None
    together = 1
    if window_right >= 0:
        head_bytes = seqlen_q * head_dim * (2 * q.element_size() + 4) * (num_heads // num_heads_kv)
        together = max(1, min(batch * num_heads_kv, L2_BYTES // head_bytes))
    tiles_n = triton.cdiv(seqlen_k, BLOCK_N)
    flashdig_hopper_backward[(tiles_n * batch * num_heads_kv,)](
        _tiles_of(q, block_m),
        _tiles_of(grad_out, block_m),
        _tiles_of(k, BLOCK_N),
        _tiles_of(v, BLOCK_N),
        _tiles_of(dk, BLOCK_N),
        _tiles_of(dv, BLOCK_N),
        _statistics_of(lse_log2, block_m),
        _statistics_of(delta, block_m),
        sums,
        alibi_slopes,
        batch,
        num_heads,
        num_heads // num_heads_kv,
        seqlen_q,
        seqlen_k,
        offset,
        together,
        max(window_left, 0),
        max(window_right, 0),
        softmax_scale / softcap if softcap > 0.0 else softmax_scale,
        LOG2_E if scaled else softmax_scale * LOG2_E,
        softcap,
        softmax_scale,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        STAGES=stages,
        LEFT=window_left >= 0,
        RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0.0,
        WITH_DQ=True,
        AHEAD=ahead,
        num_warps=4,
    )
    flashdig_hopper_backward_postprocess[(tiles_m * batch * num_heads,)](
        sums,
        dq,
        *(s // unit for s in dq.stride()[:3]),
        num_heads,
        seqlen_q,
        softmax_scale,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        UNIT=unit,
        num_warps=4,
    )
    return dq, dk, dv, delta[:, :, :seqlen_q]


def _tiles_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, seqlen, head_dim) that copies tiles of rows."""
    block = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    seen = x.transpose(1, 2)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block, layout)


def _statistics_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of one number a row, padded to whole tiles."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    flat = x.view(-1)
    return TensorDescriptor(flat, [flat.shape[0]], [1], [rows], layout)
