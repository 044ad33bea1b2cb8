"""Recording: a trace with everything that several rules ask of it, worked out once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from flashdig.costs.predict import predict
from flashdig.costs.prediction import Prediction
from flashdig.findings.finding import Gain, Number
from flashdig.hardware.detect import device_of_name
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem, Mask
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.kernel_names import KernelName, decode
from flashdig.readers.model import Copy, DeviceEvent, DeviceProperties, HostOp, Kernel, Trace
from flashdig.readers.summary import AttentionGroup, TraceSummary, summarize

# what attention is called by its backend -> the schedule that predicts it
SCHEDULE_OF_BACKEND = {
    "math": "sdpa_math",
    "efficient": "sdpa_efficient",
    "flash": "sdpa_flash",
    "flash_attention_2": "sdpa_flash",
    "cudnn": "sdpa_cudnn",
    "flash_attention_3": "v3",
    "flash_attention_4": "v3",
    "flashdig": "v3",
    "flex_attention": "sdpa_flash",
}
# Host time of a step or call without the profiler over that with it (shapes recorded), as measured
# on an H200's host (benchmarks/results/nvidia-h200/findings.json).
UNPROFILED_HOST = 0.6
# kernels of a step from which on its gaps say something about launching
MANY_KERNELS = 20


@dataclass(frozen=True, eq=False)
class Recording:
    """One trace, its summary, and indices over both."""

    trace: Trace
    summary: TraceSummary

    @classmethod
    def of(cls, trace: Trace, summary: TraceSummary | None = None) -> Recording:
        return cls(trace, summarize(trace) if summary is None else summary)

    @property
    def groups(self) -> list[AttentionGroup]:
        return self.summary.attention

    @cached_property
    def calls(self) -> list[AttentionCall]:
        return self.summary.attention_calls

    @property
    def busy_ns(self) -> int:
        return self.summary.busy_ns or 0

    @property
    def elapsed_ns(self) -> int:
        return self.summary.elapsed_ns or 0

    @cached_property
    def launches_limit(self) -> bool:
        """True for a recording of many short kernels, where launching takes longer than running."""
        steps = [step for b in self.summary.breakdowns for step in b.steps]
        return any(step.window.kernels >= MANY_KERNELS for step in steps)

    @cached_property
    def device(self) -> Device | None:
        """The device table's row for the GPU of the recording; None where it has none."""
        names = {device.name for device in self.trace.devices if device.name}
        found = [device_of_name(name) for name in sorted(names)]
        return found[0] if len(found) == 1 else None

    def properties(self, kernel: Kernel) -> DeviceProperties | None:
        return self.trace.device(kernel.device)

    @cached_property
    def events_under(self) -> dict[int, list[DeviceEvent]]:
        """id of a host op -> device events that it or an op inside of it asked for."""
        found: dict[int, list[DeviceEvent]] = {}
        for event in self.trace.device_events():
            op = event.op
            while op is not None:
                found.setdefault(id(op), []).append(event)
                op = op.parent
        return found

    @cached_property
    def operators(self) -> dict[int, list[HostOp]]:
        """thread -> its outermost forward operators, in order."""
        found: dict[int, list[HostOp]] = {}
        for op in self.trace.host_ops:
            if op.kind == "operator" and op.root() is op and not op.is_backward:
                found.setdefault(op.thread, []).append(op)
        return found

    @cached_property
    def _start_of_calls(self) -> dict[int, list[int]]:
        """thread -> host ends of its attention calls, rising."""
        found: dict[int, list[int]] = {}
        for call in self.calls:
            if call.op is not None and call.host_start_ns is not None:
                end = call.host_start_ns + (call.host_ns or 0)
                found.setdefault(call.op.thread, []).append(end)
        for ends in found.values():
            ends.sort()
        return found

    def operators_before(self, call: AttentionCall, reach: int = 60) -> list[HostOp]:
        """Outermost operators of the call's thread between the attention before it and itself."""
        if call.op is None or call.host_start_ns is None:
            return []
        lane = self.operators.get(call.op.thread, [])
        end = bisect_left(lane, call.host_start_ns, key=lambda op: op.start_ns)
        ends = self._start_of_calls.get(call.op.thread, [])
        at = bisect_left(ends, call.host_start_ns + 1) - 1
        since = ends[at] if at >= 0 else 0
        return [op for op in lane[max(0, end - reach) : end] if op.start_ns >= since]

    @cached_property
    def _inner_ns(self) -> dict[int, int]:
        """id of a host op -> host time of the operators and launches directly inside of it."""
        found: dict[int, int] = {}
        for op in self.trace.host_ops:
            if op.parent is not None:
                found[id(op.parent)] = found.get(id(op.parent), 0) + op.duration_ns
        for launch in self.trace.launches:
            if launch.op is not None:
                found[id(launch.op)] = found.get(id(launch.op), 0) + launch.duration_ns
        return found

    def own_ns(self, op: HostOp) -> int:
        """Host time of an operator without what it calls."""
        return max(0, op.duration_ns - self._inner_ns.get(id(op), 0))

    def share(self, nanoseconds: float) -> float | None:
        """Of the busy time."""
        return nanoseconds / self.busy_ns if self.busy_ns else None

    def host_gain(self, seconds: float, basis: str) -> Gain:
        """Of the elapsed time."""
        share = seconds * 1e9 / self.elapsed_ns if self.elapsed_ns else None
        return Gain(seconds, share, "host", basis)

    def device_gain(self, seconds: float, basis: str) -> Gain:
        return Gain(seconds, self.share(seconds * 1e9), "device", basis)

    def expected(
        self, problem: AttentionProblem | None, generation: str, direction: str = "forward"
    ) -> Prediction | None:
        """The model's guess; None where the chip, the sizes or the schedule are not known."""
        if problem is None or self.device is None:
            return None
        try:
            return predict(problem, self.device, generation, direction)
        except ValueError:
            return None

    def fused(self, call: AttentionCall, backends: Iterable[str] = ()) -> Prediction | None:
        """The fastest fused kernel of torch that could do the call, by the models.

        A mask of unknown content counts as none, so that what is promised is the least.
        """
        problem = call.problem()
        if problem is None:
            return None
        names = tuple(backends) or ("sdpa_cudnn", "sdpa_flash", "sdpa_efficient")
        guesses = [self.expected(problem, name, call.pass_) for name in names]
        known = [guess for guess in guesses if guess is not None]
        return min(known, key=lambda guess: guess.expected_s, default=None)


