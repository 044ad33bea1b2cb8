"""Digs at one problem: every rung is predicted, checked, timed and described, in that order.

On a GPU the rungs run there, in CUDA graphs whose rounds rotate. Without one they run on the CPU
for their errors, the Triton exhibits in the interpreter, and nothing is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

import torch

from flashdig.bench.gate import GateResult, Reference, float64_reference, naive_rounded, poison
from flashdig.bench.timing import (
    Ceilings,
    Timing,
    TimingFailure,
    float32_precision,
    paired_ratio,
    time_rotated,
)
from flashdig.costs.flops import half_rule_flops
from flashdig.costs.prediction import Prediction
from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.traffic import compulsory, visited_tiles
from flashdig.evidence.counters import Counters
from flashdig.evidence.golden_counts import golden_counts
from flashdig.evidence.interpreter import (
    Counts,
    Interpreted,
    InterpreterError,
    Job,
    interpreter_fault,
    run_in_interpreter,
)
from flashdig.evidence.kernels import LaunchedKernel, launched_kernels
from flashdig.generations.base import Generation, LaunchPrediction
from flashdig.generations.guesses import guess
from flashdig.generations.inputs import QKV
from flashdig.generations.ladder import generation
from flashdig.generations.presets import Cell, Published
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem

# tile visits of one (batch, head) pair that the interpreter walks in a few seconds
INTERPRETER_LIMIT = 2000
# tile visits of a whole problem that it walks in about a minute for each exhibit
INTERPRETER_RUN_LIMIT = 40_000
# scores up to which every rung is also compared with eager attention itself
EAGER_LIMIT = 2**24
FUSED_BACKWARD = ("sdpa_efficient", "sdpa_flash", "sdpa_cudnn")

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Counted:
    """Counted traffic of a rung and where the counts come from."""

    counts: Counts
    source: str


@dataclass
class Found:
    """All that is known of one rung on one problem.

    Attributes:
        prediction: launches, bytes and FLOP of this exhibit, from its own structure.
        guess: floor and expected time on this device, made before it ran.
        guessed_at: when both were made, ISO 8601 in UTC.
        unsupported: why it was not run; empty when it was.
        refusal: the error of a run that was tried; None when it ran.
        eager_difference: largest difference from eager attention, for problems that are small.
        forward_backward: its time with the backward, where one was asked for and exists.
        counters: what memory read and wrote, where the chip's counters were read.
    """

    generation: Generation
    prediction: LaunchPrediction
    unsupported: list[str]
    guess: Prediction | None = None
    guessed_at: str = ""
    refusal: str | None = None
    gate: GateResult | None = None
    eager_difference: float | None = None
    timing: Timing | None = None
    forward_backward: Timing | None = None
    untimed: str | None = None
    kernels: list[LaunchedKernel] | None = None
    counted: Counted | None = None
    uncounted: str | None = None
    counters: Counters | None = None
    peak_bytes: int | None = None
    published: Published | None = None

    @property
    def verdict(self) -> str:
        """ "ok", or why this rung has no time, in one line."""
        if self.unsupported:
            return f"not run: {'; '.join(self.unsupported)}"
        if self.refusal is not None:
            return f"not run: {self.refusal}"
        if self.gate is not None and not self.gate.ok:
            return self.gate.reason
        return "ok"


@dataclass
class CellFindings:
    """The ladder on one problem, bottom rung first."""

    cell: Cell
    source: str
    device_name: str
    rungs: list[Found]
    ceilings: Ceilings | None = None
    device: Device | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def problem(self) -> AttentionProblem:
        return self.cell.problem

    @property
    def flops(self) -> int:
        """Useful work, by the rule of published tables: all pairs, halved when causal."""
        return half_rule_flops(self.problem)

    def below(self, name: str) -> Found | None:
        """The nearest rung under `name` that was timed; None without a GPU."""
        names = [rung.generation.name for rung in self.rungs]
        for rung in reversed(self.rungs[: names.index(name)]):
            if rung.timing is not None:
                return rung
        return None

    def tflops(self, found: Found) -> float | None:
        return None if found.timing is None else self.flops / found.timing.ms / 1e9

    def share_of_matmul(self, found: Found) -> float | None:
        """Useful TFLOP/s over the matmul rate measured in the same run."""
        tflops = self.tflops(found)
        rate = None
        if self.ceilings is not None:
            rate = self.ceilings.matmul_tflops.get(self.cell.precision)
        return None if tflops is None or rate is None else tflops / rate

    def moved_bytes(self, found: Found) -> int:
        """Issued bytes where the kernels' instructions are known, else what nobody can avoid."""
        traffic = found.prediction.traffic
        return (compulsory(self.problem) if traffic is None else traffic).total_bytes

    def share_of_copy(self, found: Found) -> float | None:
        """`moved_bytes` a second over the copy rate of the same run; above 1 the L2 cache helps."""
        if found.timing is None or self.ceilings is None or self.ceilings.copy_tb_per_s is None:
            return None
        return self.moved_bytes(found) / found.timing.ms / 1e9 / self.ceilings.copy_tb_per_s

    def speedup(self, found: Found) -> float | None:
        """Over the rung below: the median of the rounds' own ratios."""
        return speedup_over(self.below(found.generation.name), found)


