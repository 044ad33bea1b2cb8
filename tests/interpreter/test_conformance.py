"""The conformance suite in Triton's interpreter: every pair of features, tiny lengths."""

import os
import subprocess
import sys

from flashdig.bench.results import read_record
from flashdig.evidence.interpreter import interpreter_fault
from flashdig.evidence.worker import SOURCE_FOLDER


def test_every_pair_of_features_is_right(tmp_path) -> None:
    assert interpreter_fault() is None
    output = tmp_path / "conformance.json"
    command = [sys.executable, "-m", "flashdig.bench.conformance", "--device", "cpu"]
    command += ["--inputs", "2", "--processes", "2", "--time-limit", "580", "--output", output]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SOURCE_FOLDER)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert output.exists(), done.stdout + done.stderr
    (row,) = read_record(output).rows
    assert row["failures"] == []
    assert row["cases"] >= 150
    assert (row["passed"], row["skipped"]) == (row["cases"], 0)
    assert row["features"]["pairs_covered"] == row["features"]["pairs"]
    assert done.returncode == 0, done.stderr
