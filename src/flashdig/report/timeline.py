"""A trace's time line as rectangles: lanes for attention calls, the host, and each stream.

Events narrower than a fraction of a pixel are drawn together, so a picture stays small whatever
the recording holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from flashdig.readers.attribution import AttentionCall
from flashdig.readers.breakdown import TIME_CLASSES, time_class
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import DeviceEvent, Kernel, Trace
from flashdig.readers.summary import TraceSummary
from flashdig.report.quantities import duration

WIDTH = 1000.0
_NARROWEST = 0.7
_GAP = 0.5
_TITLE_CHARACTERS = 160


@dataclass(frozen=True)
class Box:
    """One rectangle; x and width in units of which the picture has `WIDTH`."""

    x: float
    width: float
    style: str
    title: str
    label: str = ""


@dataclass(frozen=True)
class Lane:
    """One row of the picture."""

    name: str
    boxes: list[Box]


@dataclass(frozen=True)
class Tick:
    """A mark on the time axis."""

    x: float
    label: str


@dataclass(frozen=True)
class Timeline:
    """A picture of [start_ns, end_ns)."""

    title: str
    lanes: list[Lane]
    ticks: list[Tick]


@dataclass(frozen=True)
class _Span:
    start_ns: int
    end_ns: int
    style: str
    title: str
    label: str = ""


@dataclass
class _Run:
    """Spans of one style that are too close to be drawn apart."""

    first: _Span
    x: float
    right: float
    count: int
    time_ns: int


def backend_styles(summary: TraceSummary) -> dict[str, str]:
    """Backends of attention in order of device time -> style names backend-0, backend-1, …"""
    times: dict[str, int] = {}
    for group in summary.attention:
        backend = group.first.backend
        times[backend] = times.get(backend, 0) + (group.device_ns or 0)
    ordered = sorted(times, key=lambda backend: (-times[backend], backend))
    return {backend: f"backend-{min(place, 7)}" for place, backend in enumerate(ordered)}


def timelines(trace: Trace, summary: TraceSummary) -> list[Timeline]:
    """One step in detail (the median one by device time) and the whole recording."""
    if not summary.breakdowns:
        return []
    busiest = max(summary.breakdowns, key=lambda breakdown: breakdown.total.busy_ns)
    whole = _picture(trace, summary, "Whole recording", busiest.start_ns, busiest.end_ns)
    steps = [step for step in busiest.steps if step.window.events]
    if len(steps) < 2:
        return [whole]
    steps.sort(key=lambda step: step.shares.busy_ns)
    window = steps[len(steps) // 2].window
    detail = _picture(trace, summary, f"Step {window.name!r}", window.start_ns, window.end_ns)
    return [detail, whole]


def _picture(
    trace: Trace, summary: TraceSummary, title: str, start_ns: int, end_ns: int
) -> Timeline:
    scale = WIDTH / max(1, end_ns - start_ns)
    styles = backend_styles(summary)
    owner = {event: call for call in summary.attention_calls for event in call.events}
    calls, host = [], []
    for call in summary.attention_calls:
        style, text = _call_style(call, styles), f"{call.backend} {call.pass_}"
        if call.parts:
            end = max(event.end_ns for event in call.events)
            calls.append(_Span(call.start_ns, end, style, call.describe(), call.backend))
        if call.host_start_ns is not None and call.host_ns is not None:
            end = call.host_start_ns + call.host_ns
            host.append(_Span(call.host_start_ns, end, style, f"host: {text}"))
    lanes = [
        Lane("attention", _boxes(calls, start_ns, end_ns, scale)),
        Lane("host", _boxes(host, start_ns, end_ns, scale)),
    ]
    streams: dict[tuple[int, int], list[DeviceEvent]] = {}
    for event in trace.device_events():
        if event.start_ns < end_ns and event.end_ns > start_ns:
            key = (event.device, -1 if event.stream is None else event.stream)
            streams.setdefault(key, []).append(event)
    several_devices = len({device for device, _ in streams}) > 1
    for device, stream in sorted(streams):
        name = "no stream" if stream < 0 else f"stream {stream}"
        spans = []
        for event in streams[device, stream]:
            # a part of an eager attention shows what it is; the lane above shows whose it is
            own = time_class(event, {})
            owned = owner.get(event)
            style = f"class-{own}"
            if owned is not None and own.startswith("attention"):
                style = _call_style(owned, styles)
            words = decode(event.name).words if isinstance(event, Kernel) else event.name
            spans.append(_Span(event.start_ns, event.end_ns, style, words))
        label = f"GPU {device} {name}" if several_devices else name
        lanes.append(Lane(label, _boxes(spans, start_ns, end_ns, scale)))
    lanes = [lane for lane in lanes if lane.boxes]
    return Timeline(title, lanes, _ticks(end_ns - start_ns, scale))


def _call_style(call: AttentionCall, styles: Mapping[str, str]) -> str:
    return f"{styles[call.backend]} {call.pass_}"


def _boxes(spans: Iterable[_Span], start_ns: int, end_ns: int, scale: float) -> list[Box]:
    """Rectangles of spans; close ones of one style are merged."""
    runs: list[_Run] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        if span.end_ns <= start_ns or span.start_ns >= end_ns:
            continue
        x = (max(span.start_ns, start_ns) - start_ns) * scale
        right = max((min(span.end_ns, end_ns) - start_ns) * scale, x + _NARROWEST)
        last = runs[-1] if runs else None
        if last is not None and last.first.style == span.style and x - last.right < _GAP:
            last.right = max(last.right, right)
            last.count += 1
            last.time_ns += span.end_ns - span.start_ns
        else:
            runs.append(_Run(span, x, right, 1, span.end_ns - span.start_ns))
    return [_box(run) for run in runs]


def _box(run: _Run) -> Box:
    title = run.first.title
    what = f"{run.count} events, the first: {title}" if run.count > 1 else title
    width = run.right - run.x
    label = run.first.label if len(run.first.label) * 6.5 + 6 < width else ""
    text = f"{what[:_TITLE_CHARACTERS]}\n{duration(run.time_ns)}"
    return Box(round(run.x, 2), round(width, 2), run.first.style, text, label)


def _ticks(length_ns: int, scale: float) -> list[Tick]:
    step = 1
    while length_ns / step > 10:
        for factor in (2, 2.5, 2):
            step = int(step * factor)
            if length_ns / step <= 10:
                break
    return [
        Tick(round(at * scale, 2), duration(at) if at else "0")
        for at in range(0, length_ns + 1, step)
    ]


def legend(summary: TraceSummary) -> list[tuple[str, str]]:
    """(style, words) of everything that is coloured: backends first, then classes of work."""
    entries = [(style, backend) for backend, style in backend_styles(summary).items()]
    present: set[str] = {
        name for breakdown in summary.breakdowns for name in breakdown.total.by_class
    }
    present |= {row.role for row in summary.kernels}
    return entries + [
        (f"class-{name}", name)
        for name in TIME_CLASSES
        if name in present and not name.startswith("attention")
    ]
