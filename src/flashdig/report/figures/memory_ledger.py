"""The memory ledger: bytes of each tensor that a rung must move, asks for, and fetches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.ledger import TensorTraffic, ledger
from flashdig.costs.units import with_unit
from flashdig.hardware.devices import Device
from flashdig.report.dig_table import measured_bytes
from flashdig.report.figures.picture import Missing, Picture
from flashdig.report.figures.rung_rows import LONGEST_NAME, Row, guess_of, rungs_of
from flashdig.report.figures.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
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

NAME = "memory_ledger"
TITLE = "Bytes of each tensor"
COLUMNS = {
    "compulsory": GREEN,
    "issued": ORANGE,
    "expected at memory": BLUE,
    "counted": PURPLE,
    "measured": VERMILLION,
}
_ALL = "all"
_SCALARS = 64  # bytes
_MEASURED = (
    "These are the model's. Measured: bytes that memory read and wrote, by the chip's counters, "
    "each kernel from a cold L2 cache; what a kernel leaves written in the cache at its end is not "
    "among them."
)
_NOT_MEASURED = "These are the model's: no memory counters were read in this run."


@dataclass(frozen=True)
class _Panel:
    """Rungs with one ledger: (tensor or "all") -> column -> bytes loaded and stored."""

    names: tuple[str, ...]
    groups: dict[str, dict[str, int]]


def memory_ledger(
    rows: Sequence[Row], device: Device | None, name: str = NAME
) -> Picture | Missing:
    """A panel for each rung whose instructions can be counted, a group of bars for each tensor.

    Args:
        rows: of one problem and one run.
        device: whose cache stands before the memory.
    """
    if device is None:
        return Missing(name, TITLE, "The chip is not in the device table, so its cache is unknown.")
    panels: list[_Panel] = []
    for row in rungs_of(rows):
        groups = _groups(row, device)
        if groups is None:
            continue
        same = next((i for i, panel in enumerate(panels) if panel.groups == groups), None)
        if same is None:
            panels.append(_Panel((row["name"],), groups))
        else:
            panels[same] = _Panel((*panels[same].names, row["name"]), groups)
    if not panels:
        return Missing(name, TITLE, "No rung passed the gate whose bytes the cost models know.")
    alt = _alt(panels)
    caption = (
        "Loads and stores together, on a log axis. Compulsory: every input and output once. "
        "Issued: what the instructions of all launches ask for. Expected at memory: what the L2 "
        f"cache of {device.name} ({with_unit(device.cache_bytes, 'B')}) should leave of it. "
        f"{_MEASURED if _has(panels, 'measured') else _NOT_MEASURED} Instructions of library "
        "kernels are not known, so those rungs are left out."
    )
    if _has(panels, "counted"):
        caption += " Counted: with the part of the Triton kernel as its interpreter counts it."

    def draw(figure: Figure) -> None:
        _draw(figure, panels)

    height = 0.8 + 1.75 * math.ceil(len(panels) / 2)
    return picture(name, TITLE, alt, caption, draw, height=height)


def _groups(row: Row, device: Device) -> dict[str, dict[str, int]] | None:
    if row.get("predicted", {}).get("load_bytes") is None:
        return None
    guess = guess_of(row, device)
    if guess is None:
        return None
    found = {
        tensor: _columns(entry)
        for tensor, entry in ledger(guess, device).items()
        # a few scalars would stretch the axis by many decades
        if entry.issued.total_bytes > _SCALARS
    }
    if not found:
        return None
    whole = {
        column: sum(group.get(column, 0) for group in found.values())
        for column in ("compulsory", "issued", "expected at memory")
    }
    counted = _counted(row)
    if counted is not None:
        whole["counted"] = counted
    measured = measured_bytes(row)
    if measured is not None:
        whole["measured"] = measured
    return found | {_ALL: whole}


def _columns(entry: TensorTraffic) -> dict[str, int]:
    return {
        "compulsory": entry.compulsory.total_bytes,
        "issued": entry.issued.total_bytes,
        "expected at memory": entry.memory.total_bytes,
    }


def _counted(row: Row) -> int | None:
    """All launches' bytes, those of the Triton kernel as counted; None where it was not."""
    counted, predicted = row.get("counted"), row.get("predicted", {})
    if counted is None:
        return None
    total = 0
    for part in ("load_bytes", "store_bytes"):
        if counted.get(part) is None or predicted.get(f"triton_{part}") is None:
            return None
        total += predicted[part] - predicted[f"triton_{part}"] + counted[part]
    return total


def _has(panels: Sequence[_Panel], column: str) -> bool:
    return any(column in panel.groups[_ALL] for panel in panels)


def _alt(panels: Sequence[_Panel]) -> str:
    said = ["Bars of bytes for each tensor, a panel for each rung."]
    for panel in panels:
        whole = panel.groups[_ALL]
        tensors = {tensor: group for tensor, group in panel.groups.items() if tensor != _ALL}
        most = max(tensors, key=lambda tensor: tensors[tensor]["issued"])
        ratio = whole["issued"] / whole["compulsory"]
        text = (
            f"{' and '.join(panel.names)}: issued {with_unit(whole['issued'], 'B')}, {ratio:.3g} "
            f"times the compulsory {with_unit(whole['compulsory'], 'B')}; expected at memory "
            f"{with_unit(whole['expected at memory'], 'B')}"
        )
        if "counted" in whole:
            text += f"; counted {with_unit(whole['counted'], 'B')}"
        if "measured" in whole:
            text += f"; measured {with_unit(whole['measured'], 'B')}"
        said.append(f"{text}; most is {most} with {with_unit(tensors[most]['issued'], 'B')}.")
    least = min(panels, key=lambda panel: panel.groups[_ALL]["expected at memory"])
    amount = with_unit(least.groups[_ALL]["expected at memory"], "B")
    return f"{' '.join(said)} Least at memory: {' and '.join(least.names)} with {amount}."


def _draw(figure: Figure, panels: Sequence[_Panel]) -> None:
    from matplotlib.patches import Patch

    amounts = [
        amount
        for panel in panels
        for group in panel.groups.values()
        for amount in group.values()
        if amount
    ]
    low, high = log_range(amounts)
    count = math.ceil(len(panels) / 2)
    grid = figure.subplots(count, 2, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        _draw_panel(axes, panel, low)
        axes.set(yscale="log", ylim=(low, high))
        log_ticks(axes.yaxis, low, high, lambda amount: with_unit(amount, "B"))
    columns = {column for panel in panels for column in panel.groups[_ALL]}
    handles = [
        Patch(**bar_style(colour), label=column)
        for column, colour in COLUMNS.items()
        if column in columns
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(4, len(handles)))


def _draw_panel(axes: Axes, panel: _Panel, low: float) -> None:
    light_grid(axes, "y")
    width = 0.27
    for place, group in enumerate(panel.groups.values()):
        shift = (len(group) - 1) / 2
        for number, (column, amount) in enumerate(group.items()):
            if amount:
                axes.bar(
                    place + (number - shift) * width * 3 / len(group),
                    amount - low,
                    bottom=low,
                    width=width * 3 / len(group),
                    **bar_style(COLUMNS[column]),
                )
    axes.axvline(len(panel.groups) - 1.5, color=INK, linewidth=0.6, alpha=0.4)
    axes.set_xticks(range(len(panel.groups)), list(panel.groups))
    axes.tick_params(axis="x", length=0)
    axes.set_title(shortened(", ".join(panel.names), 2 * LONGEST_NAME))
