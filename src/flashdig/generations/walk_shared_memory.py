"""Shared memory as the walk needs it: wavefronts of an access pattern, bytes of a tile, limits."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

BANKS = 32
BANK_BYTES = 4
LANES = 32

# Largest shared memory of one block, KiB: CUDA C++ Programming Guide, technical specifications per
# compute capability. 48 is what a launch may ask for without opting in to more.
BLOCK_LIMITS_KIB = {"no opt-in": 48, "sm_86, 89, 120": 99, "sm_80": 163, "sm_90, 100": 227}


@dataclass(frozen=True)
class AccessPattern:
    """One shared-memory request of a warp on a row-major tile.

    Attributes:
        accesses: (row, column) of each access served together.
        element_bytes: size of an element of the tile.
        access_bytes: contiguous bytes that each access reads.
    """

    name: str
    accesses: tuple[tuple[int, int], ...]
    element_bytes: int
    access_bytes: int


COLUMN_FLOAT32 = AccessPattern(
    "float32, 32 lanes read a column", tuple((lane, 0) for lane in range(LANES)), 4, 4
)
COLUMN_FLOAT16 = AccessPattern(
    "float16, 32 lanes read a column", tuple((lane, 0) for lane in range(LANES)), 2, 2
)
# ldmatrix fetches an 8 x 8 float16 matrix at a time as 8 rows of 16 bytes
LDMATRIX_FLOAT16 = AccessPattern(
    "float16, ldmatrix reads 8 rows of 16 B", tuple((row, 0) for row in range(8)), 2, 16
)
PATTERNS = (COLUMN_FLOAT32, COLUMN_FLOAT16, LDMATRIX_FLOAT16)
PADDINGS = (0, 1, 2, 8, 16)


def wavefronts(pattern: AccessPattern, columns: int, padding: int) -> int:
    """Passes over shared memory that one request takes: the most different words in one bank.

    The tile has `columns` + `padding` elements a row; bank = byte address / 4 mod 32, and lanes
    that read the same word are served together.
    """
    row_bytes = (columns + padding) * pattern.element_bytes
    words: set[int] = set()
    for row, column in pattern.accesses:
        first = row * row_bytes + column * pattern.element_bytes
        last = first + pattern.access_bytes - 1
        words.update(range(first // BANK_BYTES, last // BANK_BYTES + 1))
    return max(Counter(word % BANKS for word in words).values())


@dataclass(frozen=True)
class TileChoice:
    """Tile of a block and where its parts live; 2-byte q, k, v, S and P.

    `stages` counts the buffers of K and V; S and P take shared memory only if `keeps_scores`.
    """

    tile_m: int
    tile_n: int
    head_dim: int
    stages: int
    keeps_scores: bool

    @property
    def shared_kib(self) -> float:
        """Shared memory of a block in KiB."""
        elements = self.tile_m * self.head_dim + 2 * self.stages * self.tile_n * self.head_dim
        if self.keeps_scores:
            elements += 2 * self.tile_m * self.tile_n
        return elements * 2 / 1024

    @property
    def label(self) -> str:
        where = "shared" if self.keeps_scores else "registers"
        return f"{self.tile_m}x{self.tile_n}x{self.head_dim}, K/V x{self.stages}, S/P {where}"


LARGE_TILE = TileChoice(128, 128, 128, 2, keeps_scores=True)
FITTING_TILE = TileChoice(128, 128, 128, 1, keeps_scores=True)
TILE_CHOICES = (
    TileChoice(64, 64, 64, 1, keeps_scores=True),
    TileChoice(64, 64, 64, 2, keeps_scores=True),
    LARGE_TILE,
    FITTING_TILE,
    TileChoice(128, 128, 128, 2, keeps_scores=False),
    TileChoice(128, 64, 128, 1, keeps_scores=False),
)
