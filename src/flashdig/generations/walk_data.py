"""What a walk holds: steps, slips and symptoms as plain frozen numbers, without tensors."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

Numbers = float | tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Shown:
    """A number, a row or a small matrix to print, with names for its rows and columns."""

    name: str
    values: Numbers
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()


@dataclass(frozen=True)
class Check:
    """A computed value beside what it must be; `ok` when they differ by at most `tolerance`."""

    what: str
    value: float
    expected: float
    tolerance: float = 0.0

    @property
    def ok(self) -> bool:
        return abs(self.value - self.expected) <= self.tolerance


@dataclass(frozen=True)
class Step:
    """One step of the path from naive to tiled attention."""

    title: str
    explanation: str
    formula: str
    shown: tuple[Shown, ...]
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)


@dataclass(frozen=True)
class Slip:
    """A wrong statement of the article and the right one, computed on the same numbers.

    Attributes:
        place: section of the article that says it.
        wrong, right: what each formula gives.
        error: largest absolute difference between the wrong answer and the truth.
        right_error: the same for the right formula.
        tolerance: rounding that `right_error` may show; `error` must lie clearly above it.
    """

    title: str
    place: str
    wrong_formula: str
    right_formula: str
    explanation: str
    wrong: Shown
    right: Shown
    error: float
    right_error: float
    tolerance: float = 1e-12

    @property
    def ok(self) -> bool:
        """The right formula is right and the wrong one is wrong by far more than rounding."""
        return self.right_error <= self.tolerance and self.error > 1e3 * self.tolerance


@dataclass(frozen=True)
class Symptom:
    """A row of the troubleshooting table: the planted cause, the number that shows it, the fix.

    Attributes:
        measure: what `seen`, `after` and `limit` count; smaller is better.
        seen: the number with the cause planted; above `limit`, or not a number.
        after: the number with the fix; at most `limit`.
    """

    symptom: str
    cause: str
    fix: str
    explanation: str
    measure: str
    limit: float
    seen: float
    after: float
    shown: tuple[Shown, ...] = ()

    @property
    def appears(self) -> bool:
        return not self.seen <= self.limit

    @property
    def is_cured(self) -> bool:
        return self.after <= self.limit

    @property
    def ok(self) -> bool:
        return self.appears and self.is_cured


@dataclass(frozen=True)
class Walk:
    """The whole path: every number in it was computed when it was built."""

    title: str
    source: str
    steps: tuple[Step, ...]
    slips: tuple[Slip, ...]
    symptoms: tuple[Symptom, ...]

    @property
    def ok(self) -> bool:
        parts: tuple[Step | Slip | Symptom, ...] = (*self.steps, *self.slips, *self.symptoms)
        return all(part.ok for part in parts)

    def to_dict(self) -> dict[str, Any]:
        """The walk as lists, strings and numbers for JSON, with an `ok` beside every part.

        Numbers that JSON cannot hold are the strings "inf", "-inf" and "nan".
        """
        return {
            "title": self.title,
            "source": self.source,
            "ok": self.ok,
            "steps": [
                _plain(step) | {"checks": [_plain(check) for check in step.checks]}
                for step in self.steps
            ],
            "slips": [_plain(slip) for slip in self.slips],
            "symptoms": [_plain(symptom) for symptom in self.symptoms],
        }


def _plain(part: Step | Slip | Symptom | Check) -> dict[str, Any]:
    fields: dict[str, Any] = _jsonable(dataclasses.asdict(part))
    return fields | {"ok": part.ok}


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
