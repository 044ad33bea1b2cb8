"""Every Triton and Gluon exhibit compiled for every architecture, without a GPU.

Each test compiles in a process of its own, so that a compiler that ends it is a failed test with a
message. What is asserted holds with Triton 3.9, and on sm_90 with 3.6.
"""

import pytest
import triton

from flashdig.evidence.offline import (
    Compiled,
    OfflineError,
    Request,
    compile_exhibit,
    compile_exhibits,
    read_cubin,
)
from flashdig.generations.steps_paths import step_names
from flashdig.hardware.arch import UnknownArchitectureError, architecture
from flashdig.problem import AttentionProblem

OLDEST = triton.__version__.startswith("3.6.")
ARCHS = ("sm_90", "sm_80", "sm_100", "sm_120")  # the longest first
# what multiplies 16-bit tiles; on sm_90 and sm_100 operands come from shared memory
TENSOR_INSTRUCTION = {"sm_80": "HMMA", "sm_90": "HGMMA", "sm_100": "UTCHMMA", "sm_120": "HMMA"}
TENSOR_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA", "QMMA", "QGMMA", "UTCQMMA", "IMMA")
FLOAT_INSTRUCTIONS = ("FADD", "FADD2", "FMUL", "FMUL2", "FFMA", "FFMA2", "MUFU")

HALF = AttentionProblem.dense(1, 4, 1024, 64, "float16", causal=True)
SINGLE = AttentionProblem.dense(1, 4, 1024, 64, "float32", causal=True)
TF32 = SINGLE.replace(allow_tf32=True)
WIDE = AttentionProblem.dense(1, 4, 1024, 128, "bfloat16")
PAIR = {
    head_dim: AttentionProblem.dense(1, 4, 1024, head_dim, "bfloat16", causal=True)
    for head_dim in (64, 128)
}


def compiled(requests: list[tuple[str, AttentionProblem, str]]) -> list[Compiled]:
    """One kernel for each request; all fit the chip and say what they are."""
    asked = [Request(*request) for request in requests]
    found = []
    for request, kernels in zip(asked, compile_exhibits(asked), strict=True):
        (kernel,) = kernels
        chip = architecture(request.arch)
        assert kernel.shared_bytes <= chip.shared_bytes_per_block, request
        assert kernel.registers <= chip.max_registers_per_thread, request
        assert kernel.name.endswith("_causal" if request.problem.causal else "_full"), request
        assert (kernel.spill_bytes > 0) == (kernel.stack_bytes > 0), request
        found.append(kernel)
    return found


def tensor_instructions(kernel: Compiled) -> dict[str, int]:
    counts = {name: kernel.count(name) for name in TENSOR_INSTRUCTIONS}
    return {name: count for name, count in counts.items() if count}


def hmma_of_a_step(block_m: int, block_n: int, head_dim: int, warps: int) -> int:
    """m16n8k16 instructions of a warp for both products of a tile; each is in the code once."""
    return 2 * block_m * block_n * head_dim // (16 * 8 * 16 * warps)


def wanted_for(arch: str) -> dict[tuple[str, str], AttentionProblem]:
    """(exhibit, kind of problem) -> problem: all that is compiled for an architecture."""
    rungs = {
        **{(name, "half"): HALF for name in ("online_softmax", "v1", "v2", "v2_transposed")},
        **{(name, "single"): SINGLE for name in ("v1", "v2")},
        **{(name, "wide"): WIDE for name in ("v1", "v2")},
        **{(name, "pair 64"): PAIR[64] for name in ("split_q", "split_k")},
    }
    if arch in ("sm_80", "sm_90"):
        rungs["v2", "tf32"] = TF32
        rungs["v2_transposed", "single"] = SINGLE
        rungs |= {(name, "pair 128"): PAIR[128] for name in ("split_q", "split_k")}
    steps = ["step:none", "step:loop_order", "step:sequence_parallel", "step:causal_skipping"]
    steps += ["without:late_division", "without:exp2"]
    if arch == "sm_90" and not OLDEST:  # which takes a part of them
        steps = step_names()
    return rungs | {(name, "half"): HALF for name in steps}


@pytest.mark.parametrize(
    "arch",
    [a if a == "sm_90" else pytest.param(a, marks=pytest.mark.newest) for a in ARCHS],
)
def test_every_exhibit(arch) -> None:
    """All of an architecture in one process: starting one takes as long as three kernels."""
    wanted = wanted_for(arch)
    kernels = compiled([(name, problem, arch) for (name, _), problem in wanted.items()])
    found = dict(zip(wanted, kernels, strict=True))
    for (name, kind), kernel in found.items():
        assert_instructions(kernel, name, kind, arch)
    assert_names_and_grids(found)
    assert_only_v1_spills(found, arch)
    half = {name: kernel for (name, kind), kernel in found.items() if kind == "half"}
    assert_ends_of_the_path(half)
    assert_what_steps_change(half)
    for kind in ("pair 64", "pair 128"):
        if ("split_q", kind) in found:
            assert_what_crosses_between_warps(found["split_q", kind], found["split_k", kind])


def assert_instructions(kernel: Compiled, name: str, kind: str, arch: str) -> None:
    where = (name, kind, arch)
    used, unit = tensor_instructions(kernel), TENSOR_INSTRUCTION[arch]
    if kind.startswith("pair"):
        unit = "HMMA"  # it asks for sm_80's instruction on every chip
    if name == "online_softmax":
        assert used == {}, where
    elif kind == "single":
        # both products as fused multiply-adds (FFMA2 does two), none on tensor cores
        assert used == {}, where
        products = kernel.count("FFMA") + 2 * kernel.count("FFMA2")
        assert products >= 2 * 32 * 32 * 64 // kernel.threads, where
    elif kind == "tf32":
        # 32 rows are too few for the instruction of a warp group, so HMMA everywhere
        assert set(used) == {"HMMA"}, where
        assert kernel.count("HMMA.1688.F32.TF32") == used["HMMA"], where
    else:
        assert set(used) == {unit}, where
        if unit == "HMMA":
            head_dim = 128 if kind in ("wide", "pair 128") else 64
            assert used["HMMA"] == hmma_of_a_step(64, 64, head_dim, warps=4), where


