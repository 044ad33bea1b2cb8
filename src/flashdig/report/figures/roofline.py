"""Roofline with the rungs on it: how fast each could be for the bytes that it moves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashdig.costs.flops import forward_flops
from flashdig.costs.units import with_unit
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import (
    LONGEST_NAME,
    Row,
    expected_ms,
    guess_of,
    look_of,
    one_problem,
    problem_of,
    rungs_of,
)
from flashdig.report.figures.style import (
    INK,
    SMALL,
    light_grid,
    log_ticks,
    picture,
    shortened,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "roofline"
TITLE = "What each rung could do for the bytes that it moves"


@dataclass(frozen=True)
class _Point:
    """A rung: FLOP for each byte at memory, and FLOP/s as expected and as measured."""

    name: str
    intensity: float
    expected: float | None
    measured: float | None

    @property
    def best_known(self) -> float:
        known = self.measured if self.measured is not None else self.expected
        assert known is not None
        return known


@dataclass(frozen=True)
class _Roofs:
    """Bytes/s or FLOP/s of each roof, at the highest SM clock seen in the run."""

    memory: float
    shared: float
    flat: tuple[tuple[str, float], ...]


def roofline(rows: Sequence[Row], device: Device | None, name: str = NAME) -> Picture | Missing:
    """Roofs of the chip, and a point for each rung whose bytes at memory the models know.

    Args:
        rows: of one problem and one run.
        device: that the roofs are of.
    """
    if device is None:
        return Missing(
            name, TITLE, "The chip is not in the device table, so its roofs are unknown."
        )
    rungs = rungs_of(rows)
    points = [point for row in rungs if (point := _point(row, device)) is not None]
    if not points:
        return Missing(name, TITLE, "No rung passed the gate with a known guess of its bytes.")
    problem = one_problem(rungs)
    clocks = [row["sm_clock_mhz"] for row in rungs if row.get("sm_clock_mhz")]
    clock_hz = max(clocks) * 1e6 if clocks else device.highest_clock_hz
    roofs = _roofs(problem, device, clock_hz)
    alt = _alt(points, roofs, device)

    def draw(figure: Figure) -> None:
        _draw(figure, points, roofs)

    timed = any(point.measured is not None for point in points)
    caption = (
        "Right: FLOP of the visible pairs for each byte expected at memory, behind the L2 cache. "
        "Up: FLOP in a second. Both axes are logarithmic. Hollow: expected by the cost models. "
    )
    caption += "Filled: measured. " if timed else "No time was measured. "
    caption += (
        "A point far below the memory line is held back by something else; the shared-memory line "
        "is for operands that come from there. One exponential for each visible pair makes the "
        f"third roof. Roofs: specified peaks of {device.name} at {clock_hz / 1e9:.3g} GHz."
    )
    return picture(name, TITLE, alt, caption, draw, height=5.6)


def _point(row: Row, device: Device) -> _Point | None:
    flops = forward_flops(problem_of(row))
    predicted = row.get("predicted", {})
    moved = None
    if predicted.get("memory_load_bytes") is not None:
        moved = predicted["memory_load_bytes"] + predicted["memory_store_bytes"]
    else:
        guess = guess_of(row, device)
        moved = None if guess is None else guess.memory.total_bytes
    expected, measured = expected_ms(row, device), row.get("ms")
    if not moved or not flops or (expected is None and measured is None):
        return None
    return _Point(
        row["name"],
        flops / moved,
        None if expected is None else flops / expected * 1e3,
        None if measured is None else flops / measured * 1e3,
    )


def _roofs(problem: AttentionProblem, device: Device, clock_hz: float) -> _Roofs:
    arch = device.arch
    per_clock = device.sm_count * clock_hz
    dtype = "tfloat32" if problem.allow_tf32 else problem.dtype
    fma = 2 * arch.fma_per_clock * per_clock
    flat = [("FP32 on FMA units", fma)]
    tensor = device.flop_per_s(dtype, clock_hz)
    if dtype != "float32" and tensor is not None:
        flat.append((f"tensor cores, {dtype}", tensor))
    exp2 = device.exp2_per_s(clock_hz)
    if exp2 is not None:
        # each visible pair is one exponential and so many FLOP of the two products
        flat.append(("exponentials", exp2 * 2 * (problem.head_dim + problem.head_dim_v)))
    shared = arch.shared_bytes_per_clock * per_clock
    return _Roofs(device.memory_bytes_per_s, shared, tuple(sorted(flat, key=lambda r: r[1])))


def _alt(points: Sequence[_Point], roofs: _Roofs, device: Device) -> str:
    flat = "; ".join(f"{words} {with_unit(value, 'FLOP/s')}" for words, value in roofs.flat)
    said = [
        f"Roofline of {device.name}: memory {with_unit(roofs.memory, 'B/s')}, shared memory "
        f"{with_unit(roofs.shared, 'B/s')}; {flat}."
    ]
    best = max(points, key=lambda point: point.best_known)
    how = "measured" if best.measured is not None else "expected"
    said.append(
        f"Fastest is {best.name}, {how} {with_unit(best.best_known, 'FLOP/s')} at "
        f"{with_unit(best.intensity, 'FLOP')} a byte."
    )
    for point in points:
        figures = [
            f"{how} {with_unit(value, 'FLOP/s')}"
            for how, value in (("measured", point.measured), ("expected", point.expected))
            if value is not None
        ]
        said.append(
            f"{point.name}: {with_unit(point.intensity, 'FLOP')} a byte, {', '.join(figures)}."
        )
    return " ".join(said)


def _draw(figure: Figure, points: Sequence[_Point], roofs: _Roofs) -> None:
    axes = figure.add_subplot()
    top = max(value for _, value in roofs.flat)
    left = min(point.intensity for point in points) / 3
    right = max(*(point.intensity for point in points), top / roofs.memory) * 3
    reached = [v for p in points for v in (p.expected, p.measured) if v is not None]
    bottom, ceiling = min(*reached, *(value for _, value in roofs.flat)) / 2, top * 2
    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(bottom, ceiling))
    light_grid(axes)
    slopes: list[tuple[str, float, float]] = []
    for words, slope, dashes in (
        ("memory", roofs.memory, "solid"),
        ("shared memory", roofs.shared, "dashed"),
    ):
        ends = [max(left, bottom / slope), top / slope]
        axes.plot(ends, [end * slope for end in ends], color=INK, linewidth=1.4, linestyle=dashes)
        # below the second highest roof if enough of the line is there, else below the highest
        below = sorted(value for _, value in roofs.flat)[-2:][0]
        fits = below > 5 * ends[0] * slope
        at = 0.8 * below if fits else 0.5 * top
        slopes.append((f"{words} {with_unit(slope, 'B/s')}", slope, at))
    places = spread([_height(value, bottom, ceiling) for _, value in roofs.flat], 0.055, 0.0, 1.0)
    styles = ("dashdot", "solid", "dotted")
    for (words, value), place, style in zip(roofs.flat, places, styles, strict=False):
        axes.plot([left, right], [value, value], color=INK, linewidth=1.2, linestyle=style)
        axes.annotate(
            f"{words} {with_unit(value, 'FLOP/s')}",
            (1.0, place),
            (-2, 3),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            fontsize=SMALL,
        )
    for point in points:
        _draw_point(axes, point)
    _name_points(axes, points, bottom, ceiling)
    axes.set_xlabel("FLOP for each byte at memory")
    axes.set_ylabel("FLOP/s")
    log_ticks(axes.xaxis, left, right, lambda value: f"{value:,.4g}")
    log_ticks(axes.yaxis, bottom, ceiling, lambda value: with_unit(value, "").strip())
    figure.draw_without_rendering()  # only now is it known how steep the slopes are drawn
    _along(axes, slopes)


def _along(axes: Axes, slopes: Sequence[tuple[str, float, float]]) -> None:
    """Words along sloped lines, each ending above a point (x, y) of its line."""
    for words, slope, y in slopes:
        ends = [(y / slope / 10, y / 10), (y / slope, y)]
        (x0, y0), (x1, y1) = axes.transData.transform(ends)
        axes.annotate(
            words,
            (y / slope, y),
            (-3, 3),
            textcoords="offset points",
            ha="right",
            va="bottom",
            rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)),
            rotation_mode="anchor",
            fontsize=SMALL,
        )


def _height(value: float, bottom: float, ceiling: float) -> float:
    """Of a value on the log axis, 0 to 1."""
    return math.log(value / bottom) / math.log(ceiling / bottom)


def _draw_point(axes: Axes, point: _Point) -> None:
    look = look_of(point.name)
    if point.expected is not None and point.measured is not None:
        pair = [point.expected, point.measured]
        axes.plot([point.intensity] * 2, pair, color=look.colour, linewidth=1.0)
    common: dict[str, Any] = {"marker": look.marker, "markersize": 9.0, "linestyle": "none"}
    if point.expected is not None:
        axes.plot(
            point.intensity,
            point.expected,
            markerfacecolor="none",
            markeredgecolor=look.colour,
            markeredgewidth=1.6,
            **common,
        )
    if point.measured is not None:
        axes.plot(
            point.intensity,
            point.measured,
            markerfacecolor=look.colour,
            markeredgecolor=INK,
            markeredgewidth=0.7,
            **common,
        )


def _name_points(axes: Axes, points: Sequence[_Point], bottom: float, ceiling: float) -> None:
    """Names right of the axes in the order of the points, each with its marker and a thin line."""
    ordered = sorted(points, key=lambda point: point.best_known)
    heights = [_height(point.best_known, bottom, ceiling) for point in ordered]
    for point, place in zip(ordered, spread(heights, 0.06, 0.0, 1.0), strict=True):
        name = shortened(point.name, LONGEST_NAME)
        line = {"arrowstyle": "-", "color": INK, "alpha": 0.35, "linewidth": 0.7}
        axes.annotate(
            "",
            (point.intensity, point.best_known),
            (1.02, place),
            textcoords="axes fraction",
            arrowprops=line | {"shrinkA": 0, "shrinkB": 0},
        )
        axes.annotate(
            f"{name}  {with_unit(point.best_known, 'FLOP/s')}",
            (1.05, place),
            xycoords="axes fraction",
            fontsize=SMALL,
            va="center",
        )
        look = look_of(point.name)
        axes.plot(
            1.03,
            place,
            linestyle="none",
            marker=look.marker,
            markersize=7.0,
            markerfacecolor=look.colour,
            markeredgecolor=INK,
            markeredgewidth=0.6,
            transform=axes.transAxes,
            clip_on=False,
        )
