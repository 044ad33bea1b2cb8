"""The GPUs of this machine, asked from the driver only when someone wants to know."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from flashdig.hardware.devices import Device, UnknownDeviceError, load_devices

_QUERY = "name,compute_cap,clocks.sm,clocks.max.sm,power.limit"


@dataclass(frozen=True)
class DetectedGpu:
    """One GPU as the driver describes it.

    Attributes:
        name: the driver's name.
        compute_capability: "9.0".
        clock_hz: SM clock now (low when idle); max_clock_hz: the highest allowed.
        power_limit_watts: None where the driver does not say.
        device: the row of the device table; None when the table has none for this name.
    """

    name: str
    compute_capability: str
    clock_hz: float
    max_clock_hz: float
    power_limit_watts: float | None
    device: Device | None


def detect_gpus() -> list[DetectedGpu]:
    """All NVIDIA GPUs that `nvidia-smi` lists; an empty list when there is no driver.

    Raises OSError when nvidia-smi is there and fails, with what it said.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    answer = subprocess.run(
        [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip()
        raise OSError(f"nvidia-smi failed with code {answer.returncode}: {said}")
    return [_parse(line) for line in answer.stdout.splitlines() if line.strip()]


def device_of_name(name: str) -> Device | None:
    """The device that the driver calls `name` ("NVIDIA H200"); None if it is not in the table.

    Variants ("RTX 2070 SUPER", "RTX 4090 Laptop GPU") are other devices, so names must be equal.
    """
    for device in load_devices().values():
        if name in device.driver_names:
            return device
    return None


def this_device() -> Device:
    """The device table's row for the first GPU of this machine.

    Raises UnknownDeviceError when there is no GPU or the table does not know it.
    """
    gpus = detect_gpus()
    if not gpus:
        raise UnknownDeviceError("no NVIDIA GPU found on this machine (nvidia-smi is not there)")
    if gpus[0].device is None:
        raise UnknownDeviceError(
            f"the device table has no row for {gpus[0].name!r}; it has {', '.join(load_devices())}"
        )
    return gpus[0].device


def _parse(line: str) -> DetectedGpu:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != 5:
        raise OSError(f"nvidia-smi answered {line!r}, not the five fields {_QUERY}")
    name, capability, clock, max_clock, power = fields
    return DetectedGpu(
        name=name,
        compute_capability=capability,
        clock_hz=float(clock) * 1e6,
        max_clock_hz=float(max_clock) * 1e6,
        power_limit_watts=_number(power),
        device=device_of_name(name),
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # "[N/A]" on boards without a power sensor
