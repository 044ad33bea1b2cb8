"""FlashAttention-2's functions on CPU tensors: values, conventions, packed forms, S_dmask."""

import math

import pytest
import torch

from flashdig.facades.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flashdig.kernels.philox import keep_mask
from flashdig.kernels.reference import reference_attention, reference_attention_varlen

CALLS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "left window": {"window_size": (3, -1), "causal": True},
    "any negative is unlimited": {"window_size": (-7, 2)},
    "softcap": {"softcap": 4.0},
    "slopes": {"alibi_slopes": 4},
    "slopes of the batch": {"alibi_slopes": (2, 4)},
    "everything": {
        "softmax_scale": 0.3,
        "causal": True,
        "window_size": (5, 0),
        "softcap": 3.0,
        "alibi_slopes": (2, 4),
        "deterministic": True,
    },
}
OFFSETS_Q, OFFSETS_K = [0, 9, 14], [0, 5, 16]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def offsets(values):
    return torch.tensor(values, dtype=torch.int32)


def options_of(name):
    """The keywords of a call, and those of the oracle."""
    ours = dict(CALLS[name])
    if "alibi_slopes" in ours:
        size = ours["alibi_slopes"]
        ours["alibi_slopes"] = torch.rand(*(size if isinstance(size, tuple) else (size,)))
    oracle = {k: v for k, v in ours.items() if k not in ("window_size", "deterministic")}
    left, right = ours.get("window_size", (-1, -1))
    oracle["window"] = (max(left, -1), max(right, -1))
    return ours, oracle


def next_seed():
    """The seed that the next call with dropout will draw."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**63 - 1, (1,)))
    torch.set_rng_state(state)
    return seed


def assert_same(ours, expected):
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def with_inf(lse):
    return torch.where(torch.isneginf(lse), math.inf, lse)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", CALLS)
def test_dense(name, dropout_p) -> None:
    torch.manual_seed(0)
    ours, oracle = options_of(name)
    q, k, v = randn(2, 9, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8)
    seed = next_seed()
    state = torch.get_rng_state()
    out = flash_attn_func(q, k, v, dropout_p, **ours)
    torch.set_rng_state(state)
    again, lse, _ = flash_attn_func(q, k, v, dropout_p, **ours, return_attn_probs=True)
    expected, expected_lse = reference_attention(
        q, k, v, **oracle, dropout_p=dropout_p, dropout_seed=seed
    )
    assert_same(out, expected)
    assert_same(again, expected)
    assert_same(lse, with_inf(expected_lse))
    weights = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), weights),
        torch.autograd.grad(expected, (q, k, v), weights),
        strict=True,
    ):
        assert_same(a, b)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("name", CALLS)
def test_varlen(name, dropout_p) -> None:
    torch.manual_seed(0)
    ours, oracle = options_of(name)
    q, k, v = randn(14, 4, 8), randn(16, 2, 8), randn(16, 2, 8)
    where = (offsets(OFFSETS_Q), offsets(OFFSETS_K), 9, 11)
    seed = next_seed()
    state = torch.get_rng_state()
    out = flash_attn_varlen_func(q, k, v, *where, dropout_p, **ours)
    torch.set_rng_state(state)
    again, lse, _ = flash_attn_varlen_func(
        q, k, v, *where, dropout_p, **ours, return_attn_probs=True
    )
    expected, expected_lse = reference_attention_varlen(
        q, k, v, *where[:2], **oracle, dropout_p=dropout_p, dropout_seed=seed
    )
    assert_same(out, expected)
    assert_same(again, expected)
    assert lse.shape == (4, 14)
    assert_same(lse, with_inf(expected_lse))
    weights = torch.randn_like(out)
    for a, b in zip(
        torch.autograd.grad(out, (q, k, v), weights),
        torch.autograd.grad(expected, (q, k, v), weights),
        strict=True,
    ):
        assert_same(a, b)


def test_arguments_by_position() -> None:
    torch.manual_seed(0)
    q, k, v = randn(1, 6, 2, 8), randn(1, 8, 2, 8), randn(1, 8, 2, 8)
    slopes = torch.rand(2)
    out, lse, mask = flash_attn_func(q, k, v, 0.0, 0.2, True, (4, 0), 5.0, slopes, True, True)
    expected, expected_lse = reference_attention(
        q, k, v, softmax_scale=0.2, causal=True, window=(4, 0), softcap=5.0, alibi_slopes=slopes
    )
    assert_same(out, expected)
    assert_same(lse, expected_lse)
    assert mask.numel() == 0


def test_lse_of_rows_without_keys_is_plus_infinity_and_harmless() -> None:
    q, k, v = randn(1, 5, 2, 8), randn(1, 2, 2, 8), randn(1, 2, 2, 8)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[..., :3] == math.inf).all()
    assert lse[..., 3:].isfinite().all()
    assert not out[:, :3].any()
    # with one key the lse is its score, so this is known: dlse/dq = scale * k
    (dq,) = torch.autograd.grad(lse[0, 0, 3], q)
    assert_same(dq[0, 3, 0], k[0, 0, 0].detach() * 8**-0.5)
    assert not dq[0, :3].any()
    no_keys = torch.zeros(1, 0, 2, 8)
    _, lse, _ = flash_attn_func(q.float(), no_keys, no_keys, return_attn_probs=True)
    assert (lse == math.inf).all()
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
@pytest.mark.parametrize(
    ("options", "by_key"),
    [
        ({"causal": True}, True),
        ({"window_size": (-1, 0)}, True),
        ({"causal": True, "window_size": (11, -1)}, True),  # hides nothing: 11 keys at most
        ({"causal": True, "window_size": (3, -1)}, False),
        ({"window_size": (-1, 1)}, False),
    ],
)
def test_causal_slopes_count_from_the_first_key_in_softmax_lse(shape, options, by_key) -> None:
    """FlashAttention-2's kernels add slope * j there, and elsewhere subtract slope * distance."""
    torch.manual_seed(0)
    slopes = torch.rand(*shape)
    q, k, v = randn(14, 4, 8), randn(18, 2, 8), randn(18, 2, 8)
    cu_q, cu_k = [0, 9, 14], [0, 7, 18]
    _, packed, _ = flash_attn_varlen_func(
        *(q, k, v, offsets(cu_q), offsets(cu_k), 9, 11),
        alibi_slopes=slopes,
        return_attn_probs=True,
        **options,
    )
    left, right = options.get("window_size", (-1, -1))
    for b in range(2):
        rows, keys = slice(*cu_q[b : b + 2]), slice(*cu_k[b : b + 2])
        one = (q[None, rows], k[None, keys], v[None, keys])
        of_sequence = slopes if slopes.dim() == 1 else slopes[b]
        if by_key:
            bias = of_sequence.double().view(1, 4, 1, 1) * torch.arange(one[1].shape[1])
            terms = {"bias": bias, "causal": True}
        else:
            terms = {"alibi_slopes": of_sequence, "window": (left, right)}
            terms["causal"] = options.get("causal", False)
        out, expected = reference_attention(*one, **terms)
        own = flash_attn_func(*one, alibi_slopes=of_sequence, return_attn_probs=True, **options)
        assert_same(own[0], out)
        assert_same(own[1], with_inf(expected))
        assert_same(packed[:, rows], with_inf(expected)[0])


