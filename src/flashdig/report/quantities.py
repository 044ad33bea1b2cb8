"""Numbers for people."""

from __future__ import annotations


def duration(nanoseconds: float) -> str:
    """A duration in the unit that suits it, four digits."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("µs", 1e3)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:,.4g} {unit}"
    return f"{nanoseconds:,.0f} ns"


def share(part: float, whole: float) -> str:
    """A percentage, three digits; "n/a" of nothing."""
    if not whole:
        return "n/a"
    percent = 100 * part / whole
    return "<0.1 %" if 0 < percent < 0.1 else f"{percent:.3g} %"
