"""flashdig bench training-step on the CPU: a tiny GPT, its gate, its losses, its record."""

import contextlib
import json
import math

import pytest
import torch
from rich.console import Console

from flashdig.bench import training_cells, training_entries
from flashdig.bench.environment import Clocks
from flashdig.bench.results import read_record
from flashdig.bench.rows import check_row
from flashdig.bench.training import judge_losses, measure_training, rates
from flashdig.bench.training_cells import CELLS, GPT_1_3B, GPTSize, TrainingCell
from flashdig.bench.training_entries import Entry, attention_of
from flashdig.bench.training_model import END_OF_FILE, Training, parameter_shapes, text_tokens
from flashdig.cli import main
from flashdig.report.training_table import print_training

TINY = TrainingCell(GPTSize("tiny", layers=2, hidden=32, num_heads=2, vocabulary=320), 16, 32)
RUN = "20260101T000000Z-0000"


def measure(**options):
    return measure_training(TINY, RUN, rounds=2, sample=lambda: Clocks(None, None), **options)


@pytest.fixture(scope="module")
def measured():
    return measure(ours=("auto", "hopper"), peers=("sdpa_flash", "unfused", "fa4"))


def test_everyone_is_a_row_and_those_who_cannot_run_say_why(measured) -> None:
    assert measured.failures == []
    rows = {row["backend"]: row for row in measured.rows}
    assert list(rows) == ["flashdig", "hopper", "sdpa_flash", "unfused", "fa4"]
    for name, row in rows.items():
        check_row(row, [RUN], name)
        assert row["pass"] == "training"
    assert rows["fa4"]["gate"] == "not run: needs a CUDA device"
    assert rows["hopper"]["gate"].startswith("not run: runs on NVIDIA GPUs")
    for name in ("flashdig", "sdpa_flash", "unfused"):
        row = rows[name]
        assert row["gate"] == "ok"
        assert row["error"] <= row["allowed_error"]
        assert row["tokens_per_s"] == pytest.approx(32e3 / row["ms"])
        # random weights know nothing of 320 tokens
        assert row["losses"][0] == pytest.approx(math.log(320), rel=0.02)
        assert row["losses"] == pytest.approx(rows["unfused"]["losses"], rel=2**-7)
        assert "mfu" not in row  # a CPU has no peak in the table
    assert "backend fused_cpu" in rows["flashdig"]["notes"]


def test_the_table_says_what_was_measured(measured) -> None:
    console = Console(width=160)
    with console.capture() as capture:
        print_training(measured.rows, console)
    text = capture.get()
    for part in ("2 layers, hidden 32, 2 heads of 16, 2 x 16 tokens", "tokens/s", "sdpa_flash",
                 "fa4: not run: needs a CUDA device", "x ["):  # fmt: skip
        assert part in text


