"""The Triton exhibits in the interpreter: right, and the traffic that they predict to the byte."""

import pytest
import torch

from flashdig.evidence.golden_counts import LONGEST_SEQLEN, golden_counts
from flashdig.evidence.interpreter import (
    InterpreterError,
    Job,
    interpreter_fault,
    run_in_interpreter,
)
from flashdig.generations.inputs import PATHOLOGICAL
from flashdig.generations.ladder import generation
from flashdig.generations.minilm import minilm_qkv
from flashdig.generations.presets import PRESETS
from flashdig.problem import AttentionProblem
from tests.exhibit_cases import (
    CASES,
    TRITON_RUNGS,
    assert_within_contract,
    inputs_of,
    problem_of,
)


@pytest.fixture(scope="module", autouse=True)
def _usable_interpreter():
    assert interpreter_fault() is None


DTYPES = ("float32", "float16")
# online_softmax runs a program for every row, which the interpreter takes long for
FEW_ROWS = ("odd", "more keys causal", "one query")


def rungs_of(name: str, dtype: str) -> tuple[str, ...]:
    few = dtype == "float16" or name in FEW_ROWS
    return tuple(rung for rung in TRITON_RUNGS if few or rung != "online_softmax")


@pytest.fixture(scope="module")
def runs_of_all_cases():
    """Every case in one interpreter process, by (name, dtype)."""
    keys = [(name, dtype) for name in CASES for dtype in DTYPES]
    jobs = []
    for name, dtype in keys:
        inputs = inputs_of(name, dtype)
        causal = problem_of(name, dtype).causal
        jobs.append(Job(rungs_of(name, dtype), inputs.q, inputs.k, inputs.v, causal))
    return dict(zip(keys, run_in_interpreter(jobs), strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_exhibits_are_right_and_predict_their_traffic(name, dtype, runs_of_all_cases) -> None:
    inputs, problem = inputs_of(name, dtype), problem_of(name, dtype)
    runs = runs_of_all_cases[name, dtype]
    assert set(runs) >= {"v1", "v2", "v2_transposed"}
    for rung, run in runs.items():
        assert_within_contract(run.out, run.lse, inputs, problem.causal)
        predicted = generation(rung).predict(problem)
        counted = (run.counts.load_bytes, run.counts.store_bytes)
        assert counted == (predicted.triton.load_bytes, predicted.triton.store_bytes), rung
        if rung != "online_softmax":  # its products are torch's
            assert run.counts.matmul_flops == predicted.matmul_flops, rung


def test_exhibits_on_difficult_and_real_input() -> None:
    problem = AttentionProblem.dense(1, 1, 70, 16, "float16", causal=True)
    every = [make(problem) for make in PATHOLOGICAL.values()]
    every.append(minilm_qkv("Online softmax never needs the whole row at once.", layer=2))
    jobs = [Job(TRITON_RUNGS, x.q, x.k, x.v, True) for x in every]
    for inputs, runs in zip(every, run_in_interpreter(jobs), strict=True):
        for run in runs.values():
            assert_within_contract(run.out, run.lse, inputs, causal=True)


def test_kept_counts_equal_fresh_ones() -> None:
    problem = AttentionProblem.dense(1, 1, 512, 64, "float16", causal=True)
    q = torch.randn(1, 1, 512, 64).half()
    (runs,) = run_in_interpreter([Job(("v1", "v2"), q, q, q, True)])
    for rung, run in runs.items():
        assert golden_counts(rung, problem) == run.counts
    assert golden_counts("v2", problem.replace(batch=3)).load_bytes == (
        3 * golden_counts("v2", problem).load_bytes
    )
    assert golden_counts("v2", problem.replace(seqlen_q=511)) is None


def test_a_failing_worker_is_one_line() -> None:
    q = torch.randn(1, 1, 8, 16)
    with pytest.raises(InterpreterError, match="unknown rung 'v7'"):
        run_in_interpreter([Job(("v7",), q, q, q, False)])


@pytest.mark.parametrize("rung", TRITON_RUNGS)
def test_kept_counts_equal_the_predictions_of_every_preset(rung) -> None:
    compared = 0
    for preset in PRESETS.values():
        for cell in preset.cells:
            kept = golden_counts(rung, cell.problem)
            if cell.problem.seqlen_q <= LONGEST_SEQLEN:
                assert kept is not None, cell.problem.describe()
            if kept is not None:
                predicted = generation(rung).predict(cell.problem).triton
                assert kept.load_bytes == predicted.load_bytes
                assert kept.store_bytes == predicted.store_bytes
                compared += 1
    assert compared > 10
