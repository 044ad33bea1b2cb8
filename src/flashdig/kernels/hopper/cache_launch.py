"""The Hopper forward over a cache: which calls it serves, with which tile, and its launches.

It attends to all keys of a sequence at once, so it is for many query rows: prompts and chunks of
them. Few rows, whose keys are cut into pieces, are `kernels.triton`'s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from flashdig.kernels.hopper.chip import multiprocessors
from flashdig.kernels.hopper.descriptors import (
    TURN,
    cache_tiles_of,
    padded,
    rows_between,
    strides_fit,
    tiles_of,
)
from flashdig.kernels.hopper.forward import flashdig_hopper_forward
from flashdig.kernels.hopper.forward_launch import (
    GROUPED_BELOW,
    ROWS,
    scale_is_served,
    score_numbers,
    tile_numbers,
)
from flashdig.kernels.hopper.tiles import Tile, tiles_for
from flashdig.kernels.launch import Launch
from flashdig.kernels.triton.arguments import check_grid
from flashdig.kernels.triton.decode_arguments import CacheCall
from flashdig.kernels.triton.tile_list import LIST_HEAD, TILE_FIELDS, flashdig_list_tiles

Tensors = tuple[torch.Tensor | None, ...]

# keys of a piece of a page, at least: TMA's swizzle repeats after so many rows
LEAST_PIECE = 8
# by padded head_dim, the share of the multiprocessors that must have work: below it, keys cut into
# pieces win; the kernels that cut them are the slower the wider heads are
LEAST_FILL = {64: 0.7, 96: 0.25, 128: 0.55, 192: 0.1, 256: 0.1}
# rows from which on idle multiprocessors do not count where the Hopper decoding kernel is the other
# choice: its tiles have 64 rows, each of which reads all keys again
_ROWS_BESIDE_PIECES = 400
MAX_LISTED_SLOTS = 4096
# rows a second with three consumers, two being 1: they share a tile of keys, and at head_dim 96
# more tiles are on their way. Where others decode beside them, it counts as well how many
# multiprocessors they leave
_THREE_CONSUMERS, _THREE_BESIDE, _THREE_96 = 1.06, 1.15, 1.5


@dataclass(frozen=True)
class ListedTile:
    """How a call's listed sequences are tiled; `group`: query heads of a tile."""

    tile: Tile
    group: int

    @property
    def block_m(self) -> int:
        return ROWS * self.tile.consumers


def choose_tile(
    call: CacheCall,
    out_dtype: torch.dtype,
    tokens: int,
    sequences: int,
    *,
    beside: bool,
    in_pieces: bool = False,
) -> ListedTile | None:
    """The tile of a call over a cache; None where this kernel does not serve it, or another one is
    faster, since so few rows would leave multiprocessors idle.

    Args:
        tokens, sequences: queries of each sequence that is listed, at least one, and how many; on
            average, or as a guess where the device alone knows.
        beside: others decode beside them, on multiprocessors that they leave.
        in_pieces: the other one is the Hopper decoding kernel.
    """
    if not is_served(call, out_dtype):
        return None
    processors = multiprocessors(call.q.device)
    wanted = processors * LEAST_FILL[padded(max(call.q.shape[-1], call.v.shape[-1]))]
    if in_pieces and tokens * call.group_size >= _ROWS_BESIDE_PIECES:
        wanted = 0
    best, least = None, math.inf
    for tile in tiles_for(
        call.q.shape[-1],
        call.v.shape[-1],
        causal=call.window_right >= 0,
        softcap=call.softcap > 0.0,
        alibi=call.alibi_slopes is not None,
    ):
        listed = ListedTile(tile, _group(call, tile, tokens))
        heads = sequences * call.num_heads // listed.group
        tiles = triton.cdiv(tokens * listed.group, listed.block_m) * heads
        # a sequence that decodes takes one multiprocessor for each KV head about as long as a tile
        others = (call.batch - sequences) * call.num_heads_kv if beside else 0
        hidden = others >= processors
        rounds = tiles / processors if hidden else triton.cdiv(tiles, processors)
        cost = rounds * listed.block_m
        if tile.consumers > 2:
            three = _THREE_BESIDE if hidden else _THREE_CONSUMERS
            cost /= _THREE_96 if padded(call.q.shape[-1]) == 96 else three
        copied = keys_of_copy(call, tile.block_n)
        fits = copied >= LEAST_PIECE and slots(call, listed) <= MAX_LISTED_SLOTS
        # of equals the last, which is that for few rows
        if fits and tiles + others >= wanted and cost <= least:
            best, least = listed, cost
    return best


def is_served(call: CacheCall, out_dtype: torch.dtype) -> bool:
    q, k, v = call.q, call.k, call.v
    between = rows_between(k)
    widths = max(q.shape[-1], v.shape[-1])
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and q.dtype == k.dtype == out_dtype
        and widths <= 256
        and (call.cache_leftpad is None or call.page_size == 0)
        and scale_is_served(call.softmax_scale, call.softcap, call.alibi_slopes)
        and all(strides_fit(x) and x.data_ptr() % 16 == 0 for x in (q, k, v))
        and 0 < between == rows_between(v)
        and k.shape[0] * between < 2**31 - 2**17
        and max(call.capacity, call.seqlen_q) <= TURN
    )


