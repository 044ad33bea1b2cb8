"""The steps from v1 to v2 in the interpreter: right, and v1 and v2 to the bit at both ends."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashdig.bench.gate import float64_reference
from flashdig.evidence.interpreter import Job, interpreter_fault, run_in_interpreter
from flashdig.generations.inputs import random_qkv
from flashdig.generations.ladder import generation
from flashdig.generations.steps_paths import STEPS, StepSet, step_generations
from flashdig.problem import AttentionProblem
from tests.exhibit_cases import CASES, assert_within_contract, inputs_of, problem_of

DTYPES = ("float32", "float16")
SMALL = tuple(name for name in CASES if not name.startswith("whole"))  # those have no masked lanes
# float32 has smaller tiles, so more programs: the three cases with the most are left to float16
MANY_PROGRAMS = ("odd causal", "gqa", "one key")
RUNS = [
    (name, dtype)
    for name in SMALL
    for dtype in DTYPES
    if dtype == "float16" or name not in MANY_PROGRAMS
]


@pytest.fixture(scope="module", autouse=True)
def _usable_interpreter():
    assert interpreter_fault() is None


@pytest.fixture(scope="module")
def runs_of_all_cases():
    """Both paths and their ends on every case, in one process, by (case, dtype)."""
    jobs = []
    for name, dtype in RUNS:
        inputs, problem = inputs_of(name, dtype), problem_of(name, dtype)
        steps = [exhibit.name for exhibit in step_generations(problem)]
        names = ("v1", "v2", "v2_transposed", *steps)
        jobs.append(Job(names, inputs.q, inputs.k, inputs.v, problem.causal))
    return dict(zip(RUNS, run_in_interpreter(jobs), strict=True))


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_paths_are_right_and_predict_their_traffic(name, dtype, runs_of_all_cases) -> None:
    inputs, problem = inputs_of(name, dtype), problem_of(name, dtype)
    runs = runs_of_all_cases[name, dtype]
    for exhibit in step_generations(problem):
        run, predicted = runs[exhibit.name], exhibit.predict(problem)
        assert_within_contract(run.out, run.lse, inputs, problem.causal)
        counted = (run.counts.load_bytes, run.counts.store_bytes, run.counts.matmul_flops)
        assert counted == (
            predicted.triton.load_bytes,
            predicted.triton.store_bytes,
            predicted.matmul_flops,
        ), exhibit.name


@pytest.mark.parametrize(("name", "dtype"), RUNS)
def test_both_ends_are_v1_and_v2_to_the_bit(name, dtype, runs_of_all_cases) -> None:
    runs = runs_of_all_cases[name, dtype]
    causal = problem_of(name, dtype).causal
    whole = "step:causal_skipping" if causal else "step:lse"
    for step, rung in (("step:none", "v1"), (whole, "v2"), ("step:k_layout", "v2_transposed")):
        assert torch.equal(runs[step].out, runs[rung].out), step
        assert runs[step].counts == runs[rung].counts, step
        if rung == "v1":
            assert runs[step].lse is None
        else:
            assert torch.equal(runs[step].lse, runs[rung].lse), step


def test_every_set_that_makes_sense_is_right() -> None:
    problem = AttentionProblem.dense(1, 1, 45, 16, "float32", causal=True, seqlen_k=70)
    inputs = random_qkv(problem, seed=1)
    sets = (
        StepSet.of(names)
        for count in range(1, len(STEPS) + 1)
        for names in itertools.combinations(STEPS, count)
    )
    names = tuple(
        "v1+" + "+".join(step.name for step in steps)
        for steps in sets
        if not steps.refusals(causal=True)
    )
    (runs,) = run_in_interpreter([Job(names, inputs.q, inputs.k, inputs.v, True)])
    for name in names:
        run, predicted = runs[name], generation(name).predict(problem).triton
        assert_within_contract(run.out, run.lse, inputs, True)
        assert (run.lse is not None) == ("+lse" in name)
        counted = (run.counts.load_bytes, run.counts.store_bytes)
        assert counted == (predicted.load_bytes, predicted.store_bytes), name


STATISTICS = """
import sys, torch
from flashdig.generations.steps_v1_v2 import launch
inputs = torch.load(sys.argv[1])
found = {}
for queries_outside in (False, True):
    for exp2 in (False, True):
        _, found[queries_outside, exp2] = launch(
            *inputs, True, queries_outside=queries_outside, sequence_parallel=False,
            late_division=False, exp2=exp2, stores_lse=False, skips_hidden=False,
            k_is_transposed=False)
torch.save(found, sys.argv[2])
"""


def test_row_max_and_row_sum_hold_the_lse(tmp_path) -> None:
    inputs = inputs_of("rows without keys", "float32")
    torch.save([inputs.q, inputs.k, inputs.v], tmp_path / "inputs.pt")
    source = str(Path(__file__).parents[2] / "src")
    path = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", STATISTICS, tmp_path / "inputs.pt", tmp_path / "found.pt"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        check=True,
        timeout=120,
    )
    reference = float64_reference(inputs.q, inputs.k, inputs.v, causal=True)
    for (_, exp2), (row_max, row_sum) in torch.load(tmp_path / "found.pt").items():
        natural = row_max.double() * (torch.tensor(2.0).log() if exp2 else 1.0)
        lse = natural + row_sum.double().log()
        torch.testing.assert_close(lse[0], reference.lse, rtol=1e-6, atol=1e-6)
