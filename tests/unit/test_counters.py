"""Memory counters of the rungs: the run under Nsight Compute, its table, and what comes of it."""

from __future__ import annotations

import itertools
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flashdig.bench.rows import RecordError, check_row
from flashdig.evidence import counters, counters_worker
from flashdig.evidence.counters import (
    METRICS,
    Counters,
    KernelCounters,
    Plan,
    attribute,
    counters_command,
    range_name,
    read_counters,
)
from flashdig.evidence.worker import run_worker
from flashdig.generations import memory_counters
from flashdig.generations.dig_rows import rows_of
from flashdig.generations.excavation import CellFindings, Found, dig_on_cpu
from flashdig.generations.guesses import UNEXPLAINED, guess, surprises
from flashdig.generations.inputs import random_qkv
from flashdig.generations.ladder import generation
from flashdig.generations.memory_counters import read_memory_counters
from flashdig.generations.presets import Cell
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem
from flashdig.readers.ncu import read_ncu

H200 = find_device("h200")
PROBLEM = AttentionProblem.dense(4, 16, 4096, 128, "bfloat16")
SMALL = AttentionProblem.dense(1, 2, 32, 16, "float32")
NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
START_STOP = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
Launch = tuple[str | None, str, int, int, int]  # rung, kernel, read, written, sectors
LAUNCHES: list[Launch] = [
    ("naive", "gemm<float>(int)", 1000, 200, 10),
    ("naive", "softmax", 300, 40, 20),
    ("naive", "gemm<float>(int)", 500, 6, 30),
    ("v2", "_v2_kernel", 4096, 1_000_064, 400),
]


def quoted(cells: Sequence[object]) -> str:
    return ",".join('"' + str(cell).replace('"', '""') + '"' for cell in cells)


def table(launches: Sequence[Launch], *, nvtx: bool = True) -> str:
    """As `ncu --csv --page raw --print-units base` prints it, remarks before it."""
    about = ["ID", "Process ID", "Process Name", "Host Name", *([NVTX, START_STOP] * nvtx)]
    about += ["Kernel Name", "Context", "Stream", "Block Size", "Grid Size", "Device", "CC"]
    lines = [
        "==PROF== Connected to process 42 (/usr/bin/python3.12)",
        "==WARNING== Note: Running with unmodified GPU clocks.",
        quoted([*about, *METRICS]),
        quoted([*[""] * len(about), "byte", "byte", "sector", "ns"]),
    ]
    for number, (rung, kernel, read, written, sectors) in enumerate(launches):
        cell = "42"
        if rung is not None:
            cell += f'  "<default domain>:{range_name(rung)}:none:none:none:none:none:none"'
        cells = [number, 42, "python3.12", "127.0.0.1", *([cell, ""] * nvtx), kernel, 1, 7]
        cells += ["(128, 1, 1)", "(64, 1, 1)", 0, "9.0", f"{read:,}", f"{written:,}", sectors, 500]
        lines.append(quoted(cells))
    return "\n".join(lines) + "\n"


def plan(**launched: int) -> Plan:
    inputs = random_qkv(SMALL, device="cpu", seed=0)
    return Plan(launched or {"naive": 3, "v2": 1}, inputs.q, inputs.k, inputs.v, False)


