"""Time of attention that works on tiles: the iterations of the grid's programs, pipe by pipe."""

from __future__ import annotations

import itertools
import math

from flashdig.costs import flops as flop_counts
from flashdig.costs import l2
from flashdig.costs.efficiency import KERNEL_START_S
from flashdig.costs.grid import makespan
from flashdig.costs.kernel_cycles import KernelCycles, kernel_cycles
from flashdig.costs.prediction import Prediction, Question
from flashdig.costs.roofline import MEMORY, roofs
from flashdig.costs.schedules import Tile, iteration_cycles, tile_of
from flashdig.costs.traffic import (
    FLOAT32_BYTES,
    Traffic,
    compulsory,
    flash_backward_issued,
    tensor_bytes,
    tiles_per_program,
    transpose_copy,
    v1_issued,
    v1_surroundings,
    v2_issued,
    visited_tiles,
)
from flashdig.costs.units import with_unit
from flashdig.hardware.occupancy import ASSUMED_MEMORY_LATENCY_S
from flashdig.problem import Mask

# A warp that shares its scheduler with no other issues its next instruction when the one before is
# done: arithmetic takes 4 cycles, exponentials, divisions and shared memory more. Assumed.
_LONE_WARP_CYCLES = 5.0


def predict_tiled(question: Question, tile: Tile | None = None) -> Prediction:
    """Forward or backward of a tiled generation; `tile` instead of its own."""
    problem, device, schedule = question.problem, question.device, question.schedule
    tile = tile or tile_of(schedule, problem)

    iterations = iterations_per_program(question, tile)
    heads = problem.batch * problem.num_heads
    programs = heads * len(iterations)
    busy_fraction = min(1.0, programs / device.sm_count) if programs else 1.0
    # what is worked on in whole: all pairs if the loops do not skip
    worked = problem if schedule.skips_masked_tiles else problem.replace(mask=Mask())
    worked_flops = flop_counts.direction_flops(worked, question.direction)
    minimum = compulsory(problem, question.direction)
    floor = roofs(
        device,
        memory_bytes=minimum.total_bytes,
        flops=worked_flops * question.matmul_passes,
        dtype=question.dtype,
        exp2=worked.visible_pairs,
        clock_hz=question.floor_clock_hz,
        busy_fraction=busy_fraction,
    )

    kernel = kernel_cycles(question, tile, programs)
    cycles = kernel.cycles
    matmul_fraction, notes = _matmul_fraction(question)
    start_s, iteration_s = _program_s(question, kernel, matmul_fraction, kernel.resident_blocks)
    compute_s = makespan([start_s + n * iteration_s for n in iterations], device.sm_count, heads)
    # neighbours do not make the longest program shorter than it is alone
    start_s, iteration_s = _program_s(question, kernel, matmul_fraction, 1)
    compute_s = max(compute_s, start_s + max(iterations, default=0) * iteration_s)
    resident = device.sm_count * kernel.resident_blocks
    issued, memory = _traffic(question, tile, resident)
    around = _traffic_around(question)
    updates = schedule.loops == "keys outside"
    reached = question.known.tile_update if updates else question.known.copy
    memory_s = memory.total_bytes / (device.memory_bytes_per_s * reached)
    expected_s = max(compute_s, memory_s) + _around_s(question, around)
    kernels = _kernel_count(question)
    expected_s += kernels * KERNEL_START_S

    visits = visited_tiles(
        problem, tile.block_m, tile.block_n, skip_masked_tiles=schedule.skips_masked_tiles
    )
    one_pair = worked_flops // worked.visible_pairs if worked.visible_pairs else 0
    return Prediction(
        problem=problem,
        device=device.key,
        generation=schedule.name,
        direction=question.direction,
        floor_s=floor.floor_s,
        expected_s=expected_s,
        floor_clock_hz=question.floor_clock_hz,
        expected_clock_hz=question.expected_clock_hz,
        limiter=floor.limiter,
        expected_limiter=MEMORY if memory_s > compute_s else cycles.limiter,
        flops=flop_counts.direction_flops(problem, question.direction),
        executed_flops=heads * visits.pairs * one_pair,
        exp2=flop_counts.exp2_count(problem),
        compulsory=minimum,
        issued=issued + around,
        memory=memory + around,
        roofs=floor,
        kernels=kernels,
        scratch_bytes=_scratch_bytes(question),
        pipes=cycles.pipes,
        programs=programs,
        waves=programs / resident,
        occupancy=kernel.occupancy,
        imbalance=_imbalance(iterations),
        notes=(*notes, *kernel.notes, *_own_notes(question)),
    )


