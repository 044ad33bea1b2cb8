"""The Hopper decoding kernel: which calls over a cache it serves, how their keys are cut, and its
launch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from flashdig.kernels.hopper.cache_launch import LEAST_PIECE, is_served, keys_of_copy
from flashdig.kernels.hopper.chip import multiprocessors
from flashdig.kernels.hopper.counters import counter_for
from flashdig.kernels.hopper.decode import flashdig_hopper_decode
from flashdig.kernels.hopper.decode_parts import ARRIVALS
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
# multiprocessors that together read as fast as the memory is
_ENOUGH = 110
# what a piece's start takes, and what joining pieces does, in the time of a tile of 128 keys
_START, _JOIN, _JOIN_PIECE = 1.0, 2.3, 0.25
# in a dense cache all of whose keys count, many short sequences are the portable kernel's, which
# needs no plan either and starts a tile sooner: so many rounds of them, of fewer keys
_DENSE_ROUNDS, _DENSE_KEYS = 4, 4096
# room for keys with which a sequence that is alone is this kernel's: in between one launch instead
# of two makes a difference
_ONE_KEYS = 4096, 16384


@dataclass(frozen=True)
class WalkTile:
    """How a block walks keys. More than 128 KB of them on their way are slower again.

    Attributes:
        block_n, stages: keys of a tile, and buffers for K and for V.
        copied: keys that are copied at once, at most.
        producer_registers: of a thread of a producer's warp.
    """

    block_n: int
    stages: int
    copied: int = 64
    producer_registers: int = 104


# by padded head_dim, where a sequence's keys are in one piece, and where they are cut; measured on
# an H200: `benchmarks/tiles/hopper-decode-h200.json`
TILES = {
    64: (WalkTile(128, 3), WalkTile(128, 3)),
    96: (WalkTile(128, 2), WalkTile(64, 4)),
    128: (WalkTile(128, 2), WalkTile(64, 4)),
}
# of a sequence that is alone, whose pieces are a few tiles each
ONE_TILE = WalkTile(64, 2)


@functools.cache
def choose_pieces(units: int, keys: int, multiprocessors: int) -> int:
    """Pieces of each sequence's keys where lengths are about even.

    The time is modelled by the memory's bandwidth, and by how many blocks are left to use it in the
    last round.

    Args:
        units: pairs of a sequence and a KV head.
        keys: that a sequence has room for.
    """
    tiles = -(-keys // 128)

    def cost(pieces: int) -> float:
        count = units * pieces
        rounds = -(-count // multiprocessors)
        left = count - (rounds - 1) * multiprocessors
        time = units * tiles / multiprocessors + rounds * _START
        time += max(0, _ENOUGH - left) / multiprocessors * tiles / pieces
        return time + (_JOIN + _JOIN_PIECE * pieces if pieces > 1 else 0.0)

    most = max(1, min(tiles // 2, 4 * multiprocessors // units))
    return min(range(1, most + 1), key=lambda pieces: (cost(pieces), pieces))


def pieces_of(call: CacheCall, out_dtype: torch.dtype) -> int:
    """Pieces of each sequence's keys, or 0: the call is none for this kernel."""
    units = call.batch * call.num_heads_kv
    processors = multiprocessors(call.q.device)
    if not serves(call, out_dtype):
        return 0
    if call.batch == 1:
        few = call.packed or not _ONE_KEYS[0] <= call.capacity <= _ONE_KEYS[1]
        return 0 if few else processors // units
    if call.cache_seqlens is None and call.page_size == 0 and not call.packed:
        many = units >= _DENSE_ROUNDS * processors
        if many and call.capacity < _DENSE_KEYS:
            return 0
    return choose_pieces(units, call.capacity, processors)


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

    def __init__(
        self,
        call: CacheCall,
        pieces: int,
        order: str,
        most_tokens: int = 0,
        tile: WalkTile | None = None,
    ) -> None:
        alone = call.batch == 1 and pieces > 1
        tile = tile or (ONE_TILE if alone else TILES[padded(call.q.shape[-1])][int(pieces > 1)])
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
