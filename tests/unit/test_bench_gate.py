"""The gate passes what is right, and refuses every way of being wrong that it is there for."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flashdig.bench import gate
from flashdig.bench.gate import (
    check,
    float64_reference,
    naive_rounded,
    poison,
    poisoned_allocator,
)
from flashdig.kernels.reference import reference_attention


def inputs(
    batch=2, heads=4, heads_kv=2, seqlen_q=24, seqlen_k=40, head_dim=16, head_dim_v=8,
    dtype=torch.float16, seed=0,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return (
        random(batch, heads, seqlen_q, head_dim),
        random(batch, heads_kv, seqlen_k, head_dim),
        random(batch, heads_kv, seqlen_k, head_dim_v),
    )


def float64_attention(q, k, v, causal, scale=None):
    """Written the long way, with an explicit mask: (out, lse) in float64."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full(q.shape[:3], -math.inf, dtype=torch.float64)
    scale = q.shape[3] ** -0.5 if scale is None else scale
    offset = k.shape[2] - q.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                end = max(0, min(k.shape[2], i + offset + 1)) if causal else k.shape[2]
                if end == 0:
                    continue
                scores = k[b, h // group, :end] @ q[b, h, i] * scale
                lse[b, h, i] = scores.logsumexp(0)
                out[b, h, i] = scores.softmax(0) @ v[b, h // group, :end]
    return out, lse


LENGTHS = [(24, 40), (40, 24), (1, 33), (17, 17)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_the_right_answer_passes_on_every_pair(causal, seqlen_q, seqlen_k) -> None:
    q, k, v = inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = float64_attention(q, k, v, causal)
    result = check(out.half(), q, k, v, causal=causal, lse=lse.float())
    assert result.ok, result.reason
    assert result.reason == "ok"
    assert result.checked == "all 8 (batch, head) pairs"
    # what rounding the exact output costs, and no more
    assert result.error <= 2**-11 * float(out.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_eager_attention_passes_its_own_budget(dtype, causal, seqlen_q, seqlen_k) -> None:
    q, k, v = inputs(dtype=dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    result = check(naive_rounded(q, k, v, causal=causal), q, k, v, causal=causal)
    assert result.ok, result.reason
    assert result.budget == pytest.approx(2 * result.error + 1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_naive_in_float64_is_exact_attention(causal, seqlen_q, seqlen_k) -> None:
    q, k, v = inputs(dtype=torch.float64, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, _ = float64_attention(q, k, v, causal, 0.3)
    found = naive_rounded(q, k, v, causal=causal, softmax_scale=0.3)
    torch.testing.assert_close(found, out, rtol=1e-12, atol=1e-12)


def test_naive_agrees_with_torch_where_both_mean_the_same() -> None:
    q, k, v = inputs(dtype=torch.float64, seqlen_q=33, seqlen_k=33)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(naive_rounded(q, k, v, causal=True), expected)


def test_naive_rounds_scores_probabilities_and_output() -> None:
    q, k, v = inputs(heads=2, heads_kv=2, dtype=torch.bfloat16)
    scores = (q.double() @ k.double().mT).bfloat16()
    scores = (scores.double() * 0.25).bfloat16()
    probs = scores.double().softmax(-1).bfloat16()
    expected = (probs.double() @ v.double()).bfloat16()
    found = naive_rounded(q, k, v, causal=False)
    assert found.dtype == torch.bfloat16
    # sums in another order may round to the neighbour, no more
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-9)
    exact = float64_attention(q, k, v, False)[0]
    assert (found.double() - exact).abs().max() > (exact.bfloat16().double() - exact).abs().max()


def right_answer(causal=True, **sizes):
    q, k, v = inputs(**sizes)
    out, lse = float64_attention(q, k, v, causal)
    return (q, k, v), out.to(q.dtype), lse.float()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_the_gate_means_what_the_oracle_means(causal, seqlen_q, seqlen_k) -> None:
    q, k, v = inputs(dtype=torch.float64, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse = reference_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=causal, softmax_scale=0.2
    )
    arguments = {"causal": causal, "softmax_scale": 0.2, "lse": lse.float()}
    result = check(out.transpose(1, 2), q, k, v, **arguments)
    assert result.ok, result.reason
    assert result.error < 1e-12


def test_one_reference_judges_any_number_of_outputs() -> None:
    (q, k, v), out, lse = right_answer(seqlen_q=40, seqlen_k=24)
    reference = float64_reference(q, k, v, causal=True, pairs=[(0, 1), (1, 3)])
    assert reference.out.shape == (2, 40, 8)
    for candidate in (out, out * 1.02, naive_rounded(q, k, v, causal=True), out[:, :1]):
        for candidate_lse in (lse, lse + 1, None):
            direct = check(
                candidate, q, k, v, causal=True, lse=candidate_lse, pairs=[(0, 1), (1, 3)]
            )
            assert reference.check(candidate, candidate_lse) == direct
    assert reference.check(out, lse).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_eager_products_are_rounded_like_torchs_own(dtype) -> None:
    a, b = torch.randn(3, 50, 40).to(dtype), torch.randn(3, 40, 30).to(dtype)
    found = gate._matmul_rounded(a, b)
    assert found.dtype == dtype
    one_bit = torch.finfo(dtype).eps
    torch.testing.assert_close(found, a @ b, rtol=one_bit, atol=one_bit / 8)


def test_errors_are_refused_above_the_budget_and_only_there() -> None:
    (q, k, v), out, _ = right_answer(dtype=torch.float32)
    exact = float64_attention(q, k, v, True)[0]
    budget = check(out, q, k, v, causal=True).budget
    for factor, ok in ((0.9, True), (1.1, False)):
        wrong = exact.clone()
        wrong[1, 3, 5, 2] += factor * budget
        result = check(wrong.float(), q, k, v, causal=True)
        assert result.ok is ok
        assert result.error == pytest.approx(factor * budget, rel=0.02)
    assert "against float64 is above the allowed" in result.reason


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q, k, v: naive_rounded(q, k, v, causal=False),
        lambda q, k, v: naive_rounded(q, k, v, causal=True, softmax_scale=0.2),
        lambda q, k, v: naive_rounded(q, k.roll(1, dims=1), v.roll(1, dims=1), causal=True),
        lambda q, k, v: naive_rounded(q, k, v, causal=True) * 1.01,
        lambda q, k, v: torch.zeros_like(naive_rounded(q, k, v, causal=True)),
        lambda q, k, v: naive_rounded(q, k[:, :, :-1], v[:, :, :-1], causal=True),
    ],
    ids=["mask forgotten", "scale", "heads swapped", "1 % large", "zeros", "one key short"],
)
def test_wrong_answers_are_refused(wrong) -> None:
    q, k, v = inputs()
    result = check(wrong(q, k, v), q, k, v, causal=True)
    assert not result.ok
    assert result.error > result.budget


def test_top_left_causal_is_refused() -> None:
    q, k, v = inputs()
    mask = torch.ones(24, 40, dtype=torch.bool).tril()
    top_left = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    assert not check(top_left, q, k, v, causal=True).ok


def test_nan_anywhere_is_refused_even_in_pairs_that_are_not_compared() -> None:
    (q, k, v), out, lse = right_answer()
    out[1, 1, 23, 7] = math.nan
    result = check(out, q, k, v, causal=True, lse=lse, pairs=[(0, 0)])
    assert result.reason == "out has 1 values that are NaN or infinite"
    assert (result.ok, result.error, result.budget) == (False, None, None)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda out, lse: (out[:, :, :-1], lse), "out has shape"),
        (lambda out, lse: (out.float(), lse), "out is torch.float32"),
        (lambda out, lse: (out, lse[:, :, None]), "lse has shape"),
        (lambda out, lse: (out, lse.half()), "lse is torch.float16"),
        (lambda out, lse: (out, lse / math.log(2)), "lse error"),
        (lambda out, lse: (out, lse + 8e-4), "lse error"),
        (lambda out, lse: (out, lse.masked_fill(lse == lse.max(), math.inf)), "lse has NaN or inf"),
        (lambda out, lse: (out, lse.masked_fill(lse == lse.max(), -math.inf)), "lse has NaN or"),
    ],
)
def test_each_fault_is_named(change, reason) -> None:
    (q, k, v), out, lse = right_answer()
    result = check(*change(out, lse)[:1], q, k, v, causal=True, lse=change(out, lse)[1])
    assert not result.ok
    assert reason in result.reason


def test_rows_without_keys_must_be_exactly_empty() -> None:
    (q, k, v), out, lse = right_answer(seqlen_q=40, seqlen_k=24)
    assert (lse[:, :, :16] == -math.inf).all()
    assert check(out, q, k, v, causal=True, lse=lse).ok
    almost = out.clone()
    almost[0, 0, 15, 0] = 1e-6
    assert "not 0 in rows that see no key" in check(almost, q, k, v, causal=True).reason
    finite = lse.clone()
    finite[0, 0, 15] = -1e30
    assert "-inf in rows that see no key" in check(out, q, k, v, causal=True, lse=finite).reason


def test_lse_of_float32_inputs_may_lose_what_eager_attention_loses(monkeypatch) -> None:
    (q, k, v), out, lse = right_answer(dtype=torch.float32)
    assert not check(out, q, k, v, causal=True, lse=lse + 2e-3).ok
    eager = gate._eager_rows

    def with_short_matmul(q, k, v, offset, scale):
        # what a TF32 setting does: 10 bits of mantissa in the inputs of the product
        if q.dtype == torch.float32:
            q, k = q.half().float(), k.half().float() * 1.001
        return eager(q, k, v, offset, scale)

    monkeypatch.setattr(gate, "_eager_rows", with_short_matmul)
    assert check(out, q, k, v, causal=True, lse=lse + 2e-3).ok


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_one_wrong_lse_is_found_beside_rows_without_keys(dtype) -> None:
    (q, k, v), out, lse = right_answer(seqlen_q=40, seqlen_k=24, dtype=dtype)
    reference = float64_reference(q, k, v, causal=True)
    assert (reference.lse[:, :16] == -math.inf).all()
    assert reference.check(out, lse).ok
    lse[1, 2, 33] += 1e-3
    assert "lse error 0.001 against" in reference.check(out, lse).reason


def test_where_eager_overflows_the_budget_follows_the_values() -> None:
    q, k, v = inputs(heads=2, heads_kv=2)
    q, k, v = q * 200, k * 200, v * 16
    assert not torch.isfinite(naive_rounded(q, k, v, causal=False)).all()
    out, _ = float64_attention(q, k, v, False)
    result = check(out.half(), q, k, v, causal=False)
    assert result.ok
    assert result.budget == 2**-8 * float(out.abs().max())
    assert not check(out.half() * 1.01, q, k, v, causal=False).ok


def test_inputs_that_are_not_finite_cannot_be_judged() -> None:
    q, k, v = inputs()
    v[0, 0, 0, 0] = math.nan
    result = check(torch.zeros(2, 4, 24, 8).half(), q, k, v, causal=False)
    assert not result.ok
    assert "reference is not finite" in result.reason


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("causal", [False, True])
def test_empty_lengths(seqlen_q, seqlen_k, causal) -> None:
    q, k, v = inputs(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out = naive_rounded(q, k, v, causal=causal)
    assert out.shape == (2, 4, seqlen_q, 8)
    lse = torch.full((2, 4, seqlen_q), -math.inf)
    assert check(out, q, k, v, causal=causal, lse=lse).ok
    if seqlen_q:
        assert not check(out + 1, q, k, v, causal=causal, lse=lse).ok


def test_no_batch_or_no_heads_is_nothing_to_compare() -> None:
    for sizes in ({"batch": 0}, {"heads": 0, "heads_kv": 0}):
        q, k, v = inputs(**sizes)
        result = check(naive_rounded(q, k, v, causal=True), q, k, v, causal=True)
        assert result.ok
        assert result.checked == "all 0 (batch, head) pairs"


def test_large_problems_are_compared_on_first_last_and_two_random_pairs(monkeypatch) -> None:
    monkeypatch.setattr(gate, "WHOLE_PROBLEM_LIMIT", 1000)
    q, k, v = inputs(batch=5, heads=8, heads_kv=1)
    out = naive_rounded(q, k, v, causal=True)
    result = check(out, q, k, v, causal=True)
    assert result.checked.startswith("4 of 40 (batch, head) pairs: (0, 0), (")
    assert result.checked.endswith(", (4, 7)")
    assert result.checked == check(out, q, k, v, causal=True).checked
    assert check(out, q, k, v, causal=True, pairs="all").checked == "all 40 (batch, head) pairs"
    wrong = out.clone()
    wrong[4, 7] *= 1.1
    assert not check(wrong, q, k, v, causal=True).ok
    # with four pairs or fewer there is nothing to draw
    q, k, v = inputs(batch=1, heads=4)
    assert check(naive_rounded(q, k, v, causal=True), q, k, v, causal=True).checked == (
        "all 4 (batch, head) pairs"
    )


def test_only_the_named_pairs_are_compared() -> None:
    q, k, v = inputs()
    out = naive_rounded(q, k, v, causal=True)
    out[1, 2] *= 2
    assert check(out, q, k, v, causal=True, pairs=[(0, 3), (1, 1)]).ok
    result = check(out, q, k, v, causal=True, pairs=[(0, 3), (1, 2)])
    assert not result.ok
    assert result.checked == "2 of 8 (batch, head) pairs: (0, 3), (1, 2)"


@settings(deadline=None, max_examples=15)
@given(st.integers(100, 5000), st.booleans(), st.sampled_from(LENGTHS))
def test_chunks_do_not_change_the_verdict(chunk, causal, lengths) -> None:
    q, k, v = inputs(seqlen_q=lengths[0], seqlen_k=lengths[1], head_dim=4, head_dim_v=4)
    out, lse = float64_attention(q, k, v, causal)
    whole = check(out.half(), q, k, v, causal=causal, lse=lse.float())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "CHUNK_SCORES", chunk)
        parts = check(out.half(), q, k, v, causal=causal, lse=lse.float())
    assert parts.ok
    assert parts.error == pytest.approx(whole.error, rel=1e-9)
    assert parts.budget == pytest.approx(whole.budget, rel=0.5)


class LargestTensor(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_memory_is_bounded_by_the_chunk(monkeypatch) -> None:
    chunk = 16384
    monkeypatch.setattr(gate, "CHUNK_SCORES", chunk)
    q, k, v = inputs(batch=1, heads=3, heads_kv=3, seqlen_q=256, seqlen_k=200, head_dim=8)
    out = torch.zeros(1, 3, 256, 8).half()
    with LargestTensor() as seen:
        check(out, q, k, v, causal=False)
    # 153,600 scores, never at once
    assert seen.largest <= chunk
    q, k, v = inputs(batch=16, heads=8, heads_kv=8, seqlen_q=1, seqlen_k=64, head_dim=16)
    with LargestTensor() as seen:  # one token: 131,072 values of the keys are what is large
        check(torch.zeros(16, 8, 1, 8).half(), q, k, v, causal=False)
    assert seen.largest <= chunk


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda q, k, v: (q[0], k, v), "q must be"),
        (lambda q, k, v: (q, k, v[:, :, :-1]), "v must have k's"),
        (lambda q, k, v: (q, k[..., :-1], v), "k must have q's"),
        (lambda q, k, v: (q, k[:1], v[:1]), "k must have q's"),
        (lambda q, k, v: (q, k.float(), v), "share dtype"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple"),
    ],
)
def test_inputs_that_do_not_fit_are_refused_by_name(change, names) -> None:
    q, k, v = change(*inputs())
    with pytest.raises(ValueError, match=names):
        naive_rounded(q, k, v, causal=False)
    with pytest.raises(ValueError, match=names):
        check(torch.zeros(1), q, k, v, causal=False)


