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


_TWO_64 = Fp8Tile(2, 128, 4, 240, q_buffers=2, every=8)
_TWO_128 = Fp8Tile(2, 128, 4, 240, every=8)
_THREE_128 = Fp8Tile(3, 64, 4, 160, every=8)
_BOTH_192 = Fp8Tile(2, 128, 2, 240)
_BOTH_256 = Fp8Tile(2, 128, 2, 240)

# (head_dim, head_dim_v), padded, and causality -> tiles, the best first
TILES: dict[tuple[int, int], dict[bool, tuple[Fp8Tile, ...]]] = {
    (64, 64): dict.fromkeys((False, True), (_TWO_64,)),
    (96, 96): dict.fromkeys((False, True), (_TWO_128,)),
    (128, 128): dict.fromkeys((False, True), (_THREE_128, _TWO_128)),
    (192, 128): dict.fromkeys((False, True), (_BOTH_192,)),
    (192, 192): dict.fromkeys((False, True), (_BOTH_192,)),
    (256, 256): dict.fromkeys((False, True), (_BOTH_256,)),
}


def tile_of(
    head_dim: int, head_dim_v: int, causal: bool = False, *, two_only: bool = False
) -> Fp8Tile:
    """The tile of a pair of widths, of at most 256 each.

    two_only: no more than two consumers, since three have too few registers for softcap and ALiBi.
    """
    widths = padded(head_dim), padded(head_dim_v)
    if widths not in TILES:
        widths = max(widths), max(widths)
    return next(tile for tile in TILES[widths][causal] if tile.consumers == 2 or not two_only)
