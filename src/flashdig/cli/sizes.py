"""Sizes as people type them: 8192, 8k, 1m. For lengths, k is 1024 and m is 1024 x 1024."""

from __future__ import annotations

from flashdig.cli.errors import UsageError

_SUFFIXES = {"k": 1024, "m": 1024 * 1024}


def parse_size(text: str, argument: str) -> int:
    """A whole number of at least 1, with an optional suffix k (1024) or m (1024 x 1024).

    Raises UsageError that names `argument` and what is allowed.
    """
    plain = text.strip().lower().replace("_", "").replace(",", "")
    factor = _SUFFIXES.get(plain[-1:], 1)
    digits = plain[:-1] if factor > 1 else plain
    if not digits.isascii() or not digits.isdigit() or int(digits) < 1:
        raise UsageError(
            f"{argument} must be a whole number of at least 1, as 8192 or 8k (k = 1024), "
            f"got {text!r}"
        )
    return int(digits) * factor


def parse_sizes(text: str, argument: str) -> list[int]:
    """Sizes with commas between them: 512,1k,2k."""
    return [parse_size(part, argument) for part in text.split(",")]
