"""One tile loop's pipes: which unit of an SM is busy how long, for each tiled rung."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.prediction import Prediction
from flashdig.costs.schedules import SCHEDULES, tile_of
from flashdig.hardware.devices import Device
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import LONGEST_NAME, Row, guess_of, rungs_of
from flashdig.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    SMALL,
    VERMILLION,
    bar_style,
    light_grid,
    log_range,
    log_ticks,
    picture,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "pipes"
TITLE = "Busy cycles of each pipe in the tile loop"
# a 64 x 64 tile of scores: what the cycles are told for, whatever the rung's own tile
SCORES = 64 * 64

_COLOURS = {
    "tensor cores": BLUE,
    "FMA units (products)": SKY,
    "shared memory": ORANGE,
    "exp2": VERMILLION,
    "FMA units": GREEN,
    "issue": PURPLE,
}


@dataclass(frozen=True)
class _Loop:
    """A rung: pipe -> cycles of an SM for SCORES scores, and the whole time in the same unit."""

    name: str
    pipes: dict[str, float]
    expected: float
    measured: float | None

    @property
    def limiter(self) -> str:
        return max(self.pipes, key=self.pipes.__getitem__)


def pipes(rows: Sequence[Row], device: Device | None, name: str = NAME) -> Picture | Missing:
    """Cycles of each pipe for 64 x 64 scores, for every rung that works on tiles.

    Args:
        rows: of one problem and one run.
        device: whose pipes they are.
    """
    if device is None:
        return Missing(
            name, TITLE, "The chip is not in the device table, so its pipes are unknown."
        )
    guesses = ((row, guess_of(row, device)) for row in rungs_of(rows))
    loops = [
        _loop(row, guess, device)
        for row, guess in guesses
        if guess is not None and guess.pipes and guess.executed_flops
    ]
    if not loops:
        return Missing(name, TITLE, "No rung that works on tiles passed the gate.")
    alt = _alt(loops)
    timed = any(loop.measured is not None for loop in loops)
    caption = (
        f"Cycles of one SM of {device.name} for {SCORES:,} scores (64 x 64), as the cost models "
        "count them. The longest bar is the least that any overlap could reach. "
    )
    caption += (
        "A solid mark is the measured time of the whole rung in the same unit, a dashed one the "
        "expected time. "
        if timed
        else "A dashed mark is the expected time of the whole rung in the same unit; no time was "
        "measured. "
    )
    caption += "What lies between bar and mark did not overlap, was waiting, or is idle SMs."

    def draw(figure: Figure) -> None:
        _draw(figure, loops)

    height = 1.2 + sum(0.2 + 0.17 * len(loop.pipes) for loop in loops)
    return picture(name, TITLE, alt, caption, draw, height=height)


def _loop(row: Row, guess: Prediction, device: Device) -> _Loop:
    problem = guess.problem
    tile = tile_of(SCHEDULES[guess.generation], problem)
    share = SCORES / (tile.block_m * tile.block_n)
    executed = guess.executed_flops / (2 * (problem.head_dim + problem.head_dim_v))
    # all SMs' cycles of a second, for each lot of scores that is worked on
    cycles_a_second = device.sm_count * guess.expected_clock_hz * SCORES / executed
    measured = row.get("ms")
    return _Loop(
        row["name"],
        {pipe: cycles * share for pipe, cycles in guess.pipes.items()},
        guess.expected_s * cycles_a_second,
        None if measured is None else measured / 1e3 * cycles_a_second,
    )


def _alt(loops: Sequence[_Loop]) -> str:
    said = [f"Bars of busy cycles for {SCORES:,} scores, a group for each rung."]
    for loop in loops:
        each = ", ".join(f"{pipe} {cycles:,.0f}" for pipe, cycles in loop.pipes.items())
        whole = f"expected in all {loop.expected:,.0f}"
        if loop.measured is not None:
            whole += f", measured {loop.measured:,.0f}"
        said.append(f"{loop.name}: busiest is {loop.limiter}; {each}; {whole}.")
    quickest = min(loops, key=lambda loop: loop.measured or loop.expected)
    cycles = quickest.measured or quickest.expected
    return f"{' '.join(said)} Fewest cycles in all: {quickest.name} with {cycles:,.0f}."


def _draw(figure: Figure, loops: Sequence[_Loop]) -> None:
    from matplotlib.patches import Patch

    axes = figure.add_subplot()
    highest = max(max(*loop.pipes.values(), loop.expected, loop.measured or 0) for loop in loops)
    lowest = min(min(cycles for cycles in loop.pipes.values() if cycles) for loop in loops)
    low, high = log_range([lowest, highest])
    low /= 1.5
    axes.set(xscale="log", xlim=(low, high * 2))
    light_grid(axes, "x")
    place, centres = 0.0, []
    for loop in loops:
        first = place
        for pipe, cycles in loop.pipes.items():
            axes.barh(
                place,
                max(cycles - low, 0.0),
                left=low,
                height=0.86,
                **bar_style(_COLOURS[pipe]),
            )
            marks = [loop.expected, loop.measured or loop.expected]
            # no figure where a mark would stand in it
            if pipe == loop.limiter and (cycles > max(marks) or 1.7 * cycles < min(marks)):
                axes.annotate(
                    f"{cycles:,.0f}",
                    (cycles, place),
                    (4, 0),
                    textcoords="offset points",
                    va="center",
                    fontsize=SMALL,
                )
            place += 1
        ends = [first - 0.5, place - 0.5]
        axes.plot([loop.expected] * 2, ends, color=INK, linewidth=1.8, linestyle=(0, (2, 1.5)))
        if loop.measured is not None:
            axes.plot([loop.measured] * 2, ends, color=INK, linewidth=2.4)
            axes.annotate(
                f"{loop.measured:,.0f}",
                (max(loop.measured, loop.expected), (first + place - 1) / 2),
                (6, 0),
                textcoords="offset points",
                va="center",
                fontsize=SMALL,
                fontweight="bold",
            )
        centres.append((first + place - 1) / 2)
        place += 1
    axes.set_ylim(place - 1.3, -0.8)
    axes.set_yticks(centres, [shortened(loop.name, LONGEST_NAME) for loop in loops])
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"cycles of an SM for {SCORES:,} scores")
    log_ticks(axes.xaxis, low, high, lambda cycles: f"{cycles:,.0f}")
    seen = {pipe for loop in loops for pipe in loop.pipes}
    handles = [
        Patch(**bar_style(colour), label=pipe) for pipe, colour in _COLOURS.items() if pipe in seen
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
