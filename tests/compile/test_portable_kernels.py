"""The portable kernels compiled with the table's tiles, without a GPU: a sample that covers every
kernel, architecture, dtype and feature.

All of an architecture in one process: starting one takes as long as three kernels. What is asserted
holds with Triton 3.6 and 3.9.
"""

from __future__ import annotations

import math

import pytest

from flashdig.evidence.offline import Compiled, OfflineError, Request, compile_exhibits
from flashdig.hardware.arch import architecture
from flashdig.kernels.choose import choose_config
from flashdig.problem import AttentionProblem, Mask
from flashdig.readers.kernel_names import decode

SEQLEN, HEADS, BATCH = 1024, 4, 2
# what multiplies 16-bit tiles; on sm_90 and sm_100 operands come from shared memory
TENSOR_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}
TENSOR_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")
# the bias's gradient has a tile of its own, which is not in the table
BIAS_SPILL_BYTES = 768

HALF = AttentionProblem.dense(BATCH, HEADS, SEQLEN, 64, "bfloat16", causal=True)
SINGLE = HALF.replace(dtype="float32")
TF32 = SINGLE.replace(allow_tf32=True)
# all that can be asked for at once; a bias is for dense input only
EVERYTHING = {
    "mask": Mask(window_left=128, window_right=0),
    "softcap": 30.0,
    "alibi": "heads",
    "bias": "float",
    "dropout": True,
    "sinks": True,
}
TERMS = {"softcap": 30.0, "alibi": "heads", "sinks": True}


def wide(problem: AttentionProblem, head_dim: int) -> AttentionProblem:
    return problem.replace(head_dim=head_dim, head_dim_v=head_dim)


# (pass, problem); the dearest features are spread over the architectures
EVERYWHERE = [
    ("forward", wide(HALF, 128)),
    ("dq", HALF.replace(**TERMS)),
    ("dkdv", wide(HALF, 128)),
]
WANTED = {
    "sm_90": [
        ("forward", HALF.replace(**EVERYTHING)),
        ("dk", wide(HALF, 256)),
        ("dv", wide(HALF, 256)),
        ("forward", TF32),
    ],
    "sm_80": [
        ("dkdv", HALF.replace(**EVERYTHING)),
        ("forward", SINGLE),
        ("dq", wide(TF32, 128)),
        ("forward", HALF.replace(dtype="float16", packed=True, head_dim=96)),
    ],
    "sm_100": [
        ("forward", wide(HALF, 256)),
        ("dq", wide(HALF, 128).replace(**EVERYTHING)),
    ],
    "sm_120": [
        ("forward", wide(HALF, 256).replace(bias="bool", mask=Mask())),
        ("bias", HALF.replace(bias="float")),
        # the widest operands on the chip with the least shared memory
        ("bias", wide(SINGLE, 256).replace(bias="float")),
        ("dkdv", HALF.replace(packed=True, mask=Mask())),
        ("dq", SINGLE),
    ],
}


@pytest.mark.parametrize(
    "arch",
    [pytest.param(a, marks=pytest.mark.newest) if a in ("sm_100", "sm_120") else a for a in WANTED],
)
def test_kernels_fit_the_chip_and_say_what_they_are(arch: str) -> None:
    chip = architecture(arch)
    wanted = EVERYWHERE + WANTED[arch]
    requests = [Request(f"portable:{pass_}", problem, arch) for pass_, problem in wanted]
    for (pass_, problem), kernels in zip(wanted, compile_exhibits(requests), strict=True):
        *before, kernel = kernels
        where = (kernel.name, arch, kernel.registers, kernel.spill_bytes)
        assert kernel.shared_bytes <= chip.shared_bytes_per_block, where
        assert kernel.registers <= chip.max_registers_per_thread, where
        assert (kernel.spill_bytes > 0) == (kernel.stack_bytes > 0), where
        if pass_ == "bias":
            assert kernel.spill_bytes <= BIAS_SPILL_BYTES, where
        else:
            assert_is_the_tables(kernel, pass_, problem, arch)
        assert_instructions(kernel, problem, arch)
        assert_name(kernel, pass_, problem)
        assert [one.name for one in before] == launched_before(pass_, problem)
        assert all(one.spill_bytes == 0 for one in before), where