def speedup_over(other: Found | None, found: Found) -> float | None:
    """How many times faster than another rung of the same measurement; None without times."""
    if other is None or other.timing is None or found.timing is None:
        return None
    return paired_ratio(other.timing, found.timing).median


def dig_on_gpu(
    cell: Cell,
    inputs: QKV,
    names: Sequence[str],
    *,
    device: Device | None,
    ceilings: Ceilings | None,
    rounds: int,
    forward_backward: bool = False,
    progress: Progress,
) -> CellFindings:
    """Predict, check, profile and time the rungs on a CUDA device."""
    problem = cell.problem
    rungs = _predicted(cell, names, "cuda", device)
    gpu = torch.cuda.get_device_name(inputs.q.device)
    findings = CellFindings(cell, inputs.source, gpu, rungs, ceilings, device)
    with float32_precision("tf32" if cell.tf32 else "ieee"):
        progress("computing the float64 reference")
        reference = float64_reference(inputs.q, inputs.k, inputs.v, causal=problem.causal)
        for found in rungs:
            if not found.unsupported:
                progress(f"{found.generation.name}: checking against float64")
                _check_on_gpu(found, inputs, problem.causal, reference)
                torch.cuda.empty_cache()
        del reference
        ready = {f.generation.name: f for f in rungs if f.verdict == "ok"}
        calls = {n: _forward_call(f.generation, inputs, problem.causal) for n, f in ready.items()}
        if calls:
            timings = time_rotated(calls, rounds=rounds, progress=progress)
            for name, timing in timings.items():
                _keep_timing(ready[name], timing)
        for found in ready.values():
            progress(f"{found.generation.name}: kernels")
            call = _forward_call(found.generation, inputs, problem.causal)
            found.kernels = launched_kernels(call)
        if forward_backward:
            _time_forward_backward(findings, ready, inputs, rounds, progress)
    _count(findings, progress)
    return findings


def dig_on_cpu(
    cell: Cell, inputs: QKV, names: Sequence[str], *, progress: Progress
) -> CellFindings:
    """Errors and counts without a GPU; nothing is timed."""
    rungs = _predicted(cell, names, "cpu", None)
    findings = CellFindings(cell, inputs.source, "cpu", rungs)
    causal = cell.problem.causal
    progress("computing the float64 reference")
    reference = float64_reference(inputs.q, inputs.k, inputs.v, causal=causal)
    fault = interpreter_fault() or _too_long_for_the_interpreter(cell.problem)
    interpreted: dict[str, Interpreted] = {}
    wanted = [f.generation.name for f in rungs if f.generation.is_triton and not f.unsupported]
    if wanted and fault is None:
        progress("running the Triton exhibits in the interpreter")
        job = Job(tuple(wanted), inputs.q, inputs.k, inputs.v, causal)
        try:
            (interpreted,) = run_in_interpreter([job])
        except InterpreterError as error:
            fault = str(error)
    for found in rungs:
        name = found.generation.name
        if found.unsupported:
            continue
        progress(f"{name}: checking against float64")
        if name in interpreted:
            run = interpreted[name]
            found.counted = Counted(run.counts, "interpreter")
            out, lse = run.out, run.lse
        elif found.generation.is_triton:
            found.refusal = fault
            continue
        else:
            try:
                out, lse = found.generation.run(inputs.q, inputs.k, inputs.v, causal)
            except RuntimeError as error:
                found.refusal = _first_line(error)
                continue
        _judge(found, out, lse, inputs, causal, reference)
        found.untimed = "no GPU: no time was measured"
    _count(findings, progress)
    return findings


def _predicted(
    cell: Cell, names: Sequence[str], device_type: str, device: Device | None
) -> list[Found]:
    """The rungs with their predictions, before anything has run."""
    problem = cell.problem.replace(allow_tf32=cell.tf32)
    rungs = []
    for name in names:
        exhibit = generation(name)
        rungs.append(
            Found(
                generation=exhibit,
                prediction=exhibit.predict(cell.problem),
                unsupported=exhibit.unsupported(cell.problem, device_type),
                guess=None if device is None else guess(name, problem, device),
                guessed_at=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                published=cell.published.get(name),
            )
        )
    return rungs


def _forward_call(exhibit: Generation, inputs: QKV, causal: bool) -> Callable[[], object]:
    def call() -> object:
        with torch.no_grad():
            return exhibit.run(inputs.q, inputs.k, inputs.v, causal)

    return call


