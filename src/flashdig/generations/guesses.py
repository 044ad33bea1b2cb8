"""Guess, then look: each rung's guess in time, and what was found against it.

A surprise is a figure outside its stated tolerance. Its cause is named where a rule knows it;
otherwise it says "unexplained".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flashdig.costs.compiled_loops import ROW_WARPS, compiled_loop
from flashdig.costs.predict import UnknownGenerationError, predict
from flashdig.costs.prediction import Prediction
from flashdig.costs.roofline import MEMORY
from flashdig.costs.traffic import Traffic, tensor_bytes
from flashdig.costs.units import seconds, with_unit
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    from flashdig.evidence.counters import Counters
    from flashdig.evidence.kernels import LaunchedKernel
    from flashdig.generations.excavation import Found

# a time within this share of the expected one is no surprise
TIME_TOLERANCE = 0.15
# below this a kernel's start and end are a large part of it
SHORT_LAUNCH_MS = 0.03
OCCUPANCY_TOLERANCE = 0.15
# one indexing step of torch's element-wise kernels covers at most this many bytes
ELEMENTWISE_BYTES = 2**31
MEMORY_TOLERANCE = 0.15
UNEXPLAINED = "unexplained"
TORCHS_OWN = "void at::"


@dataclass(frozen=True)
class Surprise:
    """A figure that is not what was guessed.

    Attributes:
        what: "time", "time floor", "kernels", "occupancy", "memory bytes", "loads", "stores" or
            "FLOP".
        predicted, found: in the unit of `what`: ms, kernels, percent, bytes, FLOP.
        tolerance: largest |found / predicted - 1| that would not have been one.
        cause: what explains it, or "unexplained".
    """

    what: str
    predicted: float
    found: float
    tolerance: float
    cause: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def guess(
    name: str, problem: AttentionProblem, device: Device, *, clock_hz: float | None = None
) -> Prediction | None:
    """The cost models' guess for a rung; None where they have no schedule for it.

    Without a clock it is the guess before anything runs; with the observed one, the same guess at
    that clock.
    """
    try:
        return predict(problem, device, name, clock_hz=clock_hz)
    except UnknownGenerationError:
        return None


def surprises(
    problem: AttentionProblem, device: Device | None, found: Found
) -> tuple[Surprise, ...]:
    """What was not as guessed, for a rung that ran."""
    return (
        *_of_time(problem, device, found),
        *_of_kernels(problem, found),
        *_of_occupancy(found),
        *_of_memory(device, found),
        *_of_counts(found),
    )


def main_kernel(found: Found) -> LaunchedKernel | None:
    """The kernel that takes most of a rung's time, for an exhibit its own; None if not recorded."""
    kernels = [kernel for kernel in found.kernels or () if kernel.is_kernel]
    own = [kernel for kernel in kernels if not kernel.name.startswith(TORCHS_OWN)]
    chosen = own if found.generation.is_triton and own else kernels
    return max(chosen, key=lambda kernel: kernel.us, default=None)


def _of_occupancy(found: Found) -> tuple[Surprise, ...]:
    kernel = main_kernel(found)
    if kernel is None or kernel.occupancy_percent is None:
        return ()
    if found.guess is None or found.guess.occupancy is None:
        return ()
    guessed = 100 * found.guess.occupancy
    if abs(kernel.occupancy_percent / guessed - 1.0) <= OCCUPANCY_TOLERANCE:
        return ()
    cause = UNEXPLAINED
    if kernel.registers is not None and kernel.occupancy_limit == "registers":
        cause = f"compiled here it has {kernel.registers} registers a thread"
    return (Surprise("occupancy", guessed, kernel.occupancy_percent, OCCUPANCY_TOLERANCE, cause),)


