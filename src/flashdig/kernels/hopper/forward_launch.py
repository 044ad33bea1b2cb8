"""From tensors to a launch of the Hopper forward: descriptors, tiles, the order of the heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton

from flashdig.kernels.hopper.chip import L2_BYTES, heads_together, multiprocessors
from flashdig.kernels.hopper.counters import counter_for
from flashdig.kernels.hopper.descriptors import fits_into, taken_by_tma, tiles_of
from flashdig.kernels.hopper.forward import flashdig_hopper_forward
from flashdig.kernels.hopper.tiles import Tile, tile_of
from flashdig.kernels.launch import Launch, allocation
from flashdig.kernels.plans import Plan
from flashdig.kernels.replay import ForwardPlan, Steps
from flashdig.kernels.triton.arguments import LOG2_E, Call, check_grid, prepared
from flashdig.kernels.triton.no_keys import without_keys
from flashdig.kernels.triton.slack import clearing

if TYPE_CHECKING:
    from flashdig.kernels.triton.decode_arguments import CacheCall

ROWS = 64  # of a consumer warpgroup
# heads that share keys go into one tile where that leaves less than so many tiles
GROUPED_BELOW = 0.9


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
    config: Tile | None = None,
    grouped: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch of `flashdig_hopper_forward`; the arguments and results are those of
    `flashdig.kernels.triton.forward_launch.attention_forward`, but for what `dispatch` keeps from
    here.

    Args:
        q, k, v: float16 or bfloat16; copied where their strides or addresses are none that TMA
            takes.
        config: a tile other than that of `TILES`.
        grouped: query heads that share keys go into one tile (without ALiBi only; of packed input
            groups of a power of two); None decides by the lengths.

    Raises ValueError for a bias, for dropout, and for an out_dtype other than that of q.
    """
    if bias is not None or dropout_p > 0.0 or out_dtype not in (None, q.dtype):
        raise ValueError("the Hopper forward takes no bias, no dropout_p and no out_dtype")
    if not scale_is_served(softmax_scale, softcap, alibi_slopes):
        q, softmax_scale = q * float(-(softmax_scale < 0.0)), abs(softmax_scale) or 1.0
    call = prepared(
        taken_by_tma(q),
        taken_by_tma(k),
        taken_by_tma(v),
        None,
        alibi_slopes,
        sinks,
        None,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_q,
        seqused_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=0.0,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        allow_tf32=allow_tf32,
    )
    if call.empty:
        return without_keys(call, q.dtype)
    return _ForwardPlan(call, config, grouped)(*call.tensors)


def plan_forward(
    *tensors: torch.Tensor | None, out_dtype: torch.dtype | None = None, **numbers: Any
) -> Plan | None:
    """The plan of `attention_forward`'s arguments; see `flashdig.kernels.launch`."""
    call = prepared(*tensors, **numbers)
    moved = any(taken_by_tma(x) is not x for x in (call.q, call.k, call.v))
    served = scale_is_served(call.softmax_scale, call.softcap, call.alibi_slopes)
    if call.empty or call.copies(tensors) or moved or not served:
        return None
    return _ForwardPlan(call, None, None)


def scale_is_served(scale: float, softcap: float, alibi_slopes: torch.Tensor | None) -> bool:
    """Without softcap and ALiBi the kernel takes the maximum of unscaled scores."""
    return scale > 0.0 or softcap > 0.0 or alibi_slopes is not None


class _ForwardPlan(ForwardPlan):
    """Can be replayed, see `flashdig.kernels.replay`."""

    __slots__ = ("_blocks", "_clear_slack", "_launch")

    counts = True

    def __init__(self, call: Call, config: Tile | None, grouped: bool | None) -> None:
        tile = config or _tile(call)
        if grouped is None:
            grouped = worth_grouping(call, tile)
        group = call.num_heads // call.num_heads_kv if grouped else 1
        dtype, device = call.q.dtype, call.q.device
        self.makes = (
            allocation(call.out_shape, dtype, device),
            allocation(call.lse_shape, torch.float32, device),
        )
        self._clear_slack = None
        if call.packed:  # slack rows belong to no program
            sizes = call.batch, call.seqlen_q, call.num_heads, call.head_dim_v
            self._clear_slack = clearing(*sizes)
        out = torch.empty(call.out_shape, dtype=dtype, device="meta")
        seen = None if call.packed else _keys_seen(call)
        tiles = {
            **tiles_of("q_desc", call.q, ROWS, group=group),
            **tiles_of("k_desc", call.k, tile.block_n, seqlen=seen),
            **tiles_of("v_desc", call.v, tile.block_n, seqlen=seen),
            **tiles_of("out_desc", out, ROWS, group=group),
        }
        # (column blocks of q and k, of v and out)
        self._blocks = ("q_desc_rest" in tiles, "v_desc_rest" in tiles)
        self._launch = Launch(
            flashdig_hopper_forward,
            min(check_grid(tiles_of_queries(call, tile, group)), multiprocessors(device)),
            numbers_of(call, tile, group),
            tiles,
            num_warps=4,
        )

    def launches(
        self, tensors: tuple[torch.Tensor | None, ...], made: Sequence[torch.Tensor]
    ) -> Steps:
        q, k, v, _, alibi_slopes, sinks, _, *lengths = tensors
        out, lse = made
        steps: Steps = []
        if self._clear_slack is not None:
            cu_seqlens_q, _, seqused_q, _ = lengths
            steps.append((self._clear_slack, (out, lse, cu_seqlens_q, seqused_q)))
        wide, wide_v = self._blocks
        arguments = (
            q,
            q if wide else None,
            k,
            k if wide else None,
            v,
            v if wide_v else None,
            out,
            out if wide_v else None,
            lse,
            alibi_slopes,
            sinks,
            *lengths,
            None,
            counter_for(out.device),
        )
        steps.append((self._launch, arguments))
        return steps


