"""Tiles and numbers of splits for attention over a cache: pure functions of sizes and the chip.

Decode reads each key once and computes little, so a tile is chosen by bytes in flight: enough
blocks with enough stages each that a multiprocessor always waits for tens of kilobytes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

# bytes of shared memory that a block may have (CUDA C++ programming guide, compute capabilities)
SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
# keys of a split that no batch mate changes: a result's bits depend on it
INVARIANT_SPLIT = 512
MAX_SPLITS = 256
# every program sums the lengths of all sequences
MAX_BALANCED_BATCH = 1024
# bytes that the parts of one launch may take
PART_BYTES = 512 * 2**20


@dataclass(frozen=True)
class DecodeTile:
    """How a program of `flashdig_decode` walks its keys.

    Attributes:
        block_m: rows, (query token, head of the group) pairs.
        block_n: keys.
        num_warps, num_stages: of the block, and tiles in flight.
        resident: blocks that a multiprocessor holds at once, as far as shared memory decides.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1


@functools.cache
def choose_decode_tile(
    arch: str,
    element_bytes: int,
    cache_bytes: int,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    group_size: int,
    batch_invariant: bool,
) -> DecodeTile:
    """The tile for a cache.

    Args:
        arch: a key of `SHARED_BYTES`.
        element_bytes, cache_bytes: of an element of q, and of the cache.
        rows: query tokens times heads of a group, of the longest sequence.
        batch_invariant: the tile must not depend on how many tokens come together.

    Raises ValueError for an unknown `arch`.
    """
    if arch not in SHARED_BYTES:
        raise ValueError(f"arch must be one of {', '.join(SHARED_BYTES)}, got {arch!r}")
    wide = max(head_dim, head_dim_v) > 256
    most = 64
    if element_bytes == 4:
        most = 16 if max(head_dim, head_dim_v) > 128 else 32
    elif wide and SHARED_BYTES[arch] < 100 * 1024:
        most = 16
    if batch_invariant:
        rows = most if element_bytes < 4 else group_size
    block_m = 16
    while block_m < min(rows, most):
        block_m *= 2
    # converted tiles of an fp8 cache lie in shared memory in q's dtype as well
    row_bytes = (head_dim + head_dim_v) * max(cache_bytes, element_bytes)
    block_n = 128
    while block_n > 16 and block_n * row_bytes > 32 * 1024:
        block_n //= 2
    if wide and SHARED_BYTES[arch] > 160 * 1024:
        block_n = 32
    fixed = block_m * head_dim * element_bytes + 2048
    stage = block_n * row_bytes
    most_stages = 4 if block_m < 64 else 3
    num_stages = max(1, min(most_stages, (SHARED_BYTES[arch] - fixed) // stage - 1))
    while num_stages > 2 and 2 * (fixed + num_stages * stage) > SHARED_BYTES[arch]:
        num_stages -= 1
    resident = max(1, min(4, SHARED_BYTES[arch] // (fixed + num_stages * stage)))
    return DecodeTile(block_m, block_n, 8 if wide and block_m == 64 else 4, num_stages, resident)


@functools.cache
def choose_splits(tiles: int, keys: int, block_n: int, multiprocessors: int, resident: int) -> int:
    """Parts that the keys of each tile of rows are split into.

    The time is modelled as waves of blocks, each as long as its keys and a start; more parts cost
    the joining of them.

    Args:
        tiles: tiles of rows, over all sequences and KV heads.
        keys: what a sequence has room for.
        resident: blocks that a multiprocessor holds at once.
    """
    at_once = multiprocessors * resident
    key_tiles = max(1, -(-keys // block_n))
    start, join, part = 2.0, 3.0, 0.02  # in the time of one tile of keys

    def cost(splits: int) -> float:
        waves = -(-tiles * splits // at_once)
        time = waves * (-(-key_tiles // splits) + start)
        return time + (join + part * splits if splits > 1 else 0.0)

    most = max(1, min(MAX_SPLITS, key_tiles, 4 * at_once // max(tiles, 1)))
    return min(range(1, most + 1), key=lambda splits: (cost(splits), splits))
