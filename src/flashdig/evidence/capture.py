"""Recordings of one's own code: torch.profiler in process, Nsight Compute around a process.

Both write files that `flashdig.readers` takes, so that what is measured here and what others send
in goes the same way.
"""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# kernels of every attention that is known by name, and the softmax of attention made of parts
NCU_KERNELS = (
    "regex:([Ff]lash|[Ff]mha|[Ss]dpa|[Aa]tte?n(tion)?(_|[A-Z]|$)|[Ss]oft[Mm]ax|paged_att"
    "|dot_do_o|convert_dq)"
)
# what the driver answers where profiling counters are reserved for administrators
NO_PERMISSION = "ERR_NVGPUCTRPERM"


class CaptureError(RuntimeError):
    """A recording could not be made; the message says why and what to do."""


class ScriptFailedError(CaptureError):
    """The recorded script raised; `path` holds what was recorded until then."""

    def __init__(self, script: str, path: str, error: BaseException) -> None:
        super().__init__(f"{script} failed: {type(error).__name__}: {error}")
        self.path = path


@contextmanager
def record(
    path: str | Path,
    *,
    shapes: bool = True,
    memory: bool = True,
    flops: bool = True,
    stacks: bool = False,
    steps: bool = False,
) -> Iterator[torch.profiler.profile]:
    """Record everything inside the `with` block and write it as a trace when the block ends.

    Args:
        path: the trace to write; compressed when it ends in ".gz".
        shapes: sizes, dtypes and strides of operator inputs (attention calls need them).
        memory: allocations and frees.
        flops: floating-point operations of the operators torch has formulas for.
        stacks: Python frames and modules; several times slower, and larger files.
        steps: write each step as a range `ProfilerStep#n`; without it `step()` marks nothing.

    Yields the running profiler: with `steps`, call its `step()` at the end of each step. The device
    is waited for before recording ends. The trace is written also when the block raises.
    """
    import torch
    from torch.profiler import ProfilerAction, ProfilerActivity, profile

    path = Path(path)
    if not path.parent.is_dir():
        raise CaptureError(f"{path}: the directory {path.parent} does not exist")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    profiler = profile(
        activities=activities,
        record_shapes=shapes,
        profile_memory=memory,
        with_flops=flops,
        with_stack=stacks,
        with_modules=stacks,
        # torch marks steps only under a schedule; this one records all of them
        schedule=(lambda step: ProfilerAction.RECORD) if steps else None,
    )
    profiler.start()
    try:
        yield profiler
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        profiler.export_chrome_trace(str(path))


def record_script(
    script: str, arguments: Sequence[str], path: str | Path, *, stacks: bool = False
) -> None:
    """Run a Python script as `python script arguments` would, in this process, and record it.

    Raises CaptureError when the script is no file, and ScriptFailedError when it raises or exits
    with an error; the trace is written in the latter case as well.
    """
    if not Path(script).is_file():
        raise CaptureError(f"{script}: no such script")
    saved_arguments, saved_path = sys.argv, sys.path[:]
    failure: BaseException | None = None
    with record(path, stacks=stacks):
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).resolve().parent))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as error:
            if error.code not in (None, 0):
                failure = error
        except Exception as error:
            failure = error
        finally:
            sys.argv, sys.path[:] = saved_arguments, saved_path
    if failure is not None:
        raise ScriptFailedError(script, str(path), failure) from failure


@dataclass(frozen=True)
class NcuOutcome:
    """What came of an Nsight Compute run.

    Attributes:
        command: the command line, quoted for a shell.
        path: the CSV file it wrote, or None when it did not run.
        reason: why it did not run, or None.
    """

    command: str
    path: str | None
    reason: str | None


def ncu_command(
    script: str, arguments: Sequence[str], path: str | Path, *, kernels: str = NCU_KERNELS
) -> list[str]:
    """The Nsight Compute command line that measures a script's attention kernels.

    All counter sets, attention kernels only, every process of the script, written as the raw page
    in CSV (`readers.ncu` takes it).
    """
    return [
        "ncu",
        *("--set", "full"),
        *("--kernel-name-base", "demangled", "--kernel-name", kernels),
        *("--target-processes", "all"),
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", str(path)),
        sys.executable,
        script,
        *arguments,
    ]


def run_ncu(script: str, arguments: Sequence[str], path: str | Path) -> NcuOutcome:
    """Measure a script's attention kernels with Nsight Compute, where that is there and permitted.

    Where it is missing, or the driver reserves its counters for administrators, nothing runs to an
    end and the outcome says so beside the command. Raises CaptureError when the script fails.
    """
    if not Path(script).is_file():
        raise CaptureError(f"{script}: no such script")
    command = ncu_command(script, arguments, path)
    shown = shlex.join(command)
    if shutil.which("ncu") is None:
        return NcuOutcome(shown, None, "Nsight Compute (ncu) is not on the PATH")
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
        output.seek(0)
        text = output.read()
    log = Path(path)
    if log.is_file():
        text += log.read_text(errors="replace")
    if NO_PERMISSION in text:
        log.unlink(missing_ok=True)
        return NcuOutcome(
            f"sudo -E {shown}",
            None,
            "the driver reserves profiling counters for administrators (ERR_NVGPUCTRPERM)",
        )
    if code:
        last = text.strip().splitlines()[-1] if text.strip() else "no output"
        raise CaptureError(f"{script}: ncu ended with code {code}: {last}")
    return NcuOutcome(shown, str(path), None)