def causal(problem: AttentionProblem) -> AttentionProblem:
    """The same problem with a causal mask."""
    return problem.replace(mask=replace(problem.mask, window_right=0))


def full(problem: AttentionProblem) -> AttentionProblem:
    return problem.replace(mask=Mask())


def place(event: DeviceEvent | HostOp) -> str:
    """Name and time stamp of an event as the file has them."""
    name = event.name if len(event.name) <= 60 else event.name[:57] + "..."
    return f"{name} at ts {stamp(event.start_ns)}"


def place_of(calls: Iterable[AttentionCall]) -> str | None:
    """Where the first of the calls that did anything on a device begins."""
    first = next((call for call in calls if call.events), None)
    return None if first is None else place(first.events[0])


def stamp(nanoseconds: int) -> str:
    """A time in the file's own unit, microseconds."""
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def duration(name: str, event: DeviceEvent | HostOp) -> Number:
    return Number(name, event.duration_ns, "ns", place(event))


def chain(event: DeviceEvent, stop: HostOp | None = None) -> Iterator[HostOp]:
    """The event's operator and those around it, innermost first, up to and with `stop`."""
    op = event.op
    while op is not None:
        yield op
        if op is stop:
            return
        op = op.parent


def is_under(event: DeviceEvent, *names: str) -> bool:
    """True when an operator of one of these names asked for the event."""
    return any(op.name in names for op in chain(event))


def is_copy(event: DeviceEvent) -> bool:
    """A copy between two places of device memory, by a memcpy or by a kernel."""
    if isinstance(event, Copy):
        return event.kind == "memcpy" and "DtoD" in event.name.replace(" ", "")
    return decode(event.name).role == "copy"


def main_kernel(call: AttentionCall) -> tuple[Kernel, KernelName] | None:
    """The longest fused attention kernel of a call."""
    found = [
        (part.event, name)
        for part in call.parts
        if isinstance(part.event, Kernel)
        and (name := decode(part.event.name)).role in ("attention_forward", "attention_backward")
    ]
    return max(found, key=lambda pair: pair[0].duration_ns, default=None)


def times(count: int, what: str) -> str:
    """'1 call', '3 calls'."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
