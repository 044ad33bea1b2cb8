"""A trace's summary as one offline HTML page: no network, no script, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdig._version import __version__
from flashdig.costs.flops import RULE
from flashdig.findings.finding import Finding
from flashdig.readers.breakdown import TIME_CLASSES, DeviceBreakdown, Shares
from flashdig.readers.compare import Comparison
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Dimensions, Trace
from flashdig.readers.summary import TraceSummary
from flashdig.report.finding_words import (
    CONFIDENCE_WORDS,
    VERDICT_WORDS,
    gain_words,
    quantity,
)
from flashdig.report.page_environment import page_environment
from flashdig.report.quantities import duration, share
from flashdig.report.timeline import backend_styles, legend, timelines
from flashdig.report.trace_words import (
    ADDS_UP,
    CLASS_WORDS,
    comparison_words,
    group_modules,
    group_parts,
    host_words,
    origin_words,
    verdict,
)

MOST_KERNELS = 150
MOST_STEPS = 40


@dataclass(frozen=True)
class StepBar:
    """A step as a stacked bar: (style, words, percent of elapsed, duration) a class, then idle."""

    name: str
    elapsed: str
    pieces: list[tuple[str, str, float, str]]


def render_trace_page(
    traces: Sequence[Trace],
    summaries: Sequence[TraceSummary],
    comparison: Comparison | None = None,
    findings: Sequence[Sequence[Finding]] = (),
) -> str:
    """The page as text.

    Args:
        traces, summaries: of the same recordings in the same order; findings too, where given.
        comparison: of the first two, where asked for.
    """
    environment = page_environment()
    environment.filters.update(
        duration=duration,
        dimensions=_dimensions,
        kernel_words=lambda name: decode(name).words,
        quantity=quantity,
        gain=gain_words,
    )
    sections = [
        {
            "summary": summary,
            "origin": origin_words(summary),
            "verdict": verdict(summary),
            "tiles": _tiles(summary),
            "styles": backend_styles(summary),
            "legend": [(style, CLASS_WORDS.get(words, words)) for style, words in legend(summary)],
            "timelines": timelines(trace, summary),
            "breakdowns": [
                (breakdown, _step_bars(breakdown), _classes(breakdown))
                for breakdown in summary.breakdowns
            ],
            "host": host_words(summary.host),
            "findings": findings[at] if at < len(findings) else (),
        }
        for at, (trace, summary) in enumerate(zip(traces, summaries, strict=True))
    ]
    return environment.get_template("trace.html").render(
        sections=sections,
        comparison=comparison,
        comparison_words=None if comparison is None else comparison_words(comparison),
        class_words=CLASS_WORDS,
        verdict_words=VERDICT_WORDS,
        confidence_words=CONFIDENCE_WORDS,
        adds_up=ADDS_UP,
        flops_rule=RULE,
        share=share,
        group_modules=group_modules,
        group_parts=group_parts,
        most_kernels=MOST_KERNELS,
        version=__version__,
    )


def _tiles(summary: TraceSummary) -> list[tuple[str, str]]:
    """(value, words) of the numbers at the top."""
    busy, elapsed = summary.busy_ns, summary.elapsed_ns
    if busy is None or elapsed is None:
        return [
            ("unknown", "device time"),
            (f"{len(summary.attention_calls):,}", "attention calls"),
        ]
    attention = summary.class_ns("attention_forward", "attention_backward")
    rates = [group.tflop_per_s for group in summary.attention if group.tflop_per_s is not None]
    tiles = [
        (duration(elapsed), "elapsed"),
        (share(busy, elapsed), "device busy"),
        (share(attention, busy), "of busy time is attention"),
        (f"{len(summary.attention_calls):,}", "attention calls"),
        (f"{summary.kernel_count:,}", "kernels"),
    ]
    if rates:
        tiles.append((f"{max(rates):.4g}", "TFLOP/s, best attention"))
    return tiles


def _step_bars(breakdown: DeviceBreakdown) -> list[StepBar]:
    """Busy time alone, then each step (or the whole recording) with its idle time."""
    total = breakdown.total
    bars = [_bar("busy time", Shares(total.busy_ns, total.busy_ns, total.by_class))]
    if not breakdown.steps:
        return [*bars, _bar("whole recording", total)]
    steps = breakdown.steps[:MOST_STEPS]
    return bars + [_bar(step.window.name, step.shares) for step in steps]


def _bar(name: str, shares: Shares) -> StepBar:
    whole = max(1, shares.elapsed_ns)
    pieces = [
        (f"class-{key}", CLASS_WORDS[key], 100 * time / whole, duration(time))
        for key in TIME_CLASSES
        if (time := shares.by_class.get(key, 0))
    ]
    pieces.append(("idle", "idle", 100 * shares.idle_ns / whole, duration(shares.idle_ns)))
    return StepBar(name, duration(shares.elapsed_ns), pieces)


def _classes(breakdown: DeviceBreakdown) -> list[tuple[str, str, str, str]]:
    """(style, words, time, share of busy time) of each class that took time."""
    total = breakdown.total
    return [
        (f"class-{key}", CLASS_WORDS[key], duration(time), share(time, total.busy_ns))
        for key in TIME_CLASSES
        if (time := total.by_class.get(key, 0))
    ]


def _dimensions(value: Dimensions | None) -> str:
    """(64, 1, 1) as "64"; trailing ones say nothing."""
    if value is None:
        return "–"
    x, y, z = value
    if z != 1:
        return f"{x}×{y}×{z}"
    return f"{x}×{y}" if y != 1 else str(x)
