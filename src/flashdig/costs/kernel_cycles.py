"""What is known of a generation's own kernel, put into the cycles of one iteration.

The Triton exhibits are known as compiled; of SDPA's memory-efficient backend the source is known
and the rest was measured; the others get the general counts of `pipes.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashdig.costs.compiled_loops import COMPILED_FOR, compiled_loop
from flashdig.costs.pipes import IterationCycles, inner_iteration
from flashdig.costs.prediction import Question
from flashdig.costs.schedules import Tile
from flashdig.costs.shared_memory import cutlass_operands, fma_wavefronts, wavefront_cycles
from flashdig.problem import DTYPE_BYTES

# What is left of the memory-efficient backend's time on an H200, 2026-11-29, when products and
# shared memory are taken off, taken as instructions: 28 a score at head_dim 64, 30 at 128, where a
# hand-written softmax takes 5. Its row maxima go through atomics and barriers.
_CUTLASS_INSTRUCTIONS_A_SCORE = 29.0
# The same for float32, per operand element that a warp loads: split into two tfloat32 numbers,
# sums of the three products kept apart (5 would do for the split alone).
_SPLIT_INSTRUCTIONS_AN_ELEMENT = 11.0


@dataclass(frozen=True)
class KernelCycles:
    """One iteration of a kernel, and the blocks of it that an SM holds at the same time.

    Attributes:
        instructions: of one warp in one iteration.
        resident_blocks: by registers and shared memory, and no more than the grid gives an SM.
        occupancy: warps resident on average over the most that an SM holds; None unless the kernel
            is known as compiled.
        notes: where the figures of this kernel come from, in words.
    """

    cycles: IterationCycles
    instructions: float
    resident_blocks: int
    occupancy: float | None = None
    notes: tuple[str, ...] = ()


def kernel_cycles(question: Question, tile: Tile, programs: int) -> KernelCycles:
    """Cycles, instructions and residency for a forward or backward of `programs` blocks."""
    problem, arch, schedule = question.problem, question.device.arch, question.schedule
    backward = question.direction == "backward"
    sizes = {
        "tile_m": tile.block_m,
        "tile_n": tile.block_n,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "warps": tile.warps,
    }
    exhibit = schedule.triton and not backward
    loop = compiled_loop(arch, schedule.name, question.dtype, problem.head_dim) if exhibit else None
    blocks = schedule.blocks_per_sm(tile, problem.element_bytes)
    shared = issue = None
    notes = []
    if exhibit:
        if loop is not None:
            notes.append(
                f"compiled for {COMPILED_FOR} with Triton 3.6.0: the loop has "
                f"{loop.instructions(problem.causal)} instructions a warp, "
                f"{loop.blocks_per_sm(arch, tile.warps, problem.causal)} blocks fit on an SM"
            )
            blocks = loop.blocks_per_sm(arch, tile.warps, problem.causal)
            issue = loop.instructions(problem.causal) * tile.warps / arch.issue_per_clock
        if question.path == "fma":
            transposed = schedule.name == "v2_transposed"
            wavefronts = fma_wavefronts(**sizes, k_is_transposed=transposed)
            shared = wavefront_cycles(arch, wavefronts)
            # the products are among the instructions, but are counted as products
            products = tile.block_m * tile.block_n * (problem.head_dim + problem.head_dim_v)
            if issue is not None:
                issue -= products / arch.warp_size / arch.issue_per_clock
    elif schedule.name == "sdpa_efficient" and not backward:
        shared, issue = _cutlass(question, tile)
        notes.append(
            f"measured on an H200, 2026-11-29: {_CUTLASS_INSTRUCTIONS_A_SCORE:.0f} instructions a "
            "score in this kernel's softmax, most of them unexplained"
        )
        if question.matmul_passes > 1:
            notes.append("float32 is three products of tfloat32 here, whatever torch allows")
    cycles = inner_iteration(
        arch,
        **sizes,
        dtype=question.dtype,
        path=question.path,
        backward=backward,
        matmul_flop_per_clock=_flop_per_clock(question),
        matmul_passes=question.matmul_passes,
        shared_cycles=shared,
        issue_cycles=issue,
        # the memory-efficient backend's are among its operands
        copies_tiles=not backward
        and schedule.loops == "queries outside"
        and schedule.name != "sdpa_efficient",
    )
    instructions = cycles.issue * arch.issue_per_clock / tile.warps
    grid_share = max(1, math.ceil(programs / question.device.sm_count))
    occupancy = None
    if loop is not None:
        resident = min(blocks, programs / question.device.sm_count)
        occupancy = resident * tile.warps / arch.max_warps
    return KernelCycles(cycles, instructions, min(blocks, grid_share), occupancy, tuple(notes))


def _cutlass(question: Question, tile: Tile) -> tuple[float, float]:
    """(shared-memory cycles, issue cycles) of the memory-efficient backend."""
    problem, arch = question.problem, question.device.arch
    elements = cutlass_operands(tile.block_m, tile.block_n, problem.head_dim, problem.head_dim_v)
    size = DTYPE_BYTES["float32" if question.dtype == "tfloat32" else question.dtype]
    instructions = tile.block_m * tile.block_n * _CUTLASS_INSTRUCTIONS_A_SCORE
    if question.matmul_passes > 1:
        written = tile.block_m * (problem.head_dim + tile.block_n)
        written += tile.block_n * (problem.head_dim + problem.head_dim_v)
        instructions += (elements - written) * _SPLIT_INSTRUCTIONS_AN_ELEMENT
    lanes = arch.warp_size * arch.issue_per_clock
    return elements * size / arch.shared_bytes_per_clock, instructions / lanes


def _flop_per_clock(question: Question) -> float | None:
    """Of one SM of this chip, from its peak; None leaves the architecture's rate."""
    device, dtype = question.device, question.dtype
    peak = device.flop_per_s(dtype)
    if question.path == "fma" or peak is None:
        return None
    return peak / device.sm_count / device.peak_clocks_hz.get(dtype, device.clock_hz)
