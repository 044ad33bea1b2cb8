"""Which device work one call launches: recorded by torch.profiler, read by the trace reader."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from flashdig.readers.model import Kernel
from flashdig.readers.occupancy import judge
from flashdig.readers.trace import read_kineto


@dataclass(frozen=True)
class LaunchedKernel:
    """Device work of one call under one name.

    Attributes:
        name: as recorded; "Memcpy ..." and "Memset ..." are work of the copy engines.
        count, us: how often, and microseconds in all.
        grid, block: of the first launch; None for copies and fills.
        registers: a thread's; shared_bytes: a block's.
        occupancy_percent: warps resident on average, of the most that an SM holds.
        occupancy_limit: what keeps more from being resident.
    """

    name: str
    count: int
    us: float
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = None
    shared_bytes: int | None = None
    occupancy_percent: float | None = None
    occupancy_limit: str | None = None

    @property
    def is_kernel(self) -> bool:
        """False for copies and fills."""
        return not self.name.startswith(("Memcpy", "Memset"))


def launched_kernels(call: Callable[[], object]) -> list[LaunchedKernel]:
    """Run `call` once under the profiler, after one warm-up, and list what ran on the device."""
    call()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as recording:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory(prefix="flashdig-kernels-") as folder:
        path = Path(folder, "call.json")
        recording.export_chrome_trace(str(path))
        trace = read_kineto(str(path))
    devices = {device.index: device for device in trace.devices}
    found: dict[str, LaunchedKernel] = {}
    for event in trace.device_events():
        us = event.duration_ns / 1000
        before = found.get(event.name)
        if before is not None:
            found[event.name] = replace(before, count=before.count + 1, us=before.us + us)
        elif isinstance(event, Kernel):
            residency = judge(event, devices.get(event.device))
            found[event.name] = LaunchedKernel(
                name=event.name,
                count=1,
                us=us,
                grid=event.grid,
                block=event.block,
                registers=event.registers_per_thread,
                shared_bytes=event.shared_memory_bytes,
                occupancy_percent=residency.percent,
                occupancy_limit=residency.limit,
            )
        else:
            found[event.name] = LaunchedKernel(event.name, 1, us)
    return list(found.values())
