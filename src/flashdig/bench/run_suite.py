"""Runs a suite cell by cell: every competitor is checked on the exact shape and pass, then all that
passed are timed against each other in rotated rounds.

On a GPU times are kernel times, by CUDA-graph replay; without one they are the host's, so that the
whole path can be tried anywhere.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashdig.bench.cell_gate import GRADIENTS, CellReference, cell_reference
from flashdig.bench.cell_inputs import CellInputs, make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Competitor, Ours, Prepared, ours_for
from flashdig.bench.gate import poison, poisoned_allocator
from flashdig.bench.meters import Call, Clock
from flashdig.bench.peers import peer
from flashdig.bench.results import Row, timing_fields
from flashdig.bench.rows import check_row
from flashdig.bench.suite import Suite
from flashdig.bench.timing import Timing, TimingFailure, time_rotated
from flashdig.hardware.detect import device_of_name

Progress = Callable[[str], None]


class DeviceLostError(RuntimeError):
    """The GPU can no longer be used in this process; the message names who lost it."""


@dataclass
class Found:
    """One competitor on one cell and pass.

    Attributes:
        error, allowed_error: of the output, or of the gradient that comes closest to the allowance.
        rms_error: of the output.
        verdict: "ok", "not run: why" (it does not serve the cell), "error: what it raised", or what
            the gate says against the result.
        peak_bytes: memory above the inputs of one forward, or of forward plus backward.
        untimed: why there is no time although the verdict is "ok".
    """

    competitor: Competitor
    direction: str
    verdict: str = "ok"
    error: float | None = None
    allowed_error: float | None = None
    rms_error: float | None = None
    checked: str = ""
    peak_bytes: int | None = None
    timing: Timing | None = None
    untimed: str | None = None

    @property
    def ours(self) -> bool:
        return isinstance(self.competitor, Ours)

    @property
    def failed(self) -> bool:
        """It was tried, and gave no right result or no time."""
        if self.verdict == "ok":
            return self.untimed is not None
        return not self.verdict.startswith("not run")


@dataclass
class CellResult:
    """Rows of one cell, and what the command must know of them."""

    cell: Cell
    rows: list[Row]
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Plan:
    """A suite with what the command line changes of it; None keeps the suite's."""

    suite: Suite
    cells: tuple[Cell, ...]
    ours: tuple[str, ...]
    peers: tuple[str, ...] | None = None
    rounds: int | None = None
    time_limit: float | None = None

    def peers_of(self, cell: Cell) -> tuple[str, ...]:
        if self.peers is not None:
            return self.peers
        return self.suite.peers if cell.peers is None else cell.peers

    def passes_of(self, cell: Cell) -> tuple[str, ...]:
        return self.suite.passes if cell.passes is None else cell.passes

    def rounds_of(self, cell: Cell) -> int:
        return self.rounds or cell.rounds or self.suite.rounds


def run_suite(
    plan: Plan,
    run_id: str,
    *,
    progress: Progress,
    now: Callable[[], float] = time.monotonic,
) -> Iterator[CellResult]:
    """Measure the cells in order; each is yielded as soon as it is done.

    With a time limit (seconds) a cell is only begun when as much time as the last one took is left.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = began = now()
    for cell in plan.cells:
        last, began = now() - began, now()
        if plan.time_limit is not None and began - start + last > plan.time_limit:
            return
        found = measure_cell(plan, cell, device, progress)
        rows = [row_of(cell, one, run_id, plan.suite.measure) for one in found]
        for row in rows:  # what no record would take must show now, not after the last cell
            check_row(row, [run_id], f"{row['backend']} on {cell.title}")
        failures = [
            f"{one.competitor.name} on {cell.title}, {one.direction}: "
            f"{one.untimed if one.verdict == 'ok' else one.verdict}"
            for one in found
            if one.ours and one.failed
        ]
        yield CellResult(cell, rows, failures)


def measure_cell(plan: Plan, cell: Cell, device: str, progress: Progress) -> list[Found]:
    """Check, then time everyone on one cell. Its tensors are freed before it returns."""
    passes = plan.passes_of(cell)
    competitors: list[Competitor] = [
        *ours_for(plan.ours, cell, device),
        *(peer(name) for name in plan.peers_of(cell)),
    ]
    found = [Found(c, direction) for direction in passes for c in competitors]
    for one in found:
        reason = one.competitor.reason_against(cell, device)
        if reason is not None:
            one.verdict = f"not run: {reason}"
    if all(one.verdict != "ok" for one in found):
        return found
    progress(f"{cell.title}: inputs and their float64 reference")
    inputs = make_inputs(cell, device, plan.suite.seed, "backward" in passes)
    reference = cell_reference(inputs)
    prepared: dict[str, Prepared] = {}
    for competitor in competitors:
        of_it = [one for one in found if one.competitor is competitor and one.verdict == "ok"]
        if of_it:
            progress(f"{cell.title}: checking {competitor.name}")
            ready = _checked(competitor, of_it, inputs, reference)
            if ready is not None:
                prepared[competitor.name] = ready
            _free(device)
    del reference
    for direction in passes:
        if "time" in plan.suite.measure:
            of_pass = [one for one in found if one.direction == direction]
            say = _prefixed(progress, f"{cell.title}, {direction}: ")
            clock = clock_for(cell, direction, device)
            _time(of_pass, prepared, plan.rounds_of(cell), plan.suite.target_ms, clock, say)
            _require_device(device, f"timing {cell.title}, {direction}")
    del prepared, inputs
    # compiled functions keep their arguments in cycles
    gc.collect()
    _free(device)
    return found


def _prefixed(progress: Progress, prefix: str) -> Progress:
    return lambda text: progress(prefix + text)


def _checked(
    competitor: Competitor, found: Sequence[Found], inputs: CellInputs, reference: CellReference
) -> Prepared | None:
    """Prepare a competitor and judge each of its passes; None when it cannot be prepared."""
    try:
        prepared = competitor.prepare(inputs)
    except Exception as error:  # whatever an implementation raises is its result
        for one in found:
            one.verdict = _error_words(error)
        _require_device(inputs.q.device.type, competitor.name)
        return None
    for one in found:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                _check(one, prepared, inputs, reference)
            except Exception as error:
                one.verdict = _error_words(error)
                if "No available kernel" in one.verdict:
                    one.verdict += _refusals(said)
        # outside of the handler, whose traceback holds the failed call's tensors
        if one.verdict != "ok":
            _require_device(inputs.q.device.type, competitor.name)
            _free(inputs.q.device.type)
    return prepared


def _check(found: Found, prepared: Prepared, inputs: CellInputs, reference: CellReference) -> None:
    """One pass of one competitor: result against float64, and peak memory."""
    forward = found.direction == "forward"
    call = prepared.forward() if forward else prepared.forward_backward()
    results, found.peak_bytes = _run_poisoned(call, inputs)
    tensors = (results,) if forward else results
    names = ("out",) if forward else GRADIENTS
    common = (prepared.to_common(x) for x in tensors)
    verdict = reference.check(dict(zip(names, common, strict=True)))
    found.verdict, found.checked = verdict.reason, verdict.checked
    found.error, found.allowed_error = verdict.error, verdict.budget
    found.rms_error = verdict.rms_error


def _run_poisoned(call: Call, inputs: CellInputs) -> tuple[Any, int | None]:
    """A call's result out of memory that held NaN, and on a GPU its peak above what was there."""
    if inputs.q.device.type == "cpu":
        with poisoned_allocator():
            return call(), None
    import torch

    call()  # compiles, and makes what is made once
    # else the blocks that come next hold the first call's right results
    torch.cuda.empty_cache()
    poison(2 * sum(x.nbytes for x in (inputs.q, inputs.k, inputs.v)), inputs.q.device)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


