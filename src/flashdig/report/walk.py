"""Prints a walk for people: numbers as small tables, each check with its verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from flashdig.generations.walk_data import Check, Numbers, Shown, Slip, Step, Symptom, Walk

WIDEST_TABLE = 16


def print_walk(walk: Walk, console: Console) -> None:
    """Prints every step, slip and symptom, and at the end how many held."""
    console.print(Text(walk.title, style="bold"))
    console.print(f"after {escape(walk.source)}", style="dim")
    for number, step in enumerate(walk.steps, 1):
        _print_step(number, step, console)
    _heading("The article's slips, each beside the right formula", console)
    for number, slip in enumerate(walk.slips, 1):
        _print_slip(number, slip, console)
    _heading("Troubleshooting: cause planted, symptom seen, fix applied", console)
    for symptom in walk.symptoms:
        _print_symptom(symptom, console)
    console.print()
    _print_summary(walk, console)


def _heading(title: str, console: Console) -> None:
    console.print()
    console.rule(escape(title), align="left")


def _print_step(number: int, step: Step, console: Console) -> None:
    _heading(f"{number}. {step.title}", console)
    _paragraph(step.explanation, console)
    for formula in step.formula.split(";  "):
        _paragraph(formula, console, style="cyan", indent=2)
    for shown in step.shown:
        _print_shown(shown, console)
    for check in step.checks:
        _paragraph(_check_line(check), console, style="green" if check.ok else "bold red")


def _check_line(check: Check) -> str:
    line = f"{_verdict(check.ok)}  {check.what}: {_number(check.value)}"
    if check.expected == 0 and check.tolerance:
        return f"{line} (at most {_number(check.tolerance)})"
    allowed = f" ± {_number(check.tolerance)}" if check.tolerance else ""
    return f"{line} (expected {_number(check.expected)}{allowed})"


def _print_slip(number: int, slip: Slip, console: Console) -> None:
    console.print()
    console.print(Text(f"{number}. {slip.title} (section {slip.place})", style="bold"))
    _paragraph(f"wrong: {slip.wrong_formula}", console, style="red", indent=2)
    _paragraph(f"right: {slip.right_formula}", console, style="cyan", indent=2)
    _print_shown(slip.wrong, console)
    _print_shown(slip.right, console)
    _paragraph(slip.explanation, console)
    _paragraph(
        f"{_verdict(slip.ok)}  wrong by {_number(slip.error)}, "
        f"right within {_number(slip.right_error)}",
        console,
        style="green" if slip.ok else "bold red",
    )


def _print_symptom(symptom: Symptom, console: Console) -> None:
    console.print()
    console.print(Text(f"Symptom: {symptom.symptom}", style="bold"))
    _paragraph(f"cause: {symptom.cause}", console, indent=2)
    _paragraph(f"fix: {symptom.fix}", console, indent=2)
    for shown in symptom.shown:
        _print_shown(shown, console)
    _paragraph(symptom.explanation, console)
    _paragraph(
        f"{_verdict(symptom.ok)}  {symptom.measure}: {_number(symptom.seen)} with the cause, "
        f"{_number(symptom.after)} with the fix (at most {_number(symptom.limit)} is right)",
        console,
        style="green" if symptom.ok else "bold red",
    )


def _print_summary(walk: Walk, console: Console) -> None:
    checks = [check.ok for step in walk.steps for check in step.checks]
    parts = (
        f"{sum(checks)} of {len(checks)} checks hold",
        f"{sum(slip.ok for slip in walk.slips)} of {len(walk.slips)} slips shown wrong",
        f"{sum(symptom.ok for symptom in walk.symptoms)} of {len(walk.symptoms)} symptoms "
        "seen and cured",
    )
    console.print(Text("; ".join(parts) + ".", style="bold green" if walk.ok else "bold red"))


def _print_shown(shown: Shown, console: Console) -> None:
    values = shown.values
    if not isinstance(values, tuple):
        _paragraph(f"{shown.name} = {_number(values)}", console, indent=2)
    elif not shown.columns and not _is_matrix(values):
        line = "  ".join(_number(x) for x in values if not isinstance(x, tuple))
        _paragraph(f"{shown.name} = {line}", console, indent=2)
    else:
        _print_table(shown, console)


def _is_matrix(values: Numbers) -> bool:
    return isinstance(values, tuple) and bool(values) and isinstance(values[0], tuple)


def _print_table(shown: Shown, console: Console) -> None:
    """A matrix, wide ones in slices of WIDEST_TABLE columns below each other."""
    rows = _as_rows(shown.values)
    width = len(rows[0])
    labels = shown.rows or ("",) * len(rows)
    for first in range(0, width, WIDEST_TABLE):
        end = min(first + WIDEST_TABLE, width)
        table = Table(
            title=escape(shown.name) if first == 0 else None,
            title_justify="left",
            title_style="italic",
            box=None,
            show_header=bool(shown.columns),
            pad_edge=False,
        )
        table.add_column("", style="dim", no_wrap=True)
        for column in range(first, end):
            header = escape(shown.columns[column]) if shown.columns else ""
            table.add_column(header, justify="right", header_style="dim", overflow="fold")
        for label, row in zip(labels, rows, strict=True):
            table.add_row(escape(label), *(_number(x) for x in row[first:end]))
        console.print(Padding(table, (0, 0, 0, 2), expand=False))


def _as_rows(values: Numbers) -> list[tuple[float, ...]]:
    if not isinstance(values, tuple):
        return [(values,)]
    matrix = [row for row in values if isinstance(row, tuple)]
    return matrix or [tuple(x for x in values if not isinstance(x, tuple))]


def _paragraph(text: str, console: Console, style: str = "", indent: int = 0) -> None:
    console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))


def _verdict(ok: bool) -> str:
    return "ok" if ok else "FAILED"


def _number(value: float) -> str:
    """Four significant digits; whole numbers in full, negative zero as 0."""
    if value == 0:
        return "0"
    if abs(value) < 1e15 and value == round(value):
        return f"{int(value):,}"
    return f"{value:.4g}"
