"""Blocks over SMs: v1's grid and v2's as they fill the chip, wave by wave."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.grid import Grid
from flashdig.costs.predict import predict
from flashdig.costs.schedules import SCHEDULES, tile_of
from flashdig.costs.traffic import tiles_per_program, visited_tiles
from flashdig.costs.units import percent
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import Row, look_of, one_problem
from flashdig.report.figures.style import INK, bar_style, light_grid, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "waves"
TITLE = "Blocks over the SMs: v1's grid and v2's"
_MOST_SIMULATED = 65536
_MOST_WAVE_LINES = 120
_MOST_POINTS = 200


@dataclass(frozen=True)
class _Run:
    """One grid on the chip.

    Attributes:
        name: of the rung.
        work: tile visits of the programs of one head, in launch order.
        programs: of the whole grid; launched: as recorded, None if it was not.
        resident: blocks that an SM holds at the same time.
        ends: when each SM has nothing left to do, in tile visits of an SM, rising.
    """

    name: str
    work: tuple[int, ...]
    programs: int
    launched: int | None
    resident: int
    ends: tuple[float, ...]

    @property
    def grid(self) -> Grid:
        return Grid(self.programs, len(self.ends), self.resident)

    @property
    def span(self) -> float:
        return self.ends[-1]

    @property
    def busy(self) -> float:
        """Part of all SMs' time that has work."""
        return sum(self.ends) / (len(self.ends) * self.span)

    @property
    def imbalance(self) -> float:
        """Longest program over the mean one."""
        return max(self.work) * len(self.work) / sum(self.work)


def waves(rows: Sequence[Row], device: Device | None, name: str = NAME) -> Picture | Missing:
    """How many SMs have work at each moment if every tile visit takes the same time of an SM.

    Args:
        rows: of one problem and one run.
        device: the chip that the grids run on.
    """
    if device is None:
        return Missing(name, TITLE, "The chip is not in the device table: how many SMs is unknown.")
    rungs = [row for row in rows if row["kind"] == "rung"]
    if not rungs:
        return Missing(name, TITLE, "The record holds no rung, so there is no problem to lay out.")
    problem = one_problem(rungs)
    if problem.visible_pairs == 0:
        return Missing(name, TITLE, "No query sees a key: there is no work.")
    if problem.dtype not in SCHEDULES["v1"].dtypes or device.flop_per_s(problem.dtype) is None:
        return Missing(name, TITLE, f"v1 and v2 do not run in {problem.dtype} on {device.name}.")
    runs = [_run(generation, problem, device, rungs) for generation in ("v1", "v2")]
    alt = _alt(runs, problem, device)
    tile = tile_of(SCHEDULES["v2"], problem)
    caption = (
        f"How many of the {device.sm_count} SMs of {device.name} have work at each moment, if each "
        f"visit of {tile.block_m} queries to {tile.block_n} keys takes the same time of an SM and "
        "blocks on one SM share it. Empty space below the dashed line is idle SMs; thin lines part "
        "the waves. v1 has a block for each head, v2 one for each tile of queries as well. A block "
        "alone on its SM has no other to hide its waits behind, so a thin grid costs more than is "
        "drawn here."
    )
    causal = runs[1].imbalance > 1.05
    if causal:
        caption += " Bottom: v2's blocks differ, since early queries see few keys; v1 visits all."

    def draw(figure: Figure) -> None:
        _draw(figure, runs, causal)

    return picture(name, TITLE, alt, caption, draw, height=6.4 if causal else 4.6)


def _run(generation: str, problem: AttentionProblem, device: Device, rungs: Sequence[Row]) -> _Run:
    guess = predict(problem, device, generation)
    assert guess.programs is not None
    assert guess.waves is not None
    tile = tile_of(SCHEDULES[generation], problem)
    if SCHEDULES[generation].skips_masked_tiles:
        work = tiles_per_program(problem, tile.block_m, tile.block_n)
    else:
        visits = visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=False)
        work = [visits.tiles]
    resident = round(guess.programs / guess.waves / device.sm_count)
    launched = next((_launched(row) for row in rungs if row["name"] == generation), None)
    ends = _ends(work, problem.batch * problem.num_heads, device.sm_count)
    return _Run(generation, tuple(work), guess.programs, launched, resident, ends)


def _launched(row: Row) -> int | None:
    """Blocks of the exhibit's own kernel, as recorded."""
    for kernel in row.get("kernels", ()):
        if kernel["name"].startswith("flash_fwd_") and kernel.get("grid"):
            return int(math.prod(kernel["grid"]))
    return None