def clock_for(cell: Cell, direction: str, device: str) -> Clock:
    """Graph replay on a GPU, but events for a backward with dropout: torch keeps the state of an
    eager forward's dropout on the host, and a captured backward takes its address for the device's.
    """
    if device != "cuda":
        return "host"
    return "events" if direction == "backward" and cell.dropout_p > 0.0 else "graph"


def _time(
    found: Sequence[Found],
    prepared: dict[str, Prepared],
    rounds: int,
    target_ms: float,
    clock: Clock,
    progress: Progress,
) -> None:
    """Time everyone that passed, of one cell and pass, against each other."""
    ready = {one.competitor.name: one for one in found if one.verdict == "ok"}
    if not ready:
        return
    calls: dict[str, Call] = {}
    for name, one in ready.items():
        of_it = prepared[name]
        calls[name] = of_it.forward() if one.direction == "forward" else of_it.backward()
    timings = time_rotated(
        calls,
        rounds=rounds,
        target_ms=target_ms,
        clock=clock,
        progress=progress,
    )
    for name, timing in timings.items():
        if isinstance(timing, TimingFailure):
            ready[name].untimed = timing.reason
        else:
            ready[name].timing = timing


def row_of(cell: Cell, found: Found, run_id: str, measure: Sequence[str]) -> Row:
    """A finding as a row of a record; unknown values are left out."""
    row: Row = {
        "run_id": run_id,
        "kind": "speed",
        "pass": found.direction,
        **cell.fields(),
        "backend": found.competitor.name,
        "gate": found.verdict,
        "error": found.error,
        "allowed_error": found.allowed_error,
        "rms_error": found.rms_error,
        "peak_bytes": found.peak_bytes,
    }
    notes = [f"compared: {found.checked}"] if found.checked else []
    if found.timing is not None:
        row |= timing_fields(found.timing)
        row["tflops"] = cell.flops(found.direction) / found.timing.ms / 1e9
        if found.timing.joules:
            row["tflop_per_joule"] = cell.flops(found.direction) / found.timing.joules / 1e12
        row["tensor_utilisation"] = _utilisation(row)
    elif found.untimed is not None:
        notes.append(f"no time: {found.untimed}")
    elif "time" not in measure:
        notes.append("memory alone was measured")
    row["notes"] = "; ".join(notes) or None
    return {name: value for name, value in row.items() if value is not None}


def _utilisation(row: Row) -> float | None:
    """FLOP/s over what the tensor cores can do at the clock that was seen; None where unknown."""
    import torch

    clock = row["sm_clock_mhz"]
    if not torch.cuda.is_available() or not clock:
        return None
    device = device_of_name(torch.cuda.get_device_name())
    if device is None or row["dtype"] not in device.arch.mma_flop_per_clock:
        return None
    rate = device.arch.mma_flop_per_clock[row["dtype"]] * device.sm_count * clock * 1e6
    return float(row["tflops"] * 1e12 / rate)


def _error_words(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"error: {type(error).__name__}" + (f": {lines[0]}" if lines else "")


def _refusals(said: Sequence[warnings.WarningMessage]) -> str:
    """Why torch has no kernel, which it says in warnings: those that are about this backend."""
    lines = [str(one.message).partition("(Triggered internally")[0].strip() for one in said]
    reasons = [line for line in dict.fromkeys(lines) if not line.endswith("because:")]
    reasons = [line for line in reasons if "runtime disabled" not in line]
    return f" ({' '.join(reasons)})" if reasons else ""


def _free(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


def _require_device(device: str, who: str) -> None:
    """Raises DeviceLostError when the GPU answers nothing but errors after a failed call."""
    if device != "cuda":
        return
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"the GPU was lost after {who}: {error}") from error
