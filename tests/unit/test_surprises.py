"""Guess against found: what counts as a surprise, and that guesses come before runs."""

import dataclasses

import pytest
import torch

from flashdig.bench.timing import Timing
from flashdig.evidence.interpreter import Counts
from flashdig.evidence.kernels import LaunchedKernel
from flashdig.generations import excavation
from flashdig.generations.excavation import CellFindings, Counted, Found, dig_on_cpu
from flashdig.generations.guesses import UNEXPLAINED, guess, surprises
from flashdig.generations.inputs import random_qkv
from flashdig.generations.ladder import generation
from flashdig.generations.presets import Cell
from flashdig.generations.step_rows import step_rows_of
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem

H200 = find_device("h200")
PROBLEM = AttentionProblem.dense(4, 16, 4096, 128, "bfloat16")


def timing(ms: float, clock_mhz: float | None = 1965.0) -> Timing:
    return Timing(ms, (ms,) * 12, 0.001, clock_mhz, None, "graph", "warm", 1, 0)


def found(name: str, ms: float, problem: AttentionProblem = PROBLEM) -> Found:
    exhibit = generation(name)
    return Found(
        generation=exhibit,
        prediction=exhibit.predict(problem),
        unsupported=[],
        guess=guess(name, problem, H200),
        timing=timing(ms),
    )


def expected_ms(name: str) -> float:
    guessed = guess(name, PROBLEM, H200, clock_hz=1965e6)
    assert guessed is not None
    return guessed.expected_s * 1e3


def whats(seen: Found) -> list[str]:
    return [surprise.what for surprise in surprises(PROBLEM, H200, seen)]


def test_a_time_within_its_tolerance_is_none_and_one_outside_is() -> None:
    expected = expected_ms("v2")
    assert whats(found("v2", expected * 1.14)) == []
    (slow,) = surprises(PROBLEM, H200, found("v2", expected * 1.3))
    assert (slow.what, slow.predicted) == ("time", pytest.approx(expected))
    assert slow.found == pytest.approx(1.3 * expected)
    assert whats(found("v2", 0.01)) == ["time floor"]


def test_without_a_clock_or_a_device_nothing_is_said_of_time() -> None:
    seen = found("v2", 100.0)
    assert surprises(PROBLEM, None, seen) == ()
    seen.timing = timing(100.0, None)
    assert surprises(PROBLEM, H200, seen) == ()


def kernel(name: str, **launch) -> LaunchedKernel:
    return LaunchedKernel(name, 1, 1000.0, **launch)


def test_kernels_beyond_the_guess_have_a_cause_where_a_rule_knows_it() -> None:
    seen = found("sdpa_flash", expected_ms("sdpa_flash"))
    seen.kernels = [kernel("flash_fwd_splitkv_kernel"), kernel("flash_fwd_splitkv_combine_kernel")]
    (surprise,) = surprises(PROBLEM, H200, seen)
    assert surprise.what == "kernels"
    assert "keys are split" in surprise.cause
    seen.kernels = [kernel("one"), kernel("Memset (Device)")]
    assert whats(seen) == []
    seen.kernels = [kernel("one"), kernel("another")]
    small = PROBLEM.replace(batch=1, num_heads=1, num_heads_kv=1, seqlen_q=64, seqlen_k=64)
    seen.timing = None
    assert [s.cause for s in surprises(small, H200, seen)] == [UNEXPLAINED]


def test_occupancy_is_that_of_the_exhibits_own_kernel() -> None:
    seen = found("v2", expected_ms("v2"))
    guessed = 100 * seen.guess.occupancy
    copy = kernel("void at::native::copy", occupancy_percent=100.0)
    own = kernel(
        "flash_fwd_v2_bf16_d128_m64n64_full",
        occupancy_percent=guessed,
        occupancy_limit="registers",
        registers=168,
    )
    seen.kernels = [dataclasses.replace(copy, us=9000.0), own]
    assert "occupancy" not in whats(seen)
    seen.kernels = [dataclasses.replace(own, occupancy_percent=guessed / 2, registers=255)]
    (surprise,) = surprises(PROBLEM, H200, seen)
    assert (surprise.what, surprise.predicted) == ("occupancy", pytest.approx(guessed))
    assert "255 registers" in surprise.cause