Install = Callable[..., None]


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts an `ncu` on the PATH that writes `text` as its table and `answer` as the worker's."""

    def install(
        text: str | None, answer: Mapping[str, str] | None = None, more: str = "pass", code: int = 0
    ) -> None:
        program = tmp_path / "ncu"
        program.write_text(
            f"#!{sys.executable}\n"
            "import pathlib, sys, time, subprocess\n"
            "if '--version' in sys.argv:\n"
            "    print('NVIDIA (R) Nsight Compute\\nVersion 2026.1.0.0 (build 1) (public)')\n"
            "    sys.exit()\n"
            "folder = pathlib.Path(sys.argv[-1])\n"
            "log = pathlib.Path(sys.argv[sys.argv.index('--log-file') + 1])\n"
            "assert (folder / 'request.json').is_file() and (folder / 'inputs.pt').is_file()\n"
            f"text, answer = {text!r}, {None if answer is None else json.dumps(answer)!r}\n"
            "if text is not None: log.write_text(text)\n"
            "if answer is not None: (folder / 'answer.json').write_text(answer)\n"
            f"{more}\n"
            f"sys.exit({code})\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return install


def test_command_counts_memory_alone_from_a_cold_cache() -> None:
    command = counters_command("/opt/ncu", "out.csv")
    assert command[0] == "/opt/ncu"
    options = dict(itertools.pairwise(command))
    assert options["--metrics"].split(",") == list(METRICS)
    assert options["--profile-from-start"] == "off"
    assert options["--cache-control"] == "all"
    assert options["--clock-control"] == "none"
    assert options["--print-units"] == "base"
    assert options["--log-file"] == "out.csv"
    assert "--nvtx" in command


def test_ranges_of_launches_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(table([*LAUNCHES, (None, "outside", 1, 1, 1)]))
    kernels = read_ncu(str(path))
    assert [kernel.ranges for kernel in kernels] == [
        *[("flashdig-rung-naive",)] * 3,
        ("flashdig-rung-v2",),
        (),
    ]
    assert not any("Range" in name for kernel in kernels for name in kernel.metrics)
    assert kernels[3].dram_write_bytes == 1_000_064
    assert kernels[0].l2_from_sms_bytes == 320
    assert kernels[0].duration_ns == 500
    nested = '42  "<default domain>:step 3: all:none:none:none:none:none:none"  "lib:inner:none"'
    path.write_text(table(LAUNCHES[:1]).replace(quoted(['42  "<default domain>:flashdig-rung-'
        'naive:none:none:none:none:none:none"']), quoted([nested])))  # fmt: skip
    assert read_ncu(str(path))[0].ranges == ("step 3: all", "inner")


def test_counters_of_each_rung_add_up(ncu: Install) -> None:
    ncu(table(LAUNCHES), {})
    found, notes = read_counters(plan())
    assert notes == []
    assert found["v2"] == Counters(
        (KernelCounters("_v2_kernel", 1, 0.5, 4096, 1_000_064, 12_800),),
        "Nsight Compute 2026.1.0.0",
    )
    naive = found["naive"]
    assert (naive.dram_read_bytes, naive.dram_write_bytes, naive.l2_bytes) == (1800, 246, 1920)
    assert naive.dram_bytes == 2046
    assert [(kernel.name, kernel.count) for kernel in naive.kernels] == [
        ("gemm<float>(int)", 2),
        ("softmax", 1),
    ]
    assert naive.kernels[0].us == 1.0


def test_without_ranges_the_order_tells_rungs_apart(ncu: Install) -> None:
    ncu(table(LAUNCHES, nvtx=False), {})
    found, notes = read_counters(plan())
    assert notes == []
    assert found["naive"].dram_read_bytes == 1800
    assert found["v2"].dram_read_bytes == 4096
    found, notes = read_counters(plan(naive=3, v2=2))
    assert found == {}
    assert notes == [
        "Memory counters were not read: 4 kernels were counted without NVTX ranges where 5 were "
        "recorded, so they cannot be told apart."
    ]


def test_an_error_of_one_rung_leaves_the_others(ncu: Install) -> None:
    ncu(table(LAUNCHES), {"v1": "out of memory"})
    found, notes = read_counters(plan(naive=3, v1=1, v2=2, sdpa_flash=1))
    assert set(found) == {"naive", "v2"}
    assert notes == [
        "Memory counters were not read for v1: out of memory.",
        "v2: 1 kernels were counted where 2 were recorded.",
        "Memory counters were not read for sdpa_flash: no kernel of it was counted.",
    ]


def test_a_kernel_without_memory_counters_gives_none(ncu: Install) -> None:
    ncu(table(LAUNCHES).replace('"4,096"', '"n/a"'), {})
    found, notes = read_counters(plan())
    assert set(found) == {"naive"}
    assert notes == ["Memory counters were not read for v2: a kernel has no memory counters."]


REFUSED = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU "
    "Performance Counters on the target device 0.\n"
)


