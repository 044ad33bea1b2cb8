"""The ladder as a terminal table, from rows of a record (fresh or committed)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from flashdig.costs.units import with_unit

Row = Mapping[str, Any]


def problem_title(row: Row) -> str:
    """The sizes of a row's problem in one line."""
    heads = str(row["num_heads"])
    if row["num_heads_kv"] != row["num_heads"]:
        heads += f"/{row['num_heads_kv']}"
    seqlen = str(row["seqlen_q"])
    if row["seqlen_k"] != row["seqlen_q"]:
        seqlen += f"/{row['seqlen_k']}"
    dtype = "float32 with TF32" if row["features"].get("tf32") else row["dtype"]
    title = f"batch {row['batch']}, heads {heads}, seqlen {seqlen}, head_dim {row['head_dim']}"
    title += f", {dtype}"
    if row["causal"]:
        title += ", causal"
    return f"{row['preset']}: {title}" if row.get("preset") else title


def print_ladder(rows: Sequence[Row], console: Console) -> None:
    """One table and one list of sentences for each problem among the rows, in their order.

    Steps come in tables of their own, one for each path.
    """
    for title, group in groupby(rows, key=_table_title):
        cell = list(group)
        console.print(f"[bold]{title}[/bold]", highlight=False)
        table, hidden = ladder_table(cell, console.width)
        console.print(table)
        if hidden:
            console.print(f"(a wider terminal shows: {', '.join(hidden)})", style="dim")
        for row in cell:
            console.print(f"[bold]{row['name']}[/bold]: {row['sentence']}", highlight=False)
            for line in surprise_lines(row):
                console.print(f"  [yellow]surprise[/yellow] {line}", highlight=False)
        console.print()


PATHS = {
    "cumulative": "v1 to v2, one step more at a time",
    "leave-one-out": "v2 without one step",
    "pair": "warps split the queries or the keys",
}


def _table_title(row: Row) -> str:
    title = problem_title(row)
    path = row["features"].get("path")
    return title if path is None else f"{title}: {PATHS[path]}"


@dataclass(frozen=True)
class Column:
    """A column of the ladder; the highest `rank` gives way first where the terminal is narrow."""

    name: str
    cell: Callable[[Row], str]
    rank: int


def ladder_table(rows: Sequence[Row], width: int) -> tuple[Table, list[str]]:
    """The rungs of one problem, and the names of the columns that did not fit into `width`.

    Columns that no rung has a value for are left out.
    """
    columns = [column for column in COLUMNS if any(column.cell(row) for row in rows)]
    hidden: list[str] = []
    while columns and _width(rows, columns) > width:
        last = max(columns, key=lambda column: column.rank)
        columns.remove(last)
        hidden.append(last.name)
    table = Table()
    table.add_column("rung", no_wrap=True)
    for column in columns:
        table.add_column(column.name, justify="right", no_wrap=True)
    for row in rows:
        style = None if row["gate"] == "ok" else "dim"
        cells = (column.cell(row) or "-" for column in columns)
        table.add_row(row["name"], *cells, style=style)
    return table, hidden


def _width(rows: Sequence[Row], columns: Sequence[Column]) -> int:
    """Characters that the table needs without wrapping: three of frame and padding a column."""
    names = max(len(str(row["name"])) for row in rows)
    widths = (max(len(column.name), *(len(column.cell(row)) for row in rows)) for column in columns)
    return 4 + names + sum(3 + width for width in widths)


def legend(rows: Sequence[Row]) -> str:
    """What the columns mean, for the rows at hand."""
    timed = any("ms" in row for row in rows)
    text = (
        "loads, stores: bytes that all launches ask for; a Triton kernel's part is counted in its "
        "interpreter, ~ is predicted alone. error: largest difference from float64."
    )
    if any("eager_difference" in row for row in rows):
        text += " from eager: largest difference from eager attention in the same dtype."
    if any("counters" in row for row in rows):
        text += (
            " DRAM: bytes that memory read and wrote, by Nsight Compute, each kernel from a cold "
            "L2 cache."
        )
    if not timed:
        return f"No GPU: no time was measured. {text}"
    return (
        "expected: what the cost models guess at the clock that was observed, over the time found. "
        "TFLOP/s: 4 x batch x heads x seqlen^2 x head_dim, half when causal. of matmul, of copy: "
        "share of the rates measured in the same run (copy: issued bytes, or for library kernels "
        f"those that cannot be avoided; above 100 % the L2 cache serves). {text}"
    )


def _time(row: Row) -> str:
    ms = row.get("ms")
    if ms is None:
        return ""
    return f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"


def _expected(row: Row) -> str:
    """The guess at the clock that was observed, as a share of the time found."""
    expected = row.get("predicted", {}).get("at_observed_clock", {}).get("expected_ms")
    if "ms" not in row or expected is None:
        return ""
    return f"{expected / row['ms']:.2f}x"


def surprise_lines(row: Row) -> list[str]:
    """Each surprise of a rung in a sentence."""
    lines = []
    for surprise in row.get("surprises", ()):
        what, unit = surprise["what"], _UNITS.get(surprise["what"], "")
        lines.append(
            f"{what}: guessed {surprise['predicted']:.4g}{unit}, found {surprise['found']:.4g}"
            f"{unit}: {surprise['cause']}"
        )
    return lines


