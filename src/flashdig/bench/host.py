"""What a call costs the host before the GPU starts: whole, beside the peers', and in parts.

Calls are made back to back on a problem so small that the GPU keeps up; only the ends of a
measurement are synchronised. The context managers that choose a backend of torch's attention stand
outside the timed calls. Everyone is checked on the problem first, as in every suite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashdig.bench.cell_inputs import CellInputs, make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.competitors import Attention, ours_call
from flashdig.bench.environment import Clocks, clocks_now
from flashdig.bench.host_parts import parts_of
from flashdig.bench.meters import MAX_HOST_REPETITIONS_ON_GPU, Call, HostMeter, Prepared
from flashdig.bench.peers import peer
from flashdig.bench.results import Row, timing_fields
from flashdig.bench.run_suite import Found, Plan, measure_cell
from flashdig.bench.suite import Suite
from flashdig.bench.timing import DEFAULT_ROUNDS, Timing, TimingFailure, rotate

if TYPE_CHECKING:
    import torch

OURS = "flashdig"
PEERS = ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4", "flex")
# what is called: (name, whether the inputs take gradients, whether the gradients are asked for)
CALLS = (
    ("forward", False, False),
    ("forward, gradients wanted", True, False),
    ("forward and backward", True, True),
)
CELL = Cell(
    batch=1,
    num_heads=8,
    num_heads_kv=8,
    seqlen_q=128,
    seqlen_k=128,
    head_dim=64,
    head_dim_v=64,
    dtype="bfloat16",
    causal=True,
)
# as many calls in a measurement as a stream accepts ahead of the GPU, unless they take longer
TARGET_MS = 20.0
WARM_UP_CALLS = 30

Surroundings = Callable[[], contextlib.AbstractContextManager[object]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class HostCall:
    """A call, and what is entered once around many of it."""

    call: Call
    surroundings: Surroundings = contextlib.nullcontext

    def __call__(self) -> object:
        with self.surroundings():
            return self.call()


class SurroundedMeter(HostMeter):
    """Times what `HostCall` holds inside of its surroundings, after so many calls that caches are
    warm and the threads of autograd awake: how long one call takes is asked only then."""

    def prepare(self, call: Call) -> Prepared:
        self.milliseconds(call, WARM_UP_CALLS)
        return super().prepare(call)

    def milliseconds(self, call: Call, repetitions: int) -> float:
        if not isinstance(call, HostCall):
            return super().milliseconds(call, repetitions)
        with call.surroundings():
            return super().milliseconds(call.call, repetitions)


@dataclass
class HostResult:
    """Rows of a run, and what of ours failed."""

    rows: list[Row]
    failures: list[str] = field(default_factory=list)


def measure_host(
    run_id: str,
    *,
    peers: tuple[str, ...] = PEERS,
    cell: Cell = CELL,
    rounds: int = DEFAULT_ROUNDS,
    progress: Progress = lambda _: None,
    sample: Callable[[], Clocks] = clocks_now,
) -> HostResult:
    """Check and time everyone on the current GPU, or on the CPU where there is none."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    suite = Suite("host", "", (cell,), peers=peers, measure=("memory",))
    checked = measure_cell(Plan(suite, (cell,), ("auto",), peers), cell, device, progress)
    inputs = make_inputs(cell, device, suite.seed, backward=True)
    meter = SurroundedMeter(
        TARGET_MS,
        synchronize=torch.cuda.synchronize if device == "cuda" else lambda: None,
        most=MAX_HOST_REPETITIONS_ON_GPU,
    )
    result = HostResult([])
    for name, wanted, backward in CALLS:
        found = [one for one in checked if one.direction == ("backward" if wanted else "forward")]
        calls = {
            one.competitor.name: _call(one, inputs, wanted, backward)
            for one in found
            if one.verdict == "ok"
        }
        timings = _timed(calls, meter, rounds, progress, sample)
        for one in found:
            timing = timings.get(one.competitor.name)
            result.rows.append(_whole_row(cell, one, name, run_id, timing))
            if one.ours and not isinstance(timing, Timing):
                why = one.verdict if timing is None else timing.reason
                result.failures.append(f"{one.competitor.name}, {name}: {why}")
    parts = parts_of(inputs)
    timings = _timed({n: HostCall(c) for n, c in parts.items()}, meter, rounds, progress, sample)
    for name, timing in timings.items():
        result.rows.append(_part_row(cell, name, run_id, timing))
        if not isinstance(timing, Timing):
            result.failures.append(f"{name}: {timing.reason}")
    return result


def _timed(
    calls: Mapping[str, HostCall],
    meter: HostMeter,
    rounds: int,
    progress: Progress,
    sample: Callable[[], Clocks],
) -> dict[str, Timing | TimingFailure]:
    if not calls:
        return {}
    return rotate(calls, meter, rounds=rounds, sample=sample, progress=progress)


def _call(found: Found, inputs: CellInputs, wanted: bool, backward: bool) -> HostCall:
    import torch

    prepared = found.competitor.prepare(inputs)
    attention, surroundings = _bare(found, inputs, prepared.attention)
    q, k, v = (x.detach().clone().requires_grad_(wanted) for x in prepared.tensors)
    dout = prepared.dout

    def call() -> object:
        out = attention(q, k, v)
        return torch.autograd.grad(out, (q, k, v), dout) if backward else out

    return HostCall(call, surroundings)


def _bare(found: Found, inputs: CellInputs, attention: Attention) -> tuple[Attention, Surroundings]:
    """The attention as a program calls it; torch's without choosing its backend each time."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"sdpa_flash": SDPBackend.FLASH_ATTENTION, "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION}
    name = found.competitor.name
    if found.ours:
        return ours_call(inputs, "auto"), contextlib.nullcontext
    if name not in backends:
        return attention, contextlib.nullcontext
    causal = bool(inputs.cell.causal)

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return sdpa, lambda: sdpa_kernel(backends[name])


def _whole_row(
    cell: Cell, found: Found, call: str, run_id: str, timing: Timing | TimingFailure | None
) -> Row:
    row: Row = {
        "run_id": run_id,
        "kind": "speed",
        "pass": "host",
        **cell.fields(),
        "name": call,
        "backend": OURS if found.ours else found.competitor.name,
        "gate": found.verdict,
        "error": found.error,
        "allowed_error": found.allowed_error,
    }
    if found.ours:
        row["notes"] = f"backend {found.competitor.name}"
    if isinstance(timing, Timing):
        row |= timing_fields(timing)
    elif timing is not None:
        row["notes"] = f"no time: {timing.reason}"
    return {name: value for name, value in row.items() if value is not None}


def _part_row(cell: Cell, name: str, run_id: str, timing: Timing | TimingFailure) -> Row:
    row: Row = {
        "run_id": run_id,
        "kind": "step",
        "pass": "host",
        **cell.fields(),
        "name": name,
        "gate": "ok",
    }
    if isinstance(timing, Timing):
        row |= timing_fields(timing)
    else:
        row["gate"] = f"error: {timing.reason}"
    return {name: value for name, value in row.items() if value is not None}


def check_peers(names: tuple[str, ...]) -> None:
    """Raises ValueError for a name that is no peer of this measurement."""
    for name in names:
        if name not in PEERS:
            raise ValueError(f"must be none or of {', '.join(PEERS)}, got {name!r}")
        peer(name)
