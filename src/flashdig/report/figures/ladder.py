"""The ladder as bars: the time of each rung, what it gained, and what was expected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.units import seconds
from flashdig.hardware.devices import Device
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import (
    LONGEST_NAME,
    Row,
    expected_ms,
    family_legend,
    look_of,
    rungs_of,
)
from flashdig.report.figures.style import (
    INK,
    SMALL,
    bar_style,
    hollow_style,
    light_grid,
    log_range,
    log_ticks,
    picture,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "ladder"
TITLE = "Time of each rung"


@dataclass(frozen=True)
class _Bar:
    """A rung: its time (measured, else expected), the expected one beside it, TFLOP/s, speed-up."""

    name: str
    ms: float
    is_measured: bool
    expected: float | None
    tflops: float | None
    speedup: float | None


def ladder(
    rows: Sequence[Row], device: Device | None = None, name: str = NAME
) -> Picture | Missing:
    """A bar for each rung that passed the gate, lowest rung first.

    Args:
        rows: of one problem and one run.
        device: for the guess where the record holds no time at all.
    """
    bars = [bar for row in rungs_of(rows) if (bar := _bar(row, device)) is not None]
    if not bars:
        return Missing(name, TITLE, "No rung passed the gate with a time, measured or expected.")
    alt = _alt(bars)
    if any(bar.is_measured for bar in bars):
        caption = (
            "Median time on a log axis; the last figure is how many times as fast a rung is as the "
            "one before it. A thick mark is the time that the cost models expect at the observed "
            "clock."
        )
    else:
        chip = "the chip" if device is None else device.name
        caption = (
            f"No time was measured: the bars are what the cost models expect of {chip}, on a log "
            "axis."
        )

    def draw(figure: Figure) -> None:
        _draw(figure, bars)

    return picture(name, TITLE, alt, caption, draw, height=1.1 + 0.34 * len(bars))


def _bar(row: Row, device: Device | None) -> _Bar | None:
    measured, expected = row.get("ms"), expected_ms(row, device)
    ms = expected if measured is None else measured
    if ms is None:
        return None
    return _Bar(
        row["name"], ms, measured is not None, expected, row.get("tflops"), row.get("speedup")
    )


def _alt(bars: Sequence[_Bar]) -> str:
    best = min(bars, key=lambda bar: bar.ms)
    worst = max(bars, key=lambda bar: bar.ms)
    how = "takes" if best.is_measured else "is expected to take"
    said = f"Bars of time. Fastest is {best.name}: it {how} {seconds(best.ms / 1e3)}"
    if len(bars) > 1:
        said += (
            f", {worst.ms / best.ms:.3g} times as fast as {worst.name} ({seconds(worst.ms / 1e3)})"
        )
    each = ", ".join(f"{bar.name} {_label(bar)}" for bar in bars)
    return f"{said}. From the lowest rung up: {each}."


def _label(bar: _Bar) -> str:
    text = seconds(bar.ms / 1e3)
    if bar.tflops is not None:
        text += f", {bar.tflops:.3g} TFLOP/s"
    if bar.speedup is not None:
        text += f", {bar.speedup:.2f}x"
    return text


def _draw(figure: Figure, bars: Sequence[_Bar]) -> None:
    axes = figure.add_subplot()
    low, high = log_range([v for bar in bars for v in (bar.ms, bar.expected) if v is not None])
    # room right of the longest bar for its figures
    axes.set(xscale="log", xlim=(low, high * (high / low) ** 0.55), ylim=(len(bars) - 0.4, -0.6))
    light_grid(axes, "x")
    for place, bar in enumerate(bars):
        look = look_of(bar.name)
        axes.barh(
            place,
            bar.ms - low,
            left=low,
            height=0.68,
            **(bar_style(look.colour) if bar.is_measured else hollow_style(look.colour)),
        )
        end = bar.ms
        if bar.is_measured and bar.expected is not None:
            axes.plot([bar.expected] * 2, [place - 0.44, place + 0.44], color=INK, linewidth=2.2)
            end = max(end, bar.expected)
        axes.annotate(
            _label(bar),
            (end, place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    axes.set_yticks(range(len(bars)), [shortened(bar.name, LONGEST_NAME) for bar in bars])
    axes.tick_params(axis="y", length=0)
    log_ticks(axes.xaxis, low, high, lambda ms: seconds(ms / 1e3))
    hollow = not any(bar.is_measured for bar in bars)
    family_legend(figure, [bar.name for bar in bars], hollow=hollow)
