"""What Nsight Compute counted, on the terminal and as plain values: a row a kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from flashdig.costs.units import with_unit
from flashdig.readers.ncu_model import NcuKernel
from flashdig.report.quantities import duration

UNKNOWN = "-"


def print_ncu(kernels: Sequence[NcuKernel], source: str, console: Console) -> None:
    """Two tables, work and waiting, and what the rules of the file advise with the most gain."""
    console.print(f"[bold]{source}[/bold]: Nsight Compute, {len(kernels)} kernels")
    console.print(_work(kernels))
    console.print(_waiting(kernels))
    for kernel in kernels:
        best = max(kernel.rules, key=lambda rule: rule.speedup_percent or 0.0, default=None)
        if best is not None and best.speedup_percent:
            console.print(
                f"{kernel.number}: {best.name} (estimated gain {best.speedup_percent:.0f} %): "
                f"{best.text}",
                highlight=False,
                markup=False,
            )


def _work(kernels: Sequence[NcuKernel]) -> Table:
    table = Table(title="Work", title_justify="left")
    table.add_column("#", justify="right")
    table.add_column("kernel", overflow="fold", ratio=1)
    for name in ("time", "DRAM", "L2", "tensor", "FMA", "exp2 (XU)"):
        table.add_column(name, justify="right", no_wrap=True)
    for kernel in kernels:
        pipes = kernel.pipes
        table.add_row(
            str(kernel.number),
            kernel.decoded.words.rstrip("."),
            UNKNOWN if kernel.duration_ns is None else duration(kernel.duration_ns),
            _bytes(kernel.dram_bytes),
            _bytes(kernel.l2_bytes),
            _percent(pipes.tensor),
            _percent(pipes.fma),
            _percent(pipes.xu),
        )
    return table


def _waiting(kernels: Sequence[NcuKernel]) -> Table:
    table = Table(title="Waiting", title_justify="left")
    table.add_column("#", justify="right")
    for name in (
        "occupancy (most)",
        "limited by",
        "registers",
        "shared memory",
        "bank conflicts",
        "slow-down",
        "largest stall",
    ):
        table.add_column(name, justify="right")
    for kernel in kernels:
        occupancy = kernel.occupancy
        most = _percent(occupancy.theoretical_percent)
        table.add_row(
            str(kernel.number),
            f"{_percent(occupancy.achieved_percent)} ({most})",
            ", ".join(name.replace("_", " ") for name in occupancy.limiters) or UNKNOWN,
            UNKNOWN if kernel.registers_per_thread is None else str(kernel.registers_per_thread),
            _bytes(_shared_bytes(kernel)),
            _share(kernel.shared.conflict_share),
            UNKNOWN if kernel.shared.slow_down is None else f"{kernel.shared.slow_down:.2f}x",
            _stall(kernel),
        )
    return table


def ncu_to_json(kernels: Sequence[NcuKernel]) -> list[dict[str, Any]]:
    """Each kernel's figures in base units, null where not measured, and all metrics of the file."""
    return [
        {
            **dataclasses.asdict(kernel),
            "words": kernel.decoded.words,
            "role": kernel.decoded.role,
            "backend": kernel.decoded.backend,
            "bank_conflict_share": kernel.shared.conflict_share,
            "bank_conflict_slow_down": kernel.shared.slow_down,
            "occupancy_limiters": list(kernel.occupancy.limiters),
        }
        for kernel in kernels
    ]


def _shared_bytes(kernel: NcuKernel) -> float | None:
    parts = (kernel.shared_memory_dynamic_bytes, kernel.shared_memory_static_bytes)
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _stall(kernel: NcuKernel) -> str:
    largest = kernel.stalls.largest()
    if largest is None:
        return UNKNOWN
    reason, cycles = largest
    share = kernel.stalls.share(reason)
    part = "" if share is None else f" ({100 * share:.0f} %)"
    return f"{reason.replace('_', ' ')} {cycles:.1f} cycles{part}"


def _bytes(amount: float | None) -> str:
    return UNKNOWN if amount is None else with_unit(amount, "B")


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g} %"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.3g} %"
