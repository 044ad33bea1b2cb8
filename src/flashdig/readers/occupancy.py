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

from flashdig.readers.model import DeviceProperties, Kernel, LaunchConfiguration, Trace

# The limit without opting in; the recorder's estimate fails above it.
_DEFAULT_SHARED_MEMORY = 48 * 1024
# CUDA programming guide: registers go out to warps in units of 256, shared memory carries 1 KB a
# block of the system's own from compute capability 8.0 on.
_REGISTER_UNIT = 256
_RESERVED_SHARED_MEMORY = 1024

Limit = Literal["grid", "shared memory", "registers", "threads", "blocks"]


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
    limit: Limit | None
    explanation: str


def judge(kernel: Kernel, device: DeviceProperties | None) -> Occupancy:
    """The occupancy of a kernel and why it is what it is."""
    launch = kernel.configuration
    recorded = launch.occupancy_percent
    resident = _residency(launch, device)
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
class _Residency:
    percent: float
    limit: Limit
    sentence: str


def _residency(launch: LaunchConfiguration, device: DeviceProperties | None) -> _Residency | None:
    """Blocks that fit an SM at once, from the launch and the device's limits."""
    threads, blocks = launch.threads_per_block, launch.num_blocks
    if device is None or not threads or not blocks:
        return None
    if device.max_threads_per_sm is None or device.num_sms is None:
        return None
    warp_size = device.warp_size or 32
    warps = -(-threads // warp_size)
    max_warps = device.max_threads_per_sm // warp_size
    fitting: dict[Limit, int] = {"threads": max_warps // warps, "blocks": 32}
    registers = launch.registers_per_thread
    if registers and device.registers_per_sm:
        per_warp = -(-registers * warp_size // _REGISTER_UNIT) * _REGISTER_UNIT
        fitting["registers"] = device.registers_per_sm // (per_warp * warps)
    if launch.shared_memory_bytes and device.shared_memory_per_sm:
        reserved = _RESERVED_SHARED_MEMORY if (device.compute_capability or (0,))[0] >= 8 else 0
        fitting["shared memory"] = device.shared_memory_per_sm // (
            launch.shared_memory_bytes + reserved
        )
    limit = min(fitting, key=lambda name: fitting[name])
    fit = fitting[limit]
    if not fit:
        return None  # such a launch would have failed: the file's numbers do not belong together
    # the grid's last blocks leave SMs idle: on average this many are resident
    per_sm = min(float(fit), blocks / device.num_sms)
    percent = 100.0 * per_sm * warps / max_warps
    if blocks < device.num_sms:
        sentence = f"Grid too small: {blocks} of {device.num_sms} SMs get a block."
        return _Residency(percent, "grid", sentence)
    if per_sm < fit:
        limit = "grid"
    noun = "block" if per_sm == 1 else "blocks"
    return _Residency(
        percent,
        limit,
        f"Limited by {limit}: {per_sm:.4g} {noun} an SM = {per_sm * warps:.4g} of {max_warps} "
        f"warps = {percent:.4g} %.",
    )