@pytest.mark.parametrize(
    ("text", "answer", "more", "note"),
    [
        (REFUSED, {}, "pass", "the driver reserves profiling counters for administrators"),
        (
            "==ERROR== Failed to find metric dram__bytes_read.sum.\n",
            None,
            "pass",
            "Failed to find metric dram__bytes_read.sum.",
        ),
        ("==WARNING== No kernels were profiled.\n", {}, "pass", "No kernels were profiled."),
        (
            "==ERROR== The application returned an error code (1).\n",
            None,
            "print('RuntimeError: no kernel image')",
            "RuntimeError: no kernel image.",
        ),
        (None, None, "pass", "Nsight Compute printed nothing."),
    ],
)
def test_what_hinders_it_is_one_note(
    ncu: Install, text: str | None, answer: dict[str, str] | None, more: str, note: str
) -> None:
    ncu(text, answer, more, code=1)
    found, notes = read_counters(plan())
    assert found == {}
    assert len(notes) == 1
    assert notes[0].startswith(f"Memory counters were not read: {note}")


def test_a_run_that_ends_early_keeps_what_was_counted(ncu: Install) -> None:
    ncu(table(LAUNCHES[:3]), None, "print('CUDA error: misaligned address')", code=1)
    found, notes = read_counters(plan())
    assert set(found) == {"naive"}
    assert "ended early: CUDA error: misaligned address." in notes[0]


