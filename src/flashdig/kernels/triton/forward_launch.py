"""From tensors to a launch of the portable forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashdig.kernels.choose import TileConfig, choose_tile
from flashdig.kernels.launch import Launch, allocation
from flashdig.kernels.plans import Plan
from flashdig.kernels.replay import ForwardPlan, Steps
from flashdig.kernels.triton.arguments import (
    Call,
    architecture_of,
    as_pointer,
    check_grid,
    prepared,
    walk_arguments,
)
from flashdig.kernels.triton.forward import flashdig_forward
from flashdig.kernels.triton.no_keys import without_keys
from flashdig.kernels.triton.slack import clearing


def attention_forward(
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
    *,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    out_dtype: torch.dtype | None = None,
    config: TileConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of `flashdig_forward`; the arguments were checked by `flashdig.validate`.

    Args:
        q, k, v: dense (batch, seqlen, heads, head_dim), or packed (total, heads, head_dim) with
            `cu_seqlens_q` and `cu_seqlens_k` (batch + 1,), int32, and `seqused_*` (batch,) or None.
        dropout_seed: (1,) int64 on the device; read only with dropout_p > 0.
        window_left, window_right: keys seen on each side of the diagonal; -1 is unlimited.
        config: a tile other than the table's.

    Returns: out (as q with head_dim_v) and lse (batch, num_heads, seqlen_q) or (num_heads, total_q)
        in float32.
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
        return without_keys(call, out_dtype or q.dtype)
    return _ForwardPlan(call, out_dtype or q.dtype, config)(*call.tensors)


def plan_forward(
    *tensors: torch.Tensor | None, out_dtype: torch.dtype | None = None, **numbers: Any
) -> Plan | None:
    """The plan of `attention_forward`'s arguments; see `flashdig.kernels.launch`."""
    call = prepared(*tensors, **numbers)
    if call.empty or call.copies(tensors):
        return None
    return _ForwardPlan(call, out_dtype or call.q.dtype, None)


class _ForwardPlan(ForwardPlan):
    """Can be replayed, see `flashdig.kernels.replay`."""

    __slots__ = ("_boolean", "_clear_slack", "_launch")

    counts = False

    def __init__(self, call: Call, dtype: torch.dtype, config: TileConfig | None) -> None:
        if config is None:
            config = choose_tile(
                "forward",
                architecture_of(call.q.device),
                call.dtype_name(),
                call.head_dim,
                call.head_dim_v,
                call.bias is not None or call.dropout_p > 0.0,
            )
        device = call.q.device
        self.makes = (
            allocation(call.out_shape, dtype, device),
            allocation(call.lse_shape, torch.float32, device),
        )
        self._clear_slack = None
        if call.packed:  # slack rows belong to no program
            sizes = call.batch, call.seqlen_q, call.num_heads, call.head_dim_v
            self._clear_slack = clearing(*sizes)
        self._boolean = call.bias is not None and call.bias.dtype == torch.bool
        out = torch.empty(call.out_shape, dtype=dtype, device="meta")
        programs = call.row_slots(config.block_m) * call.num_heads * call.sequences_in_grid()
        self._launch = Launch(
            flashdig_forward,
            check_grid(programs),
            {**walk_arguments(call, config, o=out), "SINKS": call.sinks is not None},
            num_warps=config.num_warps,
        )

    def launches(
        self, tensors: tuple[torch.Tensor | None, ...], made: Sequence[torch.Tensor]
    ) -> Steps:
        q, k, v, bias, *others = tensors
        out, lse = made
        steps: Steps = []
        if self._clear_slack is not None:
            cu_seqlens_q, _, seqused_q, _ = others[-4:]
            steps.append((self._clear_slack, (out, lse, cu_seqlens_q, seqused_q)))
        if self._boolean:
            bias = as_pointer(bias)
        steps.append((self._launch, (q, k, v, out, lse, bias, *others)))
        return steps
