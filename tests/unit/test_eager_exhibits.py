"""The eager and SDPA exhibits on the CPU: the conformance cases, and refusals in words."""

import pytest
import torch

from flashdig.generations.ladder import RUNGS, generation
from flashdig.problem import AttentionProblem
from tests.exhibit_cases import CASES, EAGER_RUNGS, assert_within_contract, inputs_of, problem_of

ON_CPU = ("naive", "inplace", "sdpa_math", "sdpa_flash")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rung", ON_CPU)
def test_conformance(rung, name, dtype) -> None:
    exhibit, problem = generation(rung), problem_of(name, dtype)
    inputs = inputs_of(name, dtype)
    if reasons := exhibit.unsupported(problem, "cpu"):
        assert problem.causal
        assert problem.seqlen_q != problem.seqlen_k, reasons
        return
    out, lse = exhibit.run(inputs.q, inputs.k, inputs.v, problem.causal)
    assert_within_contract(out, lse, inputs, problem.causal)


def test_in_place_and_out_of_place_agree_to_the_bit() -> None:
    inputs = inputs_of("odd causal", "float32")
    outs = [generation(n).run(inputs.q, inputs.k, inputs.v, True)[0] for n in ("naive", "inplace")]
    assert torch.equal(*outs)


@pytest.mark.parametrize("rung", RUNGS)
def test_every_refusal_is_in_words(rung) -> None:
    exhibit = generation(rung)
    wide = AttentionProblem.dense(1, 1, 64, 512, "float64", causal=True, seqlen_k=32)
    for device in ("cpu", "cuda"):
        for reason in exhibit.unsupported(wide, device):
            assert len(reason.split()) > 2
    plain = AttentionProblem.dense(1, 2, 64, 64, "float16")
    assert exhibit.unsupported(plain, "cuda") == []


def test_rungs_are_the_eager_and_the_triton_ones() -> None:
    assert set(ON_CPU) < set(EAGER_RUNGS)
    triton = {name for name in RUNGS if generation(name).is_triton}
    assert triton == set(RUNGS) - set(EAGER_RUNGS)


def test_an_unknown_rung_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean"):
        generation("v2_transpose")
