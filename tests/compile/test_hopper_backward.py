"""The Hopper backward compiled without a GPU: its instructions, no serialised products, and loops
whose registers stay registers.

What spills is kept outside the loops over rows: a few numbers of a tile of keys, and at most two of
them are read inside, in a step that masks.
"""

import pytest
import triton

from flashdig.evidence.offline import Request, compile_exhibits
from flashdig.evidence.ptxas import run_ptxas
from flashdig.evidence.sass import loops, parse_sass
from flashdig.problem import AttentionProblem
from flashdig.readers.kernel_names import decode

CAUSAL = AttentionProblem.dense(2, 4, 1536, 128, num_heads_kv=2, causal=True)
FEW_KEYS = AttentionProblem.dense(2, 4, 1024, 128, num_heads_kv=2, causal=True)
FULL = AttentionProblem.dense(2, 4, 1024, 128)
NARROW = AttentionProblem.dense(2, 4, 1024, 64, causal=True)
SHORT = AttentionProblem.dense(2, 4, 512, 64, causal=True)
WIDE = AttentionProblem.dense(2, 4, 1024, 256).replace(packed=True)
# numbers read in all loops of a kernel together; 3.9's ptxas spills more of them
SPILLED = 2 if triton.__version__.startswith("3.6.") else 16
# name, problem -> the kernels' parts, tiles, the most bytes of stack, and the mbarriers: one that
# is made and not used lies under other buffers
WANTED = [
    ("hopper:backward", CAUSAL, [("backward", (64, 128), 128, 10)]),
    ("hopper:backward", FULL, [("backward", (64, 128), 128, 8)]),
    ("hopper:backward", NARROW, [("backward", (128, 128), 128, 10)]),
    ("hopper:backward", SHORT, [("backward", (64, 128), 0, 14)]),
    # dQ apart
    (
        "hopper:backward",
        FEW_KEYS,
        [("backward_dkdv", (64, 128), 72, 12), ("backward_dq", (128, 64), 16, 24)],
    ),
    (
        "hopper:backward_deterministic",
        FULL.replace(alibi="heads"),
        [("backward_dkdv", (64, 128), 480, 8), ("backward_dq", (128, 128), 48, 14)],
    ),
    (
        "hopper:backward_deterministic",
        WIDE,
        [("backward_dkdv", (64, 64), 64, 6), ("backward_dq", (128, 32), 72, 16)],
    ),
]


def spilled_in_product_loops(listing: str) -> int:
    """Accesses to local memory in the innermost loops that multiply matrices."""
    multiplying = {}
    for loop in loops(parse_sass(listing)):
        opcodes = {i.address: i.opcode for i in loop.instructions}
        if any(opcode.startswith("HGMMA") for opcode in opcodes.values()):
            multiplying[loop.head] = opcodes
    assert multiplying
    return sum(
        opcode.startswith(("LDL", "STL"))
        for loop in multiplying.values()
        if not any(other.keys() < loop.keys() for other in multiplying.values())
        for opcode in loop.values()
    )


@pytest.mark.newest
def test_instructions_products_and_registers() -> None:
    requests = [Request(name, problem, "sm_90") for name, problem, _ in WANTED]
    for (_, problem, expected), kernels in zip(WANTED, compile_exhibits(requests), strict=True):
        fused = len(expected) == 1
        before, *main = kernels[:-1] if fused else kernels
        for helper in (before, kernels[-1]) if fused else (before,):
            assert decode(helper.name).role == "attention_part", helper.name
            assert helper.stack_bytes == 0, helper.name
        for kernel, (part, tile, stack_bytes, mbarriers) in zip(main, expected, strict=True):
            where = (kernel.name, kernel.registers, kernel.stack_bytes)
            assert kernel.name.startswith(f"flashdig_hopper_{part}_bf16_"), where
            assert kernel.stack_bytes <= stack_bytes, where
            assert kernel.threads == 384, where
            assert kernel.ptx.count("mbarrier.init") == mbarriers, where
            for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "SYNCS"):
                assert kernel.count(instruction), (instruction, where)
            # dQ is added by vector reductions, or not at all
            assert bool(kernel.count("REDG")) == fused, where
            if "alibi" not in kernel.name:  # whose distances spill
                assert spilled_in_product_loops(kernel.listing) <= SPILLED, where
            assert run_ptxas(kernel.ptx, kernel.options).warnings == (), where
            read = decode(kernel.name)
            assert (read.role, read.tile) == ("attention_backward", tile), where
            assert (read.dtype, read.head_dim) == ("bfloat16", problem.head_dim), where