def test_time_limit_ends_the_profiler_and_its_children(ncu: Install, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time, pathlib; time.sleep(3); pathlib.Path({str(mark)!r}).touch()"
    ncu(None, None, f"subprocess.run([sys.executable, '-c', {child!r}])")
    start = time.monotonic()
    found, notes = read_counters(plan(), timeout_s=1.0)
    assert (found, notes) == (
        {},
        ["Memory counters were not read: Nsight Compute took longer than 1 s."],
    )
    assert time.monotonic() - start < 2.5
    time.sleep(3)
    assert not mark.exists()


def test_a_worker_alone_is_ended_as_well(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_worker("timeit", str(tmp_path), timeout_s=0.0, environment={})


def test_without_nsight_compute_one_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters, "find_ncu", lambda: None)
    assert read_counters(plan()) == (
        {},
        ["Memory counters were not read: Nsight Compute (ncu) is not on the PATH."],
    )


def test_nsight_compute_of_the_toolkit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    program = tmp_path / "bin" / "ncu"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert counters.find_ncu() == str(program)


def test_worker_runs_each_rung_once_in_its_range(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def exhibit(name: str) -> SimpleNamespace:
        def run(*_: object) -> None:
            events.append(f"run {name}")
            if name == "v1" or (name == "v2" and events.count("run v2") == 2):
                raise RuntimeError(f"{name} is broken.\nmore")

        return SimpleNamespace(run=run)

    monkeypatch.setattr(counters_worker, "generation", exhibit)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: events.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: events.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: events.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: events.append("pop"))
    asked = plan()
    torch.save({"q": asked.q, "k": asked.k, "v": asked.v}, tmp_path / "inputs.pt")
    names = ["naive", "v1", "v2", "sdpa_flash"]
    request = {"names": names, "device": "cpu", "causal": False, "tf32": False}
    (tmp_path / "request.json").write_text(json.dumps(request))
    counters_worker.main(tmp_path)
    warm = [f"run {name}" for name in names]
    assert events[: len(warm)] == warm
    assert events[len(warm) :] == [
        event
        for name in ("naive", "v2", "sdpa_flash")
        for event in ("start", f"push flashdig-rung-{name}", f"run {name}", "pop", "stop")
    ]
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer == {"v1": "v1 is broken", "v2": "v2 is broken"}


def counted(read: int, written: int, launches: int = 1) -> Counters:
    kernel = KernelCounters("k", launches, 1.0, read, written, None)
    return Counters((kernel,), "Nsight Compute 2026.1")


def found_rung(name: str, seen: Counters | None) -> Found:
    exhibit = generation(name)
    return Found(
        generation=exhibit,
        prediction=exhibit.predict(PROBLEM),
        unsupported=[],
        guess=guess(name, PROBLEM, H200),
        counters=seen,
    )


def test_memory_bytes_are_guessed_and_found() -> None:
    guessed = guess("v2", PROBLEM, H200)
    assert guessed is not None
    loads, stores = guessed.memory.load_bytes, guessed.memory.store_bytes
    assert surprises(PROBLEM, H200, found_rung("v2", counted(loads, stores))) == ()
    assert surprises(PROBLEM, None, found_rung("v2", counted(7 * loads, stores))) == ()

    (more,) = surprises(PROBLEM, H200, found_rung("v2", counted(3 * loads, stores)))
    assert (more.what, more.predicted, more.found) == (
        "memory bytes",
        loads + stores,
        3 * loads + stores,
    )
    assert more.cause == UNEXPLAINED

    (left,) = surprises(PROBLEM, H200, found_rung("v2", counted(loads, stores - 45_000_000)))
    assert "still stood in the L2 cache" in left.cause
    (less,) = surprises(PROBLEM, H200, found_rung("v2", counted(loads // 4, stores // 4)))
    assert less.cause == UNEXPLAINED
    excess = H200.cache_bytes * 2
    (again,) = surprises(PROBLEM, H200, found_rung("v2", counted(loads + excess, stores, 3)))
    assert again.cause.startswith("each kernel is counted from a cold cache")


def test_rows_hold_the_counters() -> None:
    seen = found_rung("v2", counted(100, 20, 2))
    findings = CellFindings(Cell(PROBLEM), "random", "NVIDIA H200", [seen], None, H200)
    (row,) = rows_of(findings, "run", None)
    assert row["counters"] == {
        "dram_read_bytes": 100,
        "dram_write_bytes": 20,
        "l2_bytes": None,
        "cache": "cold",
        "source": "Nsight Compute 2026.1",
        "kernels": [
            {
                "name": "k",
                "count": 2,
                "us": 1.0,
                "dram_read_bytes": 100,
                "dram_write_bytes": 20,
                "l2_bytes": None,
            }
        ],
    }
    for damage in ({"kernels": []}, {"dram_read_bytes": -1}, {"cache": "hot"}, {"more": 1}):
        bad = {**row, "counters": {**row["counters"], **damage}}
        with pytest.raises(RecordError, match="rung: counters must be"):
            check_row(bad, ["run"], "rung")


def test_only_rungs_that_passed_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Plan] = []

    def answer(wanted: Plan) -> tuple[dict[str, Counters], list[str]]:
        asked.append(wanted)
        return {"v2": counted(5, 6)}, ["a note"]

    monkeypatch.setattr(memory_counters, "read_counters", answer)
    rungs = [found_rung("naive", None), found_rung("v2", None)]
    rungs[0].refusal = "out of memory"
    findings = CellFindings(Cell(PROBLEM), "random", "NVIDIA H200", rungs, None, H200)
    q = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    inputs = SimpleNamespace(q=q, k=q, v=q)
    read_memory_counters(findings, inputs, lambda text: None)  # type: ignore[arg-type]
    assert list(asked[0].launched) == ["v2"]
    assert rungs[1].counters == counted(5, 6)
    assert findings.notes == ["a note"]


def test_without_a_gpu_one_note_says_so() -> None:
    inputs = random_qkv(SMALL, device="cpu", seed=0)
    findings = dig_on_cpu(Cell(SMALL), inputs, ["naive"], progress=lambda text: None)
    read_memory_counters(findings, inputs, lambda text: None)
    assert findings.notes == ["Memory counters are a GPU's: none were read."]
    assert findings.rungs[0].counters is None


def test_attribute_ignores_kernels_outside_of_ranges(tmp_path: Path) -> None:
    path = tmp_path / "c.csv"
    path.write_text(table([(None, "fill", 9, 9, 9), *LAUNCHES]))
    groups, fault = attribute(read_ncu(str(path)), {"v2": 1})
    assert fault is None
    assert [kernel.name for kernel in groups["v2"]] == ["_v2_kernel"]