def _of_time(
    problem: AttentionProblem, device: Device | None, found: Found
) -> tuple[Surprise, ...]:
    timing = found.timing
    if device is None or timing is None or timing.sm_clock_mhz is None:
        return ()
    name = found.generation.name
    at_clock = guess(name, problem, device, clock_hz=timing.sm_clock_mhz * 1e6)
    if at_clock is None:
        return ()
    floor, expected = at_clock.floor_s * 1e3, at_clock.expected_s * 1e3
    if timing.ms < floor:
        cause = UNEXPLAINED
        if at_clock.limiter == MEMORY and fits_in_cache(problem, device):
            cause = "inputs and output fit in the L2 cache, which replays keep warm"
        return (Surprise("time floor", floor, timing.ms, 0.0, cause),)
    if abs(timing.ms / expected - 1.0) <= TIME_TOLERANCE:
        return ()
    evidence = TimeEvidence(
        name=name,
        is_triton=found.generation.is_triton,
        ms=timing.ms,
        slower=timing.ms / expected,
        kernels=tuple(found.kernels or ()),
    )
    cause = cause_of_time(problem, device, evidence, at_clock)
    return (Surprise("time", expected, timing.ms, TIME_TOLERANCE, cause),)


def fits_in_cache(problem: AttentionProblem, device: Device) -> bool:
    size = tensor_bytes(problem)
    return size.q + size.k + size.v + size.o <= (device.cache_bytes or 0)


@dataclass(frozen=True)
class TimeEvidence:
    """What a rule may look at when a time is not as expected.

    Attributes:
        name: of the rung.
        ms: of a call; slower: over the expected time.
        kernels: that were recorded, in the order of their launch; empty when none were.
    """

    name: str
    is_triton: bool
    ms: float
    slower: float
    kernels: tuple[LaunchedKernel, ...] = ()


