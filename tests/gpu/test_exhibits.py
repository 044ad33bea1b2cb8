"""Every exhibit on the GPU: the conformance cases, larger problems, and kernel names and counts."""

import pytest
import torch

from flashdig.evidence.kernels import launched_kernels
from flashdig.generations.inputs import random_qkv
from flashdig.generations.ladder import RUNGS, generation
from flashdig.problem import AttentionProblem
from tests.exhibit_cases import CASES, assert_within_contract, inputs_of, problem_of

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "bfloat16", "float32")
LARGER = {
    f"d{head_dim} {'causal' if causal else 'full'}": AttentionProblem.dense(
        2, 4, 700, head_dim, causal=causal, num_heads_kv=2
    )
    for head_dim in (32, 64, 128, 256)
    for causal in (False, True)
}


def run_and_check(rung: str, problem: AttentionProblem, inputs) -> None:
    exhibit = generation(rung)
    reasons = exhibit.unsupported(problem, "cuda")
    if reasons:
        assert all(isinstance(reason, str) and reason for reason in reasons)
        return
    if rung.startswith("sdpa") and not serves(exhibit, problem, inputs):
        return
    out, lse = exhibit.run(inputs.q, inputs.k, inputs.v, problem.causal)
    assert_within_contract(out, lse, inputs, problem.causal)


def serves(exhibit, problem: AttentionProblem, inputs) -> bool:
    """torch's backends refuse some problems only when they are called, and say so."""
    try:
        exhibit.run(inputs.q, inputs.k, inputs.v, problem.causal)
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rung", RUNGS)
def test_conformance(rung, name, dtype) -> None:
    run_and_check(rung, problem_of(name, dtype), inputs_of(name, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGER)
@pytest.mark.parametrize("rung", RUNGS)
def test_larger_problems(rung, name, dtype) -> None:
    problem = LARGER[name].replace(dtype=dtype)
    run_and_check(rung, problem, random_qkv(problem, device="cuda", seed=1))


@pytest.mark.parametrize("rung", ["v1", "v2", "v2_transposed"])
def test_tf32_is_used_only_when_torch_allows_it(rung) -> None:
    problem = AttentionProblem.dense(1, 2, 256, 64, "float32")
    inputs = random_qkv(problem, device="cuda", seed=2)
    exact = generation(rung).run(inputs.q, inputs.k, inputs.v, False)[0]
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        rounded = generation(rung).run(inputs.q, inputs.k, inputs.v, False)[0]
        assert_within_contract(rounded, None, inputs, causal=False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert_within_contract(exact, None, inputs, causal=False)
    assert 1e-5 < (exact - rounded).abs().max() < 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rung", RUNGS)
def test_as_many_kernels_as_predicted(rung, dtype, causal) -> None:
    # large enough that no library splits the keys for want of programs
    problem = AttentionProblem.dense(8, 16, 512, 64, dtype, causal=causal)
    exhibit = generation(rung)
    if exhibit.unsupported(problem, "cuda"):
        return
    inputs = random_qkv(problem, device="cuda", seed=3)

    def call() -> object:
        with torch.no_grad():
            return exhibit.run(inputs.q, inputs.k, inputs.v, causal)

    found = launched_kernels(call)
    kernels = sum(kernel.count for kernel in found if kernel.is_kernel)
    assert kernels == exhibit.predict(problem).kernels, found
    copies = sum(kernel.count for kernel in found if kernel.name.startswith("Memcpy"))
    assert copies == (1 if rung == "naive" and causal else 0)


@pytest.mark.parametrize("rung", ["v1", "v2", "online_softmax"])
def test_kernel_names_say_what_they_are(rung) -> None:
    problem = AttentionProblem.dense(1, 2, 128, 64, "float16", causal=True)
    inputs = random_qkv(problem, device="cuda", seed=4)
    names = [
        kernel.name
        for kernel in launched_kernels(
            lambda: generation(rung).run(inputs.q, inputs.k, inputs.v, True)
        )
    ]
    expected = {
        "v1": "flash_fwd_v1_fp16_d64_m64n64_causal",
        "v2": "flash_fwd_v2_fp16_d64_m64n64_causal",
        "online_softmax": "online_softmax_fp16_n128_causal",
    }
    assert expected[rung] in names


def test_forward_is_repeatable_to_the_bit_on_poisoned_memory() -> None:
    from flashdig.bench.gate import poison

    problem = AttentionProblem.dense(2, 4, 513, 64, "bfloat16", causal=True)
    inputs = random_qkv(problem, device="cuda", seed=5)
    for rung in ("online_softmax", "v1", "v2", "v2_transposed"):
        first = generation(rung).run(inputs.q, inputs.k, inputs.v, True)[0]
        for _ in range(3):
            poison(2 * first.numel() * 4)
            assert torch.equal(generation(rung).run(inputs.q, inputs.k, inputs.v, True)[0], first)
