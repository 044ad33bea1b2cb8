"""From tensors to the launches of the Hopper backward: live rows and keys, descriptors, buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashdig.kernels.gluon_api import gl
from flashdig.kernels.hopper.backward_dq import flashdig_hopper_backward_dq
from flashdig.kernels.hopper.backward_main import flashdig_hopper_backward
from flashdig.kernels.hopper.backward_pre_post import (
    flashdig_hopper_backward_postprocess,
    flashdig_hopper_backward_preprocess,
)

LOG2_E = 1.4426950408889634
BLOCK_N = 128
# row statistics are padded to whole tiles of every kernel
PADDED_ROWS = 128
# 16-bit elements in 16 bytes: strides are multiples of it
UNIT = 8
# head_dim -> (rows of a tile, buffers of Q and of dO, how early the next S^T is started)
TILES = {64: (128, 2, 1, 1), 128: (64, 2, 1, 1)}
# the same where dQ is made apart
DKDV_TILES = {64: (128, 2, 0, 1), 128: (64, 2, 1, 1)}
# head_dim -> (keys of a tile, buffers of K and of V) of dQ's own kernel
DQ_TILES = {64: (128, 2), 128: (128, 2)}
# bytes of what one section's heads read and write that may share the L2 cache
L2_BYTES = 32 * 2**20
PREPROCESS_ROWS = 32


@dataclass(frozen=True)
class Call:
    """One call, dense, in which every row sees a key and every key is seen by a row.

    Attributes:
        grad_out, q, k, v, out: (batch, seqlen, heads, head_dim), float16 or bfloat16, one head_dim
            of `TILES`, strides and addresses that TMA can take; no size is zero.
        lse: (batch, num_heads, seqlen_q), float32, contiguous; grad_lse: the same shape or None.
        softmax_scale: above zero.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        offset: key position that lies on the diagonal of query row 0.
    """

    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    alibi_slopes: torch.Tensor | None
    out: torch.Tensor
    lse: torch.Tensor
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    offset: int

    @property
    def padded_q(self) -> int:
        return triton.cdiv(self.q.shape[1], PADDED_ROWS) * PADDED_ROWS

    @property
    def group_size(self) -> int:
        return self.q.shape[2] // self.k.shape[2]

    def together(self, heads: int, head_bytes: int) -> int:
        """Heads that are walked side by side: with a causal mask, those that L2 holds."""
        if self.window_right < 0:
            return 1
        return max(1, min(heads, L2_BYTES // head_bytes))

    def numbers(self, together: int) -> tuple[Any, ...]:
        """The numbers that the kernels of this walk take, in their order."""
        slopes = self.alibi_slopes
        scaled = self.softcap > 0.0 or slopes is not None
        factor = self.softmax_scale / self.softcap if self.softcap > 0.0 else self.softmax_scale
        return (
            self.q.shape[0],
            self.q.shape[2],
            self.group_size,
            self.q.shape[1],
            self.k.shape[1],
            self.padded_q,
            self.offset,
            together,
            max(self.window_left, 0),
            max(self.window_right, 0),
            factor,
            LOG2_E if scaled else self.softmax_scale * LOG2_E,
            self.softcap,
            self.softmax_scale,
            slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        )

    def constants(self) -> dict[str, Any]:
        return {
            "HEAD_DIM": self.q.shape[3],
            "LEFT": self.window_left >= 0,
            "RIGHT": self.window_right >= 0,
            "SOFTCAP": self.softcap > 0.0,
            "num_warps": 4,
        }


def hopper_backward(
    call: Call,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    *,
    dq_apart: bool = False,
    tiles: tuple[int, int, int, int] | None = None,
    dq_tiles: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Write the gradients of a call.

    Args:
        dq, dk, dv: as q, k and v, with strides that TMA can take; None is not wanted. dk and dv
            are wanted together.
        dq_apart: dQ comes from a kernel of its own: the same bits in every run.
        tiles, dq_tiles: entries other than those of `TILES` and `DQ_TILES`.

    Returns: delta (batch, num_heads, seqlen_q) in float32.
    """
    batch, seqlen_q, num_heads, head_dim = call.q.shape
    sums = None
    if dq is not None and dk is not None and not dq_apart:
        shape = (batch, num_heads, call.padded_q, head_dim)
        sums = torch.empty(shape, dtype=torch.float32, device=call.q.device)
    tiles = tiles or (DKDV_TILES if sums is None else TILES)[head_dim]
    statistics = _preprocess(call, sums)
    if dk is not None and dv is not None:
        _main(call, statistics, sums, dk, dv, tiles)
    if dq is not None:
        if sums is None:
            _dq(call, statistics, dq, dq_tiles or DQ_TILES[head_dim])
        else:
            _postprocess(call, sums, dq, tiles[0])
    return statistics[1, :, :, :seqlen_q]


