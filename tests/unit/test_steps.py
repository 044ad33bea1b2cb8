"""The steps from v1 to v2: sets that make sense, the two paths, and what they predict."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.generations.ladder import PAIR, RUNGS, generation
from flashdig.generations.steps_paths import (
    STEPS,
    StepSet,
    all_of_v2,
    cumulative_path,
    leave_one_out,
    predict,
    run,
    step_generation,
    step_generations,
    step_names,
)
from flashdig.problem import AttentionProblem

CAUSAL = AttentionProblem.dense(2, 3, 300, 64, "float16", causal=True)
FULL = CAUSAL.replace(mask=type(CAUSAL.mask)())


def problems():
    return st.builds(
        AttentionProblem.dense,
        batch=st.integers(1, 3),
        num_heads=st.integers(1, 4),
        seqlen=st.integers(1, 400),
        head_dim=st.sampled_from([16, 64, 128, 256]),
        dtype=st.sampled_from(["float32", "float16"]),
        causal=st.booleans(),
        num_heads_kv=st.just(1),
        seqlen_k=st.integers(1, 400),
    )


def sensible_sets(causal: bool):
    every = (
        StepSet.of(names)
        for count in range(len(STEPS) + 1)
        for names in itertools.combinations(STEPS, count)
    )
    return [steps for steps in every if not steps.refusals(causal)]


def test_the_path_goes_from_v1_to_v2_one_step_at_a_time() -> None:
    path = cumulative_path(CAUSAL)
    assert [len(steps) for steps in path] == list(range(8))
    for below, above in itertools.pairwise(path):
        assert below.names < above.names
    assert path[-2] == all_of_v2(True)
    assert [step.name for step in path[-1]] == list(STEPS)
    assert path[2].describe() == "v1 + loop_order + sequence_parallel"


def test_skipping_is_no_step_without_a_causal_mask() -> None:
    path = cumulative_path(FULL)
    assert len(path) == 7
    assert all("causal_skipping" not in steps for steps in path)
    assert path[-2] == all_of_v2(False)
    assert "causal_skipping" not in leave_one_out(FULL)


def test_every_set_of_both_paths_makes_sense() -> None:
    for problem in (CAUSAL, FULL):
        sets = [*cumulative_path(problem), *leave_one_out(problem).values()]
        for steps in sets:
            assert steps.refusals(problem.causal) == []


def test_leaving_one_out_takes_what_needs_it_along() -> None:
    left = leave_one_out(CAUSAL)
    assert list(left) == [name for name in STEPS if name != "k_layout"]
    whole = all_of_v2(True)
    for name, steps in left.items():
        gone = {step.name for step in whole} - steps.names
        expected = {name}
        if name == "loop_order":
            expected |= {"sequence_parallel", "lse"}
        assert gone == expected


@pytest.mark.parametrize(
    ("names", "causal", "reason"),
    [
        (["sequence_parallel"], True, "sequence_parallel needs loop_order: several programs"),
        (["lse", "exp2"], True, "lse needs loop_order: with the keys outside, row_max"),
        (["loop_order", "causal_skipping"], False, "needs a causal mask: nothing is hidden"),
    ],
)
def test_sets_without_sense_are_refused_with_the_reason(names, causal, reason) -> None:
    steps = StepSet.of(names)
    (told,) = steps.refusals(causal)
    assert reason in told
    with pytest.raises(ValueError, match=r"makes no sense: .*needs"):
        run(None, None, None, causal, steps)


def test_how_many_sets_make_sense() -> None:
    # keys outside: late division, exp2, skipping, layout; queries outside: those and two more
    assert len(sensible_sets(True)) == 2**4 + 2**6
    assert len(sensible_sets(False)) == 2**3 + 2**5


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown step 'late_divison'; did you mean late_division"):
        StepSet.of(["late_divison"])
    with pytest.raises(ValueError, match="did you mean exp2"):
        generation("step:exp")
    with pytest.raises(ValueError, match="unknown rung 'without_exp2'; did you mean without:exp2"):
        generation("without_exp2")
    with pytest.raises(ValueError, match="k_layout is no part of v2"):
        generation("without:k_layout")
    with pytest.raises(ValueError, match="sequence_parallel needs loop_order"):
        generation("v1+sequence_parallel")
    with pytest.raises(ValueError, match=r"step:NAME or without:NAME or v1\+NAME, not 'v1'"):
        step_generation("v1")


@pytest.mark.parametrize("problem", [CAUSAL, FULL], ids=["causal", "full"])
def test_exhibits_of_both_paths_resolve_by_name(problem) -> None:
    exhibits = step_generations(problem)
    names = [exhibit.name for exhibit in exhibits]
    assert len(set(names)) == len(names)
    assert set(names) <= set(step_names())
    assert not set(names) & set(RUNGS)
    sets = [*cumulative_path(problem), *leave_one_out(problem).values()]
    for exhibit, steps in zip(exhibits, sets, strict=True):
        again = generation(exhibit.name)
        assert (again.title, again.claim, again.is_triton) == (exhibit.title, exhibit.claim, True)
        assert again.claim.endswith(".")
        assert again.unsupported(problem, "cpu") == []
        assert again.predict(problem) == predict(problem, steps)


def test_skipping_by_name_is_unsupported_without_a_causal_mask() -> None:
    for name in ("step:causal_skipping", "without:causal_skipping", "v1+causal_skipping"):
        (reason,) = generation(name).unsupported(FULL, "cuda")
        assert "needs a causal mask" in reason
        assert generation(name).predict(FULL).kernels >= 1  # predictions come before refusals


@given(problems())
def test_the_ends_of_the_path_predict_what_v1_and_v2_do(problem) -> None:
    path = cumulative_path(problem)
    assert predict(problem, path[0]) == generation("v1").predict(problem)
    assert predict(problem, path[-2]) == generation("v2").predict(problem)
    assert predict(problem, path[-1]) == generation("v2_transposed").predict(problem)


@given(problems())
def test_what_steps_do_to_the_traffic(problem) -> None:
    for steps in sensible_sets(problem.causal):
        now = predict(problem, steps)
        for name in STEPS:
            more = steps.with_step(name)
            if name in steps or more.refusals(problem.causal):
                continue
            then = predict(problem, more)
            if name in ("late_division", "exp2", "sequence_parallel"):
                assert then == now
            elif name == "lse":
                rows = problem.batch * problem.num_heads * problem.seqlen_q
                assert now.triton.store_bytes - then.triton.store_bytes == 4 * rows
            elif name == "causal_skipping":
                assert then.triton.load_bytes <= now.triton.load_bytes
                assert then.matmul_flops <= now.matmul_flops
            elif name == "loop_order":
                # fills included: they write the rows that see no key, and the kernel need not
                assert then.traffic.store_bytes <= now.traffic.store_bytes
            else:
                assert (then.triton, then.kernels) == (now.triton, now.kernels + 1)


def test_the_gluon_pair_says_what_it_serves() -> None:
    bfloat16 = CAUSAL.replace(dtype="bfloat16")
    for name in PAIR:
        exhibit = generation(name)
        assert (exhibit.name, exhibit.is_triton) == (name, False)
        assert exhibit.unsupported(bfloat16, "cuda") == []
        assert "Gluon has no interpreter" in exhibit.unsupported(CAUSAL, "cpu")
        for change in ({"dtype": "float32"}, {"head_dim": 32, "head_dim_v": 32}):
            (reason,) = exhibit.unsupported(bfloat16.replace(**change), "cuda")
            assert reason.startswith(next(iter(change)))
        assert exhibit.predict(bfloat16).kernels == 1
        assert exhibit.predict(bfloat16).traffic == generation("v2").predict(bfloat16).traffic
