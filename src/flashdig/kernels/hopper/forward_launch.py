"""From tensors to a launch of the Hopper forward: descriptors, tiles, the order of the heads."""

from __future__ import annotations

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashdig.kernels.gluon_api import gl
from flashdig.kernels.hopper.forward import flashdig_hopper_forward

LOG2_E = 1.4426950408889634
# head_dim -> (consumer warpgroups, keys of a tile, buffers of K and of V, registers of a consumer)
TILES = {64: (3, 128, 2, 160), 128: (2, 128, 2, 240), 256: (2, 64, 2, 240)}
# bytes of K and V that may share the L2 cache between the rows of one causal section
L2_BYTES = 32 * 2**20


def hopper_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    tiles: tuple[int, int, int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of `flashdig_hopper_forward`.

    Args:
        q, k, v: dense (batch, seqlen, heads, head_dim), float16 or bfloat16, one head_dim of
            `TILES`, strides and addresses that TMA can take; no size is zero.
        softmax_scale: above zero.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        tiles: an entry other than that of `TILES`.

    Returns: out as q, and lse (batch, num_heads, seqlen_q) in float32.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    consumers, block_n, stages, registers = tiles or TILES[head_dim]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty((batch, num_heads, seqlen_q), dtype=torch.float32, device=q.device)
    scaled = softcap > 0.0 or alibi_slopes is not None
    score_factor = softmax_scale / softcap if softcap > 0.0 else softmax_scale
    together = 1
    if window_right >= 0:
        head_bytes = 2 * seqlen_k * head_dim * k.element_size()
        together = max(1, min(batch * num_heads, L2_BYTES // head_bytes))
    tiles_m = triton.cdiv(seqlen_q, 64 * consumers)
    flashdig_hopper_forward[(tiles_m * batch * num_heads,)](
        _tiles_of(q, 64),
        _tiles_of(k, block_n),
        _tiles_of(v, block_n),
        _tiles_of(out, 64),
        lse,
        alibi_slopes,
        sinks,
        batch,
        num_heads,
        num_heads // num_heads_kv,
        seqlen_q,
        seqlen_k,
        together,
        max(window_left, 0),
        max(window_right, 0),
        score_factor,
        LOG2_E if scaled else softmax_scale * LOG2_E,
        softcap,
        alibi_slopes.stride(0) if alibi_slopes is not None and alibi_slopes.dim() == 2 else 0,
        HEAD_DIM=head_dim,
        CONSUMERS=consumers,
        BLOCK_N=block_n,
        STAGES=stages,
        REGISTERS=registers,
        TOP_LEFT=top_left,
        LEFT=window_left >= 0,
        RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0.0,
        num_warps=4,
    )
    return out, lse


def _tiles_of(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of (batch, heads, seqlen, head_dim) that copies tiles of rows."""
    block = [1, 1, rows, x.shape[3]]
    dtype = gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    seen = x.transpose(1, 2)
    return TensorDescriptor(seen, list(seen.shape), list(seen.stride()), block, layout)