def assert_is_the_tables(
    kernel: Compiled, pass_: str, problem: AttentionProblem, arch: str
) -> None:
    tile = choose_config(problem, arch, pass_)
    where = (kernel.name, arch, kernel.registers, tile)
    assert kernel.spill_bytes <= tile.spill_bytes, (kernel.spill_bytes, *where)
    assert kernel.threads == 32 * tile.num_warps, where
    assert decode(kernel.name).tile == (tile.block_m, tile.block_n), where
    block = tile.block_m if pass_ in ("forward", "dq") else tile.block_n
    if problem.packed:  # slots that are enough wherever the sequences begin
        programs = BATCH * SEQLEN // block + BATCH
    else:
        programs = BATCH * math.ceil(SEQLEN / block)
    assert kernel.grid == (programs * HEADS, 1, 1), where


def assert_instructions(kernel: Compiled, problem: AttentionProblem, arch: str) -> None:
    used = {name for name in TENSOR_INSTRUCTIONS if kernel.count(name)}
    if problem.dtype == "float32" and not problem.allow_tf32:
        assert used == set(), kernel.name
        assert kernel.count("FFMA") + kernel.count("FFMA2") > 0, kernel.name
    elif problem.allow_tf32:
        assert len(used) == 1, kernel.name
    else:
        assert used == {TENSOR_INSTRUCTION[arch]}, kernel.name


def assert_name(kernel: Compiled, pass_: str, problem: AttentionProblem) -> None:
    name = decode(kernel.name)
    direction = "forward" if pass_ == "forward" else "backward"
    dtype = "tf32" if problem.allow_tf32 else problem.dtype
    assert (name.family, name.role) == ("flashdig", f"attention_{direction}"), kernel.name
    assert (name.dtype, name.head_dim, name.pass_) == (dtype, problem.head_dim, direction)
    window = problem.mask.window_left is not None
    assert name.causal == (None if window else problem.causal), kernel.name
    assert name.tensor_cores == (dtype != "float32"), kernel.name
    for said, words in (
        (problem.packed, "packed"),
        (problem.softcap > 0, "softcap"),
        (problem.alibi != "none", "ALiBi"),
        (problem.dropout, "dropout"),
        (problem.bias == "float", ", bias,"),
        (problem.bias == "bool", "boolean bias"),
        (problem.sinks and direction == "forward", "sinks"),
        (problem.head_dim != problem.head_dim_v, f"(v: {problem.head_dim_v})"),
    ):
        assert said == (words in name.words), (kernel.name, words)


def launched_before(pass_: str, problem: AttentionProblem) -> list[str]:
    if pass_ != "forward":
        return [delta(problem)]
    return ["flashdig_clear_slack"] if problem.packed else []


def delta(problem: AttentionProblem) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[problem.dtype]
    return f"flashdig_backward_delta_{short}_v{problem.head_dim_v}"


def test_the_sample_covers_every_pass_dtype_and_feature() -> None:
    asked = [one for wanted in (EVERYWHERE, *WANTED.values()) for one in wanted]
    assert {pass_ for pass_, _ in asked} == {"forward", "dq", "dkdv", "dk", "dv", "bias"}
    problems = [problem for _, problem in asked]
    assert {p.dtype for p in problems} == {"float16", "bfloat16", "float32"}
    assert {p.head_dim for p in problems} == {64, 96, 128, 256}
    assert {p.bias for p in problems} == {"none", "float", "bool"}
    for feature in ("dropout", "sinks", "packed", "allow_tf32"):
        assert {getattr(p, feature) for p in problems} == {False, True}, feature


def test_an_unknown_pass_is_refused_by_name() -> None:
    request = Request("portable:sideways", HALF, "sm_80")
    with pytest.raises(OfflineError, match=r"unknown pass 'sideways' .* known: forward, dq, dkdv"):
        compile_exhibits([request])
