"""Online softmax on small numbers: running maximum, running sum and what each tile rescales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    SMALL,
    bar_style,
    picture,
    shortened,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from flashdig.generations.walk_data import Shown, Walk

NAME = "online_softmax"
TITLE = "Online softmax, tile by tile"
_RESCALE = "exp(m_old-m_new)"
_MOST_QUERIES = 4
LONGEST_NAME = 14


@dataclass(frozen=True)
class _Visit:
    """A query meets a tile of keys: its scores there, and m, l after it."""

    scores: tuple[float, ...]
    row_max: float
    row_sum: float
    rescale: float
    carried: float


def walk_picture(walk: Walk, name: str = NAME) -> Picture | Missing:
    """Each query of the walk's tiled loop: scores and running maximum, running sum below."""
    queries = _queries(walk)
    if not queries:
        return Missing(name, TITLE, "The walk holds no scores or no visit of a tile.")
    shown = dict(list(queries.items())[:_MOST_QUERIES])
    alt = _alt(shown)
    caption = (
        "Top: the scores of a query, tile after tile, and the running maximum m (line). Bottom: "
        "the running sum l after each tile: what was carried over, shrunk by exp(m_old − m_new) "
        "(the factor below the bar), and what the tile adds. Where m does not rise the factor is "
        "1. O is rescaled by the same factor, and divided by l once, at the end."
    )

    def draw(figure: Figure) -> None:
        _draw(figure, shown)

    return picture(name, TITLE, alt, caption, draw, height=4.8)


def _queries(walk: Walk) -> dict[str, list[_Visit]]:
    """Query -> its visits in order, from the tables that the walk shows."""
    tables = [shown for step in walk.steps for shown in step.shown]
    scores = next((t for t in tables if t.name == "S" and t.rows and t.columns), None)
    if scores is None:
        return {}
    rows = dict(zip(scores.rows, _matrix(scores), strict=True))
    found: dict[str, list[_Visit]] = {}
    at_key: dict[str, int] = {}
    for table in tables:
        if _RESCALE not in table.columns:
            continue
        m, total, factor = (table.columns.index(column) for column in ("m", "l", _RESCALE))
        first, _, last = table.name.rpartition("keys ")[2].partition("-")
        for query, numbers in zip(table.rows, _matrix(table), strict=True):
            visits = found.setdefault(query, [])
            begin = at_key.get(query, 0)
            end = begin + int(last) - int(first) + 1
            at_key[query] = end
            before = visits[-1].row_sum if visits else 0.0
            visits.append(
                _Visit(
                    scores=rows[query][begin:end],
                    row_max=numbers[m],
                    row_sum=numbers[total],
                    rescale=numbers[factor],
                    carried=before * numbers[factor],
                )
            )
    return found


def _matrix(shown: Shown) -> list[tuple[float, ...]]:
    if not isinstance(shown.values, tuple):
        return []
    return [row for row in shown.values if isinstance(row, tuple)]


def _alt(queries: dict[str, list[_Visit]]) -> str:
    said = ["Scores, running maximum m and running sum l of each query, tile by tile."]
    for query, visits in queries.items():
        m = ", ".join(f"{visit.row_max:.3g}" for visit in visits)
        factors = ", ".join(f"{visit.rescale:.3g}" for visit in visits)
        total = ", ".join(f"{visit.row_sum:.3g}" for visit in visits)
        said.append(f"{query}: m {m}; rescaled by {factors}; l {total}.")
    rises = {query: _rises(visits) for query, visits in queries.items()}
    most = max(rises, key=rises.__getitem__)
    return f"{' '.join(said)} The maximum of {most} rises most often: {rises[most]} times."


def _rises(visits: Sequence[_Visit]) -> int:
    """Tiles after the first that bring a new maximum."""
    return sum(visit.rescale < 1 for visit in visits[1:])


def _draw(figure: Figure, queries: dict[str, list[_Visit]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    grid = figure.subplots(2, len(queries), sharey="row", squeeze=False)
    for column, (query, visits) in enumerate(queries.items()):
        _draw_scores(grid[0][column], visits)
        grid[0][column].set_title(shortened(query, LONGEST_NAME))
        grid[0][column].set_xlabel("key")
        _draw_sums(grid[1][column], visits)
    grid[0][0].set_ylabel("score")
    grid[1][0].set_ylabel("row sum l")
    highest = max(visit.row_sum for visits in queries.values() for visit in visits)
    grid[1][0].set_ylim(0, 1.2 * highest)
    handles = [
        Patch(**bar_style(GREEN), label="score"),
        Line2D([], [], color=INK, marker="o", markersize=4, label="running maximum m"),
        Patch(**bar_style(BLUE), label="l carried over, rescaled"),
        Patch(**bar_style(ORANGE), label="l of this tile"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)


def _draw_scores(axes: Axes, visits: Sequence[_Visit]) -> None:
    key = 0
    for number, visit in enumerate(visits):
        first = key
        for score in visit.scores:
            axes.bar(key, score, width=0.8, **bar_style(GREEN))
            key += 1
        ends = [first - 0.45, key - 0.55]
        axes.plot(ends, [visit.row_max] * 2, color=INK, linewidth=1.8)
        axes.plot(sum(ends) / 2, visit.row_max, "o", color=INK, markersize=4)
        axes.annotate(
            f"{visit.row_max:.3g}",
            (sum(ends) / 2, visit.row_max),
            (0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
        )
        if number:
            axes.axvline(first - 0.5, color=INK, linewidth=0.5, alpha=0.4)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.margins(y=0.18)
    axes.set_xticks(range(key))
    axes.tick_params(axis="x", length=0)


def _draw_sums(axes: Axes, visits: Sequence[_Visit]) -> None:
    for place, visit in enumerate(visits):
        if visit.carried:
            axes.bar(place, visit.carried, width=0.7, **bar_style(BLUE))
        axes.bar(
            place,
            visit.row_sum - visit.carried,
            bottom=visit.carried,
            width=0.7,
            **bar_style(ORANGE),
        )
        axes.annotate(
            f"{visit.row_sum:.3g}",
            (place, visit.row_sum),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=SMALL,
        )
    axes.set_xticks(range(len(visits)), [f"×{visit.rescale:.2g}" for visit in visits])
    axes.tick_params(axis="x", length=0)
