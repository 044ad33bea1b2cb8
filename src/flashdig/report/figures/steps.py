"""The way from v1 to v2 as a waterfall: what each step is worth."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.units import seconds
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import LONGEST_NAME, Row
from flashdig.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
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
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME = "steps"
TITLE = "From v1 to v2, one step at a time"
_STEP = "step:"


@dataclass(frozen=True)
class _Fall:
    """A step: the time before and after it, its share of the whole gain, and the loss without."""

    name: str
    before: float
    after: float
    share: float | None
    loss: float | None

    @property
    def is_of_v2(self) -> bool:
        """k_layout makes v2_transposed, so it has no share."""
        return self.share is not None

    @property
    def speedup(self) -> float:
        return self.before / self.after


def steps(rows: Sequence[Row], name: str = NAME) -> Picture | Missing:
    """A waterfall of the cumulative steps; rows of one problem and one run."""
    ran = [row for row in rows if row["kind"] == "step" and row.get("ms") is not None]
    path = [row for row in ran if row["name"].startswith(_STEP)]
    if not any(row["kind"] == "step" for row in rows):
        return Missing(name, TITLE, "The run did not take the steps apart (flashdig dig --steps).")
    if len(path) < 2:
        return Missing(name, TITLE, "No two steps from v1 to v2 were timed; that takes a GPU.")
    without = {row["name"].removeprefix("without:"): row.get("speedup") for row in ran}
    falls = []
    for before, row in itertools.pairwise(path):
        step = row["name"].removeprefix(_STEP)
        falls.append(
            _Fall(step, before["ms"], row["ms"], row.get("share_of_gain"), without.get(step))
        )
    alt = _alt(falls)
    caption = (
        "Each bar runs from the time before a step to the time after it, on a log axis, so that "
        "its length is its share of the gain from v1 to v2 (in brackets). Hatched bars that go "
        "back to the right are losses. “Without it” is how many times as slow v2 is without this "
        "step alone."
    )
    if any(not fall.is_of_v2 for fall in falls):
        caption += " What stands below v2 is not a part of it."

    def draw(figure: Figure) -> None:
        _draw(figure, falls)

    return picture(name, TITLE, alt, caption, draw, height=0.7 + 0.36 * (len(falls) + 2))


def _alt(falls: Sequence[_Fall]) -> str:
    best = max(falls, key=lambda fall: fall.speedup)
    v1, v2 = falls[0].before, _v2_ms(falls)
    each = "; ".join(f"{fall.name} {_label(fall)}" for fall in falls)
    return (
        f"Waterfall from v1, {seconds(v1 / 1e3)}, to v2, {seconds(v2 / 1e3)}: {v1 / v2:.3g} times "
        f"as fast. The largest gain is {best.name}, {best.speedup:.2f}x. In order: {each}."
    )


def _v2_ms(falls: Sequence[_Fall]) -> float:
    """After the last step that is a part of v2."""
    return next((fall.after for fall in reversed(falls) if fall.is_of_v2), falls[-1].after)


def _label(fall: _Fall) -> str:
    text = f"{fall.speedup:.2f}x"
    if fall.share is not None:
        text += f" ({100 * fall.share:.0f} %)"
    text += f" to {seconds(fall.after / 1e3)}"
    if fall.loss:
        text += f", without it {1 / fall.loss:.2f}x"
    return text


def _draw(figure: Figure, falls: Sequence[_Fall]) -> None:
    axes = figure.add_subplot()
    low, high = log_range([falls[0].before, *(fall.after for fall in falls)])
    axes.set(xscale="log", xlim=(low, high * 1.1))
    light_grid(axes, "x")
    names: list[str] = []

    def whole(name: str, ms: float, colour: str) -> None:
        axes.barh(len(names), ms - low, left=low, height=0.66, **bar_style(colour))
        _words(axes, seconds(ms / 1e3), ms, len(names), right=True)
        names.append(name)

    def part(fall: _Fall) -> None:
        faster = fall.after <= fall.before
        left, right = sorted((fall.before, fall.after))
        colour = VERMILLION if not faster else BLUE if fall.is_of_v2 else GREEN
        place = len(names)
        axes.barh(place, right - left, left=left, height=0.66, **bar_style(colour))
        axes.plot([fall.before] * 2, [place - 0.67, place - 0.33], color=INK, linewidth=0.8)
        is_left = left * right < low * high
        _words(axes, _label(fall), right if is_left else left, place, right=is_left)
        names.append(shortened(fall.name, LONGEST_NAME))

    whole("v1", falls[0].before, ORANGE)
    for fall in falls:
        if fall.is_of_v2:
            part(fall)
    whole("v2", _v2_ms(falls), BLUE)
    for fall in falls:
        if not fall.is_of_v2:
            part(fall)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    log_ticks(axes.xaxis, low, high, lambda ms: seconds(ms / 1e3))


def _words(axes: Axes, words: str, x: float, place: int, *, right: bool) -> None:
    """Beside the end of a bar, at its right or its left."""
    axes.annotate(
        words,
        (x, place),
        (6 if right else -6, 0),
        textcoords="offset points",
        ha="left" if right else "right",
        va="center",
        fontsize=SMALL,
    )
