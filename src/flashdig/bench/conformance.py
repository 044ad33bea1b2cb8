"""The conformance suite of a backend's kernels: every pair of features, against float64.

    python -m flashdig.bench.conformance --output benchmarks/results/nvidia-h200/conformance.json
    python -m flashdig.bench.conformance --backend hopper

On a GPU a pool of processes compiles the specialisations by running them on tiny inputs, and this
process runs the cases of each as it is ready: Triton's disk cache then holds every kernel. With
TRITON_INTERPRET=1 and `--device cpu` the pool runs the cases themselves, with small tiles.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures import TimeoutError as FuturesTimeoutError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashdig.bench.conformance_cases import (
    FEATURES,
    HOPPER_FEATURES,
    Case,
    draw_case,
    features_may_meet,
    specialisations,
)
from flashdig.bench.conformance_judge import Judgement, Kernels, judge
from flashdig.bench.environment import collect, revision
from flashdig.bench.pairwise import Combination, feasible_pairs, pairs_of
from flashdig.bench.results import append_run, new_run
from flashdig.bench.timing import float32_precision
from flashdig.kernels.choose import TileConfig

SUITE = "conformance"
# what the interpreter walks quickly; bfloat16 is wrong there
INTERPRETER_TILE = TileConfig(block_m=32, block_n=32, num_warps=4, num_stages=1)
INTERPRETER_FEATURES = {
    **FEATURES,
    "dtype": ("float16", "float32"),
    "head_dims": ((8, 8), (16, 16), (24, 50), (40, 40), (63, 63)),
}
# what each backend is asked, on a GPU
BACKEND_FEATURES = {
    "triton": FEATURES,
    "hopper": HOPPER_FEATURES,
}
# tiny inputs that compile all that a specialisation needs: a bias broadcast over one row or key
# is another kernel than one over many
WARMING_INPUTS = 3


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        features: values by feature, covered pairwise.
        combinations: the specialisations.
        inputs: cases of each.
        device: "cuda", or "cpu" for the interpreter.
        processes: of the pool.
        time_limit_s: cases that have not begun by then are skipped.
        backend: whose kernels.
    """

    features: dict[str, Any]
    combinations: tuple[Combination, ...]
    inputs: int
    seed: int
    device: str
    processes: int
    time_limit_s: float
    backend: str = "triton"

    @property
    def kernels(self) -> Kernels:
        return Kernels(self.backend, INTERPRETER_TILE if self.device == "cpu" else None)

    def cases(self, number: int) -> list[Case]:
        """Those of one specialisation."""
        return [
            draw_case(self.combinations[number], (number, n), self.seed, tiny=self.device == "cpu")
            for n in range(self.inputs)
        ]


@dataclass
class Tally:
    """What was found so far."""

    passed: int = 0
    skipped: int = 0
    redrawn: int = 0
    failures: list[str] = field(default_factory=list)
    # (seconds for a case, its description)
    slowest: tuple[float, str] = (0.0, "")
    stopped: str | None = None

    @property
    def failed(self) -> int:
        return len(self.failures)

    @property
    def cases(self) -> int:
        return self.passed + self.failed + self.skipped

    def add(self, other: Tally) -> None:
        self.passed += other.passed
        self.skipped += other.skipped
        self.redrawn += other.redrawn
        self.failures += other.failures
        self.slowest = max(self.slowest, other.slowest)
        self.stopped = self.stopped or other.stopped


class DeviceLostError(RuntimeError):
    """The GPU's context is gone: no later case can run in this process."""


