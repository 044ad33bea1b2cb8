"""The cache's kernels compiled without a GPU: they fit each chip, and keys are copied ahead."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashdig.hardware.arch import architecture
from tests.compile.cache_kernels import CALLS

ROOT = Path(__file__).parents[2]
NAMES = {
    "sm_80": ["flashdig_decode_bf16_d32_m16n128_causal_split_fp8cache"],
    "sm_90": ["flashdig_append_kv", "flashdig_decode_bf16_d64_m16n128_causal_paged_split"],
    "sm_100": ["flashdig_decode_bf16_d32_m64n64_causal_split"],
    "sm_120": [
        "flashdig_plan_pieces",
        "flashdig_decode_ragged_fp16_d32_m16n128_causal_paged_split",
    ],
}
pytestmark = pytest.mark.newest


@pytest.fixture(scope="module")
def compiled():
    done = subprocess.run(
        [sys.executable, "-m", "tests.compile.cache_kernels"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", CALLS)
def test_kernels_fit_the_chip(arch, compiled) -> None:
    kernels = compiled[arch]
    assert [kernel["name"] for kernel in kernels[:-1]] == NAMES[arch]
    assert kernels[-1]["name"].startswith("flashdig_combine_")
    for kernel in kernels:
        assert kernel["shared_bytes"] <= architecture(arch).shared_bytes_per_block, kernel["name"]
        assert kernel["stack_bytes"] == 0, kernel["name"]
    opcodes = kernels[-2]["opcodes"]
    products = {name.split(".")[0] for name in opcodes} & {"HMMA", "HGMMA", "UTCHMMA"}
    assert len(products) == 1
    # tiles are on their way to shared memory while others are multiplied
    assert any(name.startswith("LDGSTS") for name in opcodes)
