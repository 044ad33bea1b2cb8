"""Occupancy: how many blocks of a kernel one SM holds, what stops more, and whether it matters.

The rules are those of NVIDIA's occupancy calculator: registers are given to warps in whole units
and each scheduler owns its share of them; shared memory is rounded up and, from compute capability
8.0 on, every block pays 1,024 bytes to the system.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flashdig.hardware.arch import Architecture

Kind = Literal["tiles", "streaming"]

# Round trip to memory under load, about; measured latencies of an idle A100 or H100 are 250 to 480
# ns (Luo et al., arXiv 2402.13499). Only the question "does occupancy matter" uses it.
ASSUMED_MEMORY_LATENCY_S = 600e-9
_BYTES_PER_LANE = 16


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks and warps of one SM.

    Attributes:
        blocks_per_sm: resident blocks; 0 when a single one does not fit.
        warps_per_block, max_warps, schedulers: of the block and of the SM.
        limits: "registers", "shared memory", "warps", "blocks" -> blocks that each would allow.
        limiter: the tightest of them, the first in that order on a tie; "grid" when the grid has
            fewer blocks than the device has SMs.
        grid_blocks, sm_count: of the launch, where given.
    """

    blocks_per_sm: int
    warps_per_block: int
    max_warps: int
    schedulers: int
    limits: Mapping[str, int]
    limiter: str
    grid_blocks: int | None = None
    sm_count: int | None = None

    @property
    def active_warps(self) -> int:
        """Warps that an SM with all its blocks holds."""
        return self.blocks_per_sm * self.warps_per_block

    @property
    def fraction(self) -> float:
        """Theoretical occupancy, 0 to 1: active warps over the most that the SM can hold."""
        return self.active_warps / self.max_warps

    @property
    def busy_sms(self) -> int | None:
        """SMs that get at least one block; None when the grid is not known."""
        if self.grid_blocks is None or self.sm_count is None:
            return None
        return min(self.grid_blocks, self.sm_count)

    @property
    def grid_fraction(self) -> float | None:
        """Occupancy averaged over all SMs for this grid, which a profiler's estimate shows."""
        if self.grid_blocks is None or self.sm_count is None:
            return None
        resident = min(self.grid_blocks, self.blocks_per_sm * self.sm_count)
        return resident * self.warps_per_block / (self.sm_count * self.max_warps)

    def matters(self, kind: Kind = "tiles", memory_bytes_per_s_per_sm: float | None = None) -> bool:
        """Whether more resident warps could make the kernel faster.

        A kernel that works on tiles in registers and shared memory needs one warp for each
        scheduler with a second one to hide its waits; data reuse, not warps, makes it fast. A
        streaming kernel must keep bandwidth x latency bytes in flight (Little's law): 16 bytes a
        lane and load, four loads ahead, with `memory_bytes_per_s_per_sm` of the chip.
        """
        if self.blocks_per_sm == 0 or self.limiter == "grid":
            return True
        if kind == "tiles":
            return self.active_warps < 2 * self.schedulers
        if memory_bytes_per_s_per_sm is None:
            return self.fraction < 0.5
        in_flight = memory_bytes_per_s_per_sm * ASSUMED_MEMORY_LATENCY_S
        return self.active_warps * 32 * _BYTES_PER_LANE * 4 < in_flight

    def explain(self, kind: Kind = "tiles") -> str:
        """One sentence: the number, the limiter, whether it matters."""
        if self.blocks_per_sm == 0:
            tight = ", ".join(name for name, blocks in self.limits.items() if blocks == 0)
            return f"one block does not fit on an SM: {tight}"
        text = (
            f"{self.blocks_per_sm} block{'s' if self.blocks_per_sm > 1 else ''} = "
            f"{self.active_warps} of {self.max_warps} warps = {100 * self.fraction:.4g} %, "
        )
        if self.limiter == "grid":
            return (
                f"{text}but the grid is too small: {self.grid_blocks} blocks for "
                f"{self.sm_count} SMs, {self.busy_sms} of them busy"
            )
        text += f"limited by {self.limiter}"
        if self.matters(kind):
            return text + "; more warps could help"
        return text + "; this does not matter: every scheduler has warps to switch between"


def occupancy(
    arch: Architecture,
    *,
    threads_per_block: int,
    registers_per_thread: int = 0,
    shared_bytes_per_block: int = 0,
    grid_blocks: int | None = None,
    sm_count: int | None = None,
) -> Occupancy:
    """Occupancy of a kernel on one SM of `arch`.

    Args:
        threads_per_block: rounded up to whole warps.
        registers_per_thread, shared_bytes_per_block: as the compiler or a profiler reports them
            (shared memory: static and dynamic, without the system's 1,024 bytes).
        grid_blocks, sm_count: blocks launched and SMs of the device, to recognise a grid that is
            too small. Give both or neither.

    Raises ValueError for a block that no launch could have.
    """
    if not 1 <= threads_per_block <= 1024:
        raise ValueError(f"threads_per_block must be 1 to 1024, got {threads_per_block}")
    if not 0 <= registers_per_thread <= arch.max_registers_per_thread:
        raise ValueError(
            f"registers_per_thread must be 0 to {arch.max_registers_per_thread}, "
            f"got {registers_per_thread}"
        )
    if shared_bytes_per_block < 0:
        raise ValueError(f"shared_bytes_per_block must be >= 0, got {shared_bytes_per_block}")
    if (grid_blocks is None) != (sm_count is None):
        raise ValueError("give both grid_blocks and sm_count, or neither")

    warps = math.ceil(threads_per_block / arch.warp_size)
    limits = {
        "registers": _blocks_by_registers(arch, registers_per_thread, warps),
        "shared memory": _blocks_by_shared_memory(arch, shared_bytes_per_block),
        "warps": arch.max_warps // warps,
        "blocks": arch.max_warps if arch.max_blocks is None else arch.max_blocks,
    }
    blocks = min(limits.values())
    limiter = next(name for name, allowed in limits.items() if allowed == blocks)
    if grid_blocks is not None and sm_count is not None and blocks > 0 and grid_blocks < sm_count:
        limiter = "grid"
    return Occupancy(
        blocks_per_sm=blocks,
        warps_per_block=warps,
        max_warps=arch.max_warps,
        schedulers=arch.schedulers,
        limits=limits,
        limiter=limiter,
        grid_blocks=grid_blocks,
        sm_count=sm_count,
    )


def _blocks_by_registers(arch: Architecture, registers_per_thread: int, warps: int) -> int:
    if registers_per_thread == 0:
        return arch.max_warps // warps
    per_scheduler = arch.registers // arch.schedulers
    warps_per_scheduler = per_scheduler // arch.registers_per_warp(registers_per_thread)
    return warps_per_scheduler * arch.schedulers // warps


def _blocks_by_shared_memory(arch: Architecture, shared_bytes: int) -> int:
    if shared_bytes > arch.shared_bytes_per_block:
        return 0
    taken = shared_bytes + arch.shared_bytes_reserved
    taken = math.ceil(taken / arch.shared_unit) * arch.shared_unit
    return arch.shared_bytes // taken if taken else arch.max_warps
