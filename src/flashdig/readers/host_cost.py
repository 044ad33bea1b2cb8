"""What the host did: launches, waiting, and how far ahead of the device it ran."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from flashdig.readers.model import Trace


@dataclass(frozen=True)
class HostCost:
    """Host calls of one trace; times in nanoseconds; None where the file has no host calls.

    Attributes:
        launches, graph_launches: calls that start kernels; graph launches are counted in both.
        launch_ns: host time inside launches; `launch_median_ns` of one.
        launch_delay_median_ns: from the start of a launch to the start of its first kernel. About
            5 us when the device waits for the host, far more when the host runs ahead.
        synchronizations, synchronization_ns: calls that wait for the device.
        launches_without_work: launches whose kernel is not in the file.
        kernels_without_launch: kernels whose launch is not in the file.
    """

    launches: int
    graph_launches: int
    launch_ns: int
    launch_median_ns: float | None
    launch_delay_median_ns: float | None
    synchronizations: int
    synchronization_ns: int
    launches_without_work: int
    kernels_without_launch: int


def host_cost(trace: Trace) -> HostCost | None:
    """Sum up the host side, or None for a recording without host calls."""
    if not trace.launches:
        return None
    launches = [launch for launch in trace.launches if launch.is_kernel_launch]
    waits = [launch for launch in trace.launches if launch.is_synchronization]
    first_start: dict[int, int] = {}
    for kernel in trace.kernels:
        if kernel.launch is not None:
            delay = kernel.start_ns - kernel.launch.start_ns
            known = first_start.get(id(kernel.launch))
            first_start[id(kernel.launch)] = delay if known is None else min(known, delay)
    return HostCost(
        launches=len(launches),
        graph_launches=sum(launch.is_graph_launch for launch in launches),
        launch_ns=sum(launch.duration_ns for launch in launches),
        launch_median_ns=median(launch.duration_ns for launch in launches) if launches else None,
        # clocks of host and device differ a little: a kernel never starts before its launch
        launch_delay_median_ns=(max(0.0, median(first_start.values())) if first_start else None),
        synchronizations=len(waits),
        synchronization_ns=sum(launch.duration_ns for launch in waits),
        launches_without_work=sum(not launch.device_events for launch in launches),
        kernels_without_launch=sum(kernel.launch is None for kernel in trace.kernels),
    )
