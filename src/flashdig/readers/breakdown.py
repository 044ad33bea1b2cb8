"""Where device time went: every moment is one class of work or idle, so that the parts add up.

Where kernels of several streams run at once the moment counts for the first of their classes in
`TIME_CLASSES`: hidden communication and copies cost nothing, as the eye sees on a time line. Busy
time is the union of all intervals, never the sum of durations.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, get_args

from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Copy, DeviceEvent, Trace
from flashdig.readers.steps import StepWindow, find_steps, step_windows
from flashdig.readers.times import intersect, length_ns, union_of_intervals

TimeClass = Literal[
    "attention_forward",
    "attention_backward",
    "matmul",
    "convolution",
    "norm",
    "softmax",
    "elementwise",
    "reduction",
    "sort",
    "other",
    "unknown",
    "copy",
    "communication",
]
TIME_CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)
Pass = Literal["forward", "backward"]
Intervals = list[tuple[int, int]]


@dataclass(frozen=True)
class Shares:
    """A stretch of device time, split up; all in nanoseconds.

    Attributes:
        busy_ns: time in which anything ran; `by_class` sums to it.
        idle_ns: elapsed_ns - busy_ns.
        by_class: time of each class that no earlier class covers; classes without any are absent.
    """

    elapsed_ns: int
    busy_ns: int
    by_class: dict[TimeClass, int]

    @property
    def idle_ns(self) -> int:
        return self.elapsed_ns - self.busy_ns


@dataclass(frozen=True)
class StepShares:
    """One step on one device."""

    window: StepWindow
    shares: Shares


@dataclass(frozen=True)
class KindTimes:
    """Compute, communication and memory traffic by union of intervals; they may overlap.

    Attributes:
        hidden_communication_ns: communication while something computes.
    """

    compute_ns: int
    communication_ns: int
    memory_ns: int
    hidden_communication_ns: int

    @property
    def hidden_fraction(self) -> float | None:
        """Share of communication that is hidden, or None where nothing was communicated."""
        if not self.communication_ns:
            return None
        return self.hidden_communication_ns / self.communication_ns


@dataclass(frozen=True)
class DeviceBreakdown:
    """The time line of one device.

    Attributes:
        start_ns, end_ns: from the first device event (or first step) to the last end.
        outside_steps: device events launched before the first step or after the last.
        notes: what does not look right, as sentences.
    """

    device: int
    start_ns: int
    end_ns: int
    total: Shares
    kinds: KindTimes
    steps: list[StepShares]
    outside_steps: int
    notes: list[str]


def time_class(event: DeviceEvent, attention: Mapping[DeviceEvent, Pass]) -> TimeClass:
    """The class of one device event.

    Args:
        attention: events that belong to an attention call, its parts included, and their pass.
    """
    in_attention = attention.get(event)
    if in_attention is not None:
        return "attention_backward" if in_attention == "backward" else "attention_forward"
    if isinstance(event, Copy):
        return "copy"
    name = decode(event.name)
    if name.role in {"attention_forward", "attention_backward", "attention_part"}:
        return "attention_backward" if name.pass_ == "backward" else "attention_forward"
    return name.role if name.role in TIME_CLASSES else "other"


def break_down(trace: Trace, attention: Mapping[DeviceEvent, Pass]) -> list[DeviceBreakdown]:
    """One breakdown a device, in order of device number; empty when no device did anything."""
    by_device: dict[int, list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events():
        by_device[event.device].append(event)
    return [
        _break_down_device(trace, device, by_device[device], attention)
        for device in sorted(by_device)
    ]


def _break_down_device(
    trace: Trace, device: int, events: list[DeviceEvent], attention: Mapping[DeviceEvent, Pass]
) -> DeviceBreakdown:
    classes = [time_class(event, attention) for event in events]
    windows = step_windows(find_steps(trace), events)
    start = min(event.start_ns for event in events)
    end = max(event.end_ns for event in events)
    if windows:
        start, end = min(start, windows[0].start_ns), max(end, windows[-1].end_ns)
    whole: dict[TimeClass, Intervals] = defaultdict(list)
    for event, name in zip(events, classes, strict=True):
        whole[name].append((event.start_ns, event.end_ns))
    whole = {name: union_of_intervals(intervals) for name, intervals in whole.items()}
    return DeviceBreakdown(
        device=device,
        start_ns=start,
        end_ns=end,
        total=_shares(end - start, whole),
        kinds=_kinds(whole),
        steps=[
            StepShares(window, _shares(window.end_ns - window.start_ns, parts))
            for window, parts in zip(windows, _cut(whole, windows), strict=True)
        ],
        outside_steps=len(events) - sum(window.events for window in windows) if windows else 0,
        notes=_notes(trace, events, windows),
    )


def _shares(elapsed_ns: int, parts: Mapping[TimeClass, Intervals]) -> Shares:
    """Exclusive times by the order of the classes; the intervals of a class are disjoint."""
    covered: Intervals = []
    busy = 0
    by_class: dict[TimeClass, int] = {}
    for name in TIME_CLASSES:
        if not parts.get(name):
            continue
        covered = union_of_intervals(covered + parts[name])
        length = length_ns(covered)
        by_class[name] = length - busy
        busy = length
    return Shares(elapsed_ns, busy, by_class)


def _cut(
    parts: Mapping[TimeClass, Intervals], windows: list[StepWindow]
) -> list[dict[TimeClass, Intervals]]:
    """The intervals that fall into each window, cut at its edges; windows tile the time."""
    result: list[dict[TimeClass, Intervals]] = [{} for _ in windows]
    starts = [window.start_ns for window in windows]
    for name, intervals in parts.items():
        for start, end in intervals:
            index = max(0, bisect_right(starts, start) - 1)
            while index < len(windows) and windows[index].start_ns < end:
                low = max(start, windows[index].start_ns)
                high = min(end, windows[index].end_ns)
                if low < high:
                    result[index].setdefault(name, []).append((low, high))
                index += 1
    return result


def _kinds(whole: Mapping[TimeClass, Intervals]) -> KindTimes:
    compute = union_of_intervals(
        [
            interval
            for name, intervals in whole.items()
            if name not in {"copy", "communication"}
            for interval in intervals
        ]
    )
    communication = whole.get("communication", [])
    return KindTimes(
        compute_ns=length_ns(compute),
        communication_ns=length_ns(communication),
        memory_ns=length_ns(whole.get("copy", [])),
        hidden_communication_ns=length_ns(intersect(compute, communication)),
    )


def _notes(trace: Trace, events: list[DeviceEvent], windows: list[StepWindow]) -> list[str]:
    empty = sum(not window.events for window in windows)
    if not empty:
        return []
    notes = [f"{empty} of {len(windows)} steps {'has' if empty == 1 else 'have'} no device work."]
    steps = find_steps(trace)
    typical = median(step.end_ns - step.start_ns for step in steps)
    longest = max(events, key=lambda event: event.duration_ns)
    if longest.duration_ns > 2 * typical:
        notes.append(
            f"One event lasts {longest.duration_ns / 1e6:,.3f} ms, as long as "
            f"{longest.duration_ns / max(typical, 1):,.0f} steps; its end may be a late stamp: "
            f"{longest.name[:80]}"
        )
    return notes
