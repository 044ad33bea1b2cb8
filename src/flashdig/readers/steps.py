"""Steps of a recording (training steps, tokens, iterations) and the stretch of time each owns.

The host runs ahead of the device, so a host range alone says little about the device. A step owns
the kernels that were *launched* in it; its stretch of time begins when the device is done with
everything launched before it (or when its host range begins, if that is later) and ends where the
next one begins. The stretches tile the time, so their sums add up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from flashdig.readers.model import DeviceEvent, HostOp, Kernel, Trace

_STEP_PREFIX = "ProfilerStep#"
# ranges that torch itself writes inside steps
_NOT_STEPS = ("##", "Torch-Compiled Region", "Optimizer.", "DistributedDataParallel.")


@dataclass(frozen=True)
class HostStep:
    """One step as the host saw it."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class StepWindow:
    """One step on the time line of a device: [start_ns, end_ns) and the events launched in it."""

    name: str
    start_ns: int
    end_ns: int
    events: int
    kernels: int


def find_steps(trace: Trace) -> list[HostStep]:
    """The steps that the recording marks, in order; empty when it marks none.

    `ProfilerStep#n` ranges where there are any, else the annotation that repeats and covers most
    time, where its ranges follow one another.
    """
    profiler_steps = [op for op in trace.annotations if op.name.startswith(_STEP_PREFIX)]
    if profiler_steps:
        return _without_empty_end(trace, _in_sequence(profiler_steps))
    by_name: dict[str, list[HostOp]] = {}
    for op in trace.annotations:
        if not op.name.startswith(_NOT_STEPS):
            by_name.setdefault(op.name, []).append(op)
    best: list[HostStep] = []
    best_time = 0
    for ranges in by_name.values():
        steps = _in_sequence(ranges)
        time = sum(step.end_ns - step.start_ns for step in steps)
        if len(steps) > 1 and time > best_time:
            best, best_time = steps, time
    numbered = len({step.name for step in best}) < len(best)
    return [
        HostStep(f"{step.name} {index}" if numbered else step.name, step.start_ns, step.end_ns)
        for index, step in enumerate(best)
    ]


def _in_sequence(ranges: list[HostOp]) -> list[HostStep]:
    """Ranges that follow one another; what lies inside an earlier one is left out."""
    steps: list[HostStep] = []
    for op in sorted(ranges, key=lambda op: (op.start_ns, -op.duration_ns)):
        if not steps or op.start_ns >= steps[-1].end_ns:
            steps.append(HostStep(op.name, op.start_ns, op.end_ns))
    return steps


def _without_empty_end(trace: Trace, steps: list[HostStep]) -> list[HostStep]:
    """Without the range that the last `step()` opened and the end of the recording closed."""
    if len(steps) < 2 or not _has_operators(trace, steps[-2]) or _has_operators(trace, steps[-1]):
        return steps
    begin = steps[-1].start_ns
    works = any(launch.device_events and launch.start_ns >= begin for launch in trace.launches)
    return steps if works else steps[:-1]


def _has_operators(trace: Trace, step: HostStep) -> bool:
    """True when an operator starts in the step."""
    first = bisect_left(trace.host_ops, step.start_ns, key=lambda op: op.start_ns)
    end = bisect_left(trace.host_ops, step.end_ns, key=lambda op: op.start_ns)
    return any(op.kind == "operator" for op in trace.host_ops[first:end])


def step_index(event: DeviceEvent, starts: list[int], last_end_ns: int) -> int | None:
    """Which step launched a device event, or None for before the first and after the last.

    Args:
        starts: host starts of the steps, rising.
        last_end_ns: host end of the last step.

    An event whose launch is not in the file counts by its own start.
    """
    at = _asked_at(event)
    if event.launch is not None and at >= last_end_ns:
        return None
    index = bisect_right(starts, at) - 1
    return index if index >= 0 else None


def _asked_at(event: DeviceEvent) -> int:
    return event.start_ns if event.launch is None else event.launch.start_ns


def step_windows(steps: list[HostStep], events: list[DeviceEvent]) -> list[StepWindow]:
    """The stretches of time that the steps own on one device, and how much ran in each.

    Args:
        steps: from `find_steps`.
        events: device events of that device.
    """
    if not steps:
        return []
    starts = [step.start_ns for step in steps]
    counts = [[0, 0] for _ in steps]
    last_end = [0] * len(steps)  # latest device end of what each step launched
    begin = starts[0]
    for event in events:
        index = step_index(event, starts, steps[-1].end_ns)
        if index is None:
            if _asked_at(event) < starts[0]:
                begin = max(begin, event.end_ns)
            continue
        counts[index][0] += 1
        counts[index][1] += isinstance(event, Kernel)
        last_end[index] = max(last_end[index], event.end_ns)
    windows = []
    done = begin
    for index, step in enumerate(steps):
        done = max(done, last_end[index])
        following = steps[index + 1].start_ns if index + 1 < len(steps) else step.end_ns
        end = max(done, following, begin)
        windows.append(StepWindow(step.name, begin, end, counts[index][0], counts[index][1]))
        begin = end
    return windows
