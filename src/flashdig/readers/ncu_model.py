"""NcuKernel: what Nsight Compute counted for one kernel, in base units.

What was not measured is None, never 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flashdig.readers.kernel_names import KernelName, decode

Metrics = Mapping[str, float | str]


@dataclass(frozen=True)
class Pipes:
    """How busy each pipe was, in percent of its peak while the SM was active.

    `xu` is the unit for exp2, conversions and other special functions; `lsu` loads and stores.
    """

    tensor: float | None = None
    fma: float | None = None
    alu: float | None = None
    xu: float | None = None
    lsu: float | None = None
    fp64: float | None = None


@dataclass(frozen=True)
class SharedMemory:
    """Shared-memory wavefronts, over the whole kernel.

    A wavefront is one pass of the data stage; requests whose lanes hit the same bank need several.
    `wavefronts` and `bank_conflicts` are the hardware's counts; `source_wavefronts` and
    `source_ideal_wavefronts` are counted per instruction, without what arbitration adds.
    """

    wavefronts: float | None = None
    bank_conflicts: float | None = None
    load_wavefronts: float | None = None
    load_bank_conflicts: float | None = None
    store_wavefronts: float | None = None
    store_bank_conflicts: float | None = None
    source_wavefronts: float | None = None
    source_ideal_wavefronts: float | None = None

    @property
    def ideal_wavefronts(self) -> float | None:
        """Wavefronts without conflicts."""
        if self.wavefronts is None or self.bank_conflicts is None:
            return None
        return self.wavefronts - self.bank_conflicts

    @property
    def conflict_share(self) -> float | None:
        """Part of the wavefronts that conflicts cause, 0 to 1; None without any wavefront."""
        if self.bank_conflicts is None or not self.wavefronts:
            return None
        return self.bank_conflicts / self.wavefronts

    @property
    def slow_down(self) -> float | None:
        """Wavefronts by ideal wavefronts: 1 is free of conflicts; None without any."""
        ideal = self.ideal_wavefronts
        return self.wavefronts / ideal if self.wavefronts and ideal else None

    @property
    def source_slow_down(self) -> float | None:
        """The same from the counts per instruction."""
        ideal = self.source_ideal_wavefronts
        return self.source_wavefronts / ideal if self.source_wavefronts and ideal else None


@dataclass(frozen=True)
class Stalls:
    """Why warps waited.

    Attributes:
        cycles: reason -> cycles a warp waits for it between two of its instructions, such as
            "mio_throttle", "long_scoreboard", "barrier"; empty where not measured. "selected" is
            the cycle of the issue itself.
        shares: the same as parts of the latency, where the file has them so.
        latency: cycles between two instructions of a warp.
    """

    cycles: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    latency: float | None = None

    def share(self, reason: str) -> float | None:
        """Part of the latency that `reason` takes, 0 to 1; None where not measured."""
        if reason not in self.cycles:
            return self.shares.get(reason)
        total = self.latency if self.latency else sum(self.cycles.values())
        return self.cycles[reason] / total if total else None

    def largest(self) -> tuple[str, float] | None:
        """The reason that costs most and its cycles, the issue itself left out."""
        waits = {reason: cycles for reason, cycles in self.cycles.items() if reason != "selected"}
        if not waits:
            return None
        reason = max(waits, key=lambda name: waits[name])
        return reason, waits[reason]


@dataclass(frozen=True)
class NcuOccupancy:
    """Resident warps in percent of the SM's limit, and the blocks each resource allows."""

    achieved_percent: float | None = None
    theoretical_percent: float | None = None
    block_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def limiters(self) -> tuple[str, ...]:
        """The resources that allow fewest blocks; () where not recorded."""
        if not self.block_limits:
            return ()
        least = min(self.block_limits.values())
        return tuple(name for name, limit in self.block_limits.items() if limit == least)


@dataclass(frozen=True)
class Rule:
    """A remark of Nsight Compute's rules, as printed on the details page."""

    section: str
    name: str
    kind: str
    text: str
    speedup_percent: float | None = None


@dataclass(frozen=True)
class NcuKernel:
    """One profiled kernel.

    Attributes:
        number: its place in the recording ("ID").
        name: as printed; Nsight Compute shortens namespaces and template arguments.
        duration_ns, cycles, sm_frequency_hz: of the profiled run, at the clocks it was run at.
        dram_read_bytes, dram_write_bytes, dram_bytes: traffic of the device memory; only the sum
            is known from a details page (throughput times duration). A details page rounds
            everything to a few digits.
        l2_bytes: all requests to the L2, its own fabric's included; `l2_from_sms_bytes`,
            `l2_read_bytes`, `l2_write_bytes`: those of the SMs' load, store and TMA units.
        shared_memory_dynamic_bytes, ..._static_bytes, ..._driver_bytes: per block.
        registers_per_thread: 32-bit registers.
        local_spill_requests: memory requests caused by spilled registers.
        metrics: every metric of the file, numbers in base units, other values as text.
        ranges: NVTX push/pop ranges around the launch, outermost first; () where not recorded.
    """

    number: int
    name: str
    source: str
    grid: tuple[int, int, int] | None
    block: tuple[int, int, int] | None
    device: int | None
    compute_capability: tuple[int, int] | None
    metrics: Metrics = field(repr=False)
    duration_ns: float | None = None
    cycles: float | None = None
    sm_frequency_hz: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    dram_bytes: float | None = None
    dram_percent: float | None = None
    l2_bytes: float | None = None
    l2_from_sms_bytes: float | None = None
    l2_read_bytes: float | None = None
    l2_write_bytes: float | None = None
    l2_hit_percent: float | None = None
    l1_hit_percent: float | None = None
    registers_per_thread: int | None = None
    shared_memory_dynamic_bytes: int | None = None
    shared_memory_static_bytes: int | None = None
    shared_memory_driver_bytes: int | None = None
    local_spill_requests: float | None = None
    waves: float | None = None
    pipes: Pipes = Pipes()
    shared: SharedMemory = SharedMemory()
    stalls: Stalls = Stalls()
    occupancy: NcuOccupancy = NcuOccupancy()
    rules: tuple[Rule, ...] = ()
    ranges: tuple[str, ...] = ()

    @property
    def decoded(self) -> KernelName:
        """The name in plain words."""
        return decode(self.name)

    def metric(self, name: str) -> float | None:
        """A metric as a number in base units; None where it is absent or no number."""
        value = self.metrics.get(name)
        return value if isinstance(value, float) else None
