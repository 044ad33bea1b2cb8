"""Grids: programs, waves over the SMs, the tail, and how uneven causal work is."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flashdig.costs.traffic import tiles_per_program
from flashdig.problem import AttentionProblem

_MOST_SIMULATED = 65536


@dataclass(frozen=True)
class Grid:
    """A launch on a device.

    Attributes:
        programs: blocks of the grid; sm_count: SMs; blocks_per_sm: resident ones an SM holds.
    """

    programs: int
    sm_count: int
    blocks_per_sm: int

    @property
    def waves(self) -> float:
        """Programs over the programs that run together; 2.5 waves take the time of 3."""
        return self.programs / (self.sm_count * self.blocks_per_sm)

    @property
    def tail_efficiency(self) -> float:
        """Part of the wave slots that is filled, for programs of equal length: 2.5 of 3."""
        return self.waves / math.ceil(self.waves) if self.programs else 1.0

    @property
    def busy_sms(self) -> int:
        return min(self.programs, self.sm_count)

    @property
    def busy_fraction(self) -> float:
        """Part of the SMs that gets work at all."""
        return self.busy_sms / self.sm_count


def v1_programs(problem: AttentionProblem) -> int:
    """FlashAttention's grid: one program for each head."""
    return problem.batch * problem.num_heads


def v2_programs(problem: AttentionProblem, block_m: int) -> int:
    """FlashAttention-2's grid: one program for each tile of queries and each head."""
    return math.ceil(problem.seqlen_q / block_m) * problem.batch * problem.num_heads


def causal_imbalance(problem: AttentionProblem, block_m: int, block_n: int) -> float:
    """The longest program over the mean one: 1 without a mask, nearly 2 for long causal rows."""
    tiles = tiles_per_program(problem, block_m, block_n)
    mean = sum(tiles) / len(tiles) if tiles else 0.0
    return max(tiles) / mean if mean else 1.0


def makespan(durations: Sequence[float], workers: int, repeats: int = 1) -> float:
    """Time until the last program ends when each free worker takes the next one in order.

    The programs are `durations`, `repeats` times over. Exact up to 65,536 programs; beyond, where
    the tail hardly matters, the bound of list scheduling: the mean load and the longest program.
    """
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    count = len(durations) * repeats
    if count == 0:
        return 0.0
    if count <= workers:
        return max(durations)
    if count > _MOST_SIMULATED:
        return repeats * sum(durations) / workers + max(durations)
    programs = [*durations] * repeats
    free_at = programs[:workers]
    heapq.heapify(free_at)
    for duration in programs[workers:]:
        heapq.heapreplace(free_at, free_at[0] + duration)
    return max(free_at)
