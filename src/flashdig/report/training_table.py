"""The tables of `flashdig bench training-step`, from rows of one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashdig.bench.results import ratio
from flashdig.bench.suite import PEERS
from flashdig.bench.training_cells import UNFUSED
from flashdig.costs.units import with_unit

Row = Mapping[str, Any]

LEGEND = (
    "step: forward, backward and update, median over the rounds; A/A: how much the two steps of a "
    "round differ, median. MFU: model FLOP/s over the dense peak, 6 x parameters a token and "
    "attention counted in full (12 x layers x hidden x seqlen^2 a sequence) or half of it, as the "
    "causal mask leaves it. attention: device time in a recorded step. memory: peak of a step, "
    "weights and all. ours / it: tokens/s of the first of ours over that row's, median of the "
    "rounds' own ratios, [interval that covers the median with at least 95 %]."
)


def print_training(rows: Sequence[Row], console: Console) -> None:
    """One table a cell, then who has no figure and why."""
    for name in dict.fromkeys(row["name"] for row in rows):
        of_cell = [row for row in rows if row["name"] == name]
        console.print(f"[bold]{escape(_title(of_cell[0]))}[/bold]", highlight=False)
        console.print(_table(of_cell))
        for row in of_cell:
            if "ms" not in row or "no attention time" in row.get("notes", ""):
                why = row["gate"] if row["gate"] != "ok" else row.get("notes", "")
                console.print(
                    f"{row['backend']}: {why}", highlight=False, markup=False, style="dim"
                )
    console.print(LEGEND, highlight=False, markup=False, style="dim")


def is_ours(row: Row) -> bool:
    return row["backend"] not in (*PEERS, UNFUSED)


def _title(row: Row) -> str:
    model = row["model"]
    return (
        f"{row['name']}: {model['layers']} layers, hidden {model['hidden']}, "
        f"{row['num_heads']} heads of {row['head_dim']}, {row['batch']} x {row['seqlen_q']} tokens"
    )


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("attention by")
    for name in (
        "step", "A/A", "tokens/s", "MFU full", "MFU half", "attention", "forward", "backward",
        "memory", "ours / it",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    ours = next((row for row in rows if is_ours(row) and "ms" in row), None)
    for row in rows:
        table.add_row(escape(row["backend"]), *_cells(row, ours))
    return table


def _cells(row: Row, ours: Row | None) -> list[str]:
    memory = with_unit(row["peak_bytes"], "B") if "peak_bytes" in row else "-"
    if "ms" not in row:
        return ["-"] * 8 + [memory, "-"]
    attention = ["-"] * 3
    if "attention_ms" in row:
        parts = row["attention_ms"]
        attention = [_ms(sum(parts.values())), _ms(parts["forward"]), _ms(parts["backward"])]
    against = "-"
    if ours is not None and row is not ours:
        found = ratio(ours, row)
        against = f"{found.median:.3f}x \\[{found.low:.3f} {found.high:.3f}]"
    return [
        _ms(row["ms"]),
        f"{row['aa_spread']:.1%}",
        f"{row['tokens_per_s']:,.0f}",
        *(f"{row[name]:.1%}" if name in row else "-" for name in ("mfu", "mfu_causal_half")),
        *attention,
        memory,
        against,
    ]


def _ms(value: float) -> str:
    return f"{value:.1f} ms"
