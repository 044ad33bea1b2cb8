"""Which tile the fp8 forward takes: by widths and causality, of those that compile without spills.

The output has shared memory of its own, whatever a tile says: its elements are wider than Q's.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdig.kernels.hopper.descriptors import padded
from flashdig.kernels.hopper.tiles import Tile


@dataclass(frozen=True)
class Fp8Tile(Tile):
    """How a block walks.

    Attributes:
        every: one power of 2 of so many is made by multiplications, see `fp8_softmax`; 0: none.
    """

    every: int = 0


# 128 keys of a block's 128 rows are seen by both consumers, so none has a walk of its own
_TWO_64 = Fp8Tile(2, 128, 4, 240, q_buffers=2, own_walk=False, joint=True)
_THREE_64 = Fp8Tile(3, 128, 4, 160, q_buffers=2, joint=True)
_TWO_96 = Fp8Tile(2, 128, 4, 240, own_walk=False, joint=True, every=8)
_TWO_128 = Fp8Tile(2, 128, 4, 240, own_walk=False, joint=True, every=4)
# a tile's first scores are made while the one before is written: of use where tiles are short
_SHORT_128 = Fp8Tile(2, 128, 4, 240, q_buffers=2, own_walk=False, joint=True, every=4)
_BOTH_192 = Fp8Tile(2, 128, 2, 240, own_walk=False)
_BOTH_256 = Fp8Tile(2, 128, 2, 240, own_walk=False, joint=True)

# (head_dim, head_dim_v), padded, and causality -> (query rows from which on, tile), the most rows
# first; any other pair takes that of its wider one
TILES: dict[tuple[int, int], dict[bool, tuple[tuple[int, Fp8Tile], ...]]] = {
    (64, 64): {
        False: ((0, _THREE_64), (0, _TWO_64)),
        True: ((3072, _THREE_64), (0, _TWO_64)),
    },
    (96, 96): dict.fromkeys((False, True), ((0, _TWO_96),)),
    (128, 128): dict.fromkeys((False, True), ((3072, _TWO_128), (0, _SHORT_128))),
    (192, 128): dict.fromkeys((False, True), ((0, _BOTH_192),)),
    (192, 192): dict.fromkeys((False, True), ((0, _BOTH_192),)),
    (256, 256): dict.fromkeys((False, True), ((0, _BOTH_256),)),
}


def tile_of(
    head_dim: int, head_dim_v: int, rows: int = 0, causal: bool = False, *, two_only: bool = False
) -> Fp8Tile:
    """The tile of a pair of widths, of at most 256 each, for so many query rows of a sequence.

    two_only: no more than two consumers, since three have too few registers for softcap and ALiBi.
    """
    widths = padded(head_dim), padded(head_dim_v)
    if widths not in TILES:
        widths = max(widths), max(widths)
    return next(
        tile
        for begin, tile in TILES[widths][causal]
        if rows >= begin and not (two_only and tile.consumers > 2)
    )
