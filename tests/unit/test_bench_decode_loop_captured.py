"""The bench of a captured decoding loop, on the CPU, where a captured step is the eager one."""

from pathlib import Path

import pytest
import torch

from flashdig.bench import decode_loop
from flashdig.bench import decode_loop_captured as captured
from flashdig.bench.decode_loop_entries import COMPETITORS
from flashdig.bench.results import read_record
from flashdig.bench.rows import check_row
from flashdig.bench.timing import Timing, TimingFailure

SMALL = decode_loop.ModelSize(layers=2, hidden=64, num_heads=4, num_heads_kv=2, vocabulary=200)
CELL = decode_loop.LoopCell(2, 9)
# torch's efficient attention needs a GPU
ON_A_CPU = [one for one in COMPETITORS if one.backend is None]


@pytest.fixture
def model(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from flashdig.integrations import decoding_graph

    monkeypatch.setattr(decoding_graph, "_check_device", lambda device: None)
    monkeypatch.setattr(decoding_graph, "_captured", lambda step: step)
    return decode_loop.make_model(SMALL, "float32", "cpu")


def test_tokens_are_compared_with_those_of_eager_attention(model) -> None:
    prompt = decode_loop.make_prompt(CELL, SMALL, "cpu")
    expected = decode_loop.generate(model, prompt, "eager", "DynamicCache", 12)
    assert captured.failures_of(model, prompt, expected, 12, ON_A_CPU) == {}
    expected = expected + (torch.arange(21) == 9 + 5)
    found = captured.failures_of(model, prompt, expected, 12, ON_A_CPU[:1])
    assert found["flashdig"].startswith("flashdig, first generation: token 5 differs")


def test_steps_are_timed_apart_from_the_prompt(model) -> None:
    prompt = decode_loop.make_prompt(CELL, SMALL, "cpu")
    measured = captured.measure_steps(model, prompt, 5, 2, ON_A_CPU)
    assert [len(timing.ms_all) for timing, _ in measured] == [2, 2, 2, 2]
    assert all(prompt_ms > 0 for _, prompt_ms in measured)


def test_a_captured_generation_is_held_against_an_eager_one(model, monkeypatch) -> None:
    prompt = decode_loop.make_prompt(CELL, SMALL, "cpu")
    assert captured.gate_of(model, prompt, 8) == "ok"
    made = captured.loop_of(model, COMPETITORS[0], 20)
    monkeypatch.setattr(captured, "loop_of", lambda *arguments: made)
    decode = made.decode
    monkeypatch.setattr(made, "decode", lambda count: decode(count).roll(1, -1))
    assert captured.gate_of(model, prompt, 8).startswith("token 1 of a captured generation")
    monkeypatch.setattr(made, "prefill", lambda prompt: prompt[:, :1] - 1)
    assert captured.gate_of(model, prompt, 8).startswith("token 0 of a captured generation")


def test_a_meter_times_steps_apart_from_the_prompt(monkeypatch) -> None:
    clock = [0.0]

    class Loop:
        def prefill(self, prompt):
            clock[0] += 5

        def decode(self, count):
            clock[0] += 0.25 * count

    monkeypatch.setattr(captured, "choose", lambda *arguments: None)
    meter = captured.StepsMeter(lambda: None, lambda: clock[0])
    competitor = COMPETITORS[0]
    prepared = meter.prepare(captured.Generation(None, competitor, Loop(), None, 9))
    prepared.enqueue()
    assert (prepared.repetitions, prepared.read()) == (9, (250.0, 250.0))
    assert meter.prompts == {"flashdig": [5000.0]}
    assert clock == [2 * (5 + 0.25 * 9)]


def timing(ms):
    return Timing(ms, (ms, 2 * ms), 0.01, 1980.0, 300.0, "host", "warm", 255, 1)


def test_rows_and_their_line() -> None:
    competitors = COMPETITORS
    measured = [(timing(ms), 9.0) for ms in (1.0, 1.5, 2.0, 4.0)]
    measured[3:3] = [(TimingFailure("no"), None)]
    common = decode_loop.common_fields(CELL, SMALL, 256)
    rows = captured.rows_of(common, 256, competitors, measured, {})
    for row in rows:
        check_row({**row, "run_id": "a"}, {"a"}, "row")
    assert [row["features"]["step"] for row in rows] == ["captured"] * 4 + ["eager"]
    assert rows[0]["tokens_per_s"] == pytest.approx(2000.0)
    assert [row["features"]["timed_steps"] for row in rows] == [255] * 4 + [32]
    line = captured.line_of(rows, competitors)
    assert line.startswith("2x9, a step: flashdig 1.000 ms, 2000 tokens/s (prompt 9 ms)")
    assert "sdpa-packed 2.000 ms, 1000 tokens/s (prompt 9 ms): 2.000 [2.000" in line
    assert "sdpa-efficient - (no time: no)" in line
    failures = {"flashdig": "flashdig: token 3 differs"}
    rows = captured.rows_of(common, 256, competitors, measured, failures)
    assert [row["gate"] for row in rows] == [failures["flashdig"]] + ["ok"] * 4
    assert ["ms" in row for row in rows] == [False, True, True, False, True]


@pytest.mark.parametrize("failures", [{}, {"flashdig": "token 3 differs"}])
def test_a_captured_run_is_kept(failures, monkeypatch, tmp_path, capsys) -> None:
    def measure(cell, size, tokens, failures, rounds, competitors):
        common = decode_loop.common_fields(cell, size, tokens)
        measured = [(timing(100.0), 1.0) for _ in competitors]
        return captured.rows_of(common, tokens, competitors, measured, failures)

    monkeypatch.setattr(decode_loop, "check_captured", lambda *arguments: failures)
    monkeypatch.setattr(decode_loop, "measure_captured", measure)
    output = tmp_path / "loop.json"
    command = ["--captured", "--cells", "1x128", "8x4096", "--peers", "sdpa", "--output"]
    assert decode_loop.main([*command, str(output)]) == bool(failures)
    tests = [row for row in read_record(output).rows if row["kind"] == "test"]
    assert [(row["backend"], row["failed"]) for row in tests] == [
        ("flashdig", len(failures)),
        ("sdpa", 0),
    ]
    assert len(read_record(output).rows) == 2 + 2 * 2
    assert "8x4096, a step: flashdig" in capsys.readouterr().out


def test_the_documented_figures_are_the_records() -> None:
    root = Path(__file__).parents[2]
    record = read_record(root / "benchmarks" / "results" / "nvidia-h200" / "decode-loop.json")
    steps = [row for row in record.rows if row.get("name") == captured.STEP]
    assert captured.table_of(steps) in (root / "docs" / "decisions" / "decode.md").read_text(
        "utf-8"
    )
    latest = {(row["features"]["competitor"], row["features"]["cell"]): row["ms"] for row in steps}
    ours, peers = (
        ", ".join(f"{latest[name, cell.name]:.2f}" for cell in decode_loop.CELLS)
        for name in ("flashdig", "sdpa-packed")
    )
    said = f"{ours} ms beside {peers} ms"
    assert said in " ".join((root / "docs" / "inference.md").read_text("utf-8").split())
