"""The conformance suite: what it covers, and that a wrong kernel does not pass it."""

import dataclasses
import itertools
import math

import pytest
import torch

from flashdig.bench import conformance, conformance_judge
from flashdig.bench.conformance_cases import (
    FEATURES,
    HEADS,
    draw_case,
    features_may_meet,
    head_dims_of,
    specialisations,
)
from flashdig.bench.conformance_eager import eager_rounded
from flashdig.bench.conformance_inputs import make_inputs
from flashdig.bench.pairwise import covering_array, feasible_pairs, pairs_of
from flashdig.bench.results import read_record
from flashdig.dispatch import Request, choose
from flashdig.problem import AttentionProblem

PLAIN = {name: values[0] for name, values in FEATURES.items()}


def case_of(index=0, tiny=True, **features):
    return draw_case({**PLAIN, **features}, (0, index), 0, tiny=tiny)


def inputs_of(case, **changes):
    return make_inputs(dataclasses.replace(case, **changes), "cpu")


def rounded_oracle(inputs):
    """What a perfect kernel returns."""
    exact = conformance_judge._oracle(inputs)
    named = dict.fromkeys(("out", "lse", "dq", "dk", "dv", "dbias", "dsinks"))
    for name, x in exact.items():
        like = inputs.q if name == "out" else getattr(inputs, name.removeprefix("d"), None)
        named[name] = x.to(torch.float32 if like is None else like.dtype)
    return named


def test_all_pairs_meet_in_few_combinations() -> None:
    found = specialisations()
    assert len(found) <= 250
    assert all(features_may_meet(one) for one in found)
    covered = set().union(*(pairs_of(one, list(FEATURES)) for one in found))
    wanted = feasible_pairs(FEATURES, features_may_meet)
    assert covered == set(wanted)
    # what is left out: a bias with packed input, nothing to take a gradient of
    assert (("bias", "full"), ("layout", "packed")) not in covered
    assert len(wanted) > 1000
    assert found == specialisations()


def test_a_covering_array_is_near_the_product_of_the_largest_two() -> None:
    domains = {
        name: tuple(range(size)) for name, size in zip("abcde", (7, 6, 3, 3, 2), strict=True)
    }
    found = covering_array(domains)
    for a, b in itertools.combinations(domains, 2):
        assert {(one[a], one[b]) for one in found} == set(itertools.product(domains[a], domains[b]))
    assert 42 <= len(found) <= 50


def test_options_that_cannot_be_completed_are_refused() -> None:
    with pytest.raises(ValueError, match="b has no values"):
        covering_array({"a": (1,), "b": ()})
    with pytest.raises(ValueError, match="no value of"):
        covering_array({"a": (1,), "b": (1,), "c": (1,)}, lambda chosen: len(chosen) < 3)


def test_the_suite_is_large_and_the_same_everywhere() -> None:
    plan = conformance.make_plan()
    cases = [case for number in range(len(plan.combinations)) for case in plan.cases(number)]
    assert len(cases) >= 3000
    assert conformance.coverage(plan) == (len(feasible_pairs(FEATURES, features_may_meet)),) * 2
    assert len({case.describe() for case in cases}) == len(cases)
    assert plan.cases(7) == plan.cases(7)
    assert {case.distribution for case in cases} >= {"gaussian", "constant", "rising", "huge key"}
    lengths = {pair for case in cases for pair in case.lengths}
    assert {(1, 1), (65, 63), (129, 127), (0, 0), (5, 0), (2049, 515)} <= lengths
    assert any(case.slack[0] for case in cases)
    assert sum(case.sampled for case in cases) > 300


def test_each_backend_is_asked_what_dispatch_gives_it() -> None:
    """Every combination of the Hopper kernels' suite is one that they serve."""
    plan = conformance.make_plan(backend="hopper")
    covered, feasible = conformance.coverage(plan)
    assert covered == feasible > 900
    on_hopper = Request("cuda", (9, 0), return_lse=True)
    for features in plan.combinations:
        head_dim, head_dim_v = head_dims_of(features)
        num_heads, num_heads_kv = HEADS[features["heads"]]
        problem = AttentionProblem(
            *(2, num_heads, num_heads_kv, 64, 64, head_dim, head_dim_v, features["dtype"]),
            softcap=2.0 * features["softcap"],
            dropout=features["dropout"],
            alibi={"none": "none", "h": "heads", "bh": "batch_heads"}[features["alibi"]],
            bias=features["bias"],
            sinks=features["sinks"],
            packed=features["layout"] != "dense",
        )
        assert choose(problem, on_hopper).name == "hopper"
    assert conformance.row_of(plan, conformance.Tally(), 0.0)["backend"] == "hopper"


