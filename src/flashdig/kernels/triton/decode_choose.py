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
# multiprocessors in the interpreter, and for tensors without memory
INTERPRETED = 4
# keys of a split that no batch mate changes: a result's bits depend on it
INVARIANT_SPLIT = 512
MAX_SPLITS = 256
# tiles of rows for each multiprocessor from which on programs share them
CROWD = 2
# keys that a sequence has room for from which on lengths are taken to differ much
LONG_KEYS = 16 * 1024
# tiles of rows that a plan is made for: each of its programs looks at all of them
MAX_PLANNED_SLOTS = 2048
# rows whose parts a program joins at most, where lengths differ
JOINED_ROWS = 8
# pieces for each multiprocessor, where lengths differ
PIECES = 8
# whether the last pieces are shorter than the first
TAPER = True
# rows beyond one token of each sequence from which on packed queries are taken to hold a chunk of a
# prompt
CHUNK_ROWS = 200
# rows of a sequence from which on all its keys may be met at once: fewer want them cut into pieces
LISTED_ROWS = 64
# tiles of keys on their way in a chunk's program
CHUNK_BUFFERS = 2
# bytes that the parts of one launch may take
PART_BYTES = 512 * 2**20


@dataclass(frozen=True)
class DecodeTile:
    """How a program of `flashdig_decode` walks its keys.

    Attributes:
        block_m: rows, (query token, head of the group) pairs.
        block_n: keys.
        num_warps, num_stages: of the block, and tiles in flight.
        resident: blocks that a multiprocessor holds at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int = 1

    @property
    def registers(self) -> int:
        """Of a thread, at most, for that many blocks."""
        return min(255, 65536 // (32 * self.num_warps * self.resident) // 8 * 8)


@functools.cache
def choose_decode_tile(
    arch: str,
    element_bytes: int,
    cache_bytes: int,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    group_size: int,
    *,
    paged: bool = False,
    crowded: bool = False,
    long: bool = False,
    batch_invariant: bool = False,
) -> DecodeTile:
    """The tile for a cache.

    Few programs get a multiprocessor each and keep 128 KB of keys on their way (through pages two
    programs hide more than one); where programs are many, small ones share it. Measured on an H200
    for head_dim 128 in bfloat16.

    Args:
        arch: a key of `SHARED_BYTES`.
        element_bytes, cache_bytes: of an element of q, and of the cache.
        rows: query tokens times heads of a group, of the longest sequence.
        paged: keys are found through a page table, whose loads take two stages.
        crowded: there are at least `CROWD` tiles of rows for each multiprocessor.
        long: a sequence has room for `LONG_KEYS` or more.
        batch_invariant: the tile must not depend on how many tokens or sequences come together.

    Raises ValueError for an unknown `arch`.
    """
    if arch not in SHARED_BYTES:
        raise ValueError(f"arch must be one of {', '.join(SHARED_BYTES)}, got {arch!r}")
    shared = SHARED_BYTES[arch] - 4096  # scratch of reductions, and what the driver keeps
    block_m = block_rows(arch, element_bytes, cache_bytes, head_dim, head_dim_v, rows, group_size,
                         batch_invariant=batch_invariant)  # fmt: skip
    width = sum(split_dim(head_dim)) + block_of(head_dim_v)  # padded, as in shared memory
    row_bytes = width * cache_bytes
    # tiles of an fp8 cache lie in shared memory in q's dtype as well
    converted = width * element_bytes if cache_bytes != element_bytes else 0
    crowded, long = crowded and not batch_invariant, long and not batch_invariant
    small = crowded or block_m >= 64
    two = paged and not small and not batch_invariant
    stage_limit = (32 if small or two else 64) * 1024
    if max(head_dim, head_dim_v) > 256 and shared > 160 * 1024:
        stage_limit = 72 * 1024  # 32 keys of latent attention
    queries = block_m * head_dim * element_bytes
    block_n = 64 if block_m >= 64 else 128
    while block_n > 16 and (
        block_n * row_bytes > stage_limit
        or queries + block_n * (2 * row_bytes + converted + block_m * element_bytes) > shared
    ):
        block_n //= 2
    fixed = queries + block_n * (converted + block_m * element_bytes)  # with the probabilities
    stage = block_n * row_bytes
    buffers = max(2, min(4, (64 if two else 128) * 1024 // stage))
    if small:
        # fewer but longer programs suffer less where keys come in pieces
        buffers = 2 if block_m >= 64 or (paged and long) else 1
    buffers = max(1, min(buffers, (shared - fixed) // stage))
    widest = max(head_dim, head_dim_v)
    warps = 8 if (block_m >= 32 and widest > 128) or (converted and block_n == 128) else 4
    # what registers allow
    most = 1 if warps == 8 else 2
    if warps == 4 and block_m == 16 and widest <= 128 and element_bytes == cache_bytes == 2:
        most = 2 if two else 4
    resident = max(1, min(most, shared // (fixed + buffers * stage + 4096)))
    return DecodeTile(block_m, block_n, warps, buffers + 1 + 2 * int(paged), resident)


@functools.cache
def choose_chunk_tile(
    arch: str,
    element_bytes: int,
    cache_bytes: int,
    head_dim: int,
    head_dim_v: int,
    *,
    paged: bool = False,
) -> DecodeTile:
    """The tile of a prompt's chunk in a launch of its own; arguments as of `choose_decode_tile`.

    On Hopper two warp groups of 64 rows read each key once for 128.
    """
    sizes = (arch, element_bytes, cache_bytes, head_dim, head_dim_v)
    tile = choose_decode_tile(*sizes, 1024, 1, paged=paged)
    if arch == "sm_90" and tile.block_m == 64 and max(head_dim, head_dim_v) <= 128:
        return DecodeTile(128, 64, 8, CHUNK_BUFFERS + 1 + 2 * int(paged))
    return tile


def block_rows(
    arch: str,
    element_bytes: int,
    cache_bytes: int,
    head_dim: int,
    head_dim_v: int,
    rows: int,
    group_size: int,
    *,
    batch_invariant: bool,
) -> int:
    """Rows of a tile: as few as hold a sequence's, 16 at least, up to what registers hold."""
    widest = max(head_dim, head_dim_v)
    odd = bool(head_dim & (head_dim - 1) or head_dim_v & (head_dim_v - 1))
    most = 64
    if element_bytes == 4:
        most = 16 if widest > 128 else 32
    elif widest > 256 and SHARED_BYTES[arch] < 100 * 1024:
        most = 16
    elif widest > 128 or odd or cache_bytes != element_bytes:
        # 64 rows are multiplied by warp groups on Hopper: with two of them, which wide heads would
        # need, Triton 3.6 lays out 128 rows, and an fp8 cache of head_dim 96 gave wrong results
        most = 32
    if batch_invariant:
        rows = most if element_bytes < 4 else group_size
    block_m = 16
    while block_m < min(rows, most):
        block_m *= 2
    return block_m


