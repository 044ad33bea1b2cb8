"""A module of this package run in a process of its own, on a folder that holds its request."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SOURCE_FOLDER = Path(__file__).parents[2]
LOG = "log.txt"


def run_worker(
    module: str, folder: str, *, timeout_s: float, environment: Mapping[str, str | None]
) -> int:
    """`python -m module folder`; its output goes to log.txt in the folder. Returns the exit code.

    Args:
        environment: variables to set, or with None to remove; the rest is inherited.

    Raises subprocess.TimeoutExpired after `timeout_s`.
    """
    inherited = os.environ.get("PYTHONPATH", "")
    parts = [str(SOURCE_FOLDER), *(part for part in inherited.split(os.pathsep) if part)]
    merged = {**os.environ, "PYTHONPATH": os.pathsep.join(parts), **environment}
    with Path(folder, LOG).open("w") as stream:
        done = subprocess.run(
            [sys.executable, "-m", module, folder],
            env={name: value for name, value in merged.items() if value is not None},
            stdout=stream,
            stderr=stream,
            timeout=timeout_s,
            check=False,
        )
    return done.returncode


def last_line(folder: str) -> str | None:
    """The last line that a worker printed; None when it printed nothing."""
    lines = Path(folder, LOG).read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else None