def _check_on_gpu(found: Found, inputs: QKV, causal: bool, reference: Reference) -> None:
    call = _forward_call(found.generation, inputs, causal)
    try:
        call()  # compiles, and makes what is made once
        poison(inputs.q.numel() * inputs.q.element_size(), inputs.q.device)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out, lse = found.generation.run(inputs.q, inputs.k, inputs.v, causal)
        torch.cuda.synchronize()
        found.peak_bytes = torch.cuda.max_memory_allocated() - before
    except RuntimeError as error:  # torch.OutOfMemoryError is one
        found.refusal = _first_line(error)
        return
    _judge(found, out, lse, inputs, causal, reference)


def _judge(
    found: Found,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    inputs: QKV,
    causal: bool,
    reference: Reference,
) -> None:
    q, k, v = inputs.q, inputs.k, inputs.v
    found.gate = reference.check(out, lse)
    if found.gate.ok and q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] <= EAGER_LIMIT:
        eager = naive_rounded(q, k, v, causal=causal)
        found.eager_difference = float((out.float() - eager.float()).abs().max())


def _keep_timing(found: Found, timing: Timing | TimingFailure) -> None:
    if isinstance(timing, Timing):
        found.timing = timing
    else:
        found.untimed = timing.reason


def _time_forward_backward(
    findings: CellFindings,
    ready: dict[str, Found],
    inputs: QKV,
    rounds: int,
    progress: Progress,
) -> None:
    """Forward plus backward of the rungs that torch differentiates in their own kernels."""
    grad_out = torch.randn_like(inputs.q)

    def call_for(exhibit: Generation) -> Callable[[], object]:
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]

        def call() -> object:
            out, _ = exhibit.run(leaves[0], leaves[1], leaves[2], findings.problem.causal)
            return torch.autograd.grad(out, leaves, grad_out)

        return call

    calls = {n: call_for(f.generation) for n, f in ready.items() if n in FUSED_BACKWARD}
    if not calls:
        return
    progress("forward plus backward")
    for name, timing in time_rotated(calls, rounds=rounds, progress=progress).items():
        if isinstance(timing, Timing):
            ready[name].forward_backward = timing
        else:
            findings.notes.append(f"{name}, forward plus backward: {timing.reason}")


def _count(findings: CellFindings, progress: Progress) -> None:
    """Fill in counts that did not come with the run: counted on one head, else the kept ones."""
    problem = findings.problem
    missing = [f for f in findings.rungs if f.generation.is_triton and f.counted is None]
    missing = [f for f in missing if not f.generation.unsupported(problem, "cuda")]
    if not missing:
        return
    fault = interpreter_fault()
    if fault is not None:
        findings.notes.append(f"{fault}: counts come from the committed golden file")
    counted: dict[str, Counts] = {}
    if fault is None and _interpreter_visits(problem) <= INTERPRETER_LIMIT:
        progress("counting in the interpreter")
        try:
            counted = _count_one_head(problem, [f.generation.name for f in missing])
        except InterpreterError as error:
            findings.notes.append(f"{error}: counts come from the committed golden file")
    for found in missing:
        name = found.generation.name
        kept = golden_counts(name, problem)
        if name in counted:
            found.counted = Counted(counted[name], "interpreter")
        elif kept is not None:
            found.counted = Counted(kept, "golden file")
        else:
            found.uncounted = "neither short enough for the interpreter nor in the golden file"


def _too_long_for_the_interpreter(problem: AttentionProblem) -> str | None:
    visits = problem.batch * problem.num_heads * _interpreter_visits(problem)
    if visits <= INTERPRETER_RUN_LIMIT:
        return None
    return f"the interpreter would take minutes ({visits:,} tiles for each exhibit)"


def _interpreter_visits(problem: AttentionProblem) -> int:
    tile = exhibit_tile(problem.head_dim, problem.element_bytes)
    return visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=False).tiles


def _count_one_head(problem: AttentionProblem, names: list[str]) -> dict[str, Counts]:
    """Counts do not depend on the values, so one head of random float16 or float32 is enough."""
    dtype = torch.float32 if problem.element_bytes == 4 else torch.float16
    q = torch.randn(1, 1, problem.seqlen_q, problem.head_dim).to(dtype)
    k = torch.randn(1, 1, problem.seqlen_k, problem.head_dim).to(dtype)
    (runs,) = run_in_interpreter([Job(tuple(names), q, k, k, problem.causal)])
    pairs = problem.batch * problem.num_heads
    return {name: run.counts.times(pairs) for name, run in runs.items()}


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__


def cut_for_cpu(problem: AttentionProblem) -> AttentionProblem:
    """What two CPU cores check and count in well under a minute: batch 1, 2 heads, seqlen 512."""
    heads_kv = min(problem.num_heads_kv, 2)
    group_size = min(problem.group_size, max(1, 2 // heads_kv))
    return dataclasses.replace(
        problem,
        batch=min(problem.batch, 1),
        num_heads=heads_kv * group_size,
        num_heads_kv=heads_kv,
        seqlen_q=min(problem.seqlen_q, 512),
        seqlen_k=min(problem.seqlen_k, 512),
        dtype="float16" if problem.dtype == "bfloat16" else problem.dtype,
    )
