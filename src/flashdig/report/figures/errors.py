"""How far each rung is from float64, beside what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.bench.gate import ERROR_FACTOR, ERROR_FLOOR
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import LONGEST_NAME, Row, look_of
from flashdig.report.figures.style import (
    INK,
    SMALL,
    light_grid,
    log_range,
    log_ticks,
    picture,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "errors"
TITLE = "Largest error against float64"


@dataclass(frozen=True)
class _Dot:
    name: str
    error: float
    passed: bool


def errors(rows: Sequence[Row], name: str = NAME) -> Picture | Missing:
    """A dot for each rung with a known error, a line for the largest error that the gate allows.

    Rungs that failed the gate are shown too, hollow. Rows of one problem and one run.
    """
    dots = [
        _Dot(row["name"], row["error"], row["gate"] == "ok")
        for row in rows
        if row["kind"] == "rung" and row.get("error") is not None
    ]
    if not dots:
        return Missing(name, TITLE, "No rung was compared with float64.")
    bound, origin = _bound(rows)
    alt = _alt(dots, bound)
    caption = (
        "Largest absolute difference of the output from attention in float64, on a log axis; an "
        f"error of 0 stands at the left edge. {origin}"
    )

    def draw(figure: Figure) -> None:
        _draw(figure, dots, bound)

    return picture(name, TITLE, alt, caption, draw, height=1.0 + 0.3 * len(dots))


def _bound(rows: Sequence[Row]) -> tuple[float | None, str]:
    """The largest allowed error, and in words where it comes from."""
    kept = [row["allowed_error"] for row in rows if row.get("allowed_error") is not None]
    if kept:
        return min(kept), "The line is what the gate allows."
    eager = [
        row["error"] for row in rows if row["name"] == "naive" and row.get("error") is not None
    ]
    if eager:
        rule = f"{ERROR_FACTOR:g} times the error of eager attention plus {ERROR_FLOOR:g}"
        return (
            ERROR_FACTOR * eager[0] + ERROR_FLOOR,
            f"The line is what the gate's rule makes of this record: {rule}, with the rung naive "
            "for eager attention.",
        )
    return None, "What the gate allowed is not in the record."


def _alt(dots: Sequence[_Dot], bound: float | None) -> str:
    best = min(dots, key=lambda dot: dot.error)
    worst = max(dots, key=lambda dot: dot.error)
    said = (
        f"Dots of the largest error against float64. Closest is {best.name} with {best.error:.2g}, "
        f"farthest {worst.name} with {worst.error:.2g}"
    )
    said += f"; allowed is {bound:.2g}." if bound is not None else "."
    failed = [dot.name for dot in dots if not dot.passed]
    if failed:
        said += f" These failed the gate: {', '.join(failed)}."
    return f"{said} Each: {', '.join(f'{dot.name} {dot.error:.2g}' for dot in dots)}."


def _draw(figure: Figure, dots: Sequence[_Dot], bound: float | None) -> None:
    axes = figure.add_subplot()
    shown = [dot.error for dot in dots if dot.error > 0] or [bound or 1.0]
    low, high = log_range(shown if bound is None else [*shown, bound])
    low, high = low / 1.5, high * 2
    axes.set(xscale="log", xlim=(low, high), ylim=(len(dots) - 0.4, -1.2))
    light_grid(axes, "x")
    if bound is not None:
        axes.plot(
            [bound] * 2, [-0.7, len(dots) - 0.4], color=INK, linewidth=1.6, linestyle="dashed"
        )
        axes.annotate(
            f"allowed {bound:.2g}", (bound, -0.75), ha="center", va="bottom", fontsize=SMALL
        )
    for place, dot in enumerate(dots):
        look = look_of(dot.name)
        at = max(dot.error, low)
        axes.plot([low, at], [place, place], color=INK, alpha=0.35, linewidth=0.8)
        axes.plot(
            at,
            place,
            linestyle="none",
            marker=look.marker,
            markersize=9.0,
            markerfacecolor=look.colour if dot.passed else "none",
            markeredgecolor=INK if dot.passed else look.colour,
            markeredgewidth=0.7 if dot.passed else 1.6,
            clip_on=False,
        )
        axes.annotate(
            f"{dot.error:.2g}" + ("" if dot.passed else ", failed"),
            (at, place),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL,
        )
    axes.set_yticks(range(len(dots)), [shortened(dot.name, LONGEST_NAME) for dot in dots])
    axes.tick_params(axis="y", length=0)
    log_ticks(axes.xaxis, low, high, lambda error: f"{error:.0e}")
