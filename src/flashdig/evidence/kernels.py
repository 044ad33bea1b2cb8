"""Which device kernels one call launches, by name, as torch.profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile


@dataclass(frozen=True)
class LaunchedKernel:
    """A device activity of one call: name, how often, microseconds in all."""

    name: str
    count: int
    us: float

    @property
    def is_kernel(self) -> bool:
        """False for the copies and fills of the copy engines ("Memcpy DtoD", "Memset")."""
        return not self.name.startswith(("Memcpy", "Memset"))


def launched_kernels(call: Callable[[], object]) -> list[LaunchedKernel]:
    """Run `call` once under the profiler, after one warm-up, and list what ran on the device."""
    call()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
    with profile(activities=activities, acc_events=True) as recording:
        call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in recording.events() or []:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            found.setdefault(event.name, []).append(float(event.device_time))
    return [LaunchedKernel(name, len(times), sum(times)) for name, times in found.items()]