@pytest.mark.parametrize("pairs", ["some", [], [(2, 0)], [(0, 4)], [(-1, 0)]])
def test_pairs_that_do_not_exist_are_refused(pairs) -> None:
    q, k, v = inputs()
    with pytest.raises(ValueError, match="pairs"):
        check(torch.zeros(2, 4, 24, 8).half(), q, k, v, causal=False, pairs=pairs)


def test_poisoned_allocations_show_what_a_kernel_left_unwritten() -> None:
    def forgets_the_last_row(q, k, v):
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
        out[:, :, :-1] = naive_rounded(q, k, v, causal=False)[:, :, :-1]
        return out

    q, k, v = inputs(dtype=torch.bfloat16)
    with poisoned_allocator():
        out = forgets_the_last_row(q, k, v)
        assert torch.isnan(torch.empty(3)).all()
    assert "NaN" in check(out, q, k, v, causal=False).reason


def test_poisoned_allocator_sets_back_what_it_changed() -> None:
    def state():
        return (
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = state()
    with pytest.raises(RuntimeError, match="inside"), poisoned_allocator():
        raise RuntimeError("inside")
    assert state() == before


def test_poison_bytes_are_nan_in_every_floating_dtype() -> None:
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.append(result.clone())
            return result

    with Watch():
        poison(4096, "cpu")
    assert seen[0].numel() == 4096
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert all(torch.isnan(block.view(dtype)).all() for block in seen)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        assert torch.isnan(seen[0].view(dtype).float()).all()
    with pytest.raises(ValueError, match="nbytes"):
        poison(-1, "cpu")