def test_a_wrong_attention_is_never_timed(monkeypatch) -> None:
    def sees_the_future(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    def runs_out(q, k, v):
        raise torch.OutOfMemoryError("no memory for the scores")

    wrong = {"auto": sees_the_future, "tiled": runs_out}
    monkeypatch.setattr(training_entries, "_ours", wrong.__getitem__)
    result = measure(ours=("auto", "tiled"), peers=("unfused",))
    ours, failing, peer = result.rows
    assert "error of" in ours["gate"]
    assert failing["gate"] == "error: OutOfMemoryError: no memory for the scores"
    assert "ms" not in ours
    assert "ms" not in failing
    assert peer["ms"] > 0
    assert len(result.failures) == 2


def test_losses_that_do_not_agree_end_a_competitor() -> None:
    entries = [Entry(name, losses=[5.0, 4.9, 4.8]) for name in "abcd"]
    entries[1].losses = [5.0, 4.9, 4.8 * 1.009]
    entries[2].losses = [5.0, math.nan, 4.8]
    judge_losses(entries)
    assert [entry.verdict for entry in entries[::3]] == ["ok", "ok"]
    assert entries[1].verdict.startswith("loss 4.8432 of step 3 differs from the median 4.8000")
    assert "loss nan of step 2" in entries[2].verdict


def test_training_learns_and_starts_again_the_same() -> None:
    training = Training(TINY, "cpu")
    attention = attention_of(Entry("unfused"), None)
    losses = []
    for _ in range(2):
        training.restart()
        losses.append([float(training.step(attention)) for _ in range(20)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0] - 0.05
    gradients = {name: p.grad for name, p in training.model.parameters.items()}
    assert all(g is not None and bool(g.any()) for g in gradients.values())


def test_the_text_is_the_source_code() -> None:
    sources = text_tokens().split(bytes([END_OF_FILE]))
    assert sources.pop() == b""
    assert len(sources) > 100
    assert any(b"def text_tokens() -> bytes:" in source for source in sources)


@pytest.mark.parametrize("size", {cell.size for cell in CELLS} | {TINY.size})
def test_parameters_are_those_of_the_model(size) -> None:
    shapes = parameter_shapes(size, 64)
    assert size.parameters == sum(map(math.prod, shapes.values())) - 64 * size.hidden
    assert size.head_dim * size.num_heads == size.hidden


def test_flops_are_megatrons_in_both_conventions() -> None:
    cell = TrainingCell(GPT_1_3B, 8192)
    products = 6 * GPT_1_3B.parameters * 16384
    attention = 12 * 24 * 2048 * 8192 * 16384
    assert cell.flops(halve_causal_attention=False) == products + attention
    assert cell.flops(halve_causal_attention=True) == products + attention // 2
    found = rates(cell, 500.0)
    assert found["tokens_per_s"] == 2 * 16384
    assert found["tflops"] == pytest.approx((products + attention) / 0.5 / 1e12)


def test_unfused_attention_is_left_out_where_its_scores_do_not_fit() -> None:
    reasons = {
        cell.title: training_entries.reason_against(Entry("unfused"), cell, "cuda")
        for cell in CELLS
    }
    assert [title for title, reason in reasons.items() if reason is None] == [
        "GPT 1.3B at 2k",
        "GPT 2.7B at 2k",
    ]
    assert "103 GB" in reasons["GPT 1.3B at 8k"]
    for cell in CELLS:
        assert 40e9 < cell.predicted_peak_bytes("flashdig") < 70e9
        more = cell.predicted_peak_bytes("unfused") - cell.predicted_peak_bytes("fa4")
        assert more == cell.kept_score_bytes


def test_the_command_keeps_the_run_and_prints_it(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(training_cells, "CELLS", (TINY,))
    output = tmp_path / "training-step.json"
    command = ["bench", "training-step", "--peers", "none", "--rounds", "1", "--json"]
    runs = []
    for _ in range(2):
        with contextlib.suppress(SystemExit):
            main([*command, "--output", str(output)])
        runs.append(json.loads(capsys.readouterr().out))
    record = read_record(output)
    assert record.suite == "training-step"
    assert [run.run_id for run in record.runs] == [one["run"]["run_id"] for one in runs]
    for one in runs:
        (kept,), (printed,) = record.rows_of(one["run"]["run_id"]), one["rows"]
        assert kept.keys() == printed.keys()
        assert kept["ms"] == pytest.approx(printed["ms"], rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "training-step needs a CUDA device"),
        (["--peers", "fa5"], "peers must be none or of sdpa_flash"),
        (["--ours", "fast"], "backend must be auto or one of"),
        (["--cells", "13B"], "no cell of training-step fits '13B'"),
        (["--cells", "speed>1"], "--cells: 'speed' is not one of"),
        (["--against", "fa4"], "--against is not for flashdig bench training-step"),
        (["--first-calls"], "--first-calls is for flashdig bench host"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["bench", "training-step", *arguments])
    assert end.value.code == 2
    assert says in capsys.readouterr().err