def _own_notes(question: Question) -> tuple[str, ...]:
    """Assumptions of this file that the guess rests on."""
    latency = f"{ASSUMED_MEMORY_LATENCY_S * 1e9:.0f} ns"
    notes = [f"assumed: round trips to memory of {latency} at a program's start and end"]
    if question.schedule.loops == "keys outside":
        notes.append(
            f"assumed: a step is a chain of a round trip and {_LONE_WARP_CYCLES:.0f} cycles an "
            "instruction, which only other resident blocks can fill"
        )
    strided = question.known.strided_elements_per_s
    if question.schedule.name == "v2_transposed" and strided is not None:
        notes.append(f"measured: strided copies at {with_unit(strided, 'elements/s')}")
    return tuple(notes)


def iterations_per_program(question: Question, tile: Tile) -> list[int]:
    """Inner iterations of the programs of one head, in launch order; heads follow each other."""
    problem = question.problem
    if question.schedule.loops == "keys outside":
        visits = visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=False)
        return [visits.tiles]
    tiles = tiles_per_program(problem, tile.block_m, tile.block_n)
    if question.direction == "backward":
        # a program for each key tile: the same tiles, counted along the other side
        count = math.ceil(problem.seqlen_k / tile.block_n)
        longest = max(tiles, default=0) * len(tiles) / count if count else 0.0
        tiles = _falling(sum(tiles), count, longest)
    return tiles


def _imbalance(iterations: list[int]) -> float:
    mean = sum(iterations) / len(iterations) if iterations else 0.0
    return max(iterations) / mean if mean else 1.0


def _program_s(
    question: Question, kernel: KernelCycles, matmul_fraction: float, resident_blocks: int
) -> tuple[float, float]:
    """SM time of a program's start and end, and of each iteration, among so many resident ones."""
    cycles = iteration_cycles(
        question.schedule,
        kernel.cycles,
        matmul_fraction=matmul_fraction,
        exp2_fraction=question.known.exp2,
        resident_blocks=resident_blocks,
        backward=question.direction == "backward",
    )
    iteration_s = max(
        cycles / question.expected_clock_hz, _chain_s(question, kernel) / resident_blocks
    )
    return _wait_per_program(question, resident_blocks), iteration_s


def _wait_per_program(question: Question, resident_blocks: int) -> float:
    """Round trips to memory at the start and end of a program, shared by the resident ones.

    A plain block waits for Q, then K, then V, and for O to be taken; a producer warp (ping-pong)
    asks for Q, K and V at once. The backward's blocks wait in step.
    """
    if question.direction == "backward" or question.schedule.overlap == "ping-pong":
        return 3 * ASSUMED_MEMORY_LATENCY_S
    return 4 * ASSUMED_MEMORY_LATENCY_S / resident_blocks


def _chain_s(question: Question, kernel: KernelCycles) -> float:
    """With the keys outside, a block's step is one chain, which only other blocks can fill.

    Every step loads the O that an earlier step has stored, works on it and stores it: a round trip
    to memory and the instructions of a warp, each of which waits for the one before.
    """
    if question.schedule.loops != "keys outside":
        return 0.0
    alone = kernel.instructions * _LONE_WARP_CYCLES / question.expected_clock_hz
    return alone + ASSUMED_MEMORY_LATENCY_S


