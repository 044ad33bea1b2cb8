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
    "sm_90, mixed": [
        "flashdig_clear_slack",
        "flashdig_plan_pieces",
        "flashdig_plan_pieces",
        "flashdig_decode_ragged_bf16_d64_m128n64_causal_varlen_paged_split",
        "flashdig_decode_ragged_bf16_d64_m16n128_causal_varlen_paged_split",
        "flashdig_combine_bf16_v64",
    ],
    "sm_90, listed": [
        "flashdig_list_tiles",
        "flashdig_hopper_forward_bf16_d64_m192n64_causal_varlen_paged",
    ],
    "sm_90, pieces": ["flashdig_append_kv"],
    "sm_90, packed pieces": [],
    "sm_100": ["flashdig_decode_bf16_d32_m64n64_causal_split"],
    "sm_120": [
        "flashdig_plan_pieces",
        "flashdig_decode_ragged_fp16_d32_m16n128_causal_paged_split",
    ],
}
# they start when what is ahead of them has ended
SEPARATE = ("flashdig_append_kv", "flashdig_clear_slack")
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


@pytest.mark.parametrize("name", CALLS)
def test_kernels_fit_the_chip(name, compiled) -> None:
    kernels = compiled[name]
    assert [kernel["name"] for kernel in kernels[:-1]] == NAMES[name]
    last = "hopper_decode" if "pieces" in name or "listed" in name else "combine"
    assert kernels[-1]["name"].startswith(f"flashdig_{last}_")
    chip = architecture(name.partition(",")[0])
    for kernel in kernels:
        assert kernel["shared_bytes"] <= chip.shared_bytes_per_block, kernel["name"]
        # kept from so many registers, it leaves a few numbers of its outer loop in memory
        assert kernel["stack_bytes"] <= (96 if "," in name else 0), kernel["name"]
    for kernel in kernels:
        if "decode" not in kernel["name"] or "hopper" in kernel["name"]:
            continue
        products = {opcode.split(".")[0] for opcode in kernel["opcodes"]}
        assert len(products & {"HMMA", "HGMMA", "UTCHMMA"}) == 1
        # tiles are on their way to shared memory while others are multiplied
        assert "LDGSTS" in products


def test_a_chunk_has_a_multiprocessor_to_itself(compiled) -> None:
    """Beside it programs that decode would be slower than on multiprocessors of their own."""
    chunk, decoding = compiled["sm_90, mixed"][3:5]
    chip = architecture("sm_90")
    assert 32 * (8 * chunk["registers"] + 4 * decoding["registers"]) > chip.registers
    assert 32 * 3 * 4 * decoding["registers"] <= chip.registers
    assert 3 * (decoding["shared_bytes"] + chip.shared_bytes_reserved) <= chip.shared_bytes
    assert any(opcode.startswith("HGMMA") for opcode in chunk["opcodes"])


def test_launches_behind_the_first_wait_for_it(compiled) -> None:
    """griddepcontrol.wait, which is ACQBULK."""
    for name in ("sm_90", "sm_90, mixed", "sm_90, listed"):
        _, *rest = (k for k in compiled[name] if k["name"] not in SEPARATE)
        assert rest
        assert all("ACQBULK" in kernel["opcodes"] for kernel in rest), name


def test_pages_are_copied_by_tma_in_pieces(compiled) -> None:
    """Four pieces of 16 keys for the first tile of keys, then for keys and values of each step, and
    three tiles of queries; the page numbers come from one load, a lane each."""
    (kernel,) = (k for k in compiled["sm_90, listed"] if "hopper_forward" in k["name"])
    assert kernel["opcodes"]["UTMALDG.5D"] == 4 + 2 * 4 + 3
    assert kernel["opcodes"]["REDUX.MAX.S32"] >= 8


def test_decoding_on_hopper_is_one_launch(compiled) -> None:
    """Its pages too are copied in pieces, by two warps; nothing of its loops lies in memory."""
    for name in ("sm_90, pieces", "sm_90, packed pieces", "sm_90, listed"):
        kernel = compiled[name][-1]
        assert kernel["opcodes"]["UTMALDG.5D"] > (2 * 4 if "packed" not in name else 2)
        assert {"HGMMA", "SYNCS"} <= {opcode.split(".")[0] for opcode in kernel["opcodes"]}
        assert kernel["stack_bytes"] == 0
        assert any(opcode.startswith("ATOMG") for opcode in kernel["opcodes"])