@functools.cache
def choose_splits(tiles: int, keys: int, block_n: int, multiprocessors: int) -> int:
    """Parts that the keys of each tile of rows are split into.

    The time is modelled as rounds of one program a multiprocessor, each as long as its keys and a
    start; programs that share a multiprocessor share its bandwidth. Joining parts costs a launch.

    Args:
        tiles: tiles of rows, over all sequences and KV heads.
        keys: what a sequence has room for.
    """
    key_tiles = max(1, -(-keys // block_n))
    start, join, part = 6.0, 3.0, 0.02  # in the time of one tile of keys

    def cost(splits: int) -> float:
        rounds = -(-tiles * splits // multiprocessors)
        time = rounds * (-(-key_tiles // splits) + start)
        return time + (join + part * splits if splits > 1 else 0.0)

    most = max(1, min(MAX_SPLITS, key_tiles, 4 * multiprocessors // max(tiles, 1)))
    return min(range(1, most + 1), key=lambda splits: (cost(splits), splits))


def block_of(head_dim: int) -> int:
    """A tile's width: the power of two that holds head_dim, at least 16 (a matrix product)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def split_dim(head_dim: int) -> tuple[int, int]:
    """Widths of one or two tiles that hold head_dim with little padding: 576 is 512 + 64.

    The second is 0 where the first holds all.
    """
    first = max(16, 1 << (head_dim.bit_length() - 1))
    if first >= head_dim:
        return first, 0
    rest = block_of(head_dim - first)
    return (2 * first, 0) if rest == first else (first, rest)
