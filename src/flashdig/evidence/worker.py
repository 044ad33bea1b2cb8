"""A module of this package run in a process of its own, on a folder that holds its request."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parents[2]
LOG = "log.txt"


def run_worker(
    module: str,
    folder: str,
    *,
    timeout_s: float,
    environment: Mapping[str, str | None],
    under: Sequence[str] = (),
) -> int:
    """`python -m module folder`; its output goes to log.txt in the folder. Returns the exit code.

    Args:
        environment: variables to set, or with None to remove; the rest is inherited.
        under: a command that starts the worker, such as a profiler with its options.

    Raises subprocess.TimeoutExpired after `timeout_s`; the worker is ended, and what started it.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    parts = [str(SOURCE_FOLDER), *(part for part in inherited.split(os.pathsep) if part)]
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), **environment}
    with (
        Path(folder, LOG).open("w") as stream,
        subprocess.Popen(
            [*under, sys.executable, "-m", module, folder],
            env={name: value for name, value in merged.items() if value is not None},
            stdout=stream,
            stderr=stream,
            start_new_session=bool(under),  # a group of its own, ended with its children
        ) as process,
    ):
        try:
            return process.wait(timeout_s)
        except BaseException:  # an interruption too: a group of its own does not get it
            _end(process, is_group=bool(under))
            raise


def _end(process: subprocess.Popen[bytes], *, is_group: bool) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        if is_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def last_line(folder: str) -> str | None:
    """The last line that a worker printed; None when it printed nothing."""
    lines = Path(folder, LOG).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else None
