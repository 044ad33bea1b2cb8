"""Recording one's own code: what is written can be read, and failures are told."""

import re
import shutil
import stat
import sys
from pathlib import Path

import pytest
import torch

from flashdig.evidence import capture
from flashdig.evidence.capture import (
    CaptureError,
    ScriptFailedError,
    ncu_command,
    record,
    record_script,
    run_ncu,
)
from flashdig.readers.kernel_names import decode
from flashdig.readers.trace import read_kineto
from tests.trace_files import RECORDED, recorded

SCRIPT = """
import sys
import torch
torch.ones(int(sys.argv[1]), 8) @ torch.ones(8, 3)
if len(sys.argv) > 2:
    raise ValueError(sys.argv[2])
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "work.py"
    path.write_text(SCRIPT)
    return str(path)


def shapes_of(path: Path, name: str) -> list[tuple[object, ...]]:
    operators = [op for op in read_kineto(str(path)).host_ops if op.name == name]
    return [op.inputs.shapes for op in operators if op.inputs is not None]


def test_record_writes_operators_with_shapes_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    with record(path, steps=True) as profiler:
        for _ in range(2):
            torch.ones(4, 8) @ torch.ones(8, 3)
            profiler.step()
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    trace = read_kineto(str(path))
    assert shapes_of(path, "aten::mm") == [((4, 8), (8, 3))] * 2
    products = [op for op in trace.host_ops if op.name == "aten::mm"]
    assert [op.annotations() for op in products] == [("ProfilerStep#0",), ("ProfilerStep#1",)]
    assert not trace.kernels
    assert not trace.warnings


def test_record_with_stacks_gives_module_paths(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with record(path, stacks=True):
        model(torch.ones(2, 4))
    trace = read_kineto(str(path))
    operator = next(op for op in trace.host_ops if op.name == "aten::addmm")
    assert operator.module_path() == ("Sequential_0", "Linear_0")
    assert any("test_capture" in frame for frame in operator.stack_frames())


def test_trace_is_written_when_the_block_raises(tmp_path: Path) -> None:
    path = tmp_path / "t.json"

    def work() -> None:
        with record(path):
            torch.ones(4, 8) @ torch.ones(8, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    assert len(shapes_of(path, "aten::mm")) == 1


def test_record_into_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="absent does not exist"), record(tmp_path / "absent/t"):
        pass


def test_record_script_runs_it_as_main_with_its_arguments(tmp_path: Path, script: str) -> None:
    before = (sys.argv[:], sys.path[:])
    path = tmp_path / "t.json"
    record_script(script, ["5"], path)
    assert shapes_of(path, "aten::mm") == [((5, 8), (8, 3))]
    assert (sys.argv, sys.path) == before


def test_failing_script_keeps_its_trace(tmp_path: Path, script: str) -> None:
    path = tmp_path / "t.json"
    with pytest.raises(ScriptFailedError, match="ValueError: oh") as error:
        record_script(script, ["5", "oh"], path)
    assert error.value.path == str(path)
    assert len(shapes_of(path, "aten::mm")) == 1
    with pytest.raises(CaptureError, match="no such script"):
        record_script(str(tmp_path / "absent.py"), [], path)


def test_ncu_command_measures_attention_kernels_only(script: str) -> None:
    command = ncu_command(script, ["--lr", "3"], "out.csv")
    assert command[0] == "ncu"
    assert command[-4:] == [sys.executable, script, "--lr", "3"]
    assert command[command.index("--log-file") + 1] == "out.csv"
    assert command[command.index("--page") + 1] == "raw"
    assert command[command.index("--kernel-name") + 1] == capture.NCU_KERNELS


def test_ncu_pattern_selects_attention_kernels_and_nothing_else() -> None:
    pattern = re.compile(capture.NCU_KERNELS.removeprefix("regex:"))
    names = {kernel.name for name in RECORDED for kernel in read_kineto(recorded(name)).kernels}
    wanted = {name for name in names if decode(name).is_attention or decode(name).role == "softmax"}
    assert len(wanted) > 15
    assert {name for name in names if pattern.search(name)} == wanted


def test_without_ncu_the_command_is_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    outcome = run_ncu(script, ["5"], tmp_path / "out.csv")
    assert outcome.path is None
    assert outcome.reason == "Nsight Compute (ncu) is not on the PATH"
    assert outcome.command.startswith("ncu --set full")


@pytest.mark.parametrize(
    ("body", "code"),
    [("echo '==ERROR== ERR_NVGPUCTRPERM - no permission' > $LOG", 1), ("echo a,b > $LOG", 0)],
)
def test_ncu_with_and_without_permission(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, body: str, code: int
) -> None:
    log = tmp_path / "out.csv"
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\nLOG={log}\n{body}\nexit {code}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    outcome = run_ncu(script, [], log)
    if code:
        assert outcome.path is None
        assert "administrators" in str(outcome.reason)
        assert outcome.command.startswith("sudo -E ncu")
        assert not log.exists()
    else:
        assert outcome.path == str(log)
        assert outcome.reason is None


def test_failing_script_under_ncu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str
) -> None:
    program = tmp_path / "ncu"
    program.write_text("#!/bin/sh\necho the application failed\nexit 9\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(CaptureError, match="code 9: the application failed"):
        run_ncu(script, [], tmp_path / "out.csv")
