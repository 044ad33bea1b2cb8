"""Backward attention in portable Triton: delta, then dQ, then dK and dV (Dao 2023, algorithm 2).

Two kernels recompute the probabilities, one by rows and one by keys: nothing is added atomically,
no float32 copy of dQ is kept, and every gradient is the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from flashdig.kernels.choose import Pass, TileConfig, choose_tile
from flashdig.kernels.launch import Launch, allocation
from flashdig.kernels.plans import Plan
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton import backward_bias, backward_delta
from flashdig.kernels.triton.arguments import (
    Call,
    architecture_of,
    as_pointer,
    block_of,
    check_grid,
    prepared,
    row_contiguous,
    rows_are_contiguous,
    strides,
    tile_arguments,
    unit_of,
    walk_arguments,
)
from flashdig.kernels.triton.backward_bias import flashdig_backward_bias
from flashdig.kernels.triton.backward_delta import flashdig_backward_delta
from flashdig.kernels.triton.backward_dkdv import flashdig_backward_dkdv
from flashdig.kernels.triton.backward_dq import flashdig_backward_dq

Wanted = tuple[bool, bool, bool, bool, bool]
# blocks that fill a large GPU; a bias gradient with fewer tiles is cut into parts
BIAS_PROGRAMS = 512
# wider heads leave no registers for both accumulators: dK and dV are made in two launches
APART_ABOVE = 128


def attention_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    wanted: Wanted,
    configs: dict[Pass, TileConfig] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `attention_forward`.

    Args:
        grad_out: as out, any strides, or None; grad_lse: as lse, or None.
        q to seqused_k, softmax_scale to allow_tf32: those of the forward call.
        out, lse: what the forward returned.
        wanted: which of (q, k, v, bias, sinks) take a gradient.
        configs: tiles other than the table's, by pass.

    Returns: (dq, dk, dv, dbias, dsinks), each in the dtype and shape of its input, None where not
        wanted.
    """
    call = prepared(
        q,
        k,
        v,
        bias,
        alibi_slopes,
        sinks,
        dropout_seed,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        allow_tf32=allow_tf32,
    )
    if call.empty:
        return _of_empty(call, q, k, v, bias, sinks, lse, grad_lse, wanted)
    grad_out = torch.zeros_like(out) if grad_out is None else row_contiguous(grad_out)
    out, lse = row_contiguous(out), lse.contiguous()
    plan = _BackwardPlan(call, grad_out, grad_lse, out, wanted, configs or {})
    return plan(grad_out, grad_lse, *call.tensors, out, lse)


def plan_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    *others: torch.Tensor,
    wanted: Wanted,
    **numbers: Any,
) -> Plan | None:
    """The plan of `attention_backward`'s arguments; see `flashdig.kernels.launch`."""
    *tensors, out, lse = others
    call = prepared(*tensors, **numbers)
    if call.empty or grad_out is None or call.copies(tensors):
        return None
    if not (rows_are_contiguous(grad_out) and rows_are_contiguous(out) and lse.is_contiguous()):
        return None
    return _BackwardPlan(call, grad_out, grad_lse, out, wanted, {})