def _preprocess(call: Call, sums: torch.Tensor | None) -> torch.Tensor:
    """(2, batch, num_heads, padded_q): log-sum-exp in units of log2, and delta; zeros in sums."""
    batch, seqlen_q, num_heads, head_dim = call.q.shape
    statistics = torch.empty(
        (2, batch, num_heads, call.padded_q), dtype=torch.float32, device=call.q.device
    )
    dlse = call.grad_lse
    flashdig_hopper_backward_preprocess[(call.padded_q // PREPROCESS_ROWS * batch * num_heads,)](
        call.out,
        call.grad_out,
        call.lse,
        dlse,
        statistics[0],
        statistics[1],
        sums,
        *(s // UNIT for s in call.out.stride()[:3]),
        *(s // UNIT for s in call.grad_out.stride()[:3]),
        *(dlse.stride() if dlse is not None else (0, 0, 0)),
        num_heads,
        seqlen_q,
        call.padded_q,
        HEAD_DIM=head_dim,
        HEAD_DIM_V=head_dim,
        BLOCK_DV=triton.next_power_of_2(head_dim),
        UNIT=UNIT,
        BLOCK_M=PREPROCESS_ROWS,
        num_warps=4,
    )
    return statistics


def _main(
    call: Call,
    statistics: torch.Tensor,
    sums: torch.Tensor | None,
    dk: torch.Tensor,
    dv: torch.Tensor,
    tiles: tuple[int, int, int, int],
) -> None:
    block_m, stages, ahead, persistent = tiles
    batch, seqlen_k, num_heads_kv, head_dim = call.k.shape
    row_bytes = head_dim * (2 * call.q.element_size() + (4 if sums is not None else 0))
    together = call.together(batch * num_heads_kv, call.q.shape[1] * row_bytes * call.group_size)
    programs = triton.cdiv(seqlen_k, BLOCK_N) * batch * num_heads_kv
    if persistent:
        programs = min(programs, 132)
    flashdig_hopper_backward[(programs,)](
        _tiles_of(call.q, block_m),
        _tiles_of(call.grad_out, block_m),
        _tiles_of(call.k, BLOCK_N),
        _tiles_of(call.v, BLOCK_N),
        _tiles_of(dk, BLOCK_N // 2),
        _tiles_of(dv, BLOCK_N // 2),
        _statistics_of(statistics[0], block_m),
        _statistics_of(statistics[1], block_m),
        sums,
        call.alibi_slopes,
        *call.numbers(together),
        BLOCK_M=block_m,
        STAGES=stages,
        WITH_DQ=sums is not None,
        AHEAD=ahead,
        **call.constants(),
    )


def _dq(call: Call, statistics: torch.Tensor, dq: torch.Tensor, tiles: tuple[int, int]) -> None:
    block_n, stages = tiles
    batch, seqlen_q, num_heads, head_dim = call.q.shape
    head_bytes = 2 * call.k.shape[1] * head_dim * call.k.element_size()
    together = call.together(batch * num_heads, head_bytes)
    flashdig_hopper_backward_dq[(triton.cdiv(seqlen_q, 128) * batch * num_heads,)](
        _tiles_of(call.q, 64),
        _tiles_of(call.grad_out, 64),
        _tiles_of(call.k, block_n),
        _tiles_of(call.v, block_n),
        _tiles_of(dq, 64),
        statistics[0],
        statistics[1],
        call.alibi_slopes,
        *call.numbers(together),
        BLOCK_N=block_n,
        STAGES=stages,
        **call.constants(),
    )


def _postprocess(call: Call, sums: torch.Tensor, dq: torch.Tensor, block_m: int) -> None:
    batch, seqlen_q, num_heads, head_dim = call.q.shape
    flashdig_hopper_backward_postprocess[(triton.cdiv(seqlen_q, block_m) * batch * num_heads,)](
        sums,
        dq,
        *(s // UNIT for s in dq.stride()[:3]),
        num_heads,
        seqlen_q,
        call.padded_q,
        call.softmax_scale,
        HEAD_DIM=head_dim,
        BLOCK_M=block_m,
        UNIT=UNIT,
        num_warps=4,
    )


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