def test_a_backend_without_a_suite_is_refused() -> None:
    with pytest.raises(ValueError, match="one of triton, hopper on cuda"):
        conformance.make_plan(backend="tiled")
    with pytest.raises(ValueError, match="backend must be one of triton on cpu, got 'hopper'"):
        conformance.make_plan(backend="hopper", device="cpu")


@pytest.mark.parametrize("numbers", [{"count": 0}, {"inputs": 0}, {"processes": 0}])
def test_numbers_below_one_are_refused(numbers) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        conformance.make_plan(**numbers)
    with pytest.raises(ValueError, match="device must be"):
        conformance.make_plan(device="tpu")


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("storage", ["contiguous", "transposed", "sliced rows", "sliced heads"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_storage_changes_strides_and_no_value(storage, layout, aligned) -> None:
    case = case_of(layout=layout, aligned=aligned, head_dims=(24, 50))
    plain = inputs_of(case, storage="contiguous")
    inputs = inputs_of(case, storage=storage)
    for x, y in ((inputs.q, plain.q), (inputs.k, plain.k), (inputs.v, plain.v)):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)
        assert x.stride(-1) == 1
        assert all(s % 8 == 0 for s in x.stride()[:-1]) == aligned


def test_nan_lies_exactly_where_nothing_is_seen() -> None:
    case = case_of(mask="causal", bias="bool bh", heads="gqa", layout="dense")
    inputs = inputs_of(case, lengths=((33, 9),), hidden_nan=True, storage="sliced rows")
    (visible,) = inputs.visible
    assert torch.equal(torch.isnan(inputs.q).all(-1), ~visible.any(-1).transpose(1, 2))
    assert torch.isnan(inputs.q).any()
    assert torch.isnan(inputs.grad_out).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "tf32"])
@pytest.mark.parametrize(
    "features",
    [
        {"softcap": True, "alibi": "bh", "bias": "bhq", "sinks": True, "dropout": True},
        {"layout": "packed seqused", "mask": "window both", "heads": "mqa", "dropout": True},
        {"bias": "bool", "mask": "top-left window", "heads": "gqa", "lse_gradient": True},
    ],
)
def test_the_yardstick_is_attention(dtype, features) -> None:
    for index in range(3):
        inputs = inputs_of(case_of(index, dtype=dtype, **features), distribution="gaussian")
        exact, eager = conformance_judge._oracle(inputs), eager_rounded(inputs)
        assert eager.keys() == exact.keys()
        loss = {"float16": 1e-2, "bfloat16": 6e-2, "float32": 2e-5, "tf32": 1e-2}[dtype]
        for name, x in exact.items():
            finite = torch.where(torch.isneginf(x), 0.0, x)
            size = max(1.0, float(finite.abs().max())) if x.numel() else 1.0
            torch.testing.assert_close(eager[name].double(), x, rtol=0, atol=loss * size)


def test_what_is_allowed_beside_eager_attentions_error() -> None:
    def share(dtype, distribution, lengths=((100, 9),), heads="mha"):
        inputs = inputs_of(
            case_of(dtype=dtype, heads=heads),
            distribution=distribution,
            lengths=lengths,
        )
        return conformance_judge._share_of_largest(inputs)

    # an order of summation in float32 alone: a hundred terms, or as many for each head of a group
    assert share("float32", "gaussian") == 10 * 2.0**-24
    assert share("float32", "gaussian", ((9, 100),)) == 10 * 2.0**-24
    group = HEADS["mqa"][0] // HEADS["mqa"][1]
    assert share("float32", "gaussian", heads="mqa") == math.sqrt(100 * group) * 2.0**-24
    assert share("bfloat16", "gaussian") == share("tf32", "huge key") == 0.0
    # one rounding of the format, where all are the same
    assert share("bfloat16", "constant") == 2.0**-8
    assert share("float16", "constant") == share("tf32", "constant") == 2.0**-11


