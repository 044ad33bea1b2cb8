"""backend="triton" through the public functions equals "tiled", in Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashdig.evidence.interpreter import interpreter_fault
from tests.interpreted_attention import DENSE, ZERO_SIZES

ROOT = Path(__file__).parents[2]
CASES = (
    *DENSE,
    "packed",
    "packed without keys",
    *(f"zero sizes {sizes}" for sizes in ZERO_SIZES),
    "vmap of grad",
    "kept",
    "replayed",
    "far rows",
)


@pytest.fixture(scope="module")
def found():
    assert interpreter_fault() is None
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_attention"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("case", CASES)
def test_triton_equals_the_tiled_walk(case, found) -> None:
    assert found[case]
    for difference in found[case]:
        assert difference <= 1e-5  # NaN is not
