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
    "bytes asked of the L2, at most": ("register-spills", "misaligned-accesses"),
    "occupancy": ("occupancy-by-design",),
    "bank conflicts": ("bank-conflicts",),
    "MIO queue": ("mio-pressure",),
    "tensor cores": ("without-tensor-cores",),
    "spill requests": ("register-spills",),
}


def counted_rows(
    kernel: NcuKernel,
    guess: Guess,
    findings: Sequence[Finding],
    beside: Sequence[NcuKernel] = (),
) -> tuple[Row, ...]:
    """Rows of one kernel, surprises first.

    Args:
        findings: of this kernel.
        beside: other kernels of the same call (fills, copies): bytes and time are of all together.
    """
    rows: list[Row] = []
    every = (kernel, *beside)

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

    moved = _sum([one.dram_bytes for one in every])
    compare("bytes at memory", guess.memory_bytes, moved, "bytes", _TOLERANCE)
    asked = _sum([one.l2_from_sms_bytes for one in every])
    if guess.issued_bytes is not None and asked is not None:
        # what instructions ask for is the most that the L2 sees; the L1 may serve a part of it
        more = asked > (1 + _TOLERANCE) * guess.issued_bytes
        row = _row(
            "bytes asked of the L2, at most", guess.issued_bytes, asked, "bytes", more, findings
        )
        if (
            more
            and row.rule == "register-spills"
            and not _spills_explain(kernel, asked - guess.issued_bytes)
        ):
            row = Row(row.what, row.guessed, row.found, "bytes", True, UNEXPLAINED)
        rows.append(row)
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
    duration = _sum([one.duration_ns for one in every])
    if guess.expected_s is not None and duration is not None:
        rows.append(Row("device time while counted", guess.expected_s * 1e9, duration, "ns", False))
    rows.sort(key=lambda row: not row.surprise)
    return tuple(rows)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _spills_explain(kernel: NcuKernel, extra: float) -> bool:
    """A spill request moves a word a lane, 128 bytes; most of the extra must be theirs."""
    return (kernel.local_spill_requests or 0) * 128 >= 0.3 * extra


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
