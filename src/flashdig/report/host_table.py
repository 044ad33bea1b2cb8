"""The tables of `flashdig bench host`, from rows of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Row = Mapping[str, Any]

LEGEND = (
    "us: host microseconds of one call, median over the rounds; the GPU is not waited for. A/A: "
    "how much a repeated measurement differs within a round, median."
)


def print_host(rows: Sequence[Row], console: Console) -> None:
    """Whole calls, one column each; the parts; first calls where they were measured."""
    whole = [row for row in rows if row["kind"] == "speed"]
    if whole:
        console.print(f"[bold]host: {_problem(whole[0])}[/bold]", highlight=False)
        console.print(_whole(whole))
    untimed = [row for row in whole if "ms" not in row]
    for line in dict.fromkeys(f"{row['backend']}: {_why(row)}" for row in untimed):
        console.print(line, highlight=False, markup=False, style="dim")
    parts = [row for row in rows if row["kind"] == "step" and "first_call" not in row["features"]]
    if parts:
        console.print(_listed("part of a call", parts, 1e3, "us"))
    first = [row for row in rows if "first_call" in row["features"]]
    if first:
        console.print(_listed("first call of a process", first, 1e-3, "s"))
    console.print(LEGEND, highlight=False, markup=False, style="dim")


def _why(row: Row) -> str:
    """Why it has no time."""
    return str(row["gate"] if row["gate"] != "ok" else row.get("notes", ""))


def _problem(row: Row) -> str:
    text = f"batch {row['batch']}, heads {row['num_heads']}, seqlen {row['seqlen_q']}"
    return f"{text}, head_dim {row['head_dim']}, {row['dtype']}"


def _whole(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("us a call")
    calls = list(dict.fromkeys(row["name"] for row in rows))
    for name in calls:
        table.add_column(name, justify="right")
    for backend in dict.fromkeys(row["backend"] for row in rows):
        of_backend = {row["name"]: row for row in rows if row["backend"] == backend}
        table.add_row(backend, *(_microseconds(of_backend.get(name)) for name in calls))
    return table


def _microseconds(row: Row | None) -> str:
    if row is None or "ms" not in row:
        return "-"
    return f"{row['ms'] * 1e3:.1f}"


def _listed(title: str, rows: Sequence[Row], factor: float, unit: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    table.add_column(unit, justify="right")
    table.add_column("A/A", justify="right")
    for row in rows:
        if "ms" in row:
            time, spread = f"{row['ms'] * factor:.2f}", f"{row['aa_spread']:.1%}"
        else:
            time, spread = "-", escape(row["gate"])
        table.add_row(escape(row["name"]), time, spread)
    return table