def worth_grouping(call: Call, tile: Tile) -> bool:
    """Whether a tile of all heads that share keys wastes fewer rows than a tile of one head."""
    group = call.num_heads // call.num_heads_kv
    group_rows = triton.next_power_of_2(group)
    if group == 1 or group > ROWS or call.alibi_slopes is not None:
        return False
    if call.packed and group != group_rows:
        return False
    block_m = ROWS * tile.consumers
    rows = max(query_rows(call), 1)
    together = triton.cdiv(rows * group_rows, block_m)
    apart = triton.cdiv(rows, block_m) * group
    return together < GROUPED_BELOW * apart


def _tile(call: Call) -> Tile:
    return tile_of(
        call.head_dim,
        call.head_dim_v,
        query_rows(call),
        call.window_right >= 0,
        softcap=call.softcap > 0.0,
        alibi=call.alibi_slopes is not None,
    )


def query_rows(call: Call) -> int:
    """Query rows of a sequence; of packed input, on average."""
    return call.seqlen_q // call.batch if call.packed else call.seqlen_q


def tiles_of_queries(call: Call, tile: Tile, group: int) -> int:
    """Tiles of queries, or slots for them; `group`: query heads of a tile."""
    block_m = ROWS * tile.consumers
    heads = call.num_heads // group
    if call.packed:
        return call.row_slots(block_m // triton.next_power_of_2(group)) * heads
    return triton.cdiv(call.seqlen_q * triton.next_power_of_2(group), block_m) * heads * call.batch


def numbers_of(call: Call, tile: Tile, group: int, *, l2_bytes: int = L2_BYTES) -> dict[str, Any]:
    """l2_bytes: of K and V that heads walked side by side share, under causality."""
    heads = call.num_heads // group
    return {
        "batch_size": call.batch,
        "num_heads": heads,
        "group_size": call.num_heads // call.num_heads_kv,
        "seqlen_q": call.seqlen_q,
        "seqlen_k": call.seqlen_k,
        "heads_together": _heads_together(call, heads, l2_bytes),
        "stride_table": 0,
        "num_pages": 0,
        "page_rows": 0,
        "tiles": tiles_of_queries(call, tile, group),
        **score_numbers(call),
        **tile_numbers(tile, call.head_dim, call.head_dim_v),
        "PACKED": call.packed,
        "GROUP": triton.next_power_of_2(group),
        "LISTED": False,
        "PAGE_SIZE": 0,
        "ORDER": "none",
    }


def score_numbers(call: Call | CacheCall) -> dict[str, Any]:
    """What the kernel takes of the mask and of what makes scores of products."""
    slopes = call.alibi_slopes
    score_factor, exp_factor = _score_factors(call)
    return {
        "left": max(call.window_left, 0),
        "right": max(call.window_right, 0),
        "score_factor": score_factor,
        "exp_factor": exp_factor,
        "softcap": call.softcap,
        "stride_slopes_b": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        "TOP_LEFT": call.top_left,
        "LEFT": call.window_left >= 0,
        "RIGHT": call.window_right >= 0,
        "SOFTCAP": call.softcap > 0.0,
    }


def tile_numbers(tile: Tile, head_dim: int, head_dim_v: int) -> dict[str, Any]:
    """What the kernel takes of its tile."""
    return {
        "HEAD_DIM": head_dim,
        "HEAD_DIM_V": head_dim_v,
        "CONSUMERS": tile.consumers,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.stages,
        "VALUE_STAGES": tile.value_stages or tile.stages,
        "REGISTERS": tile.registers,
        "Q_BUFFERS": tile.q_buffers,
        "OWN_OUTPUT": tile.own_output or not fits_into(head_dim_v, head_dim),
        "TAKE_TURNS": tile.turns,
        "OWN_WALK": tile.own_walk,
        "JOINT": int(tile.joint),
    }


def _keys_seen(call: Call) -> int:
    """Keys up to the last one that some query of a dense call sees; at least one."""
    if call.window_right < 0:
        return call.seqlen_k
    offset = 0 if call.top_left else call.seqlen_k - call.seqlen_q
    return min(call.seqlen_k, call.seqlen_q + offset + call.window_right)


def _heads_together(call: Call, heads: int, l2_bytes: int) -> int:
    """Heads whose rows are walked together: they share K and V."""
    head_bytes = call.seqlen_k * (call.head_dim + call.head_dim_v) * call.k.element_size()
    return heads_together(
        call.batch * heads,
        head_bytes,
        causal=call.window_right >= 0,
        packed=call.packed,
        l2_bytes=l2_bytes,
    )


def _score_factors(call: Call | CacheCall) -> tuple[float, float]:
    """(score_factor, exp_factor) of `problem.Problem`."""
    if call.softcap > 0.0:
        return call.softmax_scale / call.softcap, LOG2_E
    if call.alibi_slopes is not None:
        return call.softmax_scale, LOG2_E
    return call.softmax_scale, call.softmax_scale * LOG2_E
