"""The kernels of a trace as tables: one row a kernel name, one row a family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashdig.readers.breakdown import Pass, TimeClass, time_class
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import DeviceEvent, Dimensions, Kernel, Trace
from flashdig.readers.occupancy import Occupancy, judge


@dataclass(frozen=True)
class KernelRow:
    """All kernels of one name; durations in nanoseconds.

    Attributes:
        words: what the name means, in a sentence.
        time_class: class of the whole group, or the one with most time where the same kernel serves
            several (a GEMM inside and outside of attention).
        grid, block, registers_per_thread, shared_memory_bytes, occupancy: of its longest run.
        configurations: number of distinct launch configurations.
    """

    name: str
    words: str
    family: str
    role: str
    time_class: TimeClass
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    grid: Dimensions | None
    block: Dimensions | None
    registers_per_thread: int | None
    shared_memory_bytes: int | None
    occupancy: Occupancy
    configurations: int

    @property
    def mean_ns(self) -> float:
        return self.total_ns / self.count


@dataclass(frozen=True)
class FamilyRow:
    """All kernels of one maker and one role."""

    family: str
    role: str
    count: int
    total_ns: int


def kernel_rows(trace: Trace, attention: Mapping[DeviceEvent, Pass]) -> list[KernelRow]:
    """One row a name, by total duration, longest first.

    Args:
        attention: device events that belong to an attention call and their pass.
    """
    groups: dict[str, list[Kernel]] = {}
    for kernel in trace.kernels:
        groups.setdefault(kernel.name, []).append(kernel)
    rows = [_row(kernels, trace, attention) for kernels in groups.values()]
    rows.sort(key=lambda row: (-row.total_ns, row.name))
    return rows


def _row(kernels: list[Kernel], trace: Trace, attention: Mapping[DeviceEvent, Pass]) -> KernelRow:
    longest = max(kernels, key=lambda kernel: kernel.duration_ns)
    name = decode(longest.name)
    by_class: dict[TimeClass, int] = {}
    for kernel in kernels:
        of_kernel = time_class(kernel, attention)
        by_class[of_kernel] = by_class.get(of_kernel, 0) + kernel.duration_ns
    return KernelRow(
        name=longest.name,
        words=name.words,
        family=name.family,
        role=name.role,
        time_class=max(by_class, key=lambda of_kernel: by_class[of_kernel]),
        count=len(kernels),
        total_ns=sum(kernel.duration_ns for kernel in kernels),
        min_ns=min(kernel.duration_ns for kernel in kernels),
        max_ns=longest.duration_ns,
        grid=longest.grid,
        block=longest.block,
        registers_per_thread=longest.registers_per_thread,
        shared_memory_bytes=longest.shared_memory_bytes,
        occupancy=judge(longest, trace.device(longest.device)),
        configurations=len({kernel.configuration for kernel in kernels}),
    )


def family_rows(rows: list[KernelRow]) -> list[FamilyRow]:
    """Kernel rows summed by family and role, by total duration, longest first."""
    sums: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        entry = sums.setdefault((row.family, row.role), [0, 0])
        entry[0] += row.count
        entry[1] += row.total_ns
    families = [
        FamilyRow(family, role, count, total) for (family, role), (count, total) in sums.items()
    ]
    families.sort(key=lambda row: (-row.total_ns, row.family, row.role))
    return families
