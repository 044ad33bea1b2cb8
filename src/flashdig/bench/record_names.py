"""Texts of a record that come back in many rows, each written once: a row then holds the text's
number.

Kernel names, problems, notes and sentences are long; in the file they stand in one list, in the
order in which they came first, so that appending a run changes no row that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdig.bench.rows import RecordError

TEXTS = ("name", "notes", "sentence", "run_id")


def numbered(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """(names, rows that hold places in `names` instead of their texts and their kernels' names)."""
    places: dict[str, int] = {}

    def place(text: Any) -> Any:
        return places.setdefault(text, len(places)) if isinstance(text, str) else text

    short = []
    for row in rows:
        # in an order of its own: a row that was read has its keys in another
        written = {**row, **{field: place(row[field]) for field in TEXTS if field in row}}
        if row.get("kernels"):
            written["kernels"] = [{**one, "name": place(one["name"])} for one in row["kernels"]]
        short.append(written)
    return list(places), short


def named(rows: Sequence[Any], names: Any) -> list[Any]:
    """The rows that `numbered` was given. Texts that stand in their rows are left there.

    Raises RecordError for a list that holds no names, and for a number without a name.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecordError("names must be a list of strings")
    return [_named(row, names, number) for number, row in enumerate(rows, start=1)]


def _named(row: Any, names: list[str], number: int) -> Any:
    if not isinstance(row, dict):
        return row
    told = dict(row)
    for field in TEXTS:
        if field in row:
            told[field] = _text(row[field], names, f"row {number}: {field}")
    kernels = row.get("kernels")
    if isinstance(kernels, list):
        where = f"row {number}: kernel name"
        told["kernels"] = [
            {**one, "name": _text(one["name"], names, where)}
            if isinstance(one, dict) and "name" in one
            else one
            for one in kernels
        ]
    return told


def _text(place: Any, names: list[str], where: str) -> Any:
    if type(place) is not int:  # a text itself, or what `check_row` refuses
        return place
    if not 0 <= place < len(names):
        raise RecordError(f"{where} {place} is not in names")
    return names[place]
