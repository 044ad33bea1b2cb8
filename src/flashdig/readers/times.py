"""Time stamps without float error: microseconds as text or number to integer nanoseconds."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation

# A stamp beyond this is damage: 2**63 ns are 292 years.
_LIMIT_NS = 1 << 63


def nanoseconds(microseconds: object) -> int | None:
    """Integer nanoseconds of a microsecond value, or None where it is no time.

    Args:
        microseconds: an int, a float, or decimal text such as "5107937722785.943"; digits behind
            the third decimal are rounded half up.
    """
    if isinstance(microseconds, str):
        # the recorder writes three decimals: without the point they are nanoseconds
        if microseconds[-4:-3] == "." and len(microseconds) < 20:
            try:
                return int(microseconds[:-4] + microseconds[-3:])
            except ValueError:
                return None
        return _from_decimal(microseconds)
    if isinstance(microseconds, bool):
        return None
    if isinstance(microseconds, int):
        value = microseconds * 1000
        return value if -_LIMIT_NS < value < _LIMIT_NS else None
    if isinstance(microseconds, float):
        return _from_decimal(repr(microseconds)) if math.isfinite(microseconds) else None
    return None


def _from_decimal(text: str) -> int | None:
    if len(text) > 64:
        return None
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        return None
    if not value.is_finite() or value.adjusted() > 17:
        return None
    rounded = math.floor(value * 1000 + Decimal("0.5"))
    return rounded if -_LIMIT_NS < rounded < _LIMIT_NS else None


def union_of_intervals(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same set of time as disjoint (start, end) pairs in order; empty intervals vanish."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def length_ns(disjoint: list[tuple[int, int]]) -> int:
    """Total length of disjoint intervals."""
    return sum(end - start for start, end in disjoint)


def intersect(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The time that lies in both of two lists of disjoint, ordered intervals."""
    result = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if start < end:
            result.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return result
