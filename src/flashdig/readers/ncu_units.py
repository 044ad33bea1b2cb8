"""Numbers and units as Nsight Compute prints them, in base units.

Prefixes are decimal (Kbyte is 1000 byte). Base units are byte, second, hertz and counts; times are
asked for in nanoseconds by their users.
"""

from __future__ import annotations

import re
from decimal import Decimal

_PREFIX = {"n": -9, "u": -6, "m": -3, "": 0, "K": 3, "M": 6, "G": 9, "T": 12, "P": 15}
_SIZE = re.compile(r"^([KMGTP]?)(?:bytes?|bits?)$")
_TIME = re.compile(r"^([num]?)(?:s|sec|second|seconds)$")
_RATE = re.compile(r"^([KMGT]?)hz$", re.IGNORECASE)
_NUMBER = re.compile(r"^[+-]?(\d{1,3}(,\d{3})+|\d+)(\.\d+)?([eE][+-]?\d{1,3})?$", re.ASCII)
_ABSENT = {"", "n/a", "nan", "-nan", "inf", "-inf", "(!) n/a"}


def power_of_ten(unit: str) -> int:
    """The power of ten that leads from `unit` to base units; 0 for counts and percent.

    >>> [power_of_ten(unit) for unit in ("Mbyte", "us", "Tbyte/s", "sector/ns")]
    [6, -6, 12, 9]
    """
    above, _, below = unit.strip().partition("/")
    return _single(above) - _single(below)


def _single(unit: str) -> int:
    for pattern in (_SIZE, _TIME):
        found = pattern.match(unit)
        if found:
            return _PREFIX[found.group(1)]
    found = _RATE.match(unit)
    return _PREFIX[found.group(1).upper()] if found else 0


def in_base_units(text: str, unit: str) -> float | None:
    """'513.425408' and 'Mbyte' as 513425408.0; None where nothing was measured ('n/a', 'nan').

    Raises ValueError for a text that is no number ("PolicySpread").
    """
    text = text.strip()
    if text.lower() in _ABSENT:
        return None
    if not _NUMBER.match(text):
        raise ValueError(f"{text[:60]!r} is no number")
    return float(Decimal(text.replace(",", "")).scaleb(power_of_ten(unit)))