def test_results_have_the_originals_shapes() -> None:
    q, kv = torch.randn(2, 6, 4, 8).half(), torch.randn(2, 9, 2, 2, 8).half()
    out = flash_attn_kvpacked_func(q, kv)
    assert isinstance(out, torch.Tensor)
    assert (out.shape, out.dtype) == (q.shape, torch.float16)
    out, lse, mask = flash_attn_kvpacked_func(q, kv, return_attn_probs=True)
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    assert (mask.shape, mask.dtype) == ((0,), torch.float16)


PACKED = {"qkv": (2, 6, 3, 4, 8), "kv": (2, 6, 2, 2, 8)}


@pytest.mark.parametrize("packing", PACKED)
@pytest.mark.parametrize("varlen", [False, True])
def test_packed_gradients_lie_in_their_slots(packing, varlen) -> None:
    torch.manual_seed(0)
    packed = randn(*PACKED[packing])
    q = randn(2, 6, 4, 8)
    cu = offsets([0, 5, 12])
    arguments = {"causal": True, "softcap": 4.0}
    if packing == "qkv":
        parts = [x.detach().requires_grad_() for x in packed.unbind(2)]
        if varlen:
            out = flash_attn_varlen_qkvpacked_func(packed.flatten(0, 1), cu, 7, **arguments)
        else:
            out = flash_attn_qkvpacked_func(packed, **arguments)
    else:
        parts = [q, *(x.detach().requires_grad_() for x in packed.unbind(2))]
        if varlen:
            out = flash_attn_varlen_kvpacked_func(
                q.flatten(0, 1), packed.flatten(0, 1), cu, cu, 7, 7, **arguments
            )
        else:
            out = flash_attn_kvpacked_func(q, packed, **arguments)
    if varlen:
        rows = [x.flatten(0, 1) for x in parts]
        expected, _ = reference_attention_varlen(*rows, cu, cu, **arguments)
    else:
        expected, _ = reference_attention(*parts, **arguments)
    assert_same(out, expected)
    weights = torch.randn_like(out)
    (d_packed,) = torch.autograd.grad(out, packed, weights)
    wanted = torch.autograd.grad(expected, parts, weights)
    slots = d_packed.unbind(2)
    for a, b in zip(slots, wanted[-len(slots) :], strict=True):
        assert a.abs().max() > 0.01
        assert_same(a, b)


