"""Guess against found, and each rung's share of the gain, from the rows of one problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from flashdig.costs.units import with_unit
from flashdig.report.dig_table import Row, launched, measured_bytes, occupancy_percent

_AS_GUESSED = "within tolerance"
_TO_THE_BYTE = "to the byte"


@dataclass(frozen=True)
class Comparison:
    """A guess beside what was found.

    Attributes:
        guessed, found: with their units.
        difference: of found over guessed, as "+8 %"; "" where both are equal.
        is_surprise: outside its tolerance.
        words: of a surprise its cause, else how well it holds.
    """

    rung: str
    what: str
    guessed: str
    found: str
    difference: str
    is_surprise: bool
    words: str


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """All guesses of the rungs that ran, the largest surprise first, then as they stand."""
    surprising: list[tuple[float, Comparison]] = []
    holding: list[Comparison] = []
    for row in rows:
        met = set()
        for surprise in row.get("surprises", ()):
            what, predicted, found = (surprise[n] for n in ("what", "predicted", "found"))
            met.add("time" if what == "time floor" else what)
            compared = _comparison(row, what, predicted, found, surprise["cause"])
            surprising.append((_size(predicted, found), compared))
        for what, (predicted, found) in _guesses(row).items():
            if what not in met:
                holding.append(_comparison(row, what, predicted, found, None))
    surprising.sort(key=lambda pair: -pair[0])
    return [*(compared for _, compared in surprising), *holding]


def _guesses(row: Row) -> Mapping[str, tuple[float, float]]:
    """What -> (guessed, found), in the units of a row's surprises."""
    predicted, counted = row.get("predicted", {}), row.get("counted", {})
    occupancy = predicted.get("occupancy")
    pairs = {
        "time": (predicted.get("at_observed_clock", {}).get("expected_ms"), row.get("ms")),
        "kernels": (predicted.get("kernels"), launched(row)),
        "occupancy": (None if occupancy is None else 100 * occupancy, occupancy_percent(row)),
        "memory bytes": (_expected_bytes(predicted), measured_bytes(row)),
        "loads": (predicted.get("triton_load_bytes"), counted.get("load_bytes")),
        "stores": (predicted.get("triton_store_bytes"), counted.get("store_bytes")),
        # none are counted where the products are torch's
        "FLOP": (predicted.get("matmul_flops"), counted.get("matmul_flops") or None),
    }
    if row["gate"] != "ok":
        return {}
    return {
        what: (guessed, found)
        for what, (guessed, found) in pairs.items()
        if guessed is not None and found is not None
    }


def _expected_bytes(predicted: Mapping[str, float]) -> float | None:
    """At memory, reads and writes together."""
    loads, stores = predicted.get("memory_load_bytes"), predicted.get("memory_store_bytes")
    return None if loads is None or stores is None else loads + stores


def _comparison(
    row: Row, what: str, predicted: float, found: float, cause: str | None
) -> Comparison:
    words = cause or (_TO_THE_BYTE if what in ("loads", "stores") else _AS_GUESSED)
    if cause is None and what in ("kernels", "FLOP"):
        words = "exactly"
    return Comparison(
        rung=row["name"],
        what=what,
        guessed=_figure(what, predicted),
        found=_figure(what, found),
        difference=_difference(predicted, found),
        is_surprise=cause is not None,
        words=words,
    )


def _figure(what: str, value: float) -> str:
    if what in ("time", "time floor"):
        return f"{value:.3f} ms" if value < 100 else f"{value:.0f} ms"
    if what in ("loads", "stores", "memory bytes"):
        return with_unit(value, "B")
    if what == "FLOP":
        return with_unit(value, "FLOP")
    return f"{value:.3g} %" if what == "occupancy" else f"{value:,.4g}"


def _difference(predicted: float, found: float) -> str:
    if predicted == found:
        return ""
    if not predicted:
        return "from 0"
    ratio = found / predicted
    if ratio >= 2:
        return f"{ratio:.3g} times"
    percent = 100 * (ratio - 1)
    return f"{percent:+.0f} %" if abs(percent) >= 0.5 else f"{percent:+.1g} %"


def _size(predicted: float, found: float) -> float:
    """How far apart two figures are, whichever is the larger one."""
    if predicted <= 0 or found <= 0:
        return math.inf
    return abs(math.log(found / predicted))


@dataclass(frozen=True)
class Share:
    """A rung's part of the way from the bottom rung to the fastest one.

    Attributes:
        below: the timed rung under it.
        fraction: logarithm of the speed-up over it, over that of the whole way.
    """

    below: str
    fraction: float


def shares_of_gain(rows: Sequence[Row]) -> dict[str, Share]:
    """Rung -> its share; empty where nothing was timed or no rung is faster than the bottom one.

    Rungs above the fastest one have theirs as well, so that those up to it add up to 1.
    """
    timed = [row for row in rows if row.get("ms") is not None]
    if len(timed) < 2:
        return {}
    fastest = min(timed, key=lambda row: float(row["ms"]))
    whole = math.log(timed[0]["ms"] / fastest["ms"])
    if whole <= 0:
        return {}
    return {
        row["name"]: Share(below["name"], math.log(below["ms"] / row["ms"]) / whole)
        for below, row in pairwise(timed)
    }
