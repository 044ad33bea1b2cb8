"""Times several calls against each other: rounds rotated over the calls, each measured twice a
round.

Clocks, temperature and power drift during a run. In rotated rounds every call meets the same drift,
so a ratio is taken within each round and the median of the ratios is what is reported; the
difference between the two measurements of a round (A/A) says how far a ratio can be trusted.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from flashdig.bench.environment import Clocks, clocks_now
from flashdig.bench.meters import (
    L2,
    MAX_HOST_REPETITIONS_ON_GPU,
    MAX_REPETITIONS,
    Call,
    Clock,
    EventMeter,
    GraphMeter,
    HostMeter,
    Meter,
    Prepared,
)

if TYPE_CHECKING:
    import torch

DEFAULT_ROUNDS = 12
DEFAULT_TARGET_MS = 2.0
# of measurements this long the energy is read too: the counter moves some ten times a second
SUSTAINED_MS = 200.0
CONFIDENCE = 0.95

_rotations = itertools.count()


@dataclass(frozen=True)
class Timing:
    """One call's time.

    Attributes:
        ms: median over the rounds of ms_all, milliseconds a call.
        ms_all: one figure a round, the mean of its two measurements, in the order of the rounds.
        aa_spread: median over the rounds of |a / b - 1| of the two measurements.
        sm_clock_mhz, power_w: medians of one reading a round, taken while the call ran; None
            without NVML.
        joules: median energy of a call, everything on the board included; None for measurements
            shorter than SUSTAINED_MS, and without NVML.
        clock, l2: how it was measured.
        repetitions: calls in one measurement.
        rotation: which call of `time_rotated` measured it; only timings of one can be paired.
    """

    ms: float
    ms_all: tuple[float, ...]
    aa_spread: float
    sm_clock_mhz: float | None
    power_w: float | None
    clock: Clock
    l2: L2
    repetitions: int
    rotation: int
    joules: float | None = None


@dataclass(frozen=True)
class TimingFailure:
    """Why a call has no time: the error that it raised, and when."""

    reason: str


def time_rotated(
    calls: Mapping[str, Call],
    *,
    rounds: int = DEFAULT_ROUNDS,
    target_ms: float = DEFAULT_TARGET_MS,
    clock: Clock = "graph",
    l2: L2 = "warm",
    progress: Callable[[str], None] | None = None,
    sample: Callable[[], Clocks] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing | TimingFailure]:
    """Time every call, by name, on the current GPU (or the CPU with clock="host").

    A call that raises (out of memory, not capturable) becomes a TimingFailure, its memory is freed
    and the others go on; a call that leaves the GPU unusable ends the run for those that are left,
    and their reasons say so.

    Args:
        calls: name -> function without arguments; its result is dropped.
        rounds: each starts at the next call, so that none always runs first.
        target_ms: length of one measurement; decides the repetitions. From SUSTAINED_MS on the
            GPU is as warm and as slow as under a steady load, the sensors are read in the middle of
            the second measurement, and the energy before and after.
        clock: "graph" (CUDA graph replay, kernel time), "events" (CUDA events around eager calls)
            or "host" (perf_counter around eager calls, the device synchronised only outside).
        l2: "warm" or, for the two GPU clocks, "cold": the L2 cache is flushed before each call.
        progress: told in a few words what is being done.
        sample: reads the sensors, NVML by default.
        now: seconds, the clock of clock="host".

    Raises:
        ValueError: an argument is outside what is allowed, or the clock needs a GPU that is not
            there.
    """
    if not calls:
        raise ValueError("calls must hold at least one call")
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    if not (target_ms > 0 and math.isfinite(target_ms)):
        raise ValueError(f"target_ms must be positive and finite, got {target_ms}")
    meter = _meter(clock, l2, target_ms, now)
    return rotate(
        calls,
        meter,
        rounds=rounds,
        sample=clocks_now if sample is None else sample,
        progress=(lambda _: None) if progress is None else progress,
        sustained_ms=target_ms if target_ms >= SUSTAINED_MS else None,
    )


def _meter(clock: Clock, l2: L2, target_ms: float, now: Callable[[], float]) -> Meter:
    if clock not in ("graph", "events", "host"):
        raise ValueError(f"clock must be 'graph', 'events' or 'host', got {clock!r}")
    if l2 not in ("warm", "cold"):
        raise ValueError(f"l2 must be 'warm' or 'cold', got {l2!r}")
    import torch

    has_gpu = torch.cuda.is_available()
    if clock == "host":
        if l2 == "cold":
            raise ValueError("l2='cold' needs clock='graph' or 'events': it flushes a GPU's cache")
        if not has_gpu:
            return HostMeter(target_ms, now=now, most=MAX_REPETITIONS)
        return HostMeter(
            target_ms,
            now=now,
            synchronize=torch.cuda.synchronize,
            most=MAX_HOST_REPETITIONS_ON_GPU,
        )
    if not has_gpu:
        raise ValueError(f"clock={clock!r} needs an NVIDIA GPU; without one use clock='host'")
    return EventMeter(target_ms, l2) if clock == "events" else GraphMeter(target_ms, l2)


@dataclass
class _Samples:
    """What the rounds have gathered of one call."""

    prepared: Prepared
    pairs: list[tuple[float, float]] = field(default_factory=list)
    clocks: list[Clocks] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)

    def measure(self, sample: Callable[[], Clocks], sustained_ms: float | None) -> None:
        before = None if sustained_ms is None else sample().energy_j
        self.prepared.enqueue()
        if sustained_ms is not None:
            # one measurement's length of calls ran ahead of the first
            time.sleep(2.5 * sustained_ms / 1e3)
        self.clocks.append(sample())
        a, b = self.prepared.read()
        after = None if before is None else sample().energy_j
        if before is not None and after is not None:
            self.joules.append((after - before) / self.prepared.enqueued)
        if min(a, b) <= 0:
            raise RuntimeError(f"the clock saw no time pass ({a} ms and {b} ms)")
        self.pairs.append((a, b))

    def timing(self, meter: Meter, rotation: int) -> Timing:
        ms_all = tuple((a + b) / 2 for a, b in self.pairs)
        return Timing(
            ms=statistics.median(ms_all),
            ms_all=ms_all,
            aa_spread=statistics.median(abs(a / b - 1) for a, b in self.pairs),
            sm_clock_mhz=_median_of_known([c.sm_clock_mhz for c in self.clocks]),
            power_w=_median_of_known([c.power_w for c in self.clocks]),
            clock=meter.clock,
            l2=meter.l2,
            repetitions=self.prepared.repetitions,
            rotation=rotation,
            joules=_median_of_known(self.joules),
        )


def _median_of_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def rotate(
    calls: Mapping[str, Call],
    meter: Meter,
    *,
    rounds: int,
    sample: Callable[[], Clocks],
    progress: Callable[[str], None],
    sustained_ms: float | None = None,
) -> dict[str, Timing | TimingFailure]:
    """The rounds of `time_rotated`, with any meter."""
    names = list(calls)
    running: dict[str, _Samples] = {}
    failures: dict[str, TimingFailure] = {}

    def attempt(name: str, stage: str, action: Callable[[], None]) -> None:
        """Run one step of one call; a failure ends this call, a lost device all that are left."""
        try:
            action()
            return
        except Exception as error:  # whatever a measured call raises is its result
            reason = f"{stage}: {_first_line(error)}"
        # outside of the handler, so that the traceback no longer holds the call's tensors
        running.pop(name, None)
        failures[name] = TimingFailure(reason)
        try:
            meter.recover()
        except Exception as error:
            running.clear()
            for other in names:
                lost = f"not measured: the device was lost after {name!r}: {_first_line(error)}"
                failures.setdefault(other, TimingFailure(lost))

    def measure(name: str) -> None:
        # looked up here, so that a failed call's memory is held by nothing else
        running[name].measure(sample, sustained_ms)

    for name in names:
        if name not in failures:
            progress(f"preparing {name}")
            attempt(name, "preparing", partial(_prepare, running, name, calls[name], meter))
    for number in range(rounds):
        if not running:
            break
        progress(f"round {number + 1} of {rounds}")
        start = number % len(names)
        for name in names[start:] + names[:start]:
            if name in running:
                attempt(name, f"round {number + 1}", partial(measure, name))
    rotation = next(_rotations)
    return {
        name: running[name].timing(meter, rotation) if name in running else failures[name]
        for name in names
    }


def _prepare(running: dict[str, _Samples], name: str, call: Call, meter: Meter) -> None:
    running[name] = _Samples(meter.prepare(call))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


@dataclass(frozen=True)
class Ratio:
    """A median of paired ratios and its confidence interval.

    `confidence` is the interval's real coverage: at least 0.95 from 6 rounds on; with fewer no such
    interval exists, and low and high are the extremes with the coverage that those have.
    """

    median: float
    low: float
    high: float
    confidence: float

    @property
    def behind(self) -> bool:
        """The whole interval lies below 1, with 95 % confidence."""
        return self.confidence >= CONFIDENCE and self.high < 1


def paired_ratio(numerator: Timing, denominator: Timing) -> Ratio:
    """numerator's time over denominator's, round by round: how many times as fast as the numerator
    the denominator is. For "ours against a peer" give (peer, ours); `behind` then says that ours is
    slower.

    Raises ValueError for timings of different runs, clocks or cache states.
    """
    if numerator.rotation != denominator.rotation:
        raise ValueError("only timings of the same call of time_rotated can be paired")
    return median_ratio(numerator.ms_all, denominator.ms_all)


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median of numerators[i] / denominators[i] with a 95 % interval between order statistics.

    The interval runs from the k-th smallest to the k-th largest ratio, with the largest k whose
    binomial coverage is at least 95 % (12 rounds: third to tenth, 96.1 %). It assumes nothing about
    the distribution but independent rounds and is exact for few rounds, where a bootstrap of the
    median is too narrow and would depend on a seed.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError(
            f"paired times must be as many and at least one, "
            f"got {len(numerators)} and {len(denominators)}"
        )
    if min(*numerators, *denominators) <= 0:
        raise ValueError("paired times must be positive")
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    rank, coverage = _interval_rank(len(ratios))
    return Ratio(statistics.median(ratios), ratios[rank - 1], ratios[-rank], coverage)


def _interval_rank(count: int) -> tuple[int, float]:
    """Largest k such that the k-th smallest to the k-th largest of `count` values cover the median
    with at least 95 %, and that coverage; k = 1 where none does."""
    rank, coverage = 1, 1 - 2 * 0.5**count
    outside = 0.5**count
    for k in range(2, count // 2 + 1):
        outside += math.comb(count, k - 1) * 0.5**count
        if 1 - 2 * outside < CONFIDENCE:
            break
        rank, coverage = k, 1 - 2 * outside
    return rank, coverage


@dataclass(frozen=True)
class Ceilings:
    """Rates that this GPU reached in this run, to compare kernels with.

    Attributes:
        matmul_tflops: TFLOP/s of a large square matmul; keys float16, bfloat16, tf32 (float32 data
            on tensor cores) and float32 (IEEE).
        copy_tb_per_s: TB/s of a device-to-device copy, bytes read plus bytes written.
        sm_clock_mhz: median SM clock by the same keys and "copy"; None without NVML.
        failures: why a key is missing.
    """

    matmul_tflops: dict[str, float]
    copy_tb_per_s: float | None
    sm_clock_mhz: dict[str, float | None]
    failures: dict[str, str]


def measured_ceilings(
    device: torch.device | str | int = "cuda",
    *,
    rounds: int = 6,
    matmul_size: int = 8192,
    matmul_size_float32: int = 4096,
    copy_bytes: int = 1_000_000_000,
) -> Ceilings:
    """Measure the matmul and copy rates of a GPU with the same clock as the kernels beside them.

    The matrices are random normal: power, and with it the clock, depends on the data. float32 sizes
    are smaller because without tensor cores a large product takes tens of milliseconds.
    """
    import torch

    index = torch.device(device).index
    with torch.cuda.device(torch.cuda.current_device() if index is None else index):
        calls: dict[str, Call] = {"copy": _copy_call(copy_bytes)}
        flops: dict[str, int] = {}
        for key, dtype, size, precision in (
            ("float16", torch.float16, matmul_size, None),
            ("bfloat16", torch.bfloat16, matmul_size, None),
            ("tf32", torch.float32, matmul_size_float32, "tf32"),
            ("float32", torch.float32, matmul_size_float32, "ieee"),
        ):
            if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
                continue
            calls[key] = _matmul_call(size, dtype, precision)
            flops[key] = 2 * size**3
        timings = time_rotated(calls, rounds=rounds)
    return ceilings_from(timings, flops, 2 * copy_bytes)


def ceilings_from(
    timings: Mapping[str, Timing | TimingFailure], flops: Mapping[str, int], moved_bytes: int
) -> Ceilings:
    """Rates from times: `flops` a matmul by key, `moved_bytes` (read + written) for "copy"."""
    measured = {key: t for key, t in timings.items() if isinstance(t, Timing)}
    copy = measured.get("copy")
    return Ceilings(
        matmul_tflops={
            key: flops[key] / measured[key].ms / 1e9 for key in flops if key in measured
        },
        copy_tb_per_s=None if copy is None else moved_bytes / copy.ms / 1e9,
        sm_clock_mhz={key: timing.sm_clock_mhz for key, timing in measured.items()},
        failures={k: t.reason for k, t in timings.items() if isinstance(t, TimingFailure)},
    )


def _copy_call(size: int) -> Call:
    import torch

    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    # not copy_: inside a graph that is a memcpy node, which reaches 2.7 TB/s on an H200 where
    # kernels reach 4.2
    return lambda: torch.neg(source, out=target)


def _matmul_call(size: int, dtype: torch.dtype, precision: str | None) -> Call:
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    if precision is None:
        return lambda: torch.mm(a, b, out=out)

    def call() -> object:
        with float32_precision(precision):
            return torch.mm(a, b, out=out)

    return call


@contextlib.contextmanager
def float32_precision(precision: str) -> Iterator[None]:
    """Torch's setting for float32 products on CUDA devices, "ieee" or "tf32", in a with block."""
    import torch

    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before
