"""Backward attention in portable Triton: delta, then dQ, then dK and dV (Dao 2023, algorithm 2).

Two kernels recompute the probabilities, one by rows and one by keys: nothing is added atomically,
no float32 copy of dQ is kept, and every gradient is the same bits in every run.
"""

from __future__ import annotations

import torch
import triton

from flashdig.kernels.choose import Pass, TileConfig, choose_tile
from flashdig.kernels.triton import backward_bias, backward_delta
from flashdig.kernels.triton.arguments import (
    Call,
    architecture_of,
    block_of,
    check_grid,
    prepared,
    row_contiguous,
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
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    grad_out = row_contiguous(grad_out)
    delta = _delta(call, row_contiguous(out), grad_out, grad_lse)
    lse = lse.contiguous()
    configs = configs or {}
    dq = dk = dv = dbias = dsinks = None
    if wanted[0]:
        dq = _dq(call, grad_out, lse, delta, configs.get("dq"))
    want_dk, want_dv = wanted[1:3]
    if want_dk and want_dv and max(call.head_dim, call.head_dim_v) <= APART_ABOVE:
        dk, dv = _dkdv(call, grad_out, lse, delta, configs.get("dkdv"))
    else:
        if want_dk:
            dk, _ = _dkdv(call, grad_out, lse, delta, configs.get("dk"), want_dv=False)
        if want_dv:
            _, dv = _dkdv(call, grad_out, lse, delta, configs.get("dv"), want_dk=False)
    if wanted[3] and bias is not None and bias.dtype != torch.bool:
        dbias = _dbias(call, bias, grad_out, lse, delta)
    if wanted[4] and sinks is not None:
        dsinks = _dsinks(sinks, lse, delta)
    return dq, dk, dv, dbias, dsinks


def _empty_like_input(call: Call, x: torch.Tensor) -> torch.Tensor:
    """A contiguous gradient; zeros for packed input, whose slack rows belong to no program."""
    make = torch.zeros if call.packed else torch.empty
    return make(x.shape, dtype=x.dtype, device=x.device)


def _delta(
    call: Call, out: torch.Tensor, grad_out: torch.Tensor, grad_lse: torch.Tensor | None
) -> torch.Tensor:
    """float32, in the layout of the log-sum-exp."""
    delta = torch.empty(call.lse_shape, dtype=torch.float32, device=out.device)
    lse_strides = (0, 0, 0)
    if grad_lse is not None:
        lse_strides = (0, *grad_lse.stride()) if call.packed else grad_lse.stride()
    unit = unit_of(out, grad_out)
    rows = triton.cdiv(call.seqlen_q, backward_delta.BLOCK_M)
    programs = rows * call.num_heads * call.sequences_in_grid()
    flashdig_backward_delta[(check_grid(programs),)](
        out_ptr=out,
        dout_ptr=grad_out,
        dlse_ptr=grad_lse,
        delta_ptr=delta,
        **strides(unit, o=out, do=grad_out),
        **dict(zip(("stride_dlb", "stride_dlh", "stride_dlm"), lse_strides, strict=True)),
        num_heads=call.num_heads,
        seqlen_q=call.seqlen_q,
        HEAD_DIM_V=call.head_dim_v,
        BLOCK_DV=block_of(call.head_dim_v),
        UNIT=unit,
        BLOCK_M=backward_delta.BLOCK_M,
        num_warps=4,
    )
    return delta


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


def _dq(
    call: Call,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    config: TileConfig | None,
) -> torch.Tensor:
    config = _tile(call, "dq", config)
    dq = _empty_like_input(call, call.q)
    programs = call.row_slots(config.block_m) * call.num_heads * call.sequences_in_grid()
    flashdig_backward_dq[(check_grid(programs),)](
        dout_ptr=grad_out,
        lse_ptr=lse,
        delta_ptr=delta,
        dq_ptr=dq,
        **walk_arguments(call, config, do=grad_out, dq=dq),
        softmax_scale=call.softmax_scale,
        num_warps=config.num_warps,
    )
    return dq


def _dkdv(
    call: Call,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    config: TileConfig | None,
    want_dk: bool = True,
    want_dv: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    config = _tile(call, "dkdv" if want_dk and want_dv else "dk" if want_dk else "dv", config)
    dk = _empty_like_input(call, call.k) if want_dk else None
    dv = _empty_like_input(call, call.v) if want_dv else None
    # what is not wanted is not written: its pointer and strides stand in
    written = {"dk": call.k if dk is None else dk, "dv": call.v if dv is None else dv}
    programs = call.key_slots(config.block_n) * call.num_heads_kv * call.sequences_in_grid()
    flashdig_backward_dkdv[(check_grid(programs),)](
        dout_ptr=grad_out,
        lse_ptr=lse,
        delta_ptr=delta,
        dk_ptr=written["dk"],
        dv_ptr=written["dv"],
        **walk_arguments(call, config, do=grad_out, **written),
        softmax_scale=call.softmax_scale,
        WANT_DK=want_dk,
        WANT_DV=want_dv,
        num_warps=config.num_warps,
    )
    return dk, dv


def _dbias(
    call: Call,
    bias: torch.Tensor,
    grad_out: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
) -> torch.Tensor:
    block_m, block_n = backward_bias.BLOCK_M, backward_bias.BLOCK_N
    rows_shared = bias.shape[2] == 1 and call.seqlen_q > 1
    keys_shared = bias.shape[3] == 1 and call.seqlen_k > 1
    row_tiles = triton.cdiv(call.seqlen_q, block_m)
    key_tiles = triton.cdiv(call.seqlen_k, block_n)
    tiles = bias.shape[0] * bias.shape[1]
    tiles *= (1 if rows_shared else row_tiles) * (1 if keys_shared else key_tiles)
    steps = call.batch * call.num_heads * row_tiles * key_tiles // tiles
    parts = min(steps, triton.cdiv(BIAS_PROGRAMS, tiles))
    dbias = torch.empty((parts, *bias.shape), dtype=torch.float32, device=bias.device)
    flashdig_backward_bias[(check_grid(tiles * parts),)](
        dout_ptr=grad_out,
        lse_ptr=lse,
        delta_ptr=delta,
        dbias_ptr=dbias,
        **tile_arguments(call, block_m, block_n, do=grad_out),
        bias_batch=bias.shape[0],
        bias_heads=bias.shape[1],
        parts=parts,
        ROWS_SHARED=rows_shared,
        KEYS_SHARED=keys_shared,
        num_warps=4,
        num_stages=1,
    )
    return dbias.sum(0).to(bias.dtype)


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
