"""flashdig bench as a user runs it, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashdig
from flashdig.bench import run_suite as run_module
from flashdig.bench.results import read_record
from flashdig.cli import main

SOURCE = Path(flashdig.__file__).parents[1]
TINY = """
peers = ["sdpa_math"]
ours = ["tiled"]
against = "sdpa_math"
rounds = 2
target_ms = 0.01

[defaults]
batch = 1
num_heads = 2
head_dim = 16
dtype = "float32"

[[grid]]
seqlen = [16, 32]
causal = [false, true]
"""


@pytest.fixture
def tiny(tmp_path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def bench(*arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "flashdig", "bench", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


def test_a_suite_becomes_tables_and_a_record(command, tiny, tmp_path) -> None:
    record = tmp_path / "results" / "tiny.json"
    done = bench(tiny, "--output", str(record))
    assert done.returncode == 0, done.stderr
    for part in ("forward: batch 1", "backward: batch 1", "seqlen 32, causal", "vs best",
                 "tiled is", "geometric mean of 4 cells", "Recorded in"):  # fmt: skip
        assert part in done.stdout, part
    assert len(read_record(record).rows) == 4 * 2 * 2
    part = ("--cells", "seqlen_q=16,causal=true", "--peers", "none", "--ours", "tiled,reference")
    again = command("bench", tiny, "--output", str(record), *part)
    assert again.returncode == 0, again.stderr
    kept = read_record(record)
    assert len(kept.runs) == 2
    rows = kept.rows_of(kept.runs[1].run_id)
    assert [(row["pass"], row["backend"]) for row in rows] == [
        ("forward", "tiled"),
        ("forward", "reference"),
        ("backward", "tiled"),
        ("backward", "reference"),
    ]


def test_json_alone_is_printed(command, tiny) -> None:
    done = command("bench", tiny, "--json", "--cells", "seqlen 16", "--rounds", "6")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert printed["run"]["command"].startswith("flashdig bench")
    assert {row["seqlen_q"] for row in printed["rows"]} == {16}
    assert all(len(row["ms_all"]) == 6 for row in printed["rows"])
    assert [one["best"] for one in printed["ratios"]] == ["sdpa_math"] * 4
    low, high = (printed["ratios"][0]["ratios"]["sdpa_math"][end] for end in ("low", "high"))
    assert 0 < low <= high
    assert {mean["against"] for mean in printed["means"]} == {"sdpa_math", "best peer"}


def test_the_smoke_suite_runs_without_a_gpu(command) -> None:
    done = command("bench", "smoke", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    ours = [row for row in rows if not row["backend"].startswith("sdpa")]
    assert all(row["gate"] == "ok" and "ms" in row for row in ours)
    assert {"dropout 0.1", "packed"} <= {row["name"] for row in ours}
    assert {row["gate"].partition(":")[0] for row in rows} == {"ok", "not run"}


def refused(arguments: list[str], code: int, capsys) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["bench", *arguments])
    assert stopped.value.code == code
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["fa2"], "SUITE must be one of"),
        (["smoke", "--ours", "cuda"], "--ours: backend must be auto or one of"),
        (["smoke", "--peers", "fa5"], "--peers must be none or of sdpa_flash"),
        (["smoke", "--against", "fa3"], "--against must be a peer that is measured"),
        (["smoke", "--cells", "head_dim=huge"], "--cells: head_dim is compared with a number"),
        (["smoke", "--cells", "no such cell"], "no cell of smoke fits"),
        (["smoke", "--rounds", "0"], "--rounds"),
        (["smoke", "--output", "/"], "folder"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, says, capsys) -> None:
    assert says in refused(arguments, 2, capsys)


def test_a_bad_suite_is_unreadable_input(tmp_path, capsys) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("[[cell]]\nbatch = 1\nheads = 2\n")
    error = refused([str(path)], 3, capsys)
    assert "bad.toml" in error
    assert "unknown key 'heads'" in error
    assert "absent.toml" in refused([str(tmp_path / "absent.toml")], 3, capsys)
    record = tmp_path / "record.json"
    record.write_text("no record")
    assert "record.json" in refused(["smoke", "--output", str(record)], 3, capsys)


def test_wrong_results_of_ours_are_exit_code_1(tiny, capsys, monkeypatch) -> None:
    right = run_module.Ours.prepare

    def wrong(self, inputs):
        prepared = right(self, inputs)
        scaled = lambda q, k, v: 1.5 * prepared.attention(q, k, v)  # noqa: E731
        return run_module.Prepared(scaled, prepared.tensors, prepared.dout)

    monkeypatch.setattr(run_module.Ours, "prepare", wrong)
    error = refused([tiny, "--cells", "seqlen_q=16"], 1, capsys)
    assert "tiled on batch 1" in error
    assert "above the allowed" in error


def breaks_off(whole, error: BaseException):
    def run_suite(*arguments, **options):
        yield next(whole(*arguments, **options))
        raise error

    return run_suite


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyboardInterrupt(), "interrupted"),
        (run_module.DeviceLostError("the GPU was lost after fa4: CUDA error"), "lost after fa4"),
    ],
)
def test_what_was_measured_before_the_end_is_kept(
    tiny, error, says, tmp_path, capsys, monkeypatch
) -> None:
    record = tmp_path / "tiny.json"
    monkeypatch.setattr(run_module, "run_suite", breaks_off(run_module.run_suite, error))
    with pytest.raises(SystemExit) as stopped:
        main(["bench", tiny, "--output", str(record)])
    assert stopped.value.code == 1
    said = capsys.readouterr()
    assert says in said.err
    assert "3 of 4 cells were not measured" in said.out
    assert len(read_record(record).rows) == 4


def test_a_terminated_run_keeps_its_cells(tiny, tmp_path) -> None:
    record = tmp_path / "tiny.json"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    arguments = ["bench", tiny, "--output", str(record)]
    code = (
        "import os, signal, sys; from flashdig.bench import run_suite as module\n"
        "whole = module.run_suite\n"
        "def stopped(*arguments, **options):\n"
        "    yield next(whole(*arguments, **options))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    raise AssertionError('went on')\n"
        "module.run_suite = stopped\n"
        f"from flashdig.cli import main; main({arguments!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1, done.stderr
    assert "interrupted" in done.stderr
    assert len(read_record(record).rows) == 4


def test_an_unexpected_error_keeps_the_rows_too(tiny, tmp_path, monkeypatch) -> None:
    record = tmp_path / "tiny.json"
    error = RuntimeError("a bug")
    monkeypatch.setattr(run_module, "run_suite", breaks_off(run_module.run_suite, error))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["bench", tiny, "--output", str(record)])
    assert len(read_record(record).rows) == 4


def test_a_time_limit_leaves_cells_out_and_says_so(command, tiny) -> None:
    done = command("bench", tiny, "--time-limit", "0", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["notes"] == ["4 of 4 cells were not measured."]
    assert printed["rows"] == []
