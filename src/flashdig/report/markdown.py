"""The ladder as a Markdown table, for README and docs; drawn from the rows of a committed record.

python -m flashdig.report.markdown benchmarks/results/nvidia-h200/dig.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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


def default_ladder(record: Path) -> list[Row]:
    """The rungs of the newest run in a dig record that used no preset."""
    rows = json.loads(record.read_text())["rows"]
    plain = [row for row in rows if row["kind"] == "rung" and "preset" not in row]
    if not plain:
        raise ValueError(f"{record} holds no run of the dig without a preset")
    return [row for row in plain if row["run_id"] == plain[-1]["run_id"]]


if __name__ == "__main__":
    print(ladder_markdown(default_ladder(Path(sys.argv[1]))))
