"""flashdig dig from the outside: what it prints, its JSON, its record, and its errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import flashdig
from flashdig.bench.results import read_record
from flashdig.cli import main
from flashdig.generations import expedition

SOURCE = str(Path(flashdig.__file__).parents[1])
CPU_RUNGS = "naive,sdpa_math,v2,sdpa_flash,sdpa_cudnn"


def dig(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE, "COLUMNS": "160", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "flashdig", "dig", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.fixture
def qkv_file(tmp_path):
    def write(**tensors: torch.Tensor) -> str:
        path = tmp_path / "qkv.safetensors"
        save_file(tensors, path)
        return str(path)

    return write


def test_a_text_through_every_rung(command, tmp_path) -> None:
    record = tmp_path / "results" / "dig.json"
    done = dig("--text", "A real sentence, seen by MiniLM.", "--counters", "--output", str(record))
    assert done.returncode == 0, done.stderr
    assert "Memory counters are a GPU's: none were read." in done.stdout
    assert "No GPU: no time was measured" in done.stdout
    assert "Strongest attention between words" in done.stdout
    rows = read_record(record).rows
    ran = {row["name"]: row for row in rows if row["gate"] == "ok"}
    assert {"naive", "inplace", "sdpa_math", "online_softmax", "v1", "v2", "sdpa_flash"} <= set(ran)
    for row in ran.values():
        assert (row["num_heads"], row["head_dim"], row["dtype"]) == (12, 32, "float32")
        assert row["eager_difference"] < 2e-6
        assert row["error"] < 2e-6
        assert row["error"] <= row["allowed_error"] < 1e-4
        assert "ms" not in row
    for name in ("online_softmax", "v1", "v2", "v2_transposed"):
        counted, predicted = ran[name]["counted"], ran[name]["predicted"]
        assert counted["source"] == "interpreter"
        assert counted["load_bytes"] == predicted["triton_load_bytes"]
        assert counted["store_bytes"] == predicted["triton_store_bytes"]
    refused = {row["name"]: row["gate"] for row in rows if row["gate"] != "ok"}
    assert refused == {
        "sdpa_efficient": "not run: needs a CUDA device",
        "sdpa_cudnn": "not run: needs a CUDA device",
    }
    # a second run is appended
    again = command("dig", "--text", "Again.", "--rungs", "naive", "--output", str(record))
    assert again.returncode == 0, again.stderr
    assert len(read_record(record).runs) == 2


def test_saved_tensors_and_json(command, qkv_file) -> None:
    q, k = torch.randn(2, 4, 20, 16), torch.randn(2, 2, 30, 16)
    path = qkv_file(q=q, k=k, v=k.clone())
    done = command("dig", "--input", path, "--causal", "--rungs", CPU_RUNGS, "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["run"]["command"].endswith("--json")
    rows = {row["name"]: row for row in printed["rows"]}
    assert list(rows) == CPU_RUNGS.split(",")
    assert rows["v2"]["gate"] == "ok"
    assert (rows["v2"]["num_heads_kv"], rows["v2"]["seqlen_k"]) == (2, 30)
    assert "top-left" in rows["sdpa_math"]["gate"]
    assert qkv_name(path) in " ".join(printed["notes"])


def qkv_name(path: str) -> str:
    return Path(path).name


def test_a_preset_is_cut_for_the_cpu(command) -> None:
    done = command("dig", "--preset", "archaeology", "--rungs", "naive,inplace", "--json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert any("Cut for the CPU" in note for note in printed["notes"])
    assert {row["preset"] for row in printed["rows"]} == {"archaeology"}
    assert {row["dtype"] for row in printed["rows"]} == {"float32", "float16"}
    # nothing is labelled TF32 that was not, and no article measured the cut problem
    assert any("float32 products are IEEE" in note for note in printed["notes"])
    assert all(row["features"] == {} for row in printed["rows"])
    assert not any("the article measured" in row.get("notes", "") for row in printed["rows"])


def test_steps_follow_the_ladder(command) -> None:
    done = command("dig", "--steps", "--causal", "--seqlen", "64", "--rungs", "v1,v2", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    steps = [row for row in rows if row["kind"] == "step"]
    assert [row["name"] for row in rows if row["kind"] == "rung"] == ["v1", "v2"]
    assert {row["features"]["path"] for row in steps} == {"cumulative", "leave-one-out"}
    assert all(row["gate"] == "ok" for row in steps)
    by_name = {row["name"]: row for row in rows}
    assert by_name["step:none"]["counted"] == by_name["v1"]["counted"]
    assert by_name["step:causal_skipping"]["counted"] == by_name["v2"]["counted"]


def test_walk(command) -> None:
    done = command("dig", "--walk")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stdout
    as_json = command("dig", "--walk", "--json")
    assert json.loads(as_json.stdout)["slips"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--preset", "archeology"], 2, "archaeology"),
        (["--rungs", "naive,v22"], 2, "v2"),
        (["--seqlen", "0"], 2, "--seqlen"),
        (["--seqlen", "many"], 2, "--seqlen"),
        (["--batch", "-1"], 2, "--batch"),
        (["--head-dim", "0"], 2, "--head-dim"),
        (["--heads", "3", "--heads-kv", "2"], 2, "num_heads"),
        (["--dtype", "int8"], 2, "--dtype"),
        (["--text", ""], 2, "--text"),
        (["--text", "a word", "--layer", "9"], 2, "layer"),
        (["--text", "a word", "--seqlen", "64"], 2, "--seqlen"),
        (["--text", "a word", "--preset", "all"], 2, "exclude"),
        (["--input", "no-such-file.safetensors"], 3, "no-such-file.safetensors"),
        (["--output", "/proc/nowhere/dig.json"], 2, "/proc/nowhere"),
        (["--output", "/"], 2, "folder"),
        (["--rounds", "0"], 2, "--rounds"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, code, says, capsys) -> None:
    assert says in refused(arguments, code, capsys)


def refused(arguments: list[str], code: int, capsys) -> str:
    """What the command says when it refuses, in this process."""
    with pytest.raises(SystemExit) as stopped:
        main(["dig", *arguments])
    assert stopped.value.code == code
    return capsys.readouterr().err


def test_a_head_dim_that_no_exhibit_serves_is_said_in_the_row(command) -> None:
    done = command("dig", "--head-dim", "100", "--seqlen", "64", "--rungs", "naive,v2", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["naive"]["gate"] == "ok"
    assert "head_dim must be one of 16, 32, 64, 128, 256" in rows["v2"]["gate"]


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"k": (1, 2, 8, 16), "v": (1, 2, 8, 16)}, "q"),
        ({"q": (1, 2, 8, 16), "k": (1, 2, 8, 32), "v": (1, 2, 8, 16)}, "head_dim"),
        ({"q": (1, 2, 0, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16)}, "q"),
        ({"q": (1, 3, 8, 16), "k": (1, 2, 8, 16), "v": (1, 2, 8, 16)}, "heads"),
    ],
)
def test_bad_files_are_one_clear_line(tensors, says, qkv_file, capsys) -> None:
    path = qkv_file(**{name: torch.zeros(*shape) for name, shape in tensors.items()})
    error = refused(["--input", path], 3, capsys)
    assert says in error
    assert "qkv.safetensors" in error
    assert len(error.strip().splitlines()) == 1


def test_what_was_found_before_an_error_is_kept(tmp_path, monkeypatch) -> None:
    record = tmp_path / "dig.json"
    whole = expedition.expedition

    def breaks_off(*arguments, **options):
        yield next(whole(*arguments, **options))
        raise RuntimeError("the machine went away")

    monkeypatch.setattr(expedition, "expedition", breaks_off)
    sizes = ["--seqlen", "32", "--rungs", "naive"]
    with pytest.raises(RuntimeError, match="went away"):
        main(["dig", *sizes, "--output", str(record)])
    assert [row["name"] for row in read_record(record).rows] == ["naive"]


def test_an_existing_file_that_is_no_record_is_refused(tmp_path, capsys) -> None:
    record = tmp_path / "dig.json"
    record.write_text("not a record")
    arguments = ["--rungs", "naive", "--seqlen", "16", "--output", str(record)]
    assert "dig.json" in refused(arguments, 3, capsys)
    assert record.read_text() == "not a record"
