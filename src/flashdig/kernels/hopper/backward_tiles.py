"""Tiles of the Hopper backward, by width and lengths, and where dQ has a kernel of its own.

A narrower head_dim or head_dim_v arrives padded with zeros to a width. Measured, the figures are in
benchmarks/tiles/hopper-backward-h200.json and hopper-backward-apart-h200.json.
"""

from __future__ import annotations

import math

# rows of a tile, buffers of them, whether the next S^T is started early, whether dQ of a step is
# made in the next, buffers of K and V
MainTile = tuple[int, int, bool, bool, int]
# of dQ's own kernel: keys of a tile, buffers of K, of V and of rows
DQTile = tuple[int, int, int, int]

TILES: dict[int, MainTile] = {
    64: (128, 2, False, True, 2),
    128: (64, 3, False, True, 1),
    256: (64, 2, False, False, 1),
}
# the same under a causal mask, by the rows that a tile of keys meets, up to so many: where they are
# few, K and V in time count for more than a third buffer of rows
CAUSAL_TILES: dict[float, dict[int, MainTile]] = {
    512: {**TILES, 64: (64, 4, False, True, 2), 128: (64, 2, False, True, 2)},
    4095: {**TILES, 128: (64, 2, False, True, 2)},
    math.inf: TILES,
}
# where dQ is made apart
DKDV_TILES: dict[int, MainTile] = {
    **TILES,
    64: (128, 3, False, False, 2),
    128: (64, 3, True, False, 2),
}
# with softcap or ALiBi 128 rows would spill
SCALED_TILES: dict[int, MainTile] = {**TILES, 64: (64, 3, True, False, 2)}

# width -> most keys up to which dQ is faster made apart, without a causal mask and with one: the
# sums of dQ move more bytes than the inputs
APART = {128: (512, 1024), 256: (2048, 4096)}
DQ_TILES: dict[int, DQTile] = {64: (128, 3, 3, 2), 128: (128, 2, 1, 2), 256: (32, 3, 3, 1)}
# the same where dQ is faster made apart
FEW_KEYS_DQ_TILES: dict[int, DQTile] = {**DQ_TILES, 128: (64, 3, 3, 2)}


def keys_are_few(width: int, keys: int, *, causal: bool) -> bool:
    """dQ is faster made apart."""
    full_limit, causal_limit = APART.get(width, (0, 0))
    return keys <= (causal_limit if causal else full_limit)


def main_tile(
    width: int, rows_met: int, *, with_sums: bool, scaled: bool, causal: bool
) -> MainTile:
    """Of the kernel of dK and dV.

    Args:
        rows_met: rows that the first tile of keys meets.
        with_sums: it adds dQ up.
        scaled: scores are more than scaled products.
    """
    table = TILES if with_sums else DKDV_TILES
    if scaled:
        table = SCALED_TILES
    elif causal and with_sums:
        table = next(tiles for most, tiles in CAUSAL_TILES.items() if rows_met <= most)
    return table[width]


def dq_tile(width: int, *, few_keys: bool) -> DQTile:
    """Of dQ's own kernel."""
    return (FEW_KEYS_DQ_TILES if few_keys else DQ_TILES)[width]
