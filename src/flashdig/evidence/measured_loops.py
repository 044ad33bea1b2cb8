"""Cycles of an SM for one iteration of a kernel's inner loop, from the times of a dig's record.

Beside the cycles of the pipes they say how far a kernel is from its busiest pipe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdig.bench.results import Record
from flashdig.costs.traffic import visited_tiles
from flashdig.evidence.loop_cycles import TileShape
from flashdig.problem import AttentionProblem


@dataclass(frozen=True)
class MeasuredLoop:
    """The record's best run of a kernel.

    Attributes:
        cycles: of an SM for one tile of queries against one of keys, everything outside of the loop
            included.
        kernel_us: time of the kernel; problem: what it ran on, in words.
    """

    cycles: float
    kernel_us: float
    problem: str

    def explain(self, busiest: float | None) -> str:
        """In words, beside the cycles of the busiest pipe."""
        said = f"measured: {self.cycles:.0f} cycles of an SM an iteration ({self.problem})"
        if busiest is None:
            return said
        return f"{said}, {self.cycles / busiest:.2f} times those of the busiest pipe"


def measured_loop(record: Record, kernel: str, shape: TileShape, arch: str) -> MeasuredLoop | None:
    """The fewest cycles an iteration that a record shows for a kernel; None when it has none.

    Args:
        kernel: as profilers show it; shape: of its tile.
        arch: the chip that the kernel is compiled for, as "sm_90"; runs on others are not taken.
    """
    found = []
    environments = {run.run_id: run.environment for run in record.runs}
    for row in record.rows:
        environment = environments[row["run_id"]]
        capability = str(environment.get("compute_capability", "")).replace(".", "")
        if f"sm_{capability}" != arch or row["kind"] != "rung" or "sm_clock_mhz" not in row:
            continue
        for launched in row.get("kernels", ()):
            if launched["name"] == kernel:
                found.append(_measured(row, launched, shape, environment["sm_count"]))
    return min(found, key=lambda one: one.cycles, default=None)


def _measured(
    row: Mapping[str, Any], launched: Mapping[str, Any], shape: TileShape, sm_count: int
) -> MeasuredLoop:
    sizes = (row[name] for name in ("batch", "num_heads", "seqlen_q", "head_dim", "dtype"))
    problem = AttentionProblem.dense(*sizes, causal=row["causal"])
    skips = "_v1_" not in launched["name"]  # v1 visits tiles that the mask hides
    visits = visited_tiles(problem, shape.tile_m, shape.tile_n, skip_masked_tiles=skips)
    busy = min(sm_count, math.prod(launched["grid"]))
    cycles = launched["us"] * row["sm_clock_mhz"] * busy
    iterations = row["batch"] * row["num_heads"] * visits.tiles * launched.get("count", 1)
    return MeasuredLoop(cycles / iterations, launched["us"], problem.describe())