def make_plan(
    *,
    count: int | None = None,
    inputs: int = 24,
    seed: int = 0,
    device: str = "cuda",
    processes: int | None = None,
    time_limit_s: float = 480.0,
    backend: str = "triton",
) -> Plan:
    """The suite of a backend for a device; `count` keeps only the first specialisations.

    Raises ValueError for a device other than "cuda" and "cpu", for a backend that has no suite
    there, and for numbers below 1.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device must be 'cuda' or 'cpu', got {device!r}")
    known = list(BACKEND_FEATURES) if device == "cuda" else ["triton"]
    if backend not in known:
        raise ValueError(f"backend must be one of {', '.join(known)} on {device}, got {backend!r}")
    if processes is None:  # one CPU is left for the cases
        processes = max(1, (os.cpu_count() or 1) - (device == "cuda"))
    for name, value in (("count", count), ("inputs", inputs), ("processes", processes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    features = INTERPRETER_FEATURES if device == "cpu" else BACKEND_FEATURES[backend]
    found = specialisations(features)
    return Plan(
        features, tuple(found[:count]), inputs, seed, device, processes, time_limit_s, backend
    )


def coverage(plan: Plan) -> tuple[int, int]:
    """(pairs of features that the plan's specialisations cover, pairs that may meet)."""
    feasible = set(feasible_pairs(plan.features, features_may_meet))
    covered: set[Any] = set()
    for combination in plan.combinations:
        covered |= pairs_of(combination, list(plan.features))
    return len(covered & feasible), len(feasible)


def warm(plan: Plan, number: int) -> None:
    """Compile a specialisation's kernels into Triton's cache, by running them on tiny inputs."""
    from flashdig.bench.conformance_inputs import make_inputs
    from flashdig.bench.conformance_judge import lse_of_dense_calls, run_kernels

    for n in range(WARMING_INPUTS):
        case = draw_case(plan.combinations[number], (number, n), plan.seed, tiny=True)
        inputs = make_inputs(case, plan.device)
        ours = run_kernels(inputs, plan.kernels)
        if case.packed:
            lse_of_dense_calls(inputs, ours["lse"], plan.kernels)
    if plan.backend.startswith("hopper"):  # its tiles follow the lengths: the forward of every case
        for case in plan.cases(number):
            inputs = make_inputs(case, plan.device)
            _, lse = plan.kernels.forward(*inputs.operands(), **inputs.numbers())
            if case.packed and case.sampled:
                lse_of_dense_calls(inputs, lse, plan.kernels)


def run_case(case: Case, plan: Plan) -> Judgement:
    """What is wrong with a case, an exception included.

    Raises DeviceLostError where the GPU can run nothing more.
    """
    import torch

    from flashdig.bench.conformance_inputs import make_inputs

    try:
        return judge(make_inputs(case, plan.device), plan.kernels)
    except Exception as error:  # a failed case must not end the suite
        lines = str(error).strip().splitlines() or [""]
        said = f"{type(error).__name__}: {lines[0][:300]}"
        if plan.device == "cuda":
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLostError(said) from lost
        return Judgement((said,))


def run_specialisation(plan: Plan, number: int, deadline: float) -> Tally:
    """All cases of one specialisation; `deadline` is a time of `time.time()`."""
    tally = Tally()
    for case in plan.cases(number):
        if tally.stopped is not None or time.time() > deadline:
            tally.skipped += 1
            continue
        start = time.perf_counter()
        try:
            found = run_case(case, plan)
        except DeviceLostError as error:
            tally.stopped = f"{case.describe()}: {error}"
            tally.failures.append(f"{case.describe()}: the GPU's context was lost: {error}")
            continue
        tally.slowest = max(tally.slowest, (time.perf_counter() - start, case.describe()))
        tally.redrawn += found.redrawn
        if found.problems:
            tally.failures.append(f"{case.describe()}: {'; '.join(found.problems)}")
        else:
            tally.passed += 1
    return tally


@float32_precision("ieee")  # the yardstick rounds to TF32 by itself
def run(plan: Plan, say: Any = print) -> Tally:
    """The whole plan; `say` gets a line for every failure and now and then how far it is."""
    start = time.time()
    deadline = start + plan.time_limit_s
    total = Tally()
    for ready, tally in enumerate(_tallies(plan, deadline), start=1):
        for failure in tally.failures[:2]:
            say(f"FAILED {failure}")
        total.add(tally)
        if ready % 20 == 0:
            say(
                f"{time.time() - start:5.0f} s  {ready} of {len(plan.combinations)} "
                f"specialisations, {total.passed} passed, {total.failed} failed"
            )
    return total


def _quicken() -> None:
    from flashdig.evidence.quick_interpreter import quicken_interpreter

    quicken_interpreter()


def _tallies(plan: Plan, deadline: float) -> Iterator[Tally]:
    """A tally of each specialisation, in the order in which they become ready."""
    numbers = range(len(plan.combinations))
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        min(plan.processes, len(numbers)),
        mp_context=context,
        initializer=_quicken if plan.device == "cpu" else None,
    )
    waiting = set(numbers)
    try:
        if plan.device == "cpu":
            work = {pool.submit(run_specialisation, plan, n, deadline): n for n in numbers}
            for done in as_completed(work):
                yield done.result()
            return
        compiling = {pool.submit(warm, plan, number): number for number in numbers}
        for ready in as_completed(compiling, timeout=max(0.0, deadline - time.time())):
            number = compiling[ready]
            # what cannot be compiled fails here, with its own message
            tally = run_specialisation(plan, number, deadline)
            waiting.remove(number)
            yield tally
            if tally.stopped is not None:
                break
    except FuturesTimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    if waiting:
        yield Tally(skipped=len(waiting) * plan.inputs)


