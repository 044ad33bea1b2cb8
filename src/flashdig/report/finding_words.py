"""Findings and rows in words that the terminal and the pages share."""

from __future__ import annotations

from flashdig.costs.units import percent, with_unit
from flashdig.findings.explanation import Row
from flashdig.findings.finding import Finding, Gain, Unit
from flashdig.findings.guess import Guess
from flashdig.report.quantities import duration

VERDICT_WORDS = {
    "slow": "costs time",
    "check": "worth a check",
    "elsewhere": "not attention",
    "not measured": "no measurement",
    "fine": "as it should be",
}
CONFIDENCE_WORDS = {
    "certain": "the file shows it",
    "likely": "follows from documented behaviour",
    "possible": "other causes would look the same",
}


def quantity(value: float | str | None, unit: Unit | None) -> str:
    """A value in its unit, for people."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if unit == "ns":
        return duration(value)
    if unit == "bytes":
        return with_unit(value, "B")
    if unit == "FLOP":
        return with_unit(value, "FLOP/s") if value > 1e9 else f"{value:,.0f} FLOP"
    if unit == "Hz":
        return with_unit(value, "Hz")
    if unit == "percent":
        return f"{value:.3g} %"
    if unit == "ratio":
        return f"{value:.3g}"
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4g}"


def gain_words(gain: Gain | None) -> str:
    """What an advice is expected to save; "" where that is not known."""
    if gain is None:
        return ""
    text = f"{duration(gain.seconds * 1e9)} of this recording"
    if gain.share is not None:
        whose = "busy" if gain.clock == "device" else "elapsed"
        text += f", {percent(min(1.0, gain.share))} of its {whose} time"
    elif gain.clock == "host":
        text += " on the host"
    return text


def ratio_words(row: Row) -> str:
    ratio = row.ratio
    if ratio is None or row.unit == "count":
        return ""
    return f"{ratio:.3g}×"


def headline(finding: Finding) -> str:
    """Rule and verdict."""
    return f"{finding.rule} ({VERDICT_WORDS[finding.verdict]})"


def guess_cells(guess: Guess) -> dict[str, str]:
    """The guess as named cells, for a row of a table."""
    return {
        "asked": guess.asked,
        "kernels": str(guess.kernels),
        "operations": with_unit(guess.flops, "FLOP"),
        "bytes at memory": _bytes(guess.memory_bytes),
        "floor": "–" if guess.floor_s is None else duration(guess.floor_s * 1e9),
        "expected": "–" if guess.expected_s is None else duration(guess.expected_s * 1e9),
        "host": duration(guess.host_s * 1e9),
    }


def _bytes(value: int | None) -> str:
    return "–" if value is None else with_unit(value, "B")