def _ends(work: Sequence[int], heads: int, workers: int) -> tuple[float, ...]:
    """When each SM runs dry if each free one takes the next program in order, rising.

    Of very large grids only the last programs are walked; those before fill all SMs alike.
    """
    if len(set(work)) == 1:
        full, rest = divmod(heads * len(work), workers)
        early, late = float(full * work[0]), float((full + 1) * work[0])
        return (early,) * (workers - rest) + (late,) * rest
    walked = min(heads, max(1, _MOST_SIMULATED // len(work)))
    free_at = [(heads - walked) * sum(work) / workers] * workers
    for program in [*work] * walked:
        heapq.heapreplace(free_at, free_at[0] + program)
    return tuple(sorted(free_at))


def _words(run: _Run) -> str:
    return (
        f"{run.name}: {run.programs:,} blocks, {run.grid.waves:.3g} waves of "
        f"{len(run.ends) * run.resident:,}, SMs {percent(run.busy)} busy"
    )


def _alt(runs: Sequence[_Run], problem: AttentionProblem, device: Device) -> str:
    said = [f"SMs with work over time on {device.name} for {problem.describe()}."]
    for run in runs:
        text = f"{_words(run)}, {run.span:,.0f} tile visits long"
        if run.launched is not None:
            text += f"; {run.launched:,} blocks were launched in the recording"
        said.append(f"{text}.")
    v1, v2 = runs
    ratio = v1.span / v2.span
    winner, times = ("v2", ratio) if ratio >= 1 else ("v1", 1 / ratio)
    why = "its grid and the tiles that it skips" if v2.imbalance > 1.05 else "its grid"
    said.append(f"By {why} alone {winner} ends {times:.3g} times as early.")
    if v2.imbalance > 1.05:
        said.append(f"v2's longest block has {v2.imbalance:.3g} times the mean work.")
    return " ".join(said)


def _draw(figure: Figure, runs: Sequence[_Run], causal: bool) -> None:
    ratios = [1.0, 1.0, 0.75] if causal else [1.0, 1.0]
    panels = figure.subplots(len(ratios), 1, height_ratios=ratios)
    span = max(run.span for run in runs)
    for axes, run in zip(panels, runs, strict=False):
        _draw_run(axes, run, span)
    panels[1].set_xlabel("time, in tile visits of an SM")
    if causal:
        _draw_work(panels[2], runs[1])


def _draw_run(axes: Axes, run: _Run, span: float) -> None:
    sms = len(run.ends)
    times, busy = _staircase(run)
    axes.fill_between(times, busy, **bar_style(look_of(run.name).colour))
    axes.plot([0, run.span], [sms] * 2, color=INK, linewidth=1.2, linestyle="dashed")
    if len(set(run.work)) == 1 and run.grid.waves <= _MOST_WAVE_LINES:
        # a wave is one block after the other for each that an SM holds
        ends = range(run.work[0] * run.resident, int(run.span), run.work[0] * run.resident)
        tops = [sum(1 for other in run.ends if other >= end) for end in ends]
        xs = [x for end in ends for x in (end, end, math.nan)]
        ys = [y for top in tops for y in (0, top, math.nan)]
        axes.plot(xs, ys, color=INK, linewidth=0.6, alpha=0.6)
    axes.set(xlim=(0, span * 1.02), ylim=(0, sms * 1.12))
    axes.set_ylabel("busy SMs")
    axes.set_title(_words(run))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.locator_params(axis="y", nbins=4)


def _staircase(run: _Run) -> tuple[list[float], list[int]]:
    """Corners of busy SMs over time, thinned out where there are too many."""
    times, busy = [0.0], [sum(1 for end in run.ends if end > 0)]
    step = max(1, len(run.ends) // _MOST_POINTS)
    for index in [*range(0, len(run.ends), step), len(run.ends) - 1]:
        end = run.ends[index]
        if end > times[-1]:
            times += [end, end]
            busy += [busy[-1], sum(1 for other in run.ends if other > end)]
    return times, busy


def _draw_work(axes: Axes, run: _Run) -> None:
    mean = sum(run.work) / len(run.work)
    step = max(1, len(run.work) // _MOST_POINTS)
    places = [*range(0, len(run.work), step), len(run.work)]
    heights = [run.work[min(place, len(run.work) - 1)] for place in places]
    look = bar_style(look_of(run.name).colour)
    axes.fill_between(places, heights, step="post", **look)
    axes.plot([0, len(run.work)], [mean] * 2, color=INK, linewidth=1.2, linestyle="dotted")
    axes.set(xlim=(0, len(run.work)), ylim=(0, None))
    axes.set_title(
        f"{run.name}: tile visits of a block, {mean:.3g} on average, at most {max(run.work):,}"
    )
    axes.set_xlabel("tile of queries")
    axes.set_ylabel("tile visits")
    light_grid(axes, "y")
