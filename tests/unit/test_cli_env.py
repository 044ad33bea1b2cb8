"""`flashdig env` as a user runs it, and problems typed in one word."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flashdig.cli import env as env_command
from flashdig.cli.errors import UsageError
from flashdig.cli.problem_text import parse_problem
from flashdig.dispatch import BACKENDS
from flashdig.problem import AttentionProblem, Mask

SOURCE = Path(__file__).parents[2] / "src"


@pytest.fixture(autouse=True, scope="module")
def _environment_collected_once():
    """Looking through the installed packages takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(env_command, "collect", functools.cache(env_command.collect))
        yield


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # without a GPU even where there is one
    environment = {"PYTHONPATH": str(SOURCE), "COLUMNS": "200", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "flashdig", "env", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_the_machine_in_words_and_as_json(command) -> None:
    answer = run()
    assert answer.returncode == 0, answer.stderr
    assert re.search(rf"^torch +{re.escape(torch.__version__)}", answer.stdout, re.MULTILINE)
    assert re.search(r"^GPU +none that torch sees", answer.stdout, re.MULTILINE)
    for backend in BACKENDS:
        assert backend.name in answer.stdout
    found = json.loads(command("env", "--json").stdout)
    assert found["environment"]["torch"] == str(torch.__version__)
    assert found["environment"]["gpu"] is None
    assert [b["name"] for b in found["backends"]] == [b.name for b in BACKENDS]


def test_backends_of_a_problem_with_reasons(command) -> None:
    answer = command(
        "env", "--problem", "batch=4,heads=32/8,seqlen=4k,causal,softcap=30", "--device", "sm_75"
    )
    assert answer.returncode == 0, answer.stderr
    assert (
        "batch 4, heads 32/8, seqlen 4096, head_dim 128, bfloat16, causal, softcap=30, "
        "on sm_75 (compute capability 7.5):" in answer.stdout
    )
    assert "needs compute capability 8.0, the device has 7.5" in answer.stdout
    assert re.search(r"reference +│ by name", answer.stdout)
    assert 'backend="auto" takes tiled.' in answer.stdout


@pytest.mark.parametrize(
    ("text", "device", "auto"),
    [
        ("seqlen=4096", "sm_80", "triton"),
        ("seqlen=4096", "h200", "hopper"),
        ("seqlen=4096,packed,causal", "sm_90a", "hopper"),
        ("seqlen=4096,head_dim=100", "h200", "triton"),
        ("seqlen=4096,paged", "sm_90", "triton"),
        ("seqlen=4096,dtype=fp8,descale", "sm_90", "hopper_fp8"),
        ("seqlen=4096,dtype=fp8,out_dtype=float32", "sm_90", "tiled"),
        ("seqlen=4096,head_dim=512", "sm_90", "tiled"),
        ("seqlen=4096", "cpu", "fused_cpu"),
        ("seqlen=4096,lse", "cpu", "tiled"),
        ("seqlen=4096,packed", "cpu", "tiled"),
    ],
)
def test_what_auto_takes(text, device, auto, capsys) -> None:
    env_command.command(problem=text, device=device, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["auto"] == auto
    for backend in found["backends"]:
        assert backend["serves"] == (not backend["reasons"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda"], "--device cuda: torch sees no GPU here"),
        (["--device", "sm_1"], "--device must be cuda, cpu, a compute capability as sm_80"),
        (["--device", "gfx942"], "--device must name an NVIDIA chip or cpu"),
        (["--problem", "batch=4"], "--problem must say seqlen"),
        (["--problem", "seqlen=4k,head=3"], "unknown part 'head=3'; nearest: heads"),
        (["--problem", "seqlen=4k,seqlen=2k"], "--problem has seqlen twice"),
        (["--problem", "seqlen"], "seqlen needs a value"),
        (["--problem", "seqlen=4k,sinks=2"], "sinks takes no value"),
        (["--problem", "seqlen=x"], "--problem: seqlen must be a whole number"),
        (["--problem", "seqlen=4k,causal=left"], "causal must be bottom-right or top-left"),
        (["--problem", "seqlen=4k,heads=6/4"], "num_heads (6) must be a multiple"),
        (["--problem", "seqlen=4k,dtype=int8"], "dtype must be one of bf16"),
        (["--problem", "seqlen=4k,window=5"], "window must be left/right"),
        (["--problem", "seqlen=4k,window=-2/0"], "window sides must be >= 0"),
        (["--problem", "seqlen=4k,softcap=much"], "softcap must be a number >= 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message) -> None:
    options = dict(zip(("problem", "device"), (None, "cpu"), strict=True))
    options[arguments[0].removeprefix("--")] = arguments[1]
    with pytest.raises(UsageError, match=re.escape(message)):
        env_command.command(**options, as_json=True)


def test_a_wrong_argument_ends_with_2_and_one_line(command) -> None:
    answer = command("env", "--problem", "seqlen=")
    assert answer.returncode == 2
    assert answer.stderr == "flashdig: --problem: seqlen needs a value, as seqlen=...\n"
    assert answer.stdout == ""


def test_every_part_of_a_typed_problem() -> None:
    typed = parse_problem(
        "batch=2, heads=8/2, seqlen=1k/2k, head_dim=64/32, dtype=fp16, causal=top-left, "
        "window=5/-1, softcap=2.5, alibi=batch_heads, bias, sinks, dropout, paged, deterministic, "
        "tf32, lse, descale, out_dtype=fp32"
    )
    assert typed.problem == AttentionProblem(
        batch=2,
        num_heads=8,
        num_heads_kv=2,
        seqlen_q=1024,
        seqlen_k=2048,
        head_dim=64,
        head_dim_v=32,
        dtype="float16",
        mask=Mask(5, 0, "top-left"),
        softcap=2.5,
        dropout=True,
        alibi="batch_heads",
        bias="float",
        sinks=True,
        packed=True,
        deterministic=True,
        allow_tf32=True,
    )
    assert (typed.return_lse, typed.descale, typed.paged) == (True, True, True)
    assert typed.out_dtype == "float32"
    assert "causal=top-left, window=5/-1" in typed.describe()


def test_a_gpu_is_taken_by_default(monkeypatch, capsys) -> None:
    found = {**env_command.collect(), "gpu": "NVIDIA H200", "compute_capability": "9.0"}
    found |= {"sm_count": 132, "memory_bytes": 150_000_000_000, "driver": "570.1"}
    monkeypatch.setattr(env_command, "collect", lambda: found)
    env_command.command(problem="seqlen=4096", as_json=True)
    assert json.loads(capsys.readouterr().out)["auto"] == "hopper"
    env_command.command(problem="seqlen=4096", as_json=False)
    assert "NVIDIA H200, compute capability 9.0, 132 SMs, 150 GB" in capsys.readouterr().out
