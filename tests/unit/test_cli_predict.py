"""`flashdig predict` as a user runs it: output, JSON, errors, and how long it takes."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashdig.cli import main
from flashdig.cli.errors import UsageError
from flashdig.cli.sizes import parse_size, parse_sizes

SOURCE = Path(__file__).parents[2] / "src"
HUGE = "--gpu h200 --batch 64 --heads 64 --seqlen 64k --causal --json"
QUESTION = "--gpu h200 --batch 1 --heads 16 --seqlen 8k --head-dim 128 --causal"


def _run(arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashdig", "predict", *arguments.split()],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **environment},
    )


def test_the_guess_in_a_table_and_in_words():
    answer = _run(QUESTION)
    assert answer.returncode == 0, answer.stderr
    assert "v2, forward: batch 1, heads 16, seqlen 8192, head_dim 128, bfloat16" in answer.stdout
    for row in ("floor", "expected", "bytes, compulsory", "bytes, issued", "limiter of the floor"):
        assert re.search(rf"^ *{row} ", answer.stdout, re.MULTILINE), row
    assert "no run is faster than 257 µs" in answer.stdout
    assert "measured 2026-11-29" in answer.stdout
    assert "FLOP: 2 for each multiply-add" in answer.stdout


def test_json_holds_everything():
    (guess,) = json.loads(_run(f"{QUESTION} --json").stdout)
    assert guess["flops"] == 4 * 16 * 128 * (8192 * 8193 // 2)
    assert guess["floor_s"] == pytest.approx(257e-6, rel=0.01)
    assert guess["compulsory"]["load_bytes"] == 3 * 16 * 8192 * 128 * 2
    assert guess["problem"]["mask"]["window_right"] == 0
    assert guess["sentences"]


def test_two_chips_side_by_side():
    answer = _run(f"{QUESTION} --against l4")
    assert "NVIDIA L4 takes" in answer.stdout
    assert "6.25 % of the memory bandwidth and 12.2 % of the bfloat16 peak" in answer.stdout
    both = json.loads(_run(f"{QUESTION} --against l4 --json").stdout)
    assert [guess["device"] for guess in both] == ["h200", "l4"]
    assert both[1]["expected_s"] > 3 * both[0]["expected_s"]


@pytest.mark.parametrize("generation", ["naive", "v1", "v2_transposed", "sdpa_flash", "v3"])
def test_every_kind_of_generation(generation):
    assert _run(f"{QUESTION} --generation {generation}").returncode == 0


def test_backward_and_decode():
    backward = json.loads(_run(f"{QUESTION} --pass backward --json").stdout)[0]
    forward = json.loads(_run(f"{QUESTION} --json").stdout)[0]
    assert backward["flops"] == 2.5 * forward["flops"]
    decode = json.loads(
        _run("--gpu h200 --heads 32 --heads-kv 8 --seqlen 64k --pass decode --json").stdout
    )[0]
    assert (decode["problem"]["seqlen_q"], decode["problem"]["seqlen_k"]) == (1, 65536)
    assert decode["problem"]["num_heads_kv"] == 8


def test_short_names_of_types_and_an_observed_clock():
    guess = json.loads(_run("--gpu a100 --seqlen 1k --dtype fp32 --clock-mhz 1000 --json").stdout)[
        0
    ]
    assert guess["problem"]["dtype"] == "float32"
    assert guess["floor_clock_hz"] == guess["expected_clock_hz"] == 1e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--gpu h20 --seqlen 8k", "unknown device 'h20'; nearest: h200"),
        ("--gpu h200 --against l5 --seqlen 8k", "unknown device 'l5'; nearest: l4"),
        (f"{QUESTION} --generation v22", "unknown generation 'v22'; nearest: v2"),
        (f"{QUESTION} --generation v1 --pass backward", "v1 has no backward here"),
        (f"{QUESTION} --pass up", "direction must be forward, backward, decode, got 'up'"),
        (f"{QUESTION} --dtype int8", "--dtype must be bf16, fp16"),
        ("--gpu h200 --seqlen 8q", "--seqlen must be a whole number of at least 1"),
        ("--gpu h200 --seqlen 8k --heads 6 --heads-kv 4", "num_heads (6) must be a multiple of"),
        ("--gpu t4 --seqlen 8k --generation naive", "no known peak for bfloat16"),
    ],
)
def test_wrong_arguments_end_with_2_and_one_line(arguments, message):
    answer = _run(arguments)
    assert answer.returncode == 2
    assert message in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert answer.stdout == ""


def test_asking_the_driver_where_there_is_none(tmp_path):
    answer = _run("--gpu here --seqlen 8k", PATH=str(tmp_path))
    assert answer.returncode == 2
    assert "no NVIDIA GPU found on this machine" in answer.stderr


def test_neither_torch_nor_triton_nor_numpy_is_loaded():
    program = (
        "import sys, flashdig.cli.predict, flashdig.costs.banks, flashdig.hardware.occupancy;"
        "loaded = {'torch', 'triton', 'numpy', 'rich'} & set(sys.modules);"
        "sys.exit(', '.join(loaded) or 0)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr


NOTHING = """
import typer
def command(number: int = 1, text: str = ""): typer.echo("x")
typer.run(command)
"""


def test_the_command_takes_less_than_300_ms_of_its_own():
    """Processor time beyond what the command-line library takes for a command that does nothing.

    The best of several: a busy machine must not decide.
    """

    def took(command: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    commands = (
        [sys.executable, "-c", NOTHING],
        [sys.executable, "-m", "flashdig", "predict", *QUESTION.split()],
    )
    # by turns, since a processor that is shared is slower at some times than at others
    times = [[took(command) for command in commands] for _ in range(7)]
    nothing, all_of_it = (min(column) for column in zip(*times, strict=True))
    # a slow or shared processor slows both
    assert all_of_it - nothing < max(0.3, 1.1 * nothing), (nothing, all_of_it)


def test_a_huge_problem_is_guessed_as_quickly():
    took = []
    for _ in range(3):  # the machine may be busy with other things once, hardly thrice
        start = time.process_time()
        with pytest.raises(SystemExit) as ended:
            main(["predict", *HUGE.split()])
        assert ended.value.code == 0
        took.append(time.process_time() - start)
    assert min(took) < 0.3


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("8k", 8192), ("16K", 16384), ("1m", 1048576), ("1_024", 1024)]
)
def test_sizes(text, size):
    assert parse_size(text, "--seqlen") == size


def test_lists_of_sizes():
    assert parse_sizes("512,1k, 2k", "--seqlens") == [512, 1024, 2048]


@pytest.mark.parametrize("text", ["", "k", "0", "-1", "1.5k", "8kk", "²", "eight", "8 k 2"])
def test_other_sizes_are_refused(text):
    with pytest.raises(UsageError, match="--seqlen must be a whole number of at least 1"):
        parse_size(text, "--seqlen")
