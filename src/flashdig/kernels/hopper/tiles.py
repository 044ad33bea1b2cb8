"""Which tile the Hopper forward takes: by widths, lengths and causality, no tuning at run time.

Measured on an H200 for (64, 64), (128, 128) and (256, 256): `benchmarks/tiles/hopper-h200.json`;
the other pairs were only compared with a few others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashdig.kernels.hopper.descriptors import padded


@dataclass(frozen=True)
class Tile:
    """How a block walks.

    Attributes:
        consumers: warpgroups of 64 query rows.
        block_n: keys of a tile.
        stages: buffers of K, and of V where `value_stages` is 0.
        registers: of a consumer's thread.
        q_buffers: tiles of Q that are held; with two, the next one's first scores are computed
            while this one's output is written.
        own_output: the output has shared memory of its own, else it goes through Q's.
        turns: the consumers take turns at issuing their products.
        own_walk: a consumer leaves out the block's tiles of keys that its own rows do not see.
        value_stages: buffers of V: keys are freed earlier in a step than values.
        joint: keys of a step and values of the one before are freed at once, with as many buffers.
            A warpgroup meets before and after it frees something.
    """

    consumers: int
    block_n: int
    stages: int
    registers: int
    q_buffers: int = 1
    own_output: bool = False
    turns: bool = False
    own_walk: bool = True
    value_stages: int = 0
    joint: bool = False


# 128 keys of a block's 128 rows are seen by both consumers, so none has a walk of its own
_TWO_64 = Tile(2, 128, 4, 240, q_buffers=2, own_output=True, own_walk=False, joint=True)
_TWO_TURNS_64 = replace(_TWO_64, turns=True)
_THREE_64 = Tile(3, 64, 8, 160, q_buffers=2, own_output=True, joint=True)
_TURNS_64 = replace(_THREE_64, turns=True)
_TWO_96 = Tile(2, 128, 2, 240, own_output=True, own_walk=False)
_TURNS_96 = Tile(3, 64, 6, 160, own_output=True, turns=True)
_TWO_128 = Tile(2, 64, 4, 240, q_buffers=2, own_output=True)
_WIDE_128 = Tile(2, 128, 2, 240, own_output=True)
_THREE_128 = Tile(3, 64, 4, 160, own_output=True)
_BOTH_192_128 = Tile(2, 128, 2, 240)
_BOTH_192 = Tile(2, 64, 3, 240, turns=True, value_stages=4)
_BOTH_256 = Tile(2, 64, 2, 240, value_stages=3)

# (head_dim, head_dim_v), padded, and causality -> (query rows from which on, tile), the most rows
# first; any other pair takes that of its wider one. Tiles of 192 rows share their keys best; where
# a call may not have three consumers, the next entry is its
TILES: dict[tuple[int, int], dict[bool, tuple[tuple[int, Tile], ...]]] = {
    (64, 64): {
        False: ((1536, _TURNS_64), (0, _TWO_TURNS_64)),
        True: ((768, _THREE_64), (0, _TWO_64)),
    },
    (96, 96): dict.fromkeys((False, True), ((256, _TURNS_96), (0, _TWO_96))),
    (128, 128): {
        False: ((1536, _THREE_128), (1536, _WIDE_128), (256, _THREE_128), (0, _TWO_128)),
        True: ((1536, _THREE_128), (1536, _WIDE_128), (768, _THREE_128), (0, _TWO_128)),
    },
    (192, 128): dict.fromkeys((False, True), ((0, _BOTH_192_128),)),
    (192, 192): dict.fromkeys((False, True), ((0, _BOTH_192),)),
    (256, 256): dict.fromkeys((False, True), ((0, _BOTH_256),)),
}


def tile_of(
    head_dim: int,
    head_dim_v: int,
    rows: int = 0,
    causal: bool = False,
    *,
    softcap: bool = False,
    alibi: bool = False,
) -> Tile:
    """The tile of a pair of widths, of at most 256 each, for so many query rows of a sequence."""
    return next(
        tile
        for begin, tile in _steps(head_dim, head_dim_v, causal, softcap, alibi)
        if rows >= begin
    )


def tiles_for(
    head_dim: int, head_dim_v: int, *, causal: bool, softcap: bool, alibi: bool
) -> list[Tile]:
    """All that `tile_of` may choose from, those for most rows first."""
    steps = _steps(head_dim, head_dim_v, causal, softcap, alibi)
    return list(dict.fromkeys(tile for _, tile in steps))


def _steps(
    head_dim: int, head_dim_v: int, causal: bool, softcap: bool, alibi: bool
) -> list[tuple[int, Tile]]:
    """With ALiBi, and with softcap at head_dim 64, three consumers have too few registers."""
    widths = padded(head_dim), padded(head_dim_v)
    known = widths if widths in TILES else (max(widths), max(widths))
    two_only = alibi or (softcap and known == (64, 64))
    found = [s for s in TILES[known][causal] if not (two_only and s[1].consumers > 2)]
    if known != widths:  # the output may need memory of its own
        found = [(begin, replace(tile, value_stages=0)) for begin, tile in found]
    return found