_UNITS = {
    "time": " ms",
    "time floor": " ms",
    "occupancy": " %",
    "memory bytes": " bytes",
    "loads": " bytes",
    "stores": " bytes",
}


def _speedup(row: Row, path: str) -> str:
    own = row["features"].get("path", "rung")
    return _number(row.get("speedup"), "{:.2f}x") if own == path else ""


def _exchange(row: Row) -> str:
    """Static instruction counts of the pair."""
    counts = row["features"].get("instructions")
    if counts is None:
        return ""
    return " ".join(str(counts[family]) for family in ("BAR", "SHFL", "LDS", "LDSM", "STS"))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _against_paper(row: Row) -> str:
    measured, published = row.get("fwd_bwd_tflops"), row.get("paper_tflops")
    if measured is None or published is None:
        return ""
    return f"{measured / published:.2f}x of {published:g}"


def _issued(row: Row, name: str) -> str:
    """All launches' bytes: the Triton kernel's as counted, the others' as predicted."""
    predicted = row.get("predicted", {})
    total = predicted.get(name)
    if total is None:
        return ""
    counted = row.get("counted", {}).get(name)
    if counted is None:
        return f"~{_size(total)}"
    return _size(total - predicted[f"triton_{name}"] + counted)


def measured_bytes(row: Row) -> int | None:
    """What memory read and wrote, by the chip's counters; None where none were read."""
    counters = row.get("counters")
    if counters is None:
        return None
    return int(counters["dram_read_bytes"] + counters["dram_write_bytes"])


def _kernels(row: Row) -> str:
    """Kernels, and the copies of the copy engine beside them; its fills are left out."""
    kernels = launched(row)
    if kernels is None:
        return ""
    copies = _count(row["kernels"], "Memcpy")
    return f"{kernels} + {copies} copy" if copies else str(kernels)


def launched(row: Row) -> int | None:
    """Kernels of a call, copies and fills of the copy engine apart; None if not recorded."""
    if "kernels" not in row:
        return None
    engine = _count(row["kernels"], "Memcpy") + _count(row["kernels"], "Memset")
    return _count(row["kernels"], "") - engine


def _occupancy(row: Row) -> str:
    """Found, and what was guessed for it."""
    found = occupancy_percent(row)
    guessed = row.get("predicted", {}).get("occupancy")
    if found is None:
        return ""
    return f"{found:.0f} %" if guessed is None else f"{found:.0f} % ({100 * guessed:.0f} %)"


def occupancy_percent(row: Row) -> float | None:
    """Occupancy of the kernel that takes most of the time, of an exhibit its own; None if not
    recorded."""
    kernels = [k for k in row.get("kernels", ()) if k.get("occupancy_percent") is not None]
    if row.get("predicted", {}).get("occupancy") is not None:
        kernels = [k for k in kernels if not k["name"].startswith("void at::")]
    if not kernels:
        return None
    return float(max(kernels, key=lambda kernel: float(kernel["us"]))["occupancy_percent"])


def _count(kernels: Sequence[Mapping[str, Any]], prefix: str) -> int:
    return sum(int(kernel["count"]) for kernel in kernels if kernel["name"].startswith(prefix))


def _size(amount: float | None) -> str:
    return "" if amount is None else with_unit(amount, "B")


COLUMNS = (
    Column("time", _time, 0),
    Column("TFLOP/s", lambda row: _number(row.get("tflops"), "{:.1f}"), 1),
    Column("vs below", lambda row: _speedup(row, "rung"), 2),
    Column("vs before", lambda row: _speedup(row, "cumulative"), 2),
    Column("vs v2", lambda row: _speedup(row, "leave-one-out"), 2),
    Column("vs split-K", lambda row: _speedup(row, "pair"), 2),
    Column("of the gain", lambda row: _percent(row.get("share_of_gain")), 2),
    Column("BAR SHFL LDS LDSM STS", _exchange, 3),
    Column("of matmul", lambda row: _percent(row.get("share_of_matmul")), 6),
    Column("of copy", lambda row: _percent(row.get("share_of_copy")), 10),
    Column("expected", _expected, 7),
    Column("fwd+bwd TFLOP/s", lambda row: _number(row.get("fwd_bwd_tflops"), "{:.0f}"), 8),
    Column("vs paper (A100)", _against_paper, 5),
    Column("loads", lambda row: _issued(row, "load_bytes"), 9),
    Column("stores", lambda row: _issued(row, "store_bytes"), 9),
    Column("DRAM", lambda row: _size(measured_bytes(row)), 9),
    Column("memory", lambda row: _size(row.get("peak_bytes")), 4),
    Column("kernels", _kernels, 11),
    Column("occupancy (guess)", _occupancy, 13),
    Column("error", lambda row: _number(row.get("error"), "{:.1e}"), 3),
    Column("from eager", lambda row: _number(row.get("eager_difference"), "{:.1e}"), 12),
)