class _BackwardPlan:
    """The launches of one backward call: delta, then dQ, dK and dV, dBias as wanted. Plain ones can
    be replayed, see `flashdig.kernels.replay`."""

    counts = False

    def __init__(
        self,
        call: Call,
        grad_out: torch.Tensor,
        grad_lse: torch.Tensor | None,
        out: torch.Tensor,
        wanted: Wanted,
        configs: dict[Pass, TileConfig],
    ) -> None:
        device = call.q.device
        self._packed = call.packed
        self._make = tuple(
            allocation(x.shape, x.dtype, device) if want else _nothing
            for x, want in zip((call.q, call.k, call.v), wanted[:3], strict=True)
        )
        self._make_delta = allocation(call.lse_shape, torch.float32, device)
        self._boolean = call.bias is not None and call.bias.dtype == torch.bool
        self._delta = _delta_launch(call, out, grad_out, grad_lse)
        self._dq = _dq_launch(call, grad_out, configs.get("dq")) if wanted[0] else None
        # each makes dK, dV or both
        self._dkdv: list[tuple[Launch, bool, bool]] = []
        want_dk, want_dv = wanted[1:3]
        together = max(call.head_dim, call.head_dim_v) <= APART_ABOVE
        for dk, dv in [(True, True)] if together else [(True, False), (False, True)]:
            made = (dk and want_dk, dv and want_dv)
            if any(made):
                self._dkdv.append((_dkdv_launch(call, grad_out, configs, *made), *made))
        bias = call.bias
        self._dbias: tuple[Launch, tuple[int, ...]] | None = None
        if wanted[3] and bias is not None and bias.dtype != torch.bool:
            self._dbias = _dbias_launch(call, bias, grad_out)
        self._want_dsinks = wanted[4]
        # where nothing but its launches writes gradients, and all three are wanted
        self.makes: tuple[Callable[[], torch.Tensor], ...] = ()
        plain = not (call.packed or self._dbias or self._want_dsinks)
        if plain and all(wanted[:3]):
            self.makes = (*self._make, self._make_delta)

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        made = (*(self._cleared(make()) for make in self._make), self._make_delta())
        for launch, arguments in self.launches(tensors, made):
            launch(*arguments)
        bias, sinks, lse = tensors[5], tensors[7], tensors[-1]
        dq, dk, dv, delta = made
        dbias = dsinks = None
        if self._dbias is not None and bias is not None:
            launch, shape = self._dbias
            parts = torch.empty(shape, dtype=torch.float32, device=bias.device)
            walked, read = self._read(tensors, delta)
            launch(*walked, parts, *read)
            dbias = parts.sum(0).to(bias.dtype)
        if self._want_dsinks and sinks is not None:
            dsinks = _dsinks(sinks, lse, delta)
        return dq, dk, dv, dbias, dsinks

    def launches(
        self, tensors: tuple[torch.Tensor | None, ...], made: Sequence[torch.Tensor | None]
    ) -> Steps:
        """Those that write dq, dk, dv and delta, which are `made`."""
        grad_out, grad_lse, _, k, v = tensors[:5]
        out = tensors[-2]
        dq, dk, dv, delta = made
        walked, read = self._read(tensors, delta)
        steps: Steps = [(self._delta, (out, grad_out, grad_lse, delta))]
        if self._dq is not None:
            steps.append((self._dq, (*walked, dq, *read)))
        for launch, make_dk, make_dv in self._dkdv:
            # what is not made is not written: its input stands in
            written = (dk if make_dk else k, dv if make_dv else v)
            steps.append((launch, (*walked, *written, *read)))
        return steps

    def _read(
        self, tensors: tuple[torch.Tensor | None, ...], delta: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor | None, ...], tuple[torch.Tensor | None, ...]]:
        """What every kernel but delta's reads, before what it writes and behind."""
        grad_out, _, q, k, v, bias, slopes, sinks, *lengths, _, lse = tensors  # the seed first
        bias = as_pointer(bias) if self._boolean else bias
        return (q, k, v, grad_out, lse, delta), (bias, slopes, sinks, *lengths)

    def _cleared(self, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """Of packed input some rows belong to no program."""
        return gradient.zero_() if self._packed and gradient is not None else gradient


def _nothing() -> None:
    return None


def _delta_launch(
    call: Call, out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> Launch:
    lse_strides = (0, 0, 0)
    if grad_lse is not None:
        lse_strides = (0, *grad_lse.stride()) if call.packed else grad_lse.stride()
    unit = unit_of(out, grad_out)
    rows = triton.cdiv(call.seqlen_q, backward_delta.BLOCK_M)
    return Launch(
        flashdig_backward_delta,
        check_grid(rows * call.num_heads * call.sequences_in_grid()),
        {
            **strides(unit, o=out, do=grad_out),
            **dict(zip(("stride_dlb", "stride_dlh", "stride_dlm"), lse_strides, strict=True)),
            "num_heads": call.num_heads,
            "seqlen_q": call.seqlen_q,
            "HEAD_DIM_V": call.head_dim_v,
            "BLOCK_DV": block_of(call.head_dim_v),
            "UNIT": unit,
            "BLOCK_M": backward_delta.BLOCK_M,
        },
        num_warps=4,
    )


def _tile(call: Call, pass_: Pass, config: TileConfig | None) -> TileConfig:
    if config is not None:
        return config
    return choose_tile(
        pass_,
        architecture_of(call.q.device),
        call.dtype_name(),
        call.head_dim,
        call.head_dim_v,
        call.bias is not None or call.dropout_p > 0.0,
    )


def _gradient_of(x: torch.Tensor) -> torch.Tensor:
    """Its gradient's strides, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _dq_launch(call: Call, grad_out: torch.Tensor, config: TileConfig | None) -> Launch:
    config = _tile(call, "dq", config)
    programs = call.row_slots(config.block_m) * call.num_heads * call.sequences_in_grid()
    return Launch(
        flashdig_backward_dq,
        check_grid(programs),
        {
            **walk_arguments(call, config, do=grad_out, dq=_gradient_of(call.q)),
            "softmax_scale": call.softmax_scale,
        },
        num_warps=config.num_warps,
    )


def _dkdv_launch(
    call: Call,
    grad_out: torch.Tensor,
    configs: dict[Pass, TileConfig],
    make_dk: bool,
    make_dv: bool,
) -> Launch:
    pass_: Pass = "dkdv" if make_dk and make_dv else "dk" if make_dk else "dv"
    config = _tile(call, pass_, configs.get(pass_))
    dk = _gradient_of(call.k) if make_dk else call.k
    dv = _gradient_of(call.v) if make_dv else call.v
    programs = call.key_slots(config.block_n) * call.num_heads_kv * call.sequences_in_grid()
    return Launch(
        flashdig_backward_dkdv,
        check_grid(programs),
        {
            **walk_arguments(call, config, do=grad_out, dk=dk, dv=dv),
            "softmax_scale": call.softmax_scale,
            "WANT_DK": make_dk,
            "WANT_DV": make_dv,
        },
        num_warps=config.num_warps,
    )


def _dbias_launch(
    call: Call, bias: torch.Tensor, grad_out: torch.Tensor
) -> tuple[Launch, tuple[int, ...]]:
    """The launch, and the shape of the float32 parts whose sum is the gradient."""
    block = backward_bias.block_size(
        block_of(max(call.head_dim, call.head_dim_v)), call.q.element_size()
    )
    rows_shared = bias.shape[2] == 1 and call.seqlen_q > 1
    keys_shared = bias.shape[3] == 1 and call.seqlen_k > 1
    row_tiles = triton.cdiv(call.seqlen_q, block)
    key_tiles = triton.cdiv(call.seqlen_k, block)
    tiles = bias.shape[0] * bias.shape[1]
    tiles *= (1 if rows_shared else row_tiles) * (1 if keys_shared else key_tiles)
    steps = call.batch * call.num_heads * row_tiles * key_tiles // tiles
    parts = min(steps, triton.cdiv(BIAS_PROGRAMS, tiles))
    launch = Launch(
        flashdig_backward_bias,
        check_grid(tiles * parts),
        {
            **tile_arguments(call, block, block, do=grad_out),
            "bias_batch": bias.shape[0],
            "bias_heads": bias.shape[1],
            "parts": parts,
            "ROWS_SHARED": rows_shared,
            "KEYS_SHARED": keys_shared,
        },
        num_warps=4,
        num_stages=1,
    )
    return launch, (parts, *bias.shape)


def _dsinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """dsink = -sum of P_sink * delta over the head's rows; rows without a statistic add nothing."""
    head_dim = lse.dim() - 2
    logits = sinks.float()[:, None]
    alive = lse != float("-inf")
    terms = torch.where(alive, torch.exp(logits - lse) * delta, 0.0)
    others = [dim for dim in range(lse.dim()) if dim != head_dim]
    return -terms.sum(others).to(sinks.dtype)


def _of_empty(
    call: Call,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    sinks: torch.Tensor | None,
    lse: torch.Tensor,
    grad_lse: torch.Tensor | None,
    wanted: Wanted,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of a call in which no query meets a key: zeros, but for the sinks'."""
    inputs = (q, k, v, bias, sinks)
    gradients = [
        torch.zeros_like(x) if w and x is not None else None
        for x, w in zip(inputs, wanted, strict=True)
    ]
    if gradients[4] is not None and grad_lse is not None and sinks is not None and lse.numel():
        gradients[4] = _dsinks(sinks, lse, -grad_lse.float())
    return tuple(gradients)
