"""Fields that the rows of a run have in common, each written once for the run.

Shapes, dtype, clock and the like are the same in most rows of a run. In the file they stand with
their most frequent value under "shared", by run, and a row holds such a field only where its value
is another one. Only fields that every row of the run has are shared, so that a row lacks nothing
that it had and gets nothing that it had not.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flashdig.bench.rows import RecordError

RUN = "run_id"  # by which a row finds what it shares

Fields = dict[str, Any]


def shortened(rows: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Fields], list[Fields]]:
    """(run -> what its rows share, rows without what they share)."""
    of_run: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        of_run.setdefault(row[RUN], []).append(row)
    texts = {run: _most_frequent(found) for run, found in of_run.items()}
    short = []
    for row in rows:
        common = texts[row[RUN]]
        short.append({n: x for n, x in row.items() if n not in common or common[n] != _text(x)})
    shared = {run: {n: json.loads(x) for n, x in found.items()} for run, found in texts.items()}
    return {run: found for run, found in shared.items() if found}, short


def _most_frequent(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Field -> its most frequent value as JSON, where all rows have the field and some agree."""
    found = {}
    for name in rows[0]:
        if name == RUN or not all(name in row for row in rows):
            continue
        text, count = Counter(_text(row[name]) for row in rows).most_common(1)[0]
        if count > 1:
            found[name] = text
    return found


def _text(value: Any) -> str:
    """Tells 1, 1.0 and True apart, which are equal in Python."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def completed(rows: Sequence[Any], shared: Any) -> list[Any]:
    """The rows that `shortened` was given; what is no row is left as it is.

    Raises RecordError for a `shared` that is none, or of a run without rows.
    """
    if not isinstance(shared, dict) or not all(isinstance(x, dict) for x in shared.values()):
        raise RecordError("shared must be an object of objects")
    runs = {row[RUN] for row in rows if _is_of_run(row)}
    if unknown := sorted(shared.keys() - runs):
        raise RecordError(f"shared names the run {unknown[0]!r}, which has no rows")
    return [{**shared.get(row[RUN], {}), **row} if _is_of_run(row) else row for row in rows]


def _is_of_run(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get(RUN), str)