def _around_s(question: Question, around: Traffic) -> float:
    """Fills, roundings and copies before and after the kernel."""
    seconds = around.total_bytes / (question.device.memory_bytes_per_s * question.known.copy)
    strided = question.known.strided_elements_per_s
    if question.schedule.name == "v2_transposed" and strided is not None:
        elements = tensor_bytes(question.problem).k / question.problem.element_bytes
        seconds = max(seconds, elements / strided)
    return seconds


def _falling(total: int, count: int, longest: float) -> list[int]:
    """`count` whole numbers that sum to `total` and fall evenly from about `longest`."""
    if count == 0:
        return []
    mean = total / count
    fall = max(0.0, min(longest, 2 * mean) - mean)
    marks = [0]
    reached = 0.0
    for index in range(count):
        reached += mean + fall * (1 - 2 * (index + 0.5) / count)
        marks.append(round(reached))
    marks[-1] = total
    return [end - start for start, end in itertools.pairwise(marks)]


def _matmul_fraction(question: Question) -> tuple[float, tuple[str, ...]]:
    known, arch = question.known, question.device.arch
    if question.path != "mma.sync" or arch.mma_sync_fraction == 1:
        return known.matmul, known.notes
    if known.mma_sync is not None and question.direction == "forward":
        note = f"mma.sync comes to {known.mma_sync:.0%} of the peak here, as measured"
        return min(known.matmul, known.mma_sync), (*known.notes, note)
    if arch.mma_sync_fraction is None:
        note = (
            f"unknown: what mma.sync reaches on compute capability {arch.key}; taken as the "
            "fastest product, so the expected time is too short"
        )
        return known.matmul, (*known.notes, note)
    note = f"mma.sync reaches {arch.mma_sync_fraction:.1%} of the peak here (arXiv 2402.13499)"
    return min(known.matmul, arch.mma_sync_fraction), (*known.notes, note)


def _traffic(question: Question, tile: Tile, resident: int) -> tuple[Traffic, Traffic]:
    """(issued, expected at memory) of the kernel itself; the backward's three kernels together."""
    problem, device, schedule = question.problem, question.device, question.schedule
    m, n, cache = tile.block_m, tile.block_n, device.cache_bytes
    if question.direction == "backward":
        memory = l2.backward_expected(problem, m, n, cache_bytes=cache, resident_programs=resident)
        return flash_backward_issued(problem, m, n), memory
    if schedule.loops == "keys outside":
        memory = l2.v1_expected(problem, m, n, cache_bytes=cache, resident_programs=resident)
        return v1_issued(problem, m, n), memory
    memory = l2.v2_expected(problem, m, n, cache_bytes=cache, resident_programs=resident)
    return v2_issued(problem, m, n), memory


def _traffic_around(question: Question) -> Traffic:
    """Bytes of what has to run before and after the kernel."""
    if question.schedule.loops == "keys outside":
        return v1_surroundings(question.problem)
    if question.schedule.name == "v2_transposed":
        return transpose_copy(question.problem)
    return Traffic(0, 0)


def _kernel_count(question: Question) -> int:
    problem, schedule = question.problem, question.schedule
    if question.direction == "backward":
        return 3 + (problem.group_size > 1)
    if schedule.loops == "keys outside":
        return 4 + (problem.element_bytes < FLOAT32_BYTES)
    return 2 if schedule.name == "v2_transposed" else 1


def _scratch_bytes(question: Question) -> int:
    problem, schedule = question.problem, question.schedule
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    if question.direction == "backward":
        return rows * (problem.head_dim + 1) * FLOAT32_BYTES
    if schedule.loops == "keys outside":
        accumulator = problem.head_dim_v if problem.element_bytes < FLOAT32_BYTES else 0
        return rows * (2 + accumulator) * FLOAT32_BYTES
    return tensor_bytes(problem).k if schedule.name == "v2_transposed" else 0