def assert_names_and_grids(found) -> None:
    flags = "parallel_latediv_exp2_lse_skip"
    for (name, kind), expected in {
        ("online_softmax", "half"): "online_softmax_fp16_n1024_causal",
        ("v1", "half"): "flash_fwd_v1_fp16_d64_m64n64_causal",
        ("v2", "single"): "flash_fwd_v2_fp32_d64_m32n32_causal",
        ("v2", "wide"): "flash_fwd_v2_bf16_d128_m64n64_full",
        ("step:none", "half"): "flash_fwd_steps_keys_outside_fp16_d64_m64n64_causal",
        ("step:causal_skipping", "half"): (
            f"flash_fwd_steps_queries_outside_{flags}_fp16_d64_m64n64_causal"
        ),
        ("split_q", "pair 64"): "flash_fwd_split_q_bf16_d64_m64n64_causal",
        ("split_k", "pair 64"): "flash_fwd_split_k_bf16_d64_m64n64_causal",
    }.items():
        assert found[name, kind].name == expected
    for name in ("v1", "step:none", "step:loop_order"):
        assert found[name, "half"].grid == (4, 1, 1), name
    for name in ("v2", "step:sequence_parallel"):
        assert found[name, "half"].grid == (16, 4, 1), name


def assert_only_v1_spills(found, arch: str) -> None:
    """v1 keeps a tile of K and V for all queries, beside O, the scores and all their addresses.

    In float32 the FMA units want both tiles in registers: it spills everywhere. With head_dim 128
    and 16 bits it spills as well, but for sm_90, whose products read K and V from shared memory.
    """
    for (name, kind), kernel in found.items():
        if name not in ("v1", "step:none"):
            assert kernel.spill_bytes == 0, (name, kind)
    for kind, spills in (("single", True), ("wide", arch != "sm_90")):
        v1 = found["v1", kind]
        assert (v1.spill_bytes > 0) == spills, kind
        if spills:
            assert v1.registers == 255, kind


def assert_ends_of_the_path(half: dict[str, Compiled]) -> None:
    # v1: the same operations, though the instructions may stand in another order
    none, v1 = half["step:none"], half["v1"]
    assert (none.registers, none.shared_bytes) == (v1.registers, v1.shared_bytes)
    for name in (*FLOAT_INSTRUCTIONS, *TENSOR_INSTRUCTIONS, "LDG", "STG", "BAR"):
        assert none.count(name) == v1.count(name), name
    # v2: the same code
    for step, rung in {"step:causal_skipping": "v2", "step:k_layout": "v2_transposed"}.items():
        if step in half:
            assert half[step].order == half[rung].order, step
            assert half[step].registers == half[rung].registers, step


def assert_what_steps_change(half: dict[str, Compiled]) -> None:
    # Triton's e^x is a multiplication by log2(e) and a 2^x that guards denormals by two more
    scores = 64 * 64 // half["v2"].threads
    multiplications = [
        half[name].count("FMUL") + 2 * half[name].count("FMUL2") for name in ("without:exp2", "v2")
    ]
    assert multiplications[0] - multiplications[1] >= 2 * scores
    # a loop over tiles of queries in the program keeps more alive
    assert half["step:loop_order"].registers > half["step:sequence_parallel"].registers


def assert_what_crosses_between_warps(q: Compiled, k: Compiled) -> None:
    # two rows a thread, each in four lanes: two shuffles for a maximum and two for a sum
    assert q.count("SHFL") == 8
    assert q.count("STS") == 0
    # K and V: a barrier before each is read and one after; and one behind the loop
    assert q.count("BAR.SYNC") == 5
    # eight rows a thread; maxima, sums and P through shared memory
    assert k.count("SHFL") >= 4 * q.count("SHFL")
    assert k.count("STS") + k.count("STSM") >= 8
    assert k.count("LDS") > q.count("LDS")
    assert k.count("BAR.SYNC") >= 3 * q.count("BAR.SYNC")
    assert k.registers > q.registers
    assert k.shared_bytes > q.shared_bytes


@pytest.mark.newest
def test_no_tensor_cores_on_turing() -> None:
    """Triton multiplies on the CUDA cores of sm_75, whatever the type."""
    names = (("v2", HALF), ("v2", SINGLE), ("naive", HALF))
    requests = [Request(name, problem, "sm_75") for name, problem in names]
    (half,), (single,), eager = compile_exhibits(requests)
    for kernel, tile in ((half, 64), (single, 32)):
        assert tensor_instructions(kernel) == {}
        assert kernel.count("FFMA") >= 2 * tile * tile * 64 // kernel.threads
    assert single.spill_bytes == 0
    assert half.spill_bytes > 1000  # a tile made for tensor cores
    assert eager == []  # torch's kernels are not compiled here


def test_what_cannot_be_compiled_says_so_in_a_line() -> None:
    with pytest.raises(OfflineError, match=r"v9, batch 1, .*, for sm_90: .*unknown rung 'v9'"):
        compile_exhibit("v9", HALF, "sm_90")
    with pytest.raises(UnknownArchitectureError, match=r"no facts about .*'sm_55'"):
        compile_exhibit("v2", HALF, "sm_55")
    with pytest.raises(OfflineError, match=r"cuobjdump"):
        read_cubin(b"not a cubin")
