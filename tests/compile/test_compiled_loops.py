"""The table that predictions use of the exhibits as compiled, against the compiler itself."""

import pytest
import triton

from flashdig.costs.compiled_loops import CompiledLoop, compiled_loop
from flashdig.evidence.offline import Request, compile_exhibits
from flashdig.hardware.arch import architecture
from flashdig.problem import AttentionProblem

HOPPER = architecture("9.0")
WARPS = 4
CASES = [
    ("v2", "float16", False, 64),
    ("v2", "float16", False, 128),
    ("v2", "bfloat16", False, 64),
    ("v2", "float32", True, 64),
]
# v1 and CUDA-core products take other registers with 3.9 (v2 in float32: five blocks fit, not two)
if triton.__version__.startswith("3.6."):
    CASES += [
        ("v1", "float16", False, 64),
        ("v1", "float32", False, 64),
        ("v2", "float32", False, 64),
        ("v2_transposed", "float32", False, 64),
    ]


def _blocks(registers: int, shared_bytes: int) -> int:
    found = CompiledLoop(shared_bytes, (registers, registers), (1, 1))
    return found.blocks_per_sm(HOPPER, WARPS, causal=False)


@pytest.mark.newest
@pytest.mark.parametrize("causal", [False, True])
def test_resident_blocks_are_those_of_the_compiled_kernels(causal):
    """Registers move by a few between compilers; what has to hold is how many blocks fit."""
    requests = []
    for name, dtype, tf32, head_dim in CASES:
        problem = AttentionProblem.dense(2, 16, 4096, head_dim, dtype, causal=causal)
        requests.append(Request(name, problem.replace(allow_tf32=tf32), "sm_90"))
    kernels = compile_exhibits(requests)
    for (name, dtype, tf32, head_dim), (kernel,) in zip(CASES, kernels, strict=True):
        listed = compiled_loop(HOPPER, name, "tfloat32" if tf32 else dtype, head_dim)
        assert listed is not None
        assert kernel.threads == 32 * WARPS
        found = _blocks(kernel.registers, kernel.shared_bytes)
        assert found == listed.blocks_per_sm(HOPPER, WARPS, causal), (name, dtype, tf32, head_dim)
        assert listed.instructions(causal) < len(kernel.order)
