"""Memory counters on the GPU itself, where Nsight Compute is there and permitted."""

from functools import partial

import pytest

from flashdig.costs.traffic import compulsory
from flashdig.evidence.counters import Plan, find_ncu, read_counters
from flashdig.evidence.kernels import launched_kernels
from flashdig.generations.inputs import random_qkv
from flashdig.generations.ladder import generation
from flashdig.problem import AttentionProblem

pytestmark = pytest.mark.gpu


def test_unfused_attention_moves_more_than_the_inputs_and_fused_reads_them_all() -> None:
    if find_ncu() is None:
        pytest.skip("Nsight Compute is not installed")
    problem = AttentionProblem.dense(4, 16, 2048, 128, "bfloat16")
    inputs = random_qkv(problem, device="cuda", seed=0)
    q, k, v = inputs.q, inputs.k, inputs.v
    launched = {}
    for name in ("naive", "v2", "sdpa_flash"):
        kernels = launched_kernels(partial(generation(name).run, q, k, v, False))
        launched[name] = sum(kernel.count for kernel in kernels if kernel.is_kernel)
    found, notes = read_counters(Plan(launched, q, k, v, False))
    if any("administrators" in note for note in notes):
        pytest.skip(notes[0])
    assert notes == []
    assert {name: sum(k.count for k in seen.kernels) for name, seen in found.items()} == launched
    loads = compulsory(problem).load_bytes
    for name in ("v2", "sdpa_flash"):
        assert 0.98 * loads <= found[name].dram_read_bytes <= 3 * loads
        assert (found[name].l2_bytes or 0) >= 0.98 * loads
    scores = 4 * 16 * 2048 * 2048 * 2
    assert found["naive"].dram_write_bytes > scores
