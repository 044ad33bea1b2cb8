"""Schedules: what a generation does at the same time and what it does in turn, as data.

Each names the tile, the matrix instruction and the overlap; `predict.py` turns them into time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flashdig.costs.pipes import IterationCycles, Path
from flashdig.hardware.arch import Architecture
from flashdig.problem import AttentionProblem

Loops = Literal["unfused", "keys outside", "queries outside"]
Overlap = Literal["none", "blocks", "ping-pong"]
Direction = Literal["forward", "backward", "decode"]

FORWARD: tuple[Direction, ...] = ("forward",)
FORWARD_BACKWARD: tuple[Direction, ...] = ("forward", "backward")
ALL: tuple[Direction, ...] = ("forward", "backward", "decode")


HALVES = ("float16", "bfloat16")
FLOATS = ("float32", *HALVES)


@dataclass(frozen=True)
class Tile:
    """block_m queries by block_n keys, shared by `warps` warps."""

    block_m: int
    block_n: int
    warps: int


@dataclass(frozen=True)
class Schedule:
    """How one generation runs.

    Attributes:
        name: as in the ladder and on the command line.
        loops: "unfused" writes scores to memory; the other two are the loop orders of the first
            and the second FlashAttention.
        products: the matrix instruction.
        overlap: "blocks": two or more blocks (or groups of warps) are resident and independent of
            each other, and fill each other's gaps in the softmax. "ping-pong": one group of warps
            multiplies while the other does softmax. "none": neither; warps multiply together, then
            do softmax together, which is also what "blocks" comes to with one block.
        warps_per_sm: that the kernel's launch bounds keep resident, by element size; elsewhere two
            blocks of four warps with up to 255 registers a thread, or one larger block.
        matmul_passes: products of tfloat32 that stand for one of float32; 0 where float32 is
            multiplied by FMA units or, if allowed, in one pass of tfloat32.
        triton: compiled by Triton, which uses no tensor cores on compute capability 7.5.
        only: compute capabilities that it exists for; empty for all.
        dtypes: of the input that it takes.
    """

    name: str
    title: str
    loops: Loops
    products: Path = "fastest"
    overlap: Overlap = "none"
    directions: tuple[Direction, ...] = FORWARD
    triton: bool = False
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = FLOATS
    warps_per_sm: Mapping[int, int] = field(default_factory=dict)
    matmul_passes: int = 0

    def blocks_per_sm(self, tile: Tile, element_bytes: int) -> int:
        """Resident blocks where nothing is known of the compiled kernel."""
        if element_bytes in self.warps_per_sm:
            return max(1, self.warps_per_sm[element_bytes] // tile.warps)
        return 2 if self.overlap == "blocks" or self.triton else 1

    @property
    def skips_masked_tiles(self) -> bool:
        return self.loops == "queries outside"


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("naive", "five operations, mask out of place", "unfused"),
        Schedule("inplace", "five operations, mask in place", "unfused"),
        Schedule("sdpa_math", "SDPA, math backend", "unfused"),
        Schedule("online_softmax", "online softmax over scores in memory", "unfused"),
        Schedule("v1", "FlashAttention: keys outside", "keys outside", triton=True),
        Schedule(
            "v2",
            "FlashAttention-2: queries outside",
            "queries outside",
            overlap="blocks",
            directions=ALL,
            triton=True,
        ),
        Schedule(
            "v2_transposed",
            "FlashAttention-2 with K transposed beforehand",
            "queries outside",
            overlap="blocks",
            triton=True,
        ),
        Schedule(
            "sdpa_efficient",
            "SDPA, memory-efficient backend",
            "queries outside",
            products="mma.sync",
            overlap="blocks",
            # getWarpsPerSmFw of its kernel_forward.h, and OpMultiplyAddFastF32: three products of
            # tfloat32 for one of float32, whatever torch allows (gemm_kernel_utils.h)
            warps_per_sm={2: 16, 4: 12},
            matmul_passes=3,
        ),
        Schedule(
            "sdpa_flash",
            "SDPA, flash backend: FlashAttention-2 in CUDA",
            "queries outside",
            products="mma.sync",
            overlap="blocks",
            directions=FORWARD_BACKWARD,
            dtypes=HALVES,
        ),
        Schedule(
            "sdpa_cudnn",
            "SDPA, cuDNN backend",
            "queries outside",
            overlap="blocks",
            directions=FORWARD_BACKWARD,
            dtypes=HALVES,
        ),
        Schedule(
            "v3",
            "FlashAttention-3: asynchronous Hopper",
            "queries outside",
            overlap="ping-pong",
            directions=FORWARD_BACKWARD,
            only=("9.0",),
            dtypes=HALVES,
        ),
    )
}


def tile_of(schedule: Schedule, problem: AttentionProblem) -> Tile:
    """The tile that a generation takes for a problem.

    The Triton exhibits take one small tile, the same for all; the CUDA kernels those of their
    sources (FlashAttention 2.7, `flash_fwd_launch_template.h`; FlashAttention-3, `tile_size.h`,
    rounded to powers of two in keys).
    """
    if schedule.triton:
        return exhibit_tile(problem.head_dim, problem.element_bytes)
    if schedule.name == "sdpa_efficient":
        # its key tile is as wide as head_dim up to 128; a warp has 32 x 32 of the scores
        if problem.head_dim <= 64:
            return Tile(64, 64, 4)
        return Tile(64, 128, 8) if problem.head_dim <= 128 else Tile(32, 128, 4)
    if schedule.name == "sdpa_flash":
        if problem.head_dim <= 64:
            return Tile(128, 128, 4)
        return Tile(128, 64, 4) if problem.head_dim <= 128 else Tile(128, 64, 8)
    return Tile(128, 128, 8) if problem.head_dim <= 128 else Tile(128, 64, 8)


def exhibit_tile(head_dim: int, element_bytes: int) -> Tile:
    """The tile of the Triton exhibits: 32 x 32 in float32, as in the Triton article, or 64 x 64."""
    if element_bytes == 4:
        return Tile(32, 32, 4)
    return Tile(64, 64, 4) if head_dim <= 128 else Tile(64, 32, 8)


def shared_tile_bytes(
    block_m: int,
    block_n: int,
    head_dim: int,
    element_bytes: int,
    *,
    kv_buffers: int = 1,
    keeps_output: bool = False,
    keeps_statistics: bool = False,
) -> int:
    """Shared memory of a block that keeps Q, K, V and the scores there (head_dim_v = head_dim).

    Args:
        kv_buffers: 2 to load the next K and V while working on these.
        keeps_output: O as well, in the input's type.
        keeps_statistics: a row maximum and a row sum, as wide as the elements.
    """
    rows = block_m * head_dim * (2 if keeps_output else 1)
    elements = rows + 2 * kv_buffers * block_n * head_dim + block_m * block_n
    if keeps_statistics:
        elements += 2 * block_m
    return elements * element_bytes


def product_path(schedule: Schedule, arch: Architecture, dtype: str) -> Path:
    """The unit that multiplies: FMA units for IEEE float32 and for Triton on 7.5.

    The exhibits' float32 tiles have 32 rows, fewer than the newest instructions multiply, so their
    tfloat32 products are `mma.sync` everywhere.
    """
    if dtype == "float32" or (schedule.triton and arch.key == "7.5"):
        return "fma"
    if schedule.triton and dtype == "tfloat32" and arch.mma_rows is not None:
        return "mma.sync"
    return schedule.products


def iteration_cycles(
    schedule: Schedule,
    cycles: IterationCycles,
    *,
    matmul_fraction: float,
    exp2_fraction: float,
    resident_blocks: int = 2,
    backward: bool = False,
) -> float:
    """Cycles of one iteration under a schedule, at the rates that are reached in practice.

    One warp's softmax cannot overlap with itself: its exponentials and its other instructions add
    up, unless another resident block fills the gaps. Operands come from shared memory while the
    products run, or before them where `waits_for_operands`; copies into shared memory run beside
    everything and only take its bandwidth. CUDA-core products are instructions like any other, so
    with several blocks only the pipes count. The chain of the backward (S, P, dP, dS, then three
    products) leaves nothing to ping-pong with.
    """
    matmul = cycles.matmul / matmul_fraction
    exp2 = 0.0 if cycles.exp2 is None else cycles.exp2 / exp2_fraction
    one_warp_softmax = exp2 + cycles.issue - cycles.exp2_issue
    fetched = cycles.shared + cycles.copies
    if schedule.overlap == "ping-pong" and not backward:
        return max(matmul, fetched, one_warp_softmax)
    overlaps = schedule.overlap == "blocks" and resident_blocks > 1
    softmax = max(exp2, cycles.fma, cycles.issue) if overlaps else one_warp_softmax
    if cycles.path == "fma" and overlaps:
        return max(matmul + softmax, fetched)
    products = matmul + cycles.shared if cycles.waits_for_operands else matmul
    return max(products, fetched) + softmax
