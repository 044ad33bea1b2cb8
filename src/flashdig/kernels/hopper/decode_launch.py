"""The Hopper decoding kernel: which calls over a cache it serves, how their keys are cut, and its
launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton

from flashdig.kernels.hopper.cache_launch import LEAST_PIECE, is_served, keys_of_copy
from flashdig.kernels.hopper.chip import multiprocessors
from flashdig.kernels.hopper.counters import counter_for
from flashdig.kernels.hopper.decode import flashdig_hopper_decode
from flashdig.kernels.hopper.decode_parts import ARRIVALS
from flashdig.kernels.hopper.decode_tiles import TILES, WalkTile, choose_pieces, choose_tile
from flashdig.kernels.hopper.descriptors import cache_tiles_of, padded, rows_between, tiles_of
from flashdig.kernels.hopper.forward_launch import ROWS, score_numbers
from flashdig.kernels.launch import Launch
from flashdig.kernels.triton.decode_arguments import CacheCall
from flashdig.kernels.triton.decode_choose import PART_BYTES

Tensors = tuple[torch.Tensor | None, ...]

# of a plan, whose sequences lie in the lanes of one warp
MOST_SEQUENCES = 512
# pieces for each multiprocessor, where lengths differ
PIECES = 2
# rows of a tile of packed queries, at least
LEAST_ROWS = 16


def pieces_of(call: CacheCall, out_dtype: torch.dtype) -> int:
    """Pieces of each sequence's keys, or 0: the call is none for this kernel."""
    if not serves(call, out_dtype):
        return 0
    # packed, sequences differ: as many as they have on average
    tokens = triton.cdiv(call.seqlen_q, call.batch) if call.packed else call.seqlen_q
    return choose_pieces(
        call.batch,
        call.num_heads_kv,
        min(ROWS, tokens * call.group_size),
        call.capacity,
        multiprocessors(call.q.device),
        _all_count(call),
    )


def _all_count(call: CacheCall) -> bool:
    """All keys of a dense cache do, for sequences of as many queries each."""
    return call.cache_seqlens is None and call.page_size == 0 and not call.packed


def _tile_of(call: CacheCall, pieces: int) -> WalkTile:
    return choose_tile(
        padded(call.q.shape[-1]),
        pieces=pieces,
        one_round=call.batch * call.num_heads_kv * pieces <= multiprocessors(call.q.device),
        paged=call.page_size > 0,
        all_count=_all_count(call),
    )


def serves(call: CacheCall, out_dtype: torch.dtype) -> bool:
    """Whether this kernel can take a call: one tile holds a sequence's queries and heads, unless
    they are packed."""
    group = call.group_size
    rows = group if call.packed else call.seqlen_q * group
    if group & (group - 1) or rows > ROWS or call.batch > MOST_SEQUENCES:
        return False
    head_dims = call.q.shape[-1], call.v.shape[-1]
    if max(head_dims) > max(TILES) or padded(head_dims[0]) != padded(head_dims[1]):
        return False
    tiles = TILES[padded(head_dims[0])]
    units = _slots(call) * call.num_heads_kv
    return (
        call.alibi_slopes is None
        and is_served(call, out_dtype)
        and all(_copied(call, tile) >= LEAST_PIECE for tile in tiles)
        # the plan counts tiles in 32 bits
        and 8 * units * triton.cdiv(call.capacity, 64) < 2**31
        and 4 * _part_rows(call, 2) * call.v.shape[-1] <= PART_BYTES
    )


def tile_rows(call: CacheCall) -> int:
    """Rows of a tile of packed queries, 0 where they are not packed. A part has as many: where
    sequences have a token each, most of 64 would be empty."""
    if not call.packed:
        return 0
    return ROWS if call.seqlen_q > call.batch else max(LEAST_ROWS, call.group_size)


def _slots(call: CacheCall) -> int:
    """Tiles of queries, at most."""
    return call.slots(tile_rows(call) or ROWS)


