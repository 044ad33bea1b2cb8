"""The cache's kernels in Triton's interpreter: append, pages, splits, fp8, invariance."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashdig.evidence.interpreter import interpreter_fault
from tests.interpreted_kvcache import CASES, OTHERS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def found():
    assert interpreter_fault() is None
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_kvcache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", [*CASES, *OTHERS])
def test_the_kernels_agree_with_float64(case, found) -> None:
    assert found[case] is None