def row_of(plan: Plan, tally: Tally, seconds: float) -> dict[str, Any]:
    """The run as a row of a record."""
    covered, feasible = coverage(plan)
    return {
        "kind": "test",
        "name": SUITE,
        "backend": plan.backend,
        "cases": tally.cases,
        "passed": tally.passed,
        "failed": tally.failed,
        "skipped": tally.skipped,
        "failures": tally.failures,
        "features": {
            "specialisations": len(plan.combinations),
            "inputs": plan.inputs,
            "seed": plan.seed,
            "device": plan.device,
            "redrawn": tally.redrawn,
            "pairs": feasible,
            "pairs_covered": covered,
            "values": {name: len(values) for name, values in plan.features.items()},
            "seconds": round(seconds, 1),
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; 0 when no case failed or was skipped, else 1."""
    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.conformance")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    parser.add_argument("--specialisations", type=int, help="run only the first so many")
    parser.add_argument("--inputs", type=int, default=24, help="cases of each specialisation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, help="of the pool; default: by CPUs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--backend", choices=tuple(BACKEND_FEATURES), default="triton")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds")
    given = parser.parse_args(arguments)
    try:
        plan = make_plan(
            count=given.specialisations,
            inputs=given.inputs,
            seed=given.seed,
            device=given.device,
            processes=given.processes,
            time_limit_s=given.time_limit,
            backend=given.backend,
        )
    except ValueError as error:
        parser.error(str(error))
    command = shlex.join(["python", "-m", "flashdig.bench.conformance", *sys.argv[1:]])
    started = new_run(command, collect(), revision())
    start = time.perf_counter()
    tally = run(plan, lambda line: print(line, flush=True))
    row = row_of(plan, tally, time.perf_counter() - start)
    if given.output is not None:
        append_run(given.output, SUITE, started, [row])
    _print_summary(row, tally)
    return 1 if tally.failed or tally.skipped else 0


def _print_summary(row: dict[str, Any], tally: Tally) -> None:
    features = row["features"]
    lines = {
        "cases": row["cases"],
        "passed": row["passed"],
        "failed": row["failed"],
        "skipped": row["skipped"],
        "specialisations": features["specialisations"],
        "pairs covered": f"{features['pairs_covered']} of {features['pairs']}",
        "judged by more draws": features["redrawn"],
        "seconds": features["seconds"],
        "slowest case": f"{tally.slowest[0]:.2f} s, {tally.slowest[1][:120]}",
    }
    if tally.stopped is not None:
        lines["stopped"] = tally.stopped
    for name, value in lines.items():
        print(f"{name:<21} {value}")


if __name__ == "__main__":
    sys.exit(main())
