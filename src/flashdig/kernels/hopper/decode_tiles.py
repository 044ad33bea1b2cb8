"""Into how many pieces the Hopper decoding kernel cuts a sequence's keys, and how a block walks
them, as measured on an H200: `benchmarks/tiles/hopper-decode-h200.json`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from flashdig.kernels.hopper.decode_parts import JOINED_PARTS, JOINED_ROWS

# multiprocessors that together read as fast as the memory is
_ENOUGH = 124
# what a round of pieces takes to start; what joining pieces does, and what it does each time it
# reads parts: in the time of a tile of 128 keys
_START, _JOIN, _JOIN_ROUND = 2.5, 2.0, 0.33
# keys of a piece, at least
_LEAST_KEYS = 64
# in a dense cache all of whose keys count, many short sequences are the portable kernel's, which
# needs no plan either and starts a tile sooner: so many rounds of them, of fewer keys
_DENSE_ROUNDS, _DENSE_KEYS = 4, 4096
# rows of a sequence's pieces, from which on the portable kernels join them faster, in a launch that
# has blocks for all: of a sequence that is alone, and of several where no plan comes first either
_MANY_ROWS, _MANY_ROWS_OF_SEVERAL = 128, 256


@dataclass(frozen=True)
class WalkTile:
    """How a block walks keys. More than 128 KB of them on their way are slower again.

    Attributes:
        block_n, stages: keys of a tile, and buffers for K and for V.
        most_copied: keys that are copied at once, at most.
        producer_registers: of a thread of a producer's warp.
    """

    block_n: int
    stages: int
    most_copied: int = 64
    producer_registers: int = 104

    @property
    def copied(self) -> int:
        """Keys of a dense cache that are copied at once."""
        return min(self.most_copied, self.block_n)


class WalkTiles(NamedTuple):
    """Of one head_dim. The fewer bytes are on their way, the sooner a block's last keys come, which
    counts where blocks have a piece each; pages, and blocks that are left alone with a long
    sequence, need more of them.

    Attributes:
        dense: of a dense cache where blocks have one piece at most, or all keys count.
        paged: of pages where blocks have one piece at most.
        whole, cut: of all else, where a sequence's keys are in one piece, and where not.
    """

    dense: WalkTile
    paged: WalkTile
    whole: WalkTile
    cut: WalkTile


# by padded head_dim
TILES = {
    64: WalkTiles(*(WalkTile(128, 2),) * 4),
    96: WalkTiles(WalkTile(64, 3), WalkTile(64, 3), WalkTile(128, 2), WalkTile(64, 4)),
    128: WalkTiles(WalkTile(64, 2), WalkTile(64, 3), WalkTile(128, 2), WalkTile(64, 4)),
}


def choose_tile(
    head_dim: int, *, pieces: int, one_round: bool, paged: bool, all_count: bool
) -> WalkTile:
    """
    Args:
        head_dim: padded.
        pieces: of each sequence where lengths are about even.
        one_round: there are no more of them than multiprocessors.
        all_count: sequences are as long as there is room.
    """
    tiles = TILES[head_dim]
    if one_round or all_count:
        return tiles.paged if paged else tiles.dense
    return tiles.cut if pieces > 1 else tiles.whole


@functools.cache
def choose_pieces(
    batch: int, heads: int, rows: int, keys: int, multiprocessors: int, all_count: bool
) -> int:
    """Pieces of each sequence's keys where lengths are about even; 0: the portable kernels are
    faster.

    The time is modelled by the memory's bandwidth, by how many blocks are left to use it in the
    last round, and by what the blocks that join have to do.

    Args:
        heads: of keys.
        rows: of queries and heads that share a key.
        keys: that a sequence has room for.
        all_count: as of `choose_tile`, in a dense cache.
    """
    units = batch * heads
    if all_count and units >= _DENSE_ROUNDS * multiprocessors and keys < _DENSE_KEYS:
        return 0
    tiles = -(-keys // 128)

    def cost(pieces: int) -> float:
        count = units * pieces
        rounds = -(-count // multiprocessors)
        left = count - (rounds - 1) * multiprocessors
        time = units * tiles / multiprocessors + rounds * _START
        time += max(0, _ENOUGH - left) / multiprocessors * tiles / pieces
        joined = -(-rows // JOINED_ROWS.value) * -(-pieces // JOINED_PARTS.value)
        return time + (_JOIN + _JOIN_ROUND * joined if pieces > 1 else 0.0)

    most = max(1, min(-(-keys // _LEAST_KEYS), 4 * multiprocessors // units))
    pieces = min(range(1, most + 1), key=cost)
    many = _MANY_ROWS if batch == 1 else _MANY_ROWS_OF_SEVERAL
    if (all_count or batch == 1) and pieces > 1 and rows * pieces >= many:
        return 0
    return pieces
