"""Two traces side by side: where the time went in each, per step, and which attention ran."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from flashdig.readers.breakdown import TIME_CLASSES
from flashdig.readers.summary import TraceSummary


@dataclass(frozen=True)
class Difference:
    """One quantity in both traces; None where a trace does not have it.

    `before` and `after` are per step where both recordings have steps (the median step for times),
    else totals.
    """

    name: str
    before: float | None
    after: float | None

    @property
    def ratio(self) -> float | None:
        """after / before, or None where that says nothing."""
        if not self.before or self.after is None:
            return None
        return self.after / self.before


@dataclass(frozen=True)
class Comparison:
    """Differences of two traces.

    Attributes:
        per_step: True when quantities are per step.
        times: elapsed, busy, idle and each class, in nanoseconds.
        counts: kernels, launches, attention calls.
        attention: device nanoseconds of one attention call by "backend pass".
        kernels: device nanoseconds by kernel name, the largest changes first.
    """

    before: str
    after: str
    per_step: bool
    times: list[Difference]
    counts: list[Difference]
    attention: list[Difference]
    kernels: list[Difference]


def compare(before: TraceSummary, after: TraceSummary, *, most_kernels: int = 20) -> Comparison:
    """Compare two summaries; kernels that changed most come first."""
    per_step = bool(_steps(before) and _steps(after))
    divisors = [max(1, _steps(summary)) if per_step else 1 for summary in (before, after)]
    times = [
        Difference(name, _time(before, name, per_step), _time(after, name, per_step))
        for name in ("elapsed", "busy", "idle", *TIME_CLASSES)
    ]
    return Comparison(
        before=before.source,
        after=after.source,
        per_step=per_step,
        times=[time for time in times if time.before or time.after],
        counts=[
            Difference(
                name,
                *(
                    None if value is None else value / divisor
                    for value, divisor in zip(
                        (_count(before, name), _count(after, name)), divisors, strict=True
                    )
                ),
            )
            for name in ("kernels", "copies", "launches", "synchronizations", "attention calls")
        ],
        attention=_attention(before, after),
        kernels=_kernels(before, after, divisors)[:most_kernels],
    )


def _steps(summary: TraceSummary) -> int:
    """Steps with device work; the same on every device, so the first is asked."""
    if not summary.breakdowns:
        return 0
    return sum(step.window.events > 0 for step in summary.breakdowns[0].steps)


def _time(summary: TraceSummary, name: str, per_step: bool) -> float | None:
    if not summary.breakdowns:
        return None
    total = 0.0
    for breakdown in summary.breakdowns:
        stretches = [breakdown.total]
        if per_step:
            stretches = [step.shares for step in breakdown.steps if step.window.events]
        values: list[float] = []
        for shares in stretches:
            if name == "elapsed":
                values.append(shares.elapsed_ns)
            elif name == "busy":
                values.append(shares.busy_ns)
            elif name == "idle":
                values.append(shares.idle_ns)
            else:
                values.append(next((t for key, t in shares.by_class.items() if key == name), 0))
        total += median(values) if values else 0
    return total


def _count(summary: TraceSummary, name: str) -> int | None:
    if name == "kernels":
        return summary.kernel_count
    if name == "copies":
        return summary.copies
    if name == "attention calls":
        return len(summary.attention_calls)
    if summary.host is None:
        return None
    return summary.host.launches if name == "launches" else summary.host.synchronizations


def _attention(before: TraceSummary, after: TraceSummary) -> list[Difference]:
    sides: list[dict[str, float]] = []
    for summary in (before, after):
        by_name: dict[str, list[int]] = {}
        for call in summary.attention_calls:
            if call.device_ns is not None:
                by_name.setdefault(f"{call.backend} {call.pass_}", []).append(call.device_ns)
        sides.append({name: median(times) for name, times in by_name.items()})
    first, second = sides
    return [Difference(name, first.get(name), second.get(name)) for name in {**first, **second}]


def _kernels(before: TraceSummary, after: TraceSummary, divisors: list[int]) -> list[Difference]:
    first, second = (
        {row.name: row.total_ns / divisor for row in summary.kernels}
        for summary, divisor in zip((before, after), divisors, strict=True)
    )
    names = {**first, **second}
    differences = [Difference(name, first.get(name), second.get(name)) for name in names]
    differences.sort(key=lambda entry: (-abs((entry.after or 0) - (entry.before or 0)), entry.name))
    return differences
