"""Numbers for people, in decimal units: 1 GB is 1e9 bytes."""

from __future__ import annotations

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def with_unit(value: float, unit: str) -> str:
    """Three significant digits with a decimal prefix: 5.54 GB, 989 TFLOP/s, 412 MB."""
    for factor, prefix in _PREFIXES:
        # 999.5 would be written as 1000 of the smaller unit
        if abs(value) >= 0.9995 * factor:
            return f"{_three_digits(value / factor)} {prefix}{unit}"
    return f"{_three_digits(value)} {unit}"


def seconds(value: float) -> str:
    """Three significant digits in s, ms, µs or ns."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= 0.9995 * factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{_three_digits(value / 1e-9)} ns"


def percent(fraction: float) -> str:
    return f"{_three_digits(100 * fraction)} %"


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.3g}"
