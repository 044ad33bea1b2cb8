"""Kernel names of a record, each written once: a row then holds the name's number.

C++ names are long and come back in every row; in the file they stand in one list, in the order in
which they came first, so that appending a run changes no row that is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashdig.bench.rows import RecordError


def numbered(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[dict[str, Any]]]:
    """(names, rows whose kernels hold their name's place in `names`)."""
    places: dict[str, int] = {}
    short = []
    for row in rows:
        written = dict(row)
        if row.get("kernels"):
            written["kernels"] = [
                {**one, "name": places.setdefault(one["name"], len(places))}
                for one in row["kernels"]
            ]
        short.append(written)
    return list(places), short


def named(rows: Sequence[Any], names: Any) -> list[Any]:
    """The rows that `numbered` was given.

    Raises RecordError for a list that holds no names, and for a number without a name.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise RecordError("names must be a list of strings")
    return [_named(row, names, number) for number, row in enumerate(rows, start=1)]


def _named(row: Any, names: list[str], number: int) -> Any:
    kernels = row.get("kernels") if isinstance(row, dict) else None
    if not isinstance(kernels, list):
        return row
    return {**row, "kernels": [_with_name(one, names, number) for one in kernels]}


def _with_name(kernel: Any, names: list[str], number: int) -> Any:
    place = kernel.get("name") if isinstance(kernel, dict) else None
    if type(place) is not int:  # a name itself, or what `check_row` refuses
        return kernel
    if not 0 <= place < len(names):
        raise RecordError(f"row {number}: kernel name {place} is not in names")
    return {**kernel, "name": names[place]}