def _copied(call: CacheCall, tile: WalkTile) -> int:
    """Keys that are copied at once."""
    return keys_of_copy(call, tile.block_n if call.page_size > 0 else tile.copied)


def _wanted(call: CacheCall) -> int:
    return PIECES * multiprocessors(call.q.device)


def _most_pieces(call: CacheCall, pieces: int) -> int:
    """Of each KV head: the last of the keys may be cut four times as fine as the others."""
    slots = _slots(call)
    return max(2 * _wanted(call) // call.num_heads_kv + 2 * slots, pieces * slots)


def _part_rows(call: CacheCall, pieces: int) -> int:
    rows_of_part = tile_rows(call) or call.seqlen_q * call.group_size
    return _most_pieces(call, pieces) * call.num_heads_kv * rows_of_part


class PiecedAttention:
    """The launch of a call over a cache.

    Args:
        pieces: of each sequence where lengths are about even.
        order: see `launch_order`.
        most_tokens: packed sequences of more are another launch's; 0: none is.

    Attributes:
        launch: takes the counter of its stream.
        part_rows: rows of parts, as wide as the values.
    """

    __slots__ = ("_blocks", "_numbers", "launch", "part_rows")

    def __init__(self, call: CacheCall, pieces: int, order: str, most_tokens: int = 0) -> None:
        tile = _tile_of(call, pieces)
        most = _most_pieces(call, pieces)
        self.part_rows = _part_rows(call, pieces)
        counted = most if call.packed else call.batch
        self._numbers = triton.next_power_of_2(ARRIVALS.value + counted * call.num_heads_kv)
        copied = _copied(call, tile)
        tiles = {
            **tiles_of("q_desc", call.q, ROWS, group=call.group_size),
            **cache_tiles_of("k_desc", call.k, copied, paged=True),
            **cache_tiles_of("v_desc", call.v, copied, paged=True),
        }
        # (column blocks of q and k, of v)
        self._blocks = ("q_desc_rest" in tiles, "v_desc_rest" in tiles)
        terms = score_numbers(call)
        del terms["stride_slopes_b"]
        self.launch = Launch(
            flashdig_hopper_decode,
            multiprocessors(call.q.device),
            {
                "batch_size": call.batch,
                "num_heads": call.num_heads_kv,
                "seqlen_q": call.seqlen_q,
                "seqlen_new": call.seqlen_new,
                "capacity": call.capacity,
                "splits": pieces,
                "wanted": _wanted(call),
                "most_pieces": most,
                **terms,
                "stride_table": 0 if call.page_table is None else call.page_table.stride(0),
                "cache_rows": call.k.shape[0],
                "rows_between": rows_between(call.k),
                "HEAD_DIM": call.q.shape[-1],
                "HEAD_DIM_V": call.v.shape[-1],
                "COLUMNS": triton.next_power_of_2(padded(call.v.shape[-1])),
                "GROUP": call.group_size,
                "TILE_ROWS": tile_rows(call),
                "MOST_TOKENS": most_tokens,
                "PAGE_SIZE": call.page_size,
                "SLOTS": 128 if call.batch <= 128 else MOST_SEQUENCES,
                "BLOCK_N": tile.block_n,
                "STAGES": tile.stages,
                "PRODUCER_REGISTERS": tile.producer_registers,
                "ORDER": order,
            },
            tiles,
            num_warps=4,
            **({} if order == "none" else {"launch_pdl": True}),
        )

    def arguments(
        self, tensors: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> Tensors:
        """The launch's tensors.

        Args:
            tensors: in the order of `cache_attention`.
            made: out, lse, parts and their log-sum-exps.
        """
        q, k, v, *lengths, table, batch_idx, leftpad, cu_q, used_q, _, sinks = tensors[:13]
        wide, wide_v = self._blocks
        taken = (q, q if wide else None, k, k if wide else None, v, v if wide_v else None)
        counter = counter_for(made[0].device, self._numbers)
        rows = batch_idx if table is None else table
        return (*taken, *made, sinks, *lengths, leftpad, cu_q, used_q, rows, counter)
