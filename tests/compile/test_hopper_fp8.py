"""The fp8 forward compiled without a GPU: P stays in its registers, products overlap, no spills."""

import re

import pytest

from flashdig.evidence.offline import Request, compile_exhibits
from flashdig.evidence.ptxas import run_ptxas
from flashdig.problem import AttentionProblem
from flashdig.readers.kernel_names import decode

PLAIN = AttentionProblem.dense(2, 4, 1024, 128, num_heads_kv=2).replace(dtype="float8_e4m3fn")


@pytest.mark.newest
def test_p_stays_in_its_registers() -> None:
    (request,) = [Request("hopper:fp8_forward", PLAIN, "sm_90")]
    (kernels,) = compile_exhibits([request])
    assert [one.name.split("_")[1] for one in kernels] == ["fp8", "hopper"]
    kernel = kernels[-1]
    where = (kernel.name, kernel.registers, kernel.stack_bytes)
    # an address or two that are kept over a whole tile of queries; none in the walk
    assert kernel.spill_bytes <= 16, where
    assert kernel.count("QGMMA") > 0, where
    assert kernel.count("HGMMA") == 0, where
    # nothing is exchanged on the way from accumulators to operands: one permutation a word of P,
    # 8 at 64 keys, in each of three consumers' first tile and walk, and a few elsewhere; two row
    # maxima and row sums take a few shuffles each
    assert kernel.count("PRMT") <= 3 * 2 * 8 + 16, where
    assert kernel.count("SHFL") <= 64, where
    assert re.search(r"wgmma.mma_async\S*\.m64n128k32\.f32\.e4m3\.e4m3", kernel.ptx)
    assert run_ptxas(kernel.ptx, kernel.options).warnings == (), where
    name = decode(kernel.name)
    assert (name.family, name.role) == ("flashdig", "attention_forward"), where
    assert (name.dtype, name.head_dim) == ("float8_e4m3fn", 128), where
    # it waits for the sections of V^T that it reads, and for the kernel that writes it at the end
    for text in ("ld.acquire.gpu", "fence.proxy.async.global", "griddepcontrol.wait"):
        assert text in kernel.ptx, where
    # which reads and writes 16 bytes at a time, and counts what it has written
    values = kernels[0]
    where = (values.name, values.registers, values.stack_bytes, dict(values.opcodes))
    assert values.spill_bytes == 0, where
    for opcode in ("LDG", "STG"):
        assert values.count(opcode) == values.count(f"{opcode}.E.128") > 0, where
    assert "griddepcontrol.launch_dependents" in values.ptx, where
    assert re.search(r"\b(atom|red)\.\S*release", values.ptx), where
