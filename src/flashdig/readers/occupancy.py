"""What a recorder's occupancy estimate means: measured, not measured, unknown, or a small grid.

The estimate in Kineto traces is the share of an SM's warp slots that the launch could fill, rounded
to a whole percent. It reads 0 in two unlike cases: for kernels that opt in to more than 48 KB of
shared memory it was not worked out at all, and for grids of a few blocks it rounds to 0. Both are
told apart here, and where the device's limits are in the file the value is worked out again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from flashdig.hardware.arch import architecture
from flashdig.hardware.occupancy import occupancy
from flashdig.readers.model import DeviceProperties, Kernel, LaunchConfiguration, Trace

# The limit without opting in; the recorder's estimate fails above it.
_DEFAULT_SHARED_MEMORY = 48 * 1024


@dataclass(frozen=True)
class Occupancy:
    """Occupancy of one kernel; always an estimate, never a counter.

    Attributes:
        percent: 0 to 100, or None where it cannot be told.
        source: "recorded" (the file's), "computed" (from launch and device), "unknown".
        limit: what keeps more warps from being resident; None where it cannot be told.
        explanation: one sentence.
    """

    percent: float | None
    source: Literal["recorded", "computed", "unknown"]
    limit: str | None
    explanation: str


def judge(kernel: Kernel, device: DeviceProperties | None) -> Occupancy:
    """The occupancy of a kernel and why it is what it is."""
    launch = kernel.configuration
    recorded = launch.occupancy_percent
    resident = resident_warps(launch, device)
    limit = None if resident is None else resident.limit
    explanation = "" if resident is None else resident.sentence
    not_measured = recorded == 0 and (launch.shared_memory_bytes or 0) > _DEFAULT_SHARED_MEMORY
    if recorded is not None and not not_measured:
        return Occupancy(recorded, "recorded", limit, explanation or "Estimate of the recorder.")
    if resident is not None and not_measured:
        return Occupancy(
            resident.percent,
            "computed",
            limit,
            "The file's 0 means not measured (more than 48 KB of shared memory). " + explanation,
        )
    why = (
        "The file's 0 means not measured (more than 48 KB of shared memory)."
        if not_measured
        else "The file has no estimate."
    )
    return Occupancy(None, "unknown", limit, f"{why} {explanation}".strip())


def mean_percent(kernels: Iterable[Kernel], trace: Trace) -> float | None:
    """Mean occupancy weighted by duration over the kernels where it is known, or None."""
    devices = {device.index: device for device in trace.devices}
    judged: dict[tuple[LaunchConfiguration, int], float | None] = {}
    weighted = total = 0.0
    for kernel in kernels:
        key = (kernel.configuration, kernel.device)
        if key not in judged:
            judged[key] = judge(kernel, devices.get(kernel.device)).percent
        percent = judged[key]
        if percent is not None:
            weighted += percent * kernel.duration_ns
            total += kernel.duration_ns
    return weighted / total if total else None


@dataclass(frozen=True)
class Residency:
    """Warps that are resident on average, in percent of the most, and what keeps more out."""

    percent: float
    limit: str
    sentence: str


def resident_warps(
    launch: LaunchConfiguration, device: DeviceProperties | None
) -> Residency | None:
    """Warps that are resident on average over all SMs, from the launch and the architecture.

    None where the file does not say enough, or says what no launch could have.
    """
    threads, blocks = launch.threads_per_block, launch.num_blocks
    if device is None or device.compute_capability is None or device.num_sms is None:
        return None
    if not threads or not blocks:
        return None
    major, minor = device.compute_capability
    try:
        found = occupancy(
            architecture(f"sm_{major}{minor}"),
            threads_per_block=threads,
            registers_per_thread=launch.registers_per_thread or 0,
            shared_bytes_per_block=launch.shared_memory_bytes or 0,
            grid_blocks=blocks,
            sm_count=device.num_sms,
        )
    except ValueError:
        return None  # an unknown chip, or numbers of a launch that cannot have been
    if not found.blocks_per_sm or found.grid_fraction is None:
        return None
    percent = 100 * found.grid_fraction
    if blocks < device.num_sms:
        sentence = f"Grid too small: {blocks} of {device.num_sms} SMs get a block."
        return Residency(percent, "grid", sentence)
    per_sm = blocks / device.num_sms
    if per_sm < found.blocks_per_sm:
        sentence = (
            f"Limited by the grid: {per_sm:.3g} blocks an SM where {found.blocks_per_sm} fit."
        )
        return Residency(percent, "grid", sentence)
    sentence = found.explain()
    return Residency(percent, found.limiter, sentence[0].upper() + sentence[1:] + ".")
