"""Guess against counters: traffic, occupancy, instruction mix and bank conflicts of one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from flashdig.findings.explanation import UNEXPLAINED, Row
from flashdig.findings.finding import Finding, Unit
from flashdig.findings.guess import Guess
from flashdig.readers.ncu_model import NcuKernel

_TOLERANCE = 0.25
_CONFLICT_LIMIT = 10.0
_MIO_LIMIT = 25.0
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "bytes at memory": ("traffic-above-model", "misaligned-accesses"),
    "bytes asked of the L2": ("misaligned-accesses",),
    "occupancy": ("occupancy-by-design",),
    "bank conflicts": ("bank-conflicts",),
    "MIO queue": ("mio-pressure",),
    "tensor cores": ("without-tensor-cores",),
    "spill requests": ("register-spills",),
}


def counted_rows(kernel: NcuKernel, guess: Guess, findings: Sequence[Finding]) -> tuple[Row, ...]:
    """Rows of one kernel, surprises first.

    Args:
        findings: of this kernel.
    """
    rows: list[Row] = []

    def compare(
        what: str, guessed: float | None, found: float | None, unit: Unit, tolerance: float
    ) -> None:
        if guessed is None or found is None:
            return
        surprise = abs(found - guessed) > tolerance * max(abs(guessed), 1e-12)
        rows.append(_row(what, guessed, found, unit, surprise, findings))

    def limit(what: str, most: float, found: float | None, unit: Unit) -> None:
        if found is not None:
            rows.append(_row(what, most, found, unit, found > most, findings))

    compare("bytes at memory", guess.memory_bytes, kernel.dram_bytes, "bytes", _TOLERANCE)
    compare(
        "bytes asked of the L2", guess.issued_bytes, kernel.l2_from_sms_bytes, "bytes", _TOLERANCE
    )
    occupancy = None if guess.occupancy is None else 100 * guess.occupancy
    compare("occupancy", occupancy, kernel.occupancy.theoretical_percent, "percent", 0.15)
    if guess.problem.dtype == "float32":
        products = guess.flops / 2
        compare("multiply-adds of a lane", products, multiply_adds(kernel), "count", _TOLERANCE)
    limit("bank conflicts", _CONFLICT_LIMIT, _percent(kernel.shared.conflict_share), "percent")
    queue = kernel.stalls.share("mio_throttle")
    limit("MIO queue", _MIO_LIMIT, _percent(queue), "percent")
    limit("spill requests", 0, kernel.local_spill_requests, "count")
    if kernel.pipes.tensor is not None and guess.problem.dtype == "float32":
        rows.append(
            Row("tensor cores", 0.0, kernel.pipes.tensor, "percent", kernel.pipes.tensor > 1)
        )
    if guess.expected_s is not None and kernel.duration_ns is not None:
        rows.append(
            Row(
                "device time while counted", guess.expected_s * 1e9, kernel.duration_ns, "ns", False
            )
        )
    rows.sort(key=lambda row: not row.surprise)
    return tuple(rows)


def multiply_adds(kernel: NcuKernel) -> float | None:
    """Fused multiply-adds of all lanes; None where they were not counted."""
    rate = kernel.metric("smsp__sass_thread_inst_executed_op_ffma_pred_on.sum.per_cycle_elapsed")
    cycles = kernel.metric("smsp__cycles_elapsed.avg")
    return None if rate is None or cycles is None else rate * cycles


def _row(
    what: str,
    guessed: float,
    found: float,
    unit: Unit,
    surprise: bool,
    findings: Sequence[Finding],
) -> Row:
    if not surprise:
        return Row(what, guessed, found, unit, False)
    causes = [f for rule in _EXPLAINS.get(what, ()) for f in findings if f.rule == rule]
    if not causes:
        return Row(what, guessed, found, unit, True, UNEXPLAINED)
    return Row(what, guessed, found, unit, True, causes[0].claim, causes[0].rule)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
