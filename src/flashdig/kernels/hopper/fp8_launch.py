"""From tensors to the launches of the fp8 forward: V by columns, then attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from flashdig.kernels.hopper.chip import multiprocessors
from flashdig.kernels.hopper.counters import counter_for
from flashdig.kernels.hopper.descriptors import taken_by_tma, tiles_of, values_by_column
from flashdig.kernels.hopper.forward_launch import (
    ROWS,
    numbers_of,
    query_rows,
    tiles_of_queries,
    worth_grouping,
)
from flashdig.kernels.hopper.fp8_forward import flashdig_hopper_fp8_forward
from flashdig.kernels.hopper.fp8_tiles import Fp8Tile, tile_of
from flashdig.kernels.hopper.fp8_values import (
    NUMBERS,
    by_column,
    by_column_shape,
    counted,
    keys_seen,
    turning_of,
)
from flashdig.kernels.launch import Launch, allocation
from flashdig.kernels.plans import Plan
from flashdig.kernels.triton.arguments import Call, check_grid, prepared
from flashdig.kernels.triton.no_keys import without_keys
from flashdig.kernels.triton.slack import clearing

# bytes of K and V that the heads of one causal section share: half of what 16 bits take, since the
# first tiles of all its heads wait for their V^T
_L2_BYTES = 16 * 2**20
OUT_DTYPES = (torch.float16, torch.bfloat16)


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    out_dtype: torch.dtype = torch.bfloat16,
    config: Fp8Tile | None = None,
    grouped: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of e4m3 inputs; arguments and results are those of
    `flashdig.kernels.hopper.forward_launch.attention_forward` but for

    Args:
        q, k, v: float8_e4m3fn; copied where their strides or addresses are none that TMA takes.
        q_descale, k_descale, v_descale: (batch, num_heads_kv) float32, not negative; None is 1.
        out_dtype: float16 or bfloat16.

    Raises ValueError for another out_dtype and for a softmax_scale below zero.
    """
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype must be float16 or bfloat16, got {out_dtype}")
    if softmax_scale < 0.0:
        raise ValueError(f"softmax_scale must not be negative, got {softmax_scale}")
    call = _call(
        *(taken_by_tma(x) for x in (q, k, v)),
        *(alibi_slopes, sinks, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k),
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
    )
    if call.empty:
        return without_keys(call, out_dtype)
    factors = [x if x is None else x.contiguous() for x in (q_descale, k_descale, v_descale)]
    q, k, v, _, alibi_slopes, sinks, _, *lengths = call.tensors
    plan = _Fp8Plan(call, out_dtype, config, grouped)
    return plan(q, k, v, alibi_slopes, sinks, *lengths, *factors)


def plan_forward(
    *tensors: torch.Tensor | None, out_dtype: torch.dtype, **numbers: Any
) -> Plan | None:
    """The plan of `attention_forward`'s arguments; see `flashdig.kernels.launch`."""
    (q, k, v, alibi_slopes, sinks, *lengths), factors = tensors[:-3], tensors[-3:]
    call = _call(*tensors[:-3], **numbers)
    copies = call.copies((q, k, v, None, alibi_slopes, sinks, None, *lengths))
    moved = any(taken_by_tma(x) is not x for x in (call.q, call.k, call.v))
    spread = any(x is not None and not x.is_contiguous() for x in factors)
    served = call.softmax_scale >= 0.0 and out_dtype in OUT_DTYPES
    if call.empty or copies or moved or spread or not served:
        return None
    return _Fp8Plan(call, out_dtype, None, None)


def _call(*tensors: Any, **numbers: Any) -> Call:
    q, k, v, alibi_slopes, sinks, *lengths = tensors
    return prepared(
        *(q, k, v, None, alibi_slopes, sinks, None, *lengths),
        **numbers,
        dropout_p=0.0,
        allow_tf32=False,
    )


class _Fp8Plan:
    __slots__ = ("_blocks", "_by_column", "_clear_slack", "_launch", "_make")

    def __init__(
        self, call: Call, out_dtype: torch.dtype, config: Fp8Tile | None, grouped: bool | None
    ) -> None:
        tile = config or tile_of(
            call.head_dim,
            call.head_dim_v,
            query_rows(call),
            call.window_right >= 0,
            two_only=call.softcap > 0.0 or call.alibi_slopes is not None,
        )
        if grouped is None:
            grouped = worth_grouping(call, tile)
        group = call.num_heads // call.num_heads_kv if grouped else 1
        device = call.q.device
        tiles_of_all = check_grid(tiles_of_queries(call, tile, group))
        turning = turning_of(call, tiles_of_all, multiprocessors(device))
        slot = max(turning.block, tile.block_n)
        turning = replace(turning, block=slot)
        shape = by_column_shape(call, slot)
        self._make = (
            allocation(call.out_shape, out_dtype, device),
            allocation(call.lse_shape, torch.float32, device),
            allocation(shape, call.v.dtype, device),
        )
        self._by_column = by_column(call, turning)
        self._clear_slack = None
        if call.packed:  # slack rows belong to no program
            sizes = call.batch, call.seqlen_q, call.num_heads, call.head_dim_v
            self._clear_slack = clearing(*sizes)
        out = torch.empty(call.out_shape, dtype=out_dtype, device="meta")
        seen = None if call.packed else keys_seen(call)[1]
        tiles = {
            **tiles_of("q_desc", call.q, ROWS, group=group),
            **tiles_of("k_desc", call.k, tile.block_n, seqlen=seen),
            **values_by_column("v_desc", shape, tile.block_n),
            **tiles_of("out_desc", out, ROWS, group=group),
        }
        # (column blocks of q and k, of v and out)
        self._blocks = ("q_desc_rest" in tiles, "v_desc_rest" in tiles)
        # what only the kernel for 16 bits asks for is left out
        known = set(flashdig_hopper_fp8_forward.arg_names)
        shared = numbers_of(call, tile, group, l2_bytes=_L2_BYTES)
        numbers = {n: x for n, x in shared.items() if n in known} | counted(call, slot)
        self._launch = Launch(
            flashdig_hopper_fp8_forward,
            min(tiles_of_all, multiprocessors(device)),
            {**numbers, "VALUE_SLOT": slot, "EVERY": tile.every},
            tiles,
            num_warps=4,
            launch_pdl=True,  # it begins while V is turned, and waits for what it reads
        )

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, alibi_slopes, sinks, *others = tensors
        lengths, descales = others[:4], others[4:]
        out, lse, by_column = (make() for make in self._make)
        if self._clear_slack is not None:
            cu_seqlens_q, _, seqused_q, _ = lengths
            self._clear_slack(out, lse, cu_seqlens_q, seqused_q)
        counter = counter_for(out.device, NUMBERS)
        self._by_column(v, by_column, *lengths, counter)
        wide, wide_v = self._blocks
        self._launch(
            q,
            q if wide else None,
            k,
            k if wide else None,
            by_column,
            by_column if wide_v else None,
            out,
            out if wide_v else None,
            lse,
            alibi_slopes,
            sinks,
            *lengths,
            *descales,
            counter,
        )
        return out, lse