def _group(call: CacheCall, tile: Tile, tokens: int) -> int:
    """All heads that share keys, where a tile's rows hold them evenly and fewer tiles suffice."""
    group, block_m = call.group_size, ROWS * tile.consumers
    if group & (group - 1) or group > ROWS or call.alibi_slopes is not None:
        return 1
    together, apart = triton.cdiv(tokens * group, block_m), triton.cdiv(tokens, block_m) * group
    return group if together < GROUPED_BELOW * apart else 1


def slots(call: CacheCall, listed: ListedTile) -> int:
    """Tiles of one head, at most, over all sequences."""
    rows = call.seqlen_q * listed.group
    if call.packed:
        return rows // listed.block_m + call.batch
    return triton.cdiv(rows, listed.block_m) * call.batch


def keys_of_copy(call: CacheCall, block_n: int) -> int:
    """Keys that are copied at once: what a tile and a page have in common."""
    return math.gcd(call.page_size, block_n) if call.page_size else block_n


class ListedAttention:
    """The launches of a call over a cache: the list of tiles, then attention.

    Args:
        shortest: query tokens of a sequence from which on it is listed.
        orders: of both launches, see `launch_order`.
        follows: an ordered launch is ahead of them.

    Attributes:
        count: numbers that the list takes, int32.
    """

    __slots__ = ("_blocks", "attending", "count", "listing")

    def __init__(
        self,
        call: CacheCall,
        tile: ListedTile,
        shortest: int,
        orders: tuple[str, str],
        follows: bool,
    ) -> None:
        self.count = LIST_HEAD.value + TILE_FIELDS.value * slots(call, tile)
        self.listing = _listing(call, tile, shortest, orders[0], follows)
        piece, paged = keys_of_copy(call, tile.tile.block_n), call.page_size > 0
        group = tile.group
        out = torch.empty(call.out_shape, dtype=call.q.dtype, device="meta")
        tiles = {
            **tiles_of("q_desc", call.q, ROWS, group=group),
            **cache_tiles_of("k_desc", call.k, piece, paged=paged),
            **cache_tiles_of("v_desc", call.v, piece, paged=paged),
            **tiles_of("out_desc", out, ROWS, group=group),
        }
        # (column blocks of q and k, of v and out)
        self._blocks = ("q_desc_rest" in tiles, "v_desc_rest" in tiles)
        self.attending = Launch(
            flashdig_hopper_forward,
            min(
                check_grid(slots(call, tile) * call.num_heads // group),
                multiprocessors(call.q.device),
            ),
            _numbers(call, tile, orders[1]),
            tiles,
            num_warps=4,
            **_early(orders[1]),
        )

    def arguments(
        self,
        tensors: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: torch.Tensor,
    ) -> dict[str, Tensors]:
        """What both launches take: of the "list", and of what is "listed".

        Args:
            tensors: in the order of `cache_attention`.
            tiles: the list's memory.
        """
        q, k, v, *lengths, table, batch_idx, leftpad, cu_q, used_q, slopes, sinks = tensors[:13]
        wide, wide_v = self._blocks
        queries = (q, q if wide else None, k, k if wide else None)
        values = (v, v if wide_v else None, out, out if wide_v else None)
        return {
            "list": (tiles, *lengths, leftpad, batch_idx, cu_q, used_q),
            # the list says what the four tensors of lengths say elsewhere
            "listed": (*queries, *values, lse, slopes, sinks, *(None,) * 4, table, tiles),
        }


def _listing(call: CacheCall, tile: ListedTile, shortest: int, order: str, follows: bool) -> Launch:
    count = slots(call, tile)
    return Launch(
        flashdig_list_tiles,
        1,
        {
            "batch": call.batch,
            "seqlen_q": call.seqlen_q,
            "seqlen_new": call.seqlen_new,
            "capacity": call.capacity,
            "cache_rows": call.k.shape[0],
            "slots": count,
            "shortest": shortest,
            "rows_of_cache_row": rows_between(call.k),
            "GROUP": tile.group,
            "PACKED": call.packed,
            "PAGED": call.page_size > 0,
            "ORDER": order,
            "BLOCK_S": max(128, triton.next_power_of_2(count)),
            "BLOCK_M": tile.block_m,
        },
        num_warps=4 if count <= 1024 else 16,
        **(_early(order) if follows else {}),
    )


def _numbers(call: CacheCall, tile: ListedTile, order: str) -> dict[str, Any]:
    table = call.page_table
    return {
        "batch_size": call.batch,
        "num_heads": call.num_heads // tile.group,
        "group_size": call.group_size,
        "seqlen_q": call.seqlen_q,
        "seqlen_k": call.capacity,
        "heads_together": 1,
        "stride_table": 0 if table is None else table.stride(0),
        "num_pages": call.k.shape[0],
        "page_rows": rows_between(call.k),
        "tiles": 0,  # the list says it
        **score_numbers(call),
        **tile_numbers(tile.tile, call.q.shape[-1], call.v.shape[-1]),
        "PACKED": call.packed,
        "GROUP": tile.group,
        "LISTED": True,
        "PAGE_SIZE": call.page_size,
        "ORDER": order,
    }


def _early(order: str) -> dict[str, Any]:
    return {} if order == "none" else {"launch_pdl": True}