def cause_of_time(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str:
    """The first rule that knows a cause for a time outside its tolerance, or "unexplained"."""
    for rule in _TIME_RULES:
        cause = rule(problem, device, seen, guessed)
        if cause is not None:
            return cause
    return UNEXPLAINED


def _short_launch(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str | None:
    if seen.slower > 1 and seen.ms < SHORT_LAUNCH_MS:
        return "a launch of a few microseconds does not fill the chip: start and end of a kernel"
    return None


def _warm_cache(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str | None:
    if seen.slower < 1 and guessed.limiter == MEMORY and fits_in_cache(problem, device):
        return "inputs and output fit in the L2 cache, which replays keep warm"
    return None


def _spills(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str | None:
    """Registers seen on the device, or else those of the exhibit as compiled offline."""
    if seen.slower <= 1 or not seen.is_triton:
        return None
    most = device.arch.max_registers_per_thread
    dtype = "tfloat32" if problem.dtype == "float32" and problem.allow_tf32 else problem.dtype
    loop = compiled_loop(device.arch, seen.name, dtype, problem.head_dim)
    registers = [kernel.registers for kernel in seen.kernels if kernel.is_kernel]
    if most in registers or (
        not any(registers) and loop is not None and loop.registers[problem.causal] == most
    ):
        return "the kernel has the most registers a thread can have, so it may spill to memory"
    return None


def _second_read(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str | None:
    """Rows in flight, read and written, against the cache."""
    if seen.name != "online_softmax" or seen.slower <= 1:
        return None
    rows = device.sm_count * (device.arch.max_warps // ROW_WARPS)
    row_bytes = problem.seqlen_k * problem.element_bytes
    if 2 * rows * row_bytes > 2 * device.cache_bytes:
        return (
            f"{rows:,} rows in flight, each read and overwritten, are "
            f"{with_unit(2 * rows * row_bytes, 'B')}: the second read misses the cache"
        )
    return None


def _first_flash_attention(
    problem: AttentionProblem, device: Device, seen: TimeEvidence, guessed: Prediction
) -> str | None:
    """v1's two limits: what its traffic would take, against all of the expected time."""
    if seen.name != "v1" or seen.slower <= 1:
        return None
    measured = device.measured
    if measured is None:
        return None
    all_missing_s = guessed.issued.total_bytes / measured.tile_update_bytes_per_s
    expected_s = guessed.expected_s
    if all_missing_s > (1 + TIME_TOLERANCE) * expected_s:
        return (
            "O and its statistics find less room in the cache than assumed: if every access went "
            f"to memory, the traffic alone would take {seconds(all_missing_s)}"
        )
    if all_missing_s > 0.75 * expected_s:
        return (
            "the chain of a step and its traffic take about equally long "
            f"({seconds(expected_s)} and {seconds(all_missing_s)}), and get in each other's way"
        )
    return None


Rule = Callable[[AttentionProblem, Device, TimeEvidence, Prediction], "str | None"]
_TIME_RULES: tuple[Rule, ...] = (
    _short_launch,
    _warm_cache,
    _spills,
    _second_read,
    _first_flash_attention,
)


def _of_kernels(problem: AttentionProblem, found: Found) -> tuple[Surprise, ...]:
    if found.kernels is None:
        return ()
    launched = sum(kernel.count for kernel in found.kernels if kernel.is_kernel)
    predicted = found.prediction.kernels
    if launched == predicted:
        return ()
    return (Surprise("kernels", predicted, launched, 0.0, _cause_of_kernels(problem, found)),)


def _cause_of_kernels(problem: AttentionProblem, found: Found) -> str:
    names = [kernel.name for kernel in found.kernels or ()]
    if any("splitkv" in name or "split_kv" in name for name in names):
        return "the grid is too small for the chip: keys are split and a second kernel combines"
    if any("splitK" in name or "splitk" in name for name in names):
        return "a product is split over its inner dimension and reduced by a second kernel"
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    element = 4 if found.generation.name == "sdpa_math" else problem.element_bytes
    if scores * element > ELEMENTWISE_BYTES:
        return "torch splits element-wise kernels over more than 2^31 bytes into several launches"
    return UNEXPLAINED


def _of_memory(device: Device | None, found: Found) -> tuple[Surprise, ...]:
    """What memory read and wrote, against what the cache was expected to leave."""
    if device is None or found.guess is None or found.counters is None:
        return ()
    predicted, counters = found.guess.memory, found.counters
    measured = counters.dram_bytes
    if abs(measured / predicted.total_bytes - 1.0) <= MEMORY_TOLERANCE:
        return ()
    cause = _cause_of_memory(predicted, counters, device.cache_bytes or 0)
    return (Surprise("memory bytes", predicted.total_bytes, measured, MEMORY_TOLERANCE, cause),)


def _cause_of_memory(predicted: Traffic, counters: Counters, cache_bytes: int) -> str:
    """How far counting each kernel on its own, from a cold cache, explains the difference."""
    launches = sum(kernel.count for kernel in counters.kernels)
    unwritten = predicted.store_bytes - counters.dram_write_bytes
    left = min(max(unwritten, 0), launches * cache_bytes)
    lowest = (1 - MEMORY_TOLERANCE) * predicted.total_bytes
    if counters.dram_bytes < lowest <= counters.dram_bytes + left:
        return (
            f"{with_unit(unwritten, 'B')} of what was written still stood in the L2 cache when its "
            "kernel ended, and is not counted"
        )
    excess = counters.dram_read_bytes - predicted.load_bytes
    if 0 < excess <= (launches - 1) * cache_bytes:
        return "each kernel is counted from a cold cache, so it reads again what the last one left"
    return UNEXPLAINED


def _of_counts(found: Found) -> tuple[Surprise, ...]:
    """Counted traffic must equal its closed form to the byte."""
    traffic = found.prediction.triton
    if found.counted is None or traffic is None:
        return ()
    counts = found.counted.counts
    pairs = [
        ("loads", traffic.load_bytes, counts.load_bytes),
        ("stores", traffic.store_bytes, counts.store_bytes),
    ]
    if counts.matmul_flops:  # none where the products are torch's
        pairs.append(("FLOP", found.prediction.matmul_flops, counts.matmul_flops))
    return tuple(
        Surprise(what, predicted, counted, 0.0, UNEXPLAINED)
        for what, predicted, counted in pairs
        if predicted != counted
    )