@pytest.mark.parametrize("name", ["plain", "everything"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_signs_of_the_dropout_mask_are_what_was_dropped(name, dtype) -> None:
    torch.manual_seed(3)
    ours, oracle = options_of(name)
    q, k, v = (randn(*shape).to(dtype) for shape in ((2, 9, 4, 8), (2, 12, 2, 8), (2, 12, 2, 8)))
    seed = next_seed()
    out, lse, mask = flash_attn_func(q, k, v, 0.4, **ours, return_attn_probs=True)
    assert (mask.shape, mask.dtype, mask.requires_grad) == ((2, 4, 9, 12), dtype, False)
    counted = [torch.arange(n) for n in (2, 4, 9, 12)]
    kept = keep_mask(seed, 0.4, *counted)
    assert torch.equal(torch.signbit(mask), ~kept)
    # the probabilities behind the signs give the output back
    relative = mask.abs().double()
    probabilities = relative / relative.sum(-1, keepdim=True).clamp_min(1e-30)
    values = v.double().repeat_interleave(2, dim=2)
    rebuilt = torch.einsum("bhij,bjhd->bihd", probabilities * (mask >= 0) / 0.6, values)
    torch.testing.assert_close(out.double(), rebuilt, atol=5e-3, rtol=5e-3)
    _, expected_lse = reference_attention(q, k, v, **oracle)
    torch.testing.assert_close(lse.double(), with_inf(expected_lse), atol=5e-3, rtol=5e-3)
    assert relative.amax(-1).unique().tolist() == [1.0]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_dropout_mask_of_packed_input(as_tensor) -> None:
    torch.manual_seed(3)
    q, k, v = randn(20, 4, 8), randn(25, 2, 8), randn(25, 2, 8)
    cu_q, cu_k = offsets([1, 10, 10, 15]), offsets([2, 7, 9, 20])
    longest = (torch.tensor(10), torch.tensor(12)) if as_tensor else (10, 12)
    seed = next_seed()
    out, _, mask = flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, 0.4, causal=True, return_attn_probs=True
    )
    assert mask.shape == (3, 4, 10, 12)
    kept = keep_mask(seed, 0.4, *(torch.arange(n) for n in (3, 4, 10, 12)))
    expected = torch.zeros_like(out)
    for b, (rows, keys) in enumerate(zip(cu_q.diff(), cu_k.diff(), strict=True)):
        assert not mask[b, :, rows:].any()
        assert not mask[b, :, :, keys:].any()
        mine = mask[b, :, :rows, :keys]
        assert torch.equal(torch.signbit(mine), ~kept[b, :, :rows, :keys])
        probabilities = mine.abs() / mine.abs().sum(-1, keepdim=True).clamp_min(1e-30)
        values = v[cu_k[b] : cu_k[b] + keys].repeat_interleave(2, dim=1)
        expected[cu_q[b] : cu_q[b] + rows] = torch.einsum(
            "hij,jhd->ihd", probabilities * (mine >= 0) / 0.6, values
        )
    assert_same(out, expected)


def test_looking_at_dropout_draws_no_more_than_dropping() -> None:
    q = torch.randn(1, 6, 2, 8)
    torch.manual_seed(5)
    plain = [flash_attn_func(q, q, q, 0.5) for _ in range(2)]
    torch.manual_seed(5)
    looked = [flash_attn_func(q, q, q, 0.5, return_attn_probs=True)[0] for _ in range(2)]
    for a, b in zip(plain, looked, strict=True):
        torch.testing.assert_close(a, b)


def test_a_block_table_pages_the_keys() -> None:
    torch.manual_seed(0)
    q, blocks = randn(7, 4, 8), randn(6, 4, 2, 2, 8)
    k, v = blocks.unbind(2)
    cu_q, cu_k = offsets([0, 3, 7]), offsets([0, 6, 15])
    table = torch.tensor([[5, 1, 0], [3, 0, 4]], dtype=torch.int32)
    where = (cu_q, cu_k, 4, 9)
    out = flash_attn_varlen_func(q, k, v, *where, causal=True, block_table=table)
    expected, _ = reference_attention_varlen(q, k, v, cu_q, cu_k, causal=True, page_table=table)
    torch.testing.assert_close(out, expected)
    for bad, error in (
        (table.long(), TypeError),
        (table[0], ValueError),
        ([[1]], TypeError),
    ):
        with pytest.raises(error, match="block_table"):
            flash_attn_varlen_func(q, k, v, *where, block_table=bad)
    with pytest.raises(NotImplementedError, match=r"return_attn_probs.*block_table"):
        flash_attn_varlen_func(
            q, k, v, *where, dropout_p=0.1, block_table=table, return_attn_probs=True
        )
    flash_attn_varlen_func(q, k, v, *where, block_table=table, return_attn_probs=True)


BAD = [
    ({"window_size": 4}, TypeError, "window_size"),
    ({"window_size": (1, 2, 3)}, TypeError, "window_size"),
    ({"dropout_p": 1.5}, ValueError, "dropout_p"),
    ({"dropout_p": "0.1"}, TypeError, "dropout_p"),
    ({"dropout_p": 1.5, "return_attn_probs": True}, ValueError, "dropout_p"),
    ({"softcap": -1.0}, ValueError, "softcap"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale"),
    ({"alibi_slopes": torch.zeros(3)}, ValueError, "alibi_slopes"),
    ({"return_attn_probs": 1}, TypeError, "return_attn_probs"),
    ({"deterministic": None}, TypeError, "deterministic"),
]


@pytest.mark.parametrize(("change", "error", "name"), BAD)
def test_bad_arguments_are_named(change, error, name) -> None:
    qkv, cu = torch.zeros(1, 4, 3, 2, 8), offsets([0, 4])
    with pytest.raises(error, match=rf"\b{name}\b"):
        flash_attn_qkvpacked_func(qkv, **change)
    with pytest.raises(error, match=rf"\b{name}\b"):
        flash_attn_varlen_qkvpacked_func(qkv[0], cu, 4, **change)


def test_badly_packed_tensors_are_named() -> None:
    q, cu = torch.zeros(1, 4, 2, 8), offsets([0, 4])
    for parts in (1, 2, 3, 4):
        packed = torch.zeros(1, 4, parts, 2, 8)
        for bad in (packed, packed[0]):
            if parts != 3 or bad.dim() == 4:
                with pytest.raises(ValueError, match=r"^qkv must be \(batch, seqlen, 3"):
                    flash_attn_qkvpacked_func(bad)
            if parts != 2 or bad.dim() == 4:
                with pytest.raises(ValueError, match=r"^kv must be \(batch, seqlen_k, 2"):
                    flash_attn_kvpacked_func(q, bad)
            if parts != 3 or bad.dim() == 5:
                with pytest.raises(ValueError, match=r"^qkv must be \(total, 3"):
                    flash_attn_varlen_qkvpacked_func(bad, cu, 4)
            if parts != 2 or bad.dim() == 5:
                with pytest.raises(ValueError, match=r"^kv must be \(total_k, 2"):
                    flash_attn_varlen_kvpacked_func(q[0], bad, cu, cu, 4, 4)
    with pytest.raises(TypeError, match=r"^qkv"):
        flash_attn_qkvpacked_func([1])


@pytest.mark.parametrize("return_attn_probs", [False, True])
def test_tensors_are_named(return_attn_probs) -> None:
    q, wide = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 9)
    for dropout_p in (0.0, 0.5):
        with pytest.raises(TypeError, match=r"\bv must"):
            flash_attn_func(q, q, None, dropout_p, return_attn_probs=return_attn_probs)
        with pytest.raises(ValueError, match=r"\bk must"):
            flash_attn_func(q, wide, q, dropout_p, return_attn_probs=return_attn_probs)
    with pytest.raises(TypeError, match="max_seqlen_k"):
        flash_attn_varlen_func(
            q[0],
            q[0],
            q[0],
            *[offsets([0, 4])] * 2,
            4,
            None,
            0.5,
            return_attn_probs=True,
        )


def test_compiles_into_one_graph() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(1, 6, 3, 2, 8)

    def call(qkv):
        return flash_attn_qkvpacked_func(
            qkv, causal=True, window_size=(3, -1), return_attn_probs=True
        )

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for a, b in zip(compiled(qkv), call(qkv), strict=True):
        torch.testing.assert_close(a, b)
