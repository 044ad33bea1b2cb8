"""Ties a recording together: kernels to launches, launches to host ops, backward to forward.

Works on the model alone, so every reader uses it; the result does not depend on the order in which
a file lists its events.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from operator import attrgetter

from flashdig.readers.model import ClippedEvent, DeviceEvent, HostOp, Kernel, ReadWarning, Trace

# A device stamp may be late by this much without saying anything about the kernel.
_STAMP_TOLERANCE_NS = 1_000
# Start and duration are rounded apart where a recorder writes whole microseconds.
_ROUNDING_NS = 1_000


def link(trace: Trace) -> None:
    """Sort the lists of a freshly read trace, fill all links, and clip impossible durations."""
    by_time = attrgetter("start_ns", "duration_ns", "name")
    trace.kernels.sort(key=by_time)
    trace.copies.sort(key=by_time)
    trace.launches.sort(key=by_time)
    trace.device_annotations.sort(key=by_time)
    # of two that start together the longer one encloses the other
    trace.host_ops.sort(key=lambda op: (op.start_ns, -op.duration_ns, op.kind))
    trace.annotations = [op for op in trace.host_ops if op.kind == "annotation"]
    _nest_host_ops(trace)
    _link_device_to_host(trace)
    _link_backward_to_forward(trace)
    _clip_overruns(trace)


def _nest_host_ops(trace: Trace) -> None:
    """Parents by enclosure on the same thread, for host ops and for launches."""
    open_ops: dict[int, list[HostOp]] = defaultdict(list)
    launches = iter(trace.launches)
    launch = next(launches, None)

    for op in trace.host_ops:
        while launch is not None and launch.start_ns < op.start_ns:
            launch.op = _innermost(open_ops[launch.thread], launch.start_ns)
            launch = next(launches, None)
        stack = open_ops[op.thread]
        op.parent = _around_all_of(op, _innermost(stack, op.start_ns))
        stack.append(op)
    while launch is not None:
        launch.op = _innermost(open_ops[launch.thread], launch.start_ns)
        launch = next(launches, None)


def _innermost(stack: list[HostOp], at_ns: int) -> HostOp | None:
    """Drop from the stack what has ended; what is left on top encloses the moment."""
    while stack and stack[-1].end_ns <= at_ns:
        stack.pop()
    return stack[-1] if stack else None


def _around_all_of(op: HostOp, outer: HostOp | None) -> HostOp | None:
    """The innermost of `outer` and those around it that is still open when `op` ends.

    A range that a hook or a `step()` opens outlasts the Python frame in which it was opened, and
    one that is closed so ends inside of a frame that it does not enclose.
    """
    while outer is not None and outer.end_ns + _ROUNDING_NS < op.end_ns:
        outer = outer.parent
    return outer


def _link_device_to_host(trace: Trace) -> None:
    by_correlation = {
        launch.correlation: launch for launch in trace.launches if launch.correlation is not None
    }
    by_external_id: dict[int, HostOp] = {
        op.external_id: op for op in trace.host_ops if op.external_id is not None
    }
    events: list[DeviceEvent] = [*trace.kernels, *trace.copies]
    for event in events:
        if event.correlation is not None:
            launch = by_correlation.get(event.correlation)
            if launch is not None:
                event.launch = launch
                launch.device_events += 1
        if event.external_id is not None:
            event.op = by_external_id.get(event.external_id)
        if event.launch is not None and (event.op is None or event.op.kind != "operator"):
            event.op = event.launch.op or event.op


def _link_backward_to_forward(trace: Trace) -> None:
    """A backward node belongs to the last forward operator that carries its sequence number.

    Several nested operators may carry the number (it is the number of the *next* node); the one
    that starts last is the one that made the node.
    """
    forward: dict[int, list[HostOp]] = defaultdict(list)
    for op in trace.host_ops:
        if op.sequence is not None and op.sequence >= 0 and not op.is_backward:
            forward[op.sequence].append(op)
    for op in trace.host_ops:
        if op.sequence is None or not op.is_backward:
            continue
        candidates = forward.get(op.sequence, [])
        before = bisect_right(candidates, op.start_ns, key=attrgetter("start_ns"))
        if before:
            op.forward = candidates[before - 1]


def _clip_overruns(trace: Trace) -> None:
    """Cut durations that reach past the end of their successor on the same stream.

    Work of one stream runs in order. A kernel may start a little before its predecessor ends
    (programmatic launch), but it never ends before it: a predecessor that does outlast its
    successor has a late completion stamp. Kernels of one graph launch may run side by side.
    """
    lanes: dict[tuple[int, int], list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events():
        if event.stream is not None:
            lanes[event.device, event.stream].append(event)
    for lane in lanes.values():
        # from the end, so that a successor's own end is already the corrected one
        for event, successor in zip(reversed(lane[:-1]), reversed(lane[1:]), strict=True):
            if event.end_ns <= successor.end_ns + _STAMP_TOLERANCE_NS:
                continue
            if _same_graph_launch(event, successor):
                continue
            trace.clipped.append(ClippedEvent(event, event.duration_ns))
            event.duration_ns = successor.start_ns - event.start_ns
    if trace.clipped:
        worst = max(trace.clipped, key=attrgetter("recorded_duration_ns"))
        trace.warnings.append(
            ReadWarning(
                "clipped_duration",
                f"{len(trace.clipped)} device events outlast their successors on the same stream, "
                "which cannot be; they are cut where the successor starts (the longest says "
                f"{worst.recorded_duration_ns / 1000:,.3f} µs, counted as "
                f"{worst.event.duration_ns / 1000:,.3f} µs)",
            )
        )


def _same_graph_launch(event: DeviceEvent, successor: DeviceEvent) -> bool:
    if event.correlation is None or event.correlation != successor.correlation:
        return False
    return isinstance(event, Kernel) or isinstance(successor, Kernel)
