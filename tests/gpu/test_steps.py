"""The steps from v1 to v2 and the Gluon pair on a GPU: right, and their ends equal to the bit."""

import pytest
import torch

from flashdig.bench.gate import check, poison
from flashdig.evidence.kernels import launched_kernels
from flashdig.generations.inputs import PATHOLOGICAL, random_qkv
from flashdig.generations.ladder import PAIR, generation
from flashdig.generations.steps_paths import step_generations
from flashdig.problem import AttentionProblem
from tests.exhibit_cases import CASES, assert_within_contract, inputs_of, problem_of

pytestmark = pytest.mark.gpu
DTYPES = ("float16", "bfloat16", "float32")
LARGER = {
    f"d{head_dim} {'causal' if causal else 'full'}": AttentionProblem.dense(
        2, 4, 700, head_dim, causal=causal, num_heads_kv=2
    )
    for head_dim in (64, 128)
    for causal in (False, True)
}
# (queries, keys, causal): partial tiles, rows without keys, one of each, more keys than queries
PAIR_LENGTHS = [
    (128, 128, False),
    (128, 128, True),
    (65, 130, False),
    (65, 130, True),
    (200, 90, True),
    (1, 300, True),
    (300, 1, False),
    (1000, 1000, True),
]


def assert_paths_hold(problem: AttentionProblem, inputs) -> None:
    whole = "step:causal_skipping" if problem.causal else "step:lse"
    ends = {"step:none": "v1", whole: "v2", "step:k_layout": "v2_transposed"}
    for exhibit in step_generations(problem):
        assert exhibit.unsupported(problem, "cuda") == []
        out, lse = exhibit.run(inputs.q, inputs.k, inputs.v, problem.causal)
        assert_within_contract(out, lse, inputs, problem.causal)
        if exhibit.name in ends:
            rung = generation(ends[exhibit.name])
            expected, expected_lse = rung.run(inputs.q, inputs.k, inputs.v, problem.causal)
            assert torch.equal(out, expected), exhibit.name
            assert (lse is None) == (expected_lse is None)
            assert lse is None or torch.equal(lse, expected_lse), exhibit.name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_paths_on_the_conformance_cases(name, dtype) -> None:
    assert_paths_hold(problem_of(name, dtype), inputs_of(name, dtype, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LARGER)
def test_paths_on_larger_problems(name, dtype) -> None:
    problem = LARGER[name].replace(dtype=dtype)
    assert_paths_hold(problem, random_qkv(problem, device="cuda", seed=1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_as_many_kernels_as_predicted(dtype, causal) -> None:
    problem = AttentionProblem.dense(2, 4, 512, 64, dtype, causal=causal)
    inputs = random_qkv(problem, device="cuda", seed=3)
    for exhibit in step_generations(problem):
        found = launched_kernels(
            lambda run=exhibit.run: run(inputs.q, inputs.k, inputs.v, causal),
        )
        kernels = sum(kernel.count for kernel in found if kernel.is_kernel)
        assert kernels == exhibit.predict(problem).kernels, (exhibit.name, found)


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("lengths", PAIR_LENGTHS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", PAIR)
def test_gluon_pair_within_the_gate(name, dtype, head_dim, lengths, group_size) -> None:
    seqlen_q, seqlen_k, causal = lengths
    problem = AttentionProblem.dense(
        2, 4, seqlen_q, head_dim, dtype, causal=causal, num_heads_kv=4 // group_size,
        seqlen_k=seqlen_k,
    )  # fmt: skip
    inputs = random_qkv(problem, device="cuda", seed=5)
    exhibit = generation(name)
    assert exhibit.unsupported(problem, "cuda") == []
    poison(inputs.q.numel() * inputs.q.element_size(), inputs.q.device)
    out, lse = exhibit.run(inputs.q, inputs.k, inputs.v, causal)
    result = check(out, inputs.q, inputs.k, inputs.v, causal=causal, lse=lse, pairs="all")
    assert result.ok, result.reason


@pytest.mark.parametrize("make", PATHOLOGICAL.values(), ids=PATHOLOGICAL)
@pytest.mark.parametrize("name", PAIR)
def test_gluon_pair_on_difficult_input(name, make) -> None:
    problem = AttentionProblem.dense(1, 2, 190, 64, "bfloat16", causal=True)
    inputs = make(problem)
    q, k, v = (x.cuda() for x in (inputs.q, inputs.k, inputs.v))
    out, lse = generation(name).run(q, k, v, True)
    result = check(out, q, k, v, causal=True, lse=lse, pairs="all")
    assert result.ok, result.reason


@pytest.mark.parametrize("name", PAIR)
def test_gluon_pair_is_repeatable_and_one_kernel(name) -> None:
    problem = AttentionProblem.dense(2, 4, 513, 128, "bfloat16", causal=True)
    inputs = random_qkv(problem, device="cuda", seed=6)

    def call() -> torch.Tensor:
        return generation(name).run(inputs.q, inputs.k, inputs.v, True)[0]

    first = call()
    for _ in range(5):
        poison(2 * first.numel() * 4)
        assert torch.equal(call(), first)
    (kernel,) = [kernel for kernel in launched_kernels(call) if kernel.is_kernel]
    assert kernel.name == f"flash_fwd_{name}_bf16_d128_m64n64_causal"
