"""The oracle against closed-form values, torch's own attention and FlexAttention."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from flashdig.kernels.reference import (
    merge_partials,
    reference_attention,
    reference_attention_varlen,
)
from tests.attention_cases import CASES, build

INF = math.inf


def zeros_and_positions(seqlen_q: int, seqlen_k: int, head_dim: int = 16):
    """q = k = 0 and v[j] = j: every visible key weighs the same."""
    q = torch.zeros(1, seqlen_q, 1, head_dim)
    k = torch.zeros(1, seqlen_k, 1, head_dim)
    v = torch.arange(seqlen_k).float()[None, :, None, None].expand(1, -1, 1, head_dim)
    return q, k, v


def unit(*first: float, head_dim: int = 16) -> torch.Tensor:
    """(1, len(first), 1, head_dim) rows that hold a value in their first place."""
    x = torch.zeros(1, len(first), 1, head_dim, dtype=torch.float64)
    x[0, :, 0, 0] = torch.tensor(first, dtype=torch.float64)
    return x


@pytest.mark.parametrize(
    ("lengths", "causal", "outs", "lses"),
    [
        ((2, 5), True, [1.5, 2.0], [math.log(4), math.log(5)]),
        ((5, 2), True, [0, 0, 0, 0, 0.5], [-INF, -INF, -INF, 0, math.log(2)]),
        ((1, 7), True, [3.0], [math.log(7)]),
        ((2, 5), "top-left", [0.0, 0.5], [0, math.log(2)]),
        ((1, 8), False, [3.5], [2.079442]),
    ],
)
def test_alignment_of_the_causal_mask(lengths, causal, outs, lses) -> None:
    out, lse = reference_attention(*zeros_and_positions(*lengths), causal=causal)
    torch.testing.assert_close(out[0, :, 0, 0].tolist(), [float(x) for x in outs])
    torch.testing.assert_close(lse[0, 0].tolist(), [float(x) for x in lses], atol=1e-6, rtol=0)


def test_rows_without_keys_give_nothing_and_take_nothing() -> None:
    q = torch.zeros(1, 4, 1, 16, requires_grad=True)
    k = torch.zeros(1, 2, 1, 16, requires_grad=True)
    v = torch.tensor([1.0, 3.0])[None, :, None, None].repeat(1, 1, 1, 16).requires_grad_()
    out, lse = reference_attention(q, k, v, causal=True)
    assert out[0, :, 0, 0].tolist() == [0, 0, 1, 2]
    assert lse[0, 0].tolist() == [-INF, -INF, 0, math.log(2)]
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert dv[0, :, 0, 0].tolist() == [1.5, 0.5]
    assert not dq[0, :2].any()
    assert dk.isfinite().all()


def test_huge_logits_have_no_finite_sentinel() -> None:
    positions = torch.arange(64.0)[None, :, None, None].expand(1, 64, 1, 128)
    q = torch.full((1, 1, 1, 128), 16.0)
    for sign in (-1, 1):
        k = torch.full((1, 64, 1, 128), 120.0 * sign)
        out, lse = reference_attention(q, k, positions)
        assert out[0, 0, 0, 0] == pytest.approx(31.5)
        assert lse.item() == pytest.approx(sign * 245760 / 128**0.5 + math.log(64), abs=1e-6)
    q, k = unit(-200), unit(100, 0)
    v = torch.tensor([1.0, 100.0])[None, :, None, None]
    out, lse = reference_attention(
        q, k, v, softmax_scale=1.0, bias=torch.tensor([[[[True, False]]]])
    )
    assert out.item() == 1.0
    assert lse.item() == -20000.0


@pytest.mark.parametrize(
    ("softcap", "p0", "lse", "dq0", "dk0"),
    [
        (2.0, 0.873034, 2.063836, -0.125301, -0.501205),
        (30.0, 0.981593, 3.995042, -0.284007, None),
        (0.0, 0.982014, 4.018150, None, None),
    ],
)
def test_softcap_and_its_gradient(softcap, p0, lse, dq0, dk0) -> None:
    q, k = unit(4).requires_grad_(), unit(1, 0).requires_grad_()
    v = torch.tensor([0.0, 1.0], dtype=torch.float64)[None, :, None, None].expand(1, 2, 1, 16)
    out, got = reference_attention(q, k, v, softmax_scale=1.0, softcap=softcap)
    assert 1 - out[0, 0, 0, 0].item() == pytest.approx(p0, abs=1e-6)
    assert got.item() == pytest.approx(lse, abs=1e-6)
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    if dq0 is not None:
        assert float(dq[0, 0, 0, 0]) == pytest.approx(dq0, abs=1e-6)
    if dk0 is not None:
        assert float(dk[0, 0, 0, 0]) == pytest.approx(dk0, abs=1e-6)


def test_gradient_of_the_lse() -> None:
    q, k = unit(1).requires_grad_(), unit(1, -1).requires_grad_()
    v = torch.randn(1, 2, 1, 16, dtype=torch.float64, requires_grad=True)
    _, lse = reference_attention(q, k, v, softmax_scale=1.0)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), allow_unused=True)
    assert lse.item() == pytest.approx(1.126928, abs=1e-6)
    assert float(dq[0, 0, 0, 0]) == pytest.approx(0.761594, abs=1e-6)
    assert float(dk[0, 0, 0, 0]) == pytest.approx(0.880797, abs=1e-6)
    assert float(dk[0, 1, 0, 0]) == pytest.approx(0.119203, abs=1e-6)
    assert dv is None or not dv.any()


def test_window_counts_both_ends() -> None:
    out, lse = reference_attention(*zeros_and_positions(6, 6), causal=True, window=(2, 0))
    assert out[0, :, 0, 0].tolist() == pytest.approx([0, 0.5, 1, 2, 3, 4])
    expected = [math.log(n) for n in (1, 2, 3, 3, 3, 3)]
    torch.testing.assert_close(lse[0, 0].tolist(), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "causal", "outs", "lse"),
    [((1, 4), True, [2.084576], 0.787339), ((2, 4), False, [1.714926, 2.084576], None)],
)
def test_alibi_with_unequal_lengths(lengths, causal, outs, lse) -> None:
    slopes = torch.tensor([0.5])
    out, got = reference_attention(
        *zeros_and_positions(*lengths), causal=causal, alibi_slopes=slopes
    )
    torch.testing.assert_close(out[0, :, 0, 0].tolist(), outs, atol=1e-6, rtol=0)
    if lse is not None:
        assert got.item() == pytest.approx(lse, abs=1e-6)


def test_gqa_maps_query_heads_in_blocks() -> None:
    v = torch.tensor([1.0, 2.0])[None, None, :, None].expand(1, 5, 2, 4)
    out, _ = reference_attention(torch.zeros(1, 3, 6, 4), torch.zeros(1, 5, 2, 4), v)
    assert out[0, 0, :, 0].tolist() == [1, 1, 1, 2, 2, 2]


def test_sinks_take_probability_and_gradient() -> None:
    q, k, v = zeros_and_positions(2, 1)
    v = torch.ones_like(v)
    sinks = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    out, lse = reference_attention(q, k, v, causal=True, sinks=sinks)
    # row 0 sees no key: its lse is the sink's logit; row 1 shares with one key
    assert out[0, :, 0, 0].tolist() == [0, 0.5]
    assert lse[0, 0].tolist() == [0, math.log(2)]
    (dsinks,) = torch.autograd.grad(out.sum(), sinks)
    assert float(dsinks) == pytest.approx(-16 * 0.25)  # d(0.5)/dsink = -P * P_sink
    _, lse = reference_attention(q, k, v, causal=True, sinks=sinks)
    (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    assert float(dsinks) == pytest.approx(1.5)


def test_dropout_is_seen_through_an_identity() -> None:
    q, k = torch.zeros(1, 160, 1, 64), torch.zeros(1, 64, 1, 64)
    v = torch.eye(64)[None, :, None]
    out, lse = reference_attention(q, k, v, dropout_p=0.25, dropout_seed=5)
    mask = out[0, :, 0] * 64 * 0.75
    torch.testing.assert_close(mask, mask.round())
    assert set(mask.round().unique().tolist()) == {0.0, 1.0}
    assert abs(mask.mean() - 0.75) < 4 * (0.25 * 0.75 / mask.numel()) ** 0.5
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(64)))
    dropped, _ = reference_attention(q, k, v, dropout_p=1.0)
    assert not dropped.any()


def hidden_noise(x: torch.Tensor, hidden: torch.Tensor, value: float) -> torch.Tensor:
    noisy = x.detach().clone()
    noisy[hidden] = value
    return noisy.requires_grad_()


@pytest.mark.parametrize("value", [math.nan, INF])
@pytest.mark.parametrize("name", ["top-left", "window hides keys", "bool bias of keys"])
def test_what_is_hidden_from_all_never_shows(name, value) -> None:
    q, k, v, options = build(name)
    hidden = torch.autograd.grad(reference_attention(q, k, v, **options)[0].abs().sum(), v)[0]
    hidden = (hidden == 0).all(dim=-1)
    assert hidden.any()
    clean = torch.autograd.grad(reference_attention(q, k, v, **options)[0].sum(), (q, k, v))
    k_noisy, v_noisy = hidden_noise(k, hidden, value), hidden_noise(v, hidden, value)
    out, _ = reference_attention(q, k_noisy, v_noisy, **options)
    torch.testing.assert_close(out, reference_attention(q, k, v, **options)[0], atol=0, rtol=0)
    noisy = torch.autograd.grad(out.sum(), (q, k_noisy, v_noisy))
    for a, b in zip(noisy, clean, strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_a_seen_nan_shows_in_its_row() -> None:
    q, k, v, _ = build("causal", grad=False)
    v = v.clone()
    v[0, 7, 0] = math.nan
    out, _ = reference_attention(q, k, v, causal=True)
    assert out[0, 7, 0].isnan().all()


def test_dead_queries_and_their_upstream_gradients_do_not_spread() -> None:
    q, k, v, options = build("causal more queries")
    dead = 50 - 21
    with torch.no_grad():
        q[:, :dead] = math.nan
    out, _ = reference_attention(q, k, v, **options)
    upstream = torch.ones_like(out)
    upstream[:, :dead] = math.nan
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), upstream)
    assert not dq[:, :dead].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(33, 33), (20, 31)])
def test_equals_scaled_dot_product_attention(causal, lengths) -> None:
    seqlen_q, seqlen_k = lengths
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, seqlen_q, 6, 16, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, seqlen_k, 2, 16, generator=generator, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (q, k.clone(), v.clone())]
    # torch aligns its causal mask top-left
    out, _ = reference_attention(*inputs, causal="top-left" if causal else False)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in inputs), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
    torch.testing.assert_close(out, theirs)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(out, inputs, upstream)
    for a, b in zip(ours, torch.autograd.grad(theirs, inputs, upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "name", ["causal", "causal more keys", "window both sides", "softcap", "alibi"]
)
def test_equals_flex_attention(name) -> None:
    q, k, v, options = build(name, grad=False)
    offset = k.shape[1] - q.shape[1]
    left, right = options.get("window", (None, None))
    softcap = options.get("softcap", 0.0)
    slopes = options.get("alibi_slopes")

    def visible(b, h, i, j):
        seen = j >= 0
        if options.get("causal"):
            seen = seen & (j <= i + offset)
        if left is not None:
            seen = seen & (j >= i + offset - left)
        if right is not None:
            seen = seen & (j <= i + offset + right)
        return seen

    def change_score(score, b, h, i, j):
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h].double() * (i + offset - j).abs()
        return score

    block_mask = create_block_mask(visible, None, None, q.shape[1], k.shape[1], device="cpu")
    theirs, aux = flex_attention(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=change_score,
        block_mask=block_mask,
        enable_gqa=True,
        return_aux=AuxRequest(lse=True),
    )
    out, lse = reference_attention(q, k, v, **options)
    torch.testing.assert_close(out, theirs.transpose(1, 2))
    torch.testing.assert_close(lse, aux.lse, atol=1e-5, rtol=1e-5, check_dtype=False)


@pytest.mark.parametrize("name", ["causal more queries", "sinks", "everything"])
def test_second_derivatives(name) -> None:
    q, k, v, options = build(name)
    q, k, v = (x.detach()[:1, :6, :, :4].requires_grad_() for x in (q, k, v))
    options = {n: o for n, o in options.items() if n not in ("bias", "alibi_slopes")}
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: reference_attention(q, k, v, **options)[0], (q, k, v)
    )


def packed_case():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(12, 4, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    k = torch.randn(27, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    v = torch.randn(27, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    return q, k, v, torch.tensor([0, 0, 5, 9, 9]), torch.tensor([0, 7, 12, 16, 25])


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences_equal_dense_calls(causal) -> None:
    q, k, v, cu_q, cu_k = packed_case()
    out, lse = reference_attention_varlen(q, k, v, cu_q, cu_k, causal=causal, dropout_p=0.2)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        dense, dense_lse = reference_attention(
            q[rows][None],
            k[keys][None],
            v[keys][None],
            causal=causal,
            dropout_p=0.2,
            first_sequence=b,
        )
        torch.testing.assert_close(out[rows], dense[0], atol=0, rtol=0)
        torch.testing.assert_close(lse[:, rows], dense_lse[0], atol=0, rtol=0)
    assert not out[9:].any()
    assert (lse[:, 9:] == -INF).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq[9:].any()
    for gradient in (dk, dv):
        assert gradient.isfinite().all()
        assert not gradient[:7].any()
        assert not gradient[16:].any()


def test_packed_lengths_in_use_pages_and_bad_offsets() -> None:
    q, k, v, cu_q, cu_k = packed_case()
    used_q, used_k = torch.tensor([0, 3, 4, 0]), torch.tensor([7, 2, 0, 9])
    with torch.no_grad():
        k[9:12] = math.nan  # behind the used length of sequence 1
    out, lse = reference_attention_varlen(
        q, k, v, cu_q, cu_k, seqused_q=used_q, seqused_k=used_k, causal=True
    )
    dense, _ = reference_attention(q[None, :3], k[None, 7:9], v[None, 7:9], causal=True)
    torch.testing.assert_close(out[:3], dense[0], atol=0, rtol=0)
    assert not out[3:].any()  # slack rows of sequence 1; sequence 2 has no keys
    assert (lse[:, 3:] == -INF).all()
    pages = k.detach().nan_to_num()[:24].unflatten(0, (8, 3))
    table = torch.tensor([[7, 2, 5, 99], [0, 0, 1, 1]], dtype=torch.int32)
    out, _ = reference_attention_varlen(
        q, pages, pages, torch.tensor([0, 4, 9]), torch.tensor([0, 8, 10]), page_table=table
    )
    gathered = pages[[7, 2, 5]].flatten(0, 1)[:8]
    dense, _ = reference_attention(q[None, :4], gathered[None], gathered[None])
    torch.testing.assert_close(out[:4], dense[0], atol=0, rtol=0)
    wild = torch.tensor([-3, 5, 4, 900])
    out, _ = reference_attention_varlen(q, k.nan_to_num(), v, wild, wild)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match="bias"):
        reference_attention_varlen(q, k, v, cu_q, cu_k, bias=torch.zeros(1, 1, 1, 1))


def test_fp8_descales() -> None:
    q, k, v, _ = build("plain", torch.float32, grad=False)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    two, half = torch.full((2, 2), 2.0), torch.full((2, 2), 0.5)
    out, _ = reference_attention(q8, k8, v8)
    doubled, _ = reference_attention(q8, k8, v8, v_descale=two)
    torch.testing.assert_close(doubled, 2 * out, atol=0, rtol=0)
    same, _ = reference_attention(q8, k8, v8, q_descale=two, k_descale=half)
    torch.testing.assert_close(same, out, atol=0, rtol=0)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_merged_partials_equal_the_whole(with_sinks) -> None:
    q, k, v, _ = build("causal more keys")
    sinks = torch.randn(3, dtype=torch.float64) if with_sinks else None
    whole = reference_attention(q, k, v, sinks=sinks)
    cuts = [(0, 100), (100, 100), (100, 211)]  # an empty part among them
    parts = [reference_attention(q, k[:, a:b], v[:, a:b]) for a, b in cuts]
    outs, lses = zip(*parts, strict=True)
    poisoned = (outs[0], torch.full_like(outs[1], math.nan), outs[2])
    merged = merge_partials(poisoned, lses, sinks)
    for a, b in zip(merged, whole, strict=True):
        torch.testing.assert_close(a, b)
    nothing, lse = merge_partials(torch.stack([outs[1]] * 2), torch.stack([lses[1]] * 2))
    assert not nothing.any()
    assert (lse == -INF).all()


def test_every_case_is_finite() -> None:
    for name in CASES:
        q, k, v, options = build(name, grad=False)
        out, _ = reference_attention(q, k, v, **options)
        assert out.isfinite().all(), name
