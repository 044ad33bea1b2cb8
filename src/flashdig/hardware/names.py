"""The nearest of some names to a mistyped one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(wanted: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Up to `count` of `names`, the most similar to `wanted` first; never empty if names are not.

    Case is ignored.
    """
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(wanted.lower(), by_lower, n=count, cutoff=0.0)
    return [by_lower[name] for name in found]
