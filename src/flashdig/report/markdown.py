"""Tables for README and docs, drawn from the rows of a committed record.

    python -m flashdig.report.markdown benchmarks/results/nvidia-h200/dig.json README.md docs/...

rewrites what stands between "<!-- table: NAME -->" and "<!-- end of table -->" in each file; NAME
is "ladder" (the newest run without a preset), "steps" or "pair".
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from flashdig.report.dig_table import COLUMNS, Row, problem_title

SHOWN = ("time", "TFLOP/s", "of matmul", "memory", "kernels", "error")


def ladder_markdown(rows: Sequence[Row], columns: Sequence[str] = SHOWN) -> str:
    """Title and table of one problem's rungs."""
    chosen = [column for column in COLUMNS if column.name in columns]
    lines = [
        f"{problem_title(rows[0])}:",
        "",
        f"| rung | {' | '.join(column.name for column in chosen)} |",
        f"| --- |{' ---: |' * len(chosen)}",
    ]
    for row in rows:
        cells = " | ".join(column.cell(row) or "-" for column in chosen)
        lines.append(f"| {row['name']} | {cells} |")
    return "\n".join(lines)


def default_ladder(rows: Sequence[Row]) -> list[Row]:
    """The rungs of the newest run that used no preset."""
    plain = [row for row in rows if row["kind"] == "rung" and "preset" not in row]
    if not plain:
        raise ValueError("the record holds no run of the dig without a preset")
    return [row for row in plain if row["run_id"] == plain[-1]["run_id"]]


def step_markdown(rows: Sequence[Row]) -> str:
    """The way from v1 to v2 on every problem of the record: time, share of the gain, loss without.

    A column is a problem, a row a step; "a / b / c" are the time after the step, its share of the
    gain from v1 to v2, and how much slower v2 is without it.
    """
    steps = [row for row in rows if row["kind"] == "step" and row["gate"] == "ok"]
    columns = _by_problem(steps)
    longest = max(columns.values(), key=len, default={})
    names = [name.removeprefix("step:") for name in longest if name.startswith("step:")]
    lines = _header("step", columns)
    for name in names:
        cells = []
        for own in columns.values():
            step, without = own.get(f"step:{name}"), own.get(f"without:{name}")
            cells.append("-" if step is None else _step_cell(step, without))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def pair_markdown(rows: Sequence[Row]) -> str:
    """Split-Q against split-K: time, and barriers / shuffles / shared-memory instructions."""
    pair = [row for row in rows if row["name"] in ("split_q", "split_k") and row["gate"] == "ok"]
    columns = _by_problem(pair)
    lines = _header("warps split", columns)
    for name, title in (("split_q", "queries"), ("split_k", "keys")):
        cells = []
        for own in columns.values():
            counts = own[name]["features"]["instructions"]
            shared = sum(counts[family] for family in ("LDS", "LDSM", "STS", "STSM"))
            cells.append(f"{own[name]['ms']:.3f} ms, {counts['BAR']} / {counts['SHFL']} / {shared}")
        lines.append(f"| {title} | {' | '.join(cells)} |")
    gains = (f"{own['split_k']['ms'] / own['split_q']['ms']:.2f}x" for own in columns.values())
    lines.append(f"| gain | {' | '.join(gains)} |")
    return "\n".join(lines)


def _by_problem(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(problem_title(row), {})[row["name"]] = row
    return found


def _header(first: str, columns: Mapping[str, object]) -> list[str]:
    titles = (title.replace(", ", "<br>") for title in columns)
    return [f"| {first} | {' | '.join(titles)} |", f"| --- |{' ---: |' * len(columns)}"]


def _step_cell(step: Row, without: Row | None) -> str:
    share = step.get("share_of_gain")
    parts = [
        f"{step['ms']:.3f} ms",
        "-" if share is None else f"{100 * share:.0f} %",
        "-" if without is None else f"{1 / without['speedup']:.2f}x",
    ]
    return " / ".join(parts)


def with_tables(text: str, rows: Sequence[Row]) -> str:
    """A document with its tables drawn anew. Raises ValueError for an unknown or open table."""
    return with_drawn(text, {name: partial(draw, rows) for name, draw in TABLES.items()})


def with_drawn(text: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """A document with what stands between the marks of a table replaced by what its name draws.

    Raises ValueError for an unknown or open table.
    """

    def drawn(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in tables:
            raise ValueError(f"unknown table {name!r}; there are {', '.join(tables)}")
        return f"<!-- table: {name} -->\n{tables[name]()}\n{END}"

    if text.count("<!-- table: ") != text.count(END):
        raise ValueError(f"a table begins without its {END!r}")
    return _TABLE.sub(drawn, text)


END = "<!-- end of table -->"
_TABLE = re.compile(rf"<!-- table: (?P<name>[\w-]+) -->.*?{END}", re.DOTALL)
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "ladder": lambda rows: ladder_markdown(default_ladder(rows)),
    "steps": step_markdown,
    "pair": pair_markdown,
}


if __name__ == "__main__":
    from flashdig.bench.results import read_record

    record, *documents = (Path(argument) for argument in sys.argv[1:])
    recorded = read_record(record).rows
    for document in documents:
        document.write_text(with_tables(document.read_text(), recorded))
