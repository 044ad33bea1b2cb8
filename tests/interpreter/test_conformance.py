"""The conformance suite in Triton's interpreter: every pair of features, tiny lengths.

The oldest Triton takes a part of it.
"""

import os
import subprocess
import sys

import triton

from flashdig.bench.results import read_record
from flashdig.evidence.interpreter import interpreter_fault
from flashdig.evidence.worker import SOURCE_FOLDER

OLDEST = triton.__version__.startswith("3.6.")


def test_every_pair_of_features_is_right(tmp_path) -> None:
    assert interpreter_fault() is None
    output = tmp_path / "conformance.json"
    command = [sys.executable, "-m", "flashdig.bench.conformance", "--device", "cpu"]
    command += ["--inputs", "2", "--processes", "2", "--time-limit", "580", "--output", output]
    if OLDEST:
        command += ["--specialisations", "8"]
    path = os.pathsep.join([str(SOURCE_FOLDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert output.exists(), done.stdout + done.stderr
    (row,) = read_record(output).rows
    assert row["failures"] == []
    assert row["cases"] >= (16 if OLDEST else 150)
    assert (row["passed"], row["skipped"]) == (row["cases"], 0)
    assert OLDEST or row["features"]["pairs_covered"] == row["features"]["pairs"]
    assert done.returncode == 0, done.stderr
