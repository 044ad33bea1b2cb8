"""One trace, summed up: what the terminal, the page and the JSON of `flashdig trace` show."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

from flashdig.costs.flops import direction_flops
from flashdig.readers.attribution import AttentionCall, attention_calls
from flashdig.readers.breakdown import DeviceBreakdown, Pass, break_down
from flashdig.readers.host_cost import HostCost, host_cost
from flashdig.readers.kernel_table import FamilyRow, KernelRow, family_rows, kernel_rows
from flashdig.readers.model import DeviceEvent, DeviceProperties, Kernel, ReadWarning, Trace
from flashdig.readers.occupancy import mean_percent

# a growing cache gains at most this many keys from one decoding call to the next (several where
# tokens are guessed ahead)
_LARGEST_GROWTH = 16


@dataclass(frozen=True)
class AttentionGroup:
    """Attention calls that are alike: same backend, pass, sizes and mask; in order of time.

    Decoding calls of one problem are together while their cache grows; a cache of another length
    (cross attention, another prompt) makes a group of its own.
    """

    calls: list[AttentionCall]

    @property
    def first(self) -> AttentionCall:
        return self.calls[0]

    @property
    def count(self) -> int:
        return len(self.calls)

    @property
    def module_paths(self) -> list[tuple[str, ...]]:
        """Distinct modules around the calls, in order of time; none without recorded stacks."""
        return list(dict.fromkeys(call.module_path for call in self.calls if call.module_path))

    @property
    def device_ns(self) -> int | None:
        """Device time of all calls, or None where none ran on a device."""
        known = [call.device_ns for call in self.calls if call.device_ns is not None]
        return sum(known) if known else None

    @property
    def median_device_ns(self) -> float | None:
        """Device time of one call, or None."""
        known = [call.device_ns for call in self.calls if call.device_ns is not None]
        return median(known) if known else None

    @property
    def median_host_ns(self) -> float | None:
        """Host time of one call, from its first to its last operator, or None."""
        known = [time for call in self.calls if (time := call.host_ns) is not None]
        return median(known) if known else None

    @property
    def kernels_per_call(self) -> float:
        """Kernels of one call on average; copies and memsets are not counted."""
        kernels = sum(isinstance(event, Kernel) for call in self.calls for event in call.events)
        return kernels / len(self.calls)

    @property
    def copies_per_call(self) -> float:
        """Copies and memsets of one call on average."""
        events = sum(len(call.events) for call in self.calls)
        return events / len(self.calls) - self.kernels_per_call

    @property
    def parts_ns(self) -> dict[str, float]:
        """Mean device time a call by what its events do, in order of first appearance."""
        sums: dict[str, float] = {}
        for call in self.calls:
            for part in call.parts:
                sums[part.label] = sums.get(part.label, 0) + part.event.duration_ns
        return {label: time / len(self.calls) for label, time in sums.items()}

    @property
    def flops(self) -> float | None:
        """Floating-point operations of the median call by `costs.flops.RULE`.

        None where a size is unknown or a mask tensor hides an unknown number of keys.
        """
        known = [flops for call in self.calls if (flops := _flops(call)) is not None]
        return median(known) if known else None

    @property
    def tflop_per_s(self) -> float | None:
        """Achieved by all calls over the sum of their kernels' and copies' durations."""
        flops = [_flops(call) for call in self.calls]
        time = self.device_ns
        known = [value for value in flops if value is not None]
        return sum(known) / time / 1e3 if time and len(known) == len(flops) else None

    def describe(self) -> str:
        """One line: backend, pass, sizes, mask; of decoding calls the range of cache lengths."""
        text = self.first.describe()
        lengths = [call.sizes.seqlen_k or 0 for call in self.calls]
        if min(lengths) == max(lengths):
            return text
        sizes = self.first.sizes
        one = f"seqlen {sizes.seqlen_q}/{sizes.seqlen_k}"
        return text.replace(one, f"seqlen {sizes.seqlen_q}/{min(lengths)}–{max(lengths)}")


def _flops(call: AttentionCall) -> int | None:
    problem = call.problem()
    if problem is None or call.mask.kind not in {"none", "causal", "window"}:
        return None
    return direction_flops(problem, call.pass_)


@dataclass(frozen=True)
class TraceSummary:
    """Everything that is shown of one trace.

    Attributes:
        breakdowns: one a device; empty when the recording holds no device work.
        mean_occupancy: percent, weighted by duration, an estimate; None where unknown.
    """

    source: str
    format: str
    rank: int
    world_size: int | None
    incomplete: bool
    devices: list[DeviceProperties]
    breakdowns: list[DeviceBreakdown]
    attention: list[AttentionGroup]
    kernels: list[KernelRow]
    families: list[FamilyRow]
    host: HostCost | None
    mean_occupancy: float | None
    peak_allocated_bytes: int | None
    warnings: list[ReadWarning]
    copies: int

    @property
    def attention_calls(self) -> list[AttentionCall]:
        """All calls in order of time."""
        calls = [call for group in self.attention for call in group.calls]
        calls.sort(key=lambda call: call.start_ns)
        return calls

    @property
    def kernel_count(self) -> int:
        return sum(row.count for row in self.kernels)

    @property
    def busy_ns(self) -> int | None:
        """Device busy time over all devices, or None without device work."""
        if not self.breakdowns:
            return None
        return sum(breakdown.total.busy_ns for breakdown in self.breakdowns)

    @property
    def elapsed_ns(self) -> int | None:
        if not self.breakdowns:
            return None
        return sum(breakdown.total.elapsed_ns for breakdown in self.breakdowns)

    def class_ns(self, *names: str) -> int:
        """Time of some classes over all devices."""
        return sum(
            time
            for breakdown in self.breakdowns
            for name, time in breakdown.total.by_class.items()
            if name in names
        )


def summarize(trace: Trace) -> TraceSummary:
    """Find the attention calls of a trace and sum up where its time went."""
    calls = attention_calls(trace)
    attention: dict[DeviceEvent, Pass] = {
        event: call.pass_ for call in calls for event in call.events
    }
    kernels = kernel_rows(trace, attention)
    return TraceSummary(
        source=trace.source,
        format=trace.format,
        rank=trace.rank,
        world_size=trace.world_size,
        incomplete=trace.incomplete,
        devices=trace.devices,
        breakdowns=break_down(trace, attention),
        attention=_group(calls),
        kernels=kernels,
        families=family_rows(kernels),
        host=host_cost(trace),
        mean_occupancy=mean_percent(trace.kernels, trace),
        peak_allocated_bytes=trace.peak_allocated_bytes,
        warnings=trace.warnings,
        copies=len(trace.copies),
    )


def _group(calls: list[AttentionCall]) -> list[AttentionGroup]:
    """Alike calls together, by device time, longest first."""
    groups: dict[tuple[object, ...], list[AttentionCall]] = {}
    for call in calls:
        sizes = replace(call.sizes, seqlen_k=None) if call.is_decoding else call.sizes
        key = (
            *(call.backend, call.pass_, call.is_decoding, sizes),
            *(call.mask, call.dropout, call.recomputed),
        )
        groups.setdefault(key, []).append(call)
    result = [AttentionGroup(run) for members in groups.values() for run in _runs(members)]
    result.sort(key=lambda group: (-(group.device_ns or 0), group.first.start_ns))
    return result


def _runs(calls: list[AttentionCall]) -> list[list[AttentionCall]]:
    """Calls that differ in their key length alone, apart where the lengths leave a gap."""
    lengths = sorted({call.sizes.seqlen_k or 0 for call in calls})
    run_of: dict[int, int] = {}
    run = 0
    for i, length in enumerate(lengths):
        run += i > 0 and length - lengths[i - 1] > _LARGEST_GROWTH
        run_of[length] = run
    runs: list[list[AttentionCall]] = [[] for _ in range(run + 1)]
    for call in calls:
        runs[run_of[call.sizes.seqlen_k or 0]].append(call)
    return runs