@pytest.mark.parametrize("layout", ["dense", "packed"])
def test_what_is_wrong_is_named(layout, monkeypatch) -> None:
    case = case_of(layout=layout, mask="causal", sinks=layout == "dense", lse_gradient=True)
    # more queries than keys: some rows see nothing
    lengths = ((33, 9),) * (3 if layout == "packed" else 2)
    inputs = inputs_of(
        case,
        lengths=lengths,
        hidden_nan=True,
        storage="contiguous",
        sampled=False,
        grad_storage="contiguous",
        distribution="gaussian",
    )
    right = rounded_oracle(inputs)

    def said_of(**wrong) -> str:
        monkeypatch.setattr(conformance_judge, "run_kernels", lambda *_: {**right, **wrong})
        return "; ".join(conformance_judge.judge(inputs).problems)

    assert said_of() == ""
    for name, x in right.items():
        if x is None:
            continue
        assert said_of(**{name: None}) == f"{name} is missing"
        assert f"{name} is " in said_of(**{name: x.double()})
        assert name in said_of(**{name: torch.where(x == x.max(), x + 0.5, x)})
        assert name in said_of(**{name: torch.where(x == x.max(), math.nan, x)})
    hidden = torch.isnan(inputs.q).any(-1, keepdim=True)
    assert "not 0 where nothing is seen" in said_of(out=torch.where(hidden, 1e-6, right["out"]))
    assert "dq: not 0" in said_of(dq=torch.where(hidden, 1e-6, right["dq"]))
    if layout == "packed":
        finite = torch.where(torch.isneginf(right["lse"]), 0.0, right["lse"])
        assert "-inf is missing" in said_of(lse=finite)


def test_gradients_that_were_not_wanted_are_named(monkeypatch) -> None:
    inputs = inputs_of(case_of(wanted="q", sampled=False), sampled=False)
    wrong = {**rounded_oracle(inputs), "dk": inputs.k}
    monkeypatch.setattr(conformance_judge, "run_kernels", lambda *_: wrong)
    assert conformance_judge.judge(inputs).problems == ("dk was not wanted",)


def test_two_runs_that_differ_are_named(monkeypatch) -> None:
    inputs = inputs_of(case_of(), sampled=True, lengths=((9, 33),))
    runs = [rounded_oracle(inputs) for _ in range(2)]
    runs[1]["dv"] = torch.nextafter(runs[1]["dv"], torch.ones_like(runs[1]["dv"]))
    monkeypatch.setattr(conformance_judge, "run_kernels", lambda *_: runs.pop(0))
    (said,) = conformance_judge.judge(inputs).problems
    assert "values differ from a second run" in said


def test_a_run_is_tallied_and_recorded(monkeypatch, tmp_path) -> None:
    plan = conformance.make_plan(count=2, inputs=2, device="cpu")
    found = iter([conformance_judge.Judgement(said, True) for said in ((), ("dq: error",))])
    monkeypatch.setattr(conformance, "run_case", lambda case, plan: next(found))
    tally = conformance.run_specialisation(plan, 0, math.inf)
    assert (tally.cases, tally.passed, tally.failed) == (2, 1, 1)
    assert tally.failures[0].startswith("0.1 dtype=float16")
    assert tally.failures[0].endswith(": dq: error")
    late = conformance.run_specialisation(plan, 1, 0.0)
    assert (late.cases, late.skipped) == (2, 2)
    monkeypatch.setattr(conformance, "_tallies", lambda plan, deadline: iter([tally, late]))
    output = tmp_path / "conformance.json"
    arguments = ["--device", "cpu", "--specialisations", "2", "--inputs", "2"]
    assert conformance.main([*arguments, "--output", str(output)]) == 1
    (row,) = read_record(output).rows
    assert (row["cases"], row["passed"], row["failed"], row["skipped"]) == (4, 1, 1, 2)
    assert (row["features"]["specialisations"], row["features"]["redrawn"]) == (2, 2)


def test_bits_that_must_repeat_and_the_kernels_that_repeat_them() -> None:
    hopper = conformance_judge.Kernels("hopper")
    any_order, in_order = (case_of(deterministic=on) for on in (False, True))
    assert hopper.of_case(any_order).backend == "hopper"
    assert hopper.of_case(in_order).backend == "hopper_deterministic"
    assert conformance_judge.Kernels().of_case(case_of()).backend == "triton"
    for name in ("out", "lse", "dq", "dk", "dv"):
        assert conformance_judge.repeats(name, any_order) == (name != "dq")
        assert conformance_judge.repeats(name, in_order)
        assert conformance_judge.repeats(name, case_of())


def test_a_lost_gpu_ends_the_suite_and_is_told(monkeypatch) -> None:
    plan = conformance.make_plan(count=1, inputs=3)

    def lose(case, plan):
        raise conformance.DeviceLostError("an illegal memory access was encountered")

    monkeypatch.setattr(conformance, "run_case", lose)
    tally = conformance.run_specialisation(plan, 0, math.inf)
    assert (tally.failed, tally.skipped) == (1, 2)
    assert "illegal memory access" in tally.stopped
