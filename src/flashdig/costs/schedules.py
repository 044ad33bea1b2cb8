"""Schedules: what a generation does at the same time and what it does in turn, as data.

Each names the tile, the matrix instruction and the overlap; `predict.py` turns them into time.
"""

from __future__ import annotations

from dataclasses import dataclass
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
        overlap: "none": the warps of a block multiply together, then do softmax together. "blocks":
            two resident blocks, independent of each other, fill each other's gaps in the softmax.
            "ping-pong": one group of warps multiplies while the other does softmax.
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

    @property
    def blocks_per_sm(self) -> int:
        """Resident blocks: four warps with up to 255 registers a thread fit twice on an SM."""
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
            directions=ALL,
            triton=True,
        ),
        Schedule(
            "v2_transposed",
            "FlashAttention-2 with K transposed beforehand",
            "queries outside",
            triton=True,
        ),
        Schedule(
            "sdpa_efficient",
            "SDPA, memory-efficient backend",
            "queries outside",
            products="mma.sync",
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
            overlap="ping-pong",
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
        return Tile(64, 64, 4)
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
    """The unit that multiplies: FMA units for IEEE float32 and for Triton on 7.5."""
    if dtype == "float32" or (schedule.triton and arch.key == "7.5"):
        return "fma"
    return schedule.products


def iteration_cycles(
    schedule: Schedule,
    cycles: IterationCycles,
    *,
    matmul_fraction: float,
    exp2_fraction: float,
    backward: bool = False,
) -> float:
    """Cycles of one iteration under a schedule, at the rates that are reached in practice.

    One warp's softmax cannot overlap with itself: its exponentials and its other instructions add
    up. Operands come from shared memory while the products run, or before them where
    `waits_for_operands`. The chain of the backward (S, P, dP, dS, then three products) leaves
    nothing to ping-pong with.
    """
    matmul = cycles.matmul / matmul_fraction
    exp2 = 0.0 if cycles.exp2 is None else cycles.exp2 / exp2_fraction
    one_warp_softmax = exp2 + cycles.issue - cycles.exp2_issue
    if schedule.overlap == "ping-pong" and not backward:
        return max(matmul, cycles.shared, one_warp_softmax)
    products = matmul + cycles.shared if cycles.waits_for_operands else max(matmul, cycles.shared)
    if schedule.overlap == "blocks":
        return products + max(exp2, cycles.fma, cycles.issue)
    return products + one_warp_softmax