def test_counts_must_equal_their_closed_form_to_the_byte() -> None:
    seen = found("v2", expected_ms("v2"))
    traffic = seen.prediction.triton
    right = Counts(traffic.load_bytes, traffic.store_bytes, seen.prediction.matmul_flops)
    seen.counted = Counted(right, "interpreter")
    assert whats(seen) == []
    seen.counted = Counted(dataclasses.replace(right, load_bytes=right.load_bytes + 2), "test")
    assert whats(seen) == ["loads"]


def test_every_guess_is_made_before_anything_runs(monkeypatch) -> None:
    events: list[str] = []

    def watched(name: str):
        exhibit = generation(name)

        def run(q, k, v, causal):
            events.append(f"run {name}")
            return exhibit.run(q, k, v, causal)

        def predict(problem):
            events.append(f"guess {name}")
            return exhibit.predict(problem)

        return dataclasses.replace(exhibit, run=run, predict=predict)

    monkeypatch.setattr(excavation, "generation", watched)
    problem = AttentionProblem.dense(1, 1, 32, 16, "float32")
    names = ["naive", "sdpa_math", "sdpa_flash"]
    findings = dig_on_cpu(Cell(problem), random_qkv(problem), names, progress=lambda _: None)
    assert events[:3] == [f"guess {name}" for name in names]
    assert events[3:] == [f"run {name}" for name in names]
    assert all(rung.guessed_at for rung in findings.rungs)


def test_shares_of_the_steps_add_up_to_the_whole_gain() -> None:
    problem = AttentionProblem.dense(2, 4, 256, 64, "float16")
    names = ["step:none", "step:loop_order", "step:sequence_parallel", "step:late_division"]
    names += ["step:exp2", "step:lse", "step:k_layout", "without:exp2"]
    times = [8.0, 4.0, 2.0, 1.5, 1.6, 1.0, 1.3, 1.2]
    rungs = [found(name, ms, problem) for name, ms in zip(names, times, strict=True)]
    findings = CellFindings(Cell(problem), "test", "NVIDIA H200", rungs, None, H200)
    rows = {row["name"]: row for row in step_rows_of(findings, "run", None)}
    shares = [row["share_of_gain"] for row in rows.values() if "share_of_gain" in row]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(1.0)
    assert rows["step:loop_order"]["share_of_gain"] == pytest.approx(1 / 3)
    assert rows["step:exp2"]["share_of_gain"] < 0
    assert rows["step:loop_order"]["speedup"] == pytest.approx(2.0)
    assert rows["without:exp2"]["speedup"] == pytest.approx(1.0 / 1.2)
    assert "1.20x slower" in rows["without:exp2"]["sentence"]
    assert "33 % of the way" in rows["step:loop_order"]["sentence"]
    assert "share_of_gain" not in rows["step:k_layout"]
    assert not torch.is_tensor(rows["step:lse"]["ms"])


def test_what_the_interpreter_cannot_do_is_a_reason_not_the_end(monkeypatch) -> None:
    problem = AttentionProblem.dense(1, 1, 32, 16, "float32")
    inputs = random_qkv(problem)

    def fails(jobs):
        raise excavation.InterpreterError("the interpreter failed: out of luck")

    monkeypatch.setattr(excavation, "run_in_interpreter", fails)
    findings = dig_on_cpu(Cell(problem), inputs, ["naive", "v2"], progress=lambda _: None)
    assert [rung.verdict for rung in findings.rungs] == [
        "ok",
        "not run: the interpreter failed: out of luck",
    ]
    monkeypatch.setattr(excavation, "INTERPRETER_RUN_LIMIT", 0)
    findings = dig_on_cpu(Cell(problem), inputs, ["naive", "v2"], progress=lambda _: None)
    assert "would take minutes" in findings.rungs[1].verdict


def test_without_an_interpreter_the_kept_counts_are_shown_and_said(monkeypatch) -> None:
    problem = AttentionProblem.dense(1, 1, 512, 64, "float16")
    monkeypatch.setattr(excavation, "interpreter_fault", lambda: "no interpreter here")
    inputs = random_qkv(problem)
    findings = dig_on_cpu(Cell(problem), inputs, ["naive", "v2"], progress=lambda _: None)
    v2 = findings.rungs[1]
    assert v2.verdict == "not run: no interpreter here"
    assert v2.counted.source == "golden file"
    assert v2.counted.counts.load_bytes == v2.prediction.triton.load_bytes
    assert any("golden file" in note for note in findings.notes)
