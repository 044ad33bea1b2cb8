"""Which tile the fp8 forward takes: what compiles without spills; none has been timed.

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
        lazy: the output is rescaled only where a row's maximum grew much.
    """

    lazy: bool = False


_TWO_64 = Fp8Tile(2, 128, 4, 240, q_buffers=2)
_TWO_128 = Fp8Tile(2, 128, 4, 240)
_BOTH_192 = Fp8Tile(2, 128, 2, 240)
_BOTH_256 = Fp8Tile(2, 128, 2, 240, lazy=True)

TILES: dict[tuple[int, int], dict[bool, tuple[tuple[int, Fp8Tile], ...]]] = {
    (64, 64): dict.fromkeys((False, True), ((0, _TWO_64),)),
    (96, 96): dict.fromkeys((False, True), ((0, _TWO_128),)),
    (128, 128): dict.fromkeys((False, True), ((0, _TWO_128),)),
    (192, 128): dict.fromkeys((False, True), ((0, _BOTH_192),)),
    (192, 192): dict.fromkeys((False, True), ((0, _BOTH_192),)),
    (256, 256): dict.fromkeys((False, True), ((0, _BOTH_256),)),
}


def tile_of(head_dim: int, head_dim_v: int, rows: int = 0, causal: bool = False) -> Fp8Tile:
    """The tile of a pair of widths, of at most 256 each, for so many query rows of a sequence."""
    widths = padded(head_dim), padded(head_dim_v)
    if widths not in TILES:
        widths = max(widths), max(widths)
    for begin, tile in TILES[widths][causal]:
        if rows >= begin:
            return tile
    raise AssertionError(f"no tile for {widths}")
