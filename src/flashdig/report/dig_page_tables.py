"""Tables of a dig's page: the terminal's columns, and the same cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdig.costs.units import with_unit
from flashdig.evidence.card_file import Cards
from flashdig.report.dig_page_findings import shares_of_gain
from flashdig.report.dig_page_words import share_words, whole_percent
from flashdig.report.dig_table import COLUMNS, Row, measured_bytes, surprise_lines
from flashdig.report.sass_terminal import card_cell, card_figures, card_more


@dataclass(frozen=True)
class TableRow:
    """`is_dim`: of a rung that has no result."""

    name: str
    cells: list[str]
    is_dim: bool = False


@dataclass(frozen=True)
class Table:
    """The first of `columns` is above the names."""

    columns: list[str]
    rows: list[TableRow]


def ladder_table(rows: Sequence[Row], first: str = "rung") -> Table:
    """Every column of the terminal's table that some row has a value for, and shares of the gain
    of rungs."""
    columns = [column for column in COLUMNS if any(column.cell(row) for row in rows)]
    shares = shares_of_gain(rows) if all(row["kind"] == "rung" for row in rows) else {}
    names = [first, *(column.name for column in columns)]
    place = names.index("vs below") + 1 if shares and "vs below" in names else None
    if place is not None:
        names.insert(place, "of the gain")
    found = []
    for row in rows:
        cells = [column.cell(row) or "–" for column in columns]
        if place is not None:
            share = shares.get(row["name"])
            cells.insert(place - 1, "–" if share is None else whole_percent(share.fraction))
        found.append(TableRow(row["name"], cells, row["gate"] != "ok"))
    return Table(names, found)


def error_table(rows: Sequence[Row]) -> Table | None:
    """Errors of the rungs, beside that of the bottom rung; None where none was checked."""
    checked = [row for row in rows if "error" in row]
    if not checked:
        return None
    first = float(checked[0]["error"])
    has_bound = any("allowed_error" in row for row in checked)
    has_eager = any("eager_difference" in row for row in checked)
    columns = ["rung", "error", f"of {checked[0]['name']}'s"]
    columns += [*(["allowed"] if has_bound else []), *(["from eager"] if has_eager else []), "gate"]
    found = []
    for row in rows:
        cells = ["–", "–"]
        if "error" in row:
            cells[0] = f"{row['error']:.1e}"
            cells[1] = f"{row['error'] / first:.2f}x" if first else "–"
        for name, is_shown in (("allowed_error", has_bound), ("eager_difference", has_eager)):
            if is_shown:
                cells.append("–" if name not in row else f"{row[name]:.1e}")
        found.append(TableRow(row["name"], [*cells, row["gate"]], row["gate"] != "ok"))
    return Table(columns, found)


def counters_table(rows: Sequence[Row]) -> Table | None:
    """What memory was asked for and what it moved, a rung a row; None where nothing was counted."""
    counted = [row for row in rows if "counters" in row]
    if not counted:
        return None
    columns = ["rung", "kernels", "asked of the L2", "read", "written", "read + written"]
    columns.append("expected")
    found = []
    for row in counted:
        counters, predicted = row["counters"], row.get("predicted", {})
        expected = [predicted.get(f"memory_{part}_bytes") for part in ("load", "store")]
        amounts = [
            counters.get("l2_bytes"),
            counters["dram_read_bytes"],
            counters["dram_write_bytes"],
            measured_bytes(row),
            None if None in expected else sum(expected),
        ]
        cells = ["–" if amount is None else with_unit(amount, "B") for amount in amounts]
        launches = sum(kernel["count"] for kernel in counters["kernels"])
        found.append(TableRow(row["name"], [str(launches), *cells]))
    return Table(columns, found)


def card_table(cards: Cards) -> Table | None:
    """The cards side by side, and of two what the second has more; None without any."""
    shown = list(cards.cards)
    if not shown:
        return None
    columns = [cards.key.arch, *(card.subject for card in shown)]
    if len(shown) == 2:
        columns.append("more")
    rows = []
    for name, values in card_figures(shown).items():
        cells = [card_cell(value) for value in values]
        if len(shown) == 2:
            cells.append(card_more(values[0], values[1]))
        rows.append(TableRow(name, cells))
    return Table(columns, rows)


@dataclass(frozen=True)
class KernelLine:
    name: str
    figures: str


@dataclass(frozen=True)
class RungWords:
    """What a page says of a rung beside its figures."""

    name: str
    sentence: str
    share: str = ""
    surprises: tuple[str, ...] = ()
    notes: str = ""
    kernels: tuple[KernelLine, ...] = ()


def rung_words(rows: Sequence[Row], *, kernels: bool) -> list[RungWords]:
    """Sentence, share of the gain, surprises, notes and (where asked for) launches of each row."""
    shares = shares_of_gain(rows) if all(row["kind"] == "rung" for row in rows) else {}
    # the rates of a run stand in the trust box, not beside every rung
    told = [set(_notes(row)) for row in rows if row["gate"] == "ok"]
    common = set.intersection(*told) if len(told) > 1 else set()
    found = []
    for row in rows:
        share = shares.get(row["name"])
        found.append(
            RungWords(
                name=row["name"],
                sentence=row["sentence"],
                share="" if share is None else share_words(share.fraction),
                surprises=tuple(surprise_lines(row)),
                notes="; ".join(part for part in _notes(row) if part not in common),
                kernels=tuple(map(_kernel_line, row.get("kernels", ()))) if kernels else (),
            )
        )
    return found


def _notes(row: Row) -> list[str]:
    return [part for part in row.get("notes", "").split("; ") if part]


def _kernel_line(kernel: Row) -> KernelLine:
    parts = [f"{kernel['count']} x, {kernel['us']:,.4g} µs in all"]
    if "grid" in kernel:
        parts.append(f"grid {' x '.join(map(str, kernel['grid']))}")
    if "block" in kernel:
        parts.append(f"block {' x '.join(map(str, kernel['block']))}")
    if "registers" in kernel:
        parts.append(f"{kernel['registers']} registers a thread")
    if "shared_bytes" in kernel:
        parts.append(f"{kernel['shared_bytes']:,} bytes of shared memory")
    if "occupancy_percent" in kernel:
        limit = f" (limited by {kernel['occupancy_limit']})" if "occupancy_limit" in kernel else ""
        parts.append(f"occupancy {kernel['occupancy_percent']:.3g} %{limit}")
    return KernelLine(kernel["name"], ", ".join(parts))
