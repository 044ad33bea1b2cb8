"""FlashAttention-3's and -4's functions on CPU tensors: values, conventions, refusals."""

import pytest
import torch

from flashdig.facades import flash_attn_3 as fa3
from flashdig.facades import flash_attn_4 as fa4
from flashdig.kernels.reference import reference_attention, reference_attention_varlen

SHARED = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "softcap": {"softcap": 4.0, "causal": True},
    "hints": {"num_splits": 3, "pack_gqa": True, "deterministic": True},
}
ONLY = {
    fa3: {"negative is unlimited": {"window_size": (-7, 2)}},
    fa4: {
        "None is unlimited": {"window_size": (None, 2)},
        "minus one is unlimited": {"window_size": (-1, -1), "causal": True},
        "sink": {"learnable_sink": 4, "causal": True},
    },
}
CALLS = [
    pytest.param(module, call, id=f"{module.__name__[-1]}-{name}")
    for module in (fa3, fa4)
    for name, call in {**SHARED, **ONLY[module]}.items()
]
QV = [pytest.param(module, id=module.__name__[-1]) for module in (fa3, fa4)]


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def offsets(*values):
    return torch.tensor(values, dtype=torch.int32)


def options_of(call):
    """The keywords of a call, and those of the oracle."""
    ours = dict(call)
    if "learnable_sink" in ours:
        ours["learnable_sink"] = randn(ours["learnable_sink"])
    names = {"window_size": "window", "learnable_sink": "sinks"}
    hints = ("num_splits", "pack_gqa", "deterministic")
    oracle = {names.get(k, k): v for k, v in ours.items() if k not in hints}
    if "window" in oracle:
        oracle["window"] = tuple(None if s is None or s < 0 else s for s in oracle["window"])
    return ours, oracle


def with_lse(module, function, *arguments, **options):
    flag = "return_attn_probs" if module is fa3 else "return_lse"
    return getattr(module, function)(*arguments, **options, **{flag: True})


def only_out(module, function, *arguments, **options):
    result = getattr(module, function)(*arguments, **options)
    return result if module is fa3 else result[0]


def assert_same(ours, expected):
    torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


def assert_equal_with_gradients(results, oracle_results, inputs):
    for a, b in zip(results, oracle_results, strict=True):
        assert_same(a, b)
    weights = [torch.randn_like(x) for x in results]
    losses = [
        sum((torch.where(x.isinf(), 0.0, x) * w).sum() for x, w in zip(xs, weights, strict=True))
        for xs in (results, oracle_results)
    ]
    for a, b in zip(*(torch.autograd.grad(loss, inputs) for loss in losses), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(("module", "call"), CALLS)
def test_dense(module, call) -> None:
    torch.manual_seed(0)
    ours, oracle = options_of(call)
    q, k, v = randn(2, 9, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 6)
    results = with_lse(module, "flash_attn_func", q, k, v, **ours)
    expected = reference_attention(q, k, v, **oracle)
    inputs = [q, k, v, *([ours["learnable_sink"]] if "learnable_sink" in ours else [])]
    assert_equal_with_gradients(results, expected, inputs)
    assert_same(only_out(module, "flash_attn_func", q, k, v, **ours), expected[0])


@pytest.mark.parametrize(("module", "call"), CALLS)
@pytest.mark.parametrize("used", [False, True])
def test_varlen(module, call, used) -> None:
    torch.manual_seed(0)
    ours, oracle = options_of(call)
    q, k, v = randn(14, 4, 8), randn(16, 2, 8), randn(16, 2, 6)
    where = {"cu_seqlens_q": offsets(0, 9, 14), "cu_seqlens_k": offsets(0, 5, 16)}
    if used:
        where |= {"seqused_q": offsets(7, 5), "seqused_k": offsets(0, 4)}
    longest = {"max_seqlen_q": 9, "max_seqlen_k": torch.tensor(11)}
    results = with_lse(module, "flash_attn_varlen_func", q, k, v, **where, **longest, **ours)
    expected = reference_attention_varlen(q, k, v, **where, **oracle)
    inputs = [q, k, v, *([ours["learnable_sink"]] if "learnable_sink" in ours else [])]
    assert_equal_with_gradients(results, expected, inputs)
    out = only_out(module, "flash_attn_varlen_func", q, k, v, **where, **longest, **ours)
    assert_same(out, expected[0])


@pytest.mark.parametrize("module", QV)
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_a_second_query(module, softmax_scale) -> None:
    torch.manual_seed(0)
    q, k, v, qv = randn(2, 9, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 6), randn(2, 9, 4, 6)
    options = {"causal": True, "softmax_scale": softmax_scale}
    out, lse = with_lse(module, "flash_attn_func", q, k, v, qv=qv, **options)
    # scale * (q k^T + qv v^T), with the scale of both sizes
    scale = 14**-0.5 if softmax_scale is None else softmax_scale
    bias = scale * torch.einsum("bihd,bjhd->bhij", qv, v.repeat_interleave(2, dim=2))
    expected = reference_attention(q, k, v, causal=True, softmax_scale=scale, bias=bias)
    lse_first = lse.mT if module is fa4 else lse
    assert lse_first.shape == (2, 4, 9)
    assert_equal_with_gradients((out, lse_first), expected, [q, k, v, qv])
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    where = {
        "cu_seqlens_q": offsets(0, 9, 18),
        "cu_seqlens_k": offsets(0, 7, 14),
        "max_seqlen_q": 9,
        "max_seqlen_k": 7,
    }
    packed = with_lse(
        module, "flash_attn_varlen_func", *rows, qv=qv.flatten(0, 1), **where, **options
    )
    assert_same(packed[0], out.flatten(0, 1))
    assert packed[1].shape == ((18, 4) if module is fa4 else (4, 18))
    for bad, error in (
        (qv[:, :5], ValueError),
        (qv.float(), TypeError),
        ([1], TypeError),
    ):
        with pytest.raises(error, match=r"\bqv\b"):
            module.flash_attn_func(q, k, v, qv=bad)
    with pytest.raises(ValueError, match=r"\bv must"):
        module.flash_attn_func(q, k, v[:, :3], qv=qv)
    if module is fa3:
        with pytest.raises(NotImplementedError, match="k_descale"):
            fa3.flash_attn_func(q, k, v, qv=qv, k_descale=torch.ones(2, 2))
    fp8 = [x.detach().to(torch.float8_e4m3fn) for x in (q, k, v, qv)]
    with pytest.raises(NotImplementedError, match=r"qv.*fp8"):
        module.flash_attn_func(*fp8[:3], qv=fp8[3])


def test_descale_factors_and_fp8() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 5, h, 8).to(torch.float8_e4m3fn) for h in (4, 2, 2))
    descales = {name: torch.rand(2, 2) + 0.5 for name in ("q_descale", "k_descale", "v_descale")}
    out = fa3.flash_attn_func(q, k, v, causal=True, **descales)
    assert out.dtype == torch.bfloat16
    expected, _ = reference_attention(q, k, v, causal=True, **descales)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    where = (offsets(0, 5, 10), offsets(0, 5, 10), 5, 5)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    packed = fa3.flash_attn_varlen_func(*rows, *where, causal=True, **descales)
    torch.testing.assert_close(packed, out.flatten(0, 1))
    qkv = torch.cat((q, k, v), dim=2)
    assert torch.equal(
        fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4, **descales), out
    )


@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_packed_gradients_lie_in_their_slots(num_heads_q) -> None:
    torch.manual_seed(0)
    if num_heads_q is None:
        qkv = randn(2, 6, 3, 2, 8)
        parts = [x.detach().requires_grad_() for x in qkv.unbind(2)]
    else:
        qkv = randn(2, 6, 8, 8)
        parts = [x.detach().requires_grad_() for x in qkv.split([4, 2, 2], dim=2)]
    out = fa3.flash_attn_qkvpacked_func(qkv, 0.3, True, num_heads_q=num_heads_q)
    expected, _ = reference_attention(*parts, softmax_scale=0.3, causal=True)
    assert_same(out, expected)
    weights = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, qkv, weights)
    slots = gradient.unbind(2) if num_heads_q is None else gradient.split([4, 2, 2], dim=2)
    for a, b in zip(slots, torch.autograd.grad(expected, parts, weights), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(
    ("shape", "num_heads_q", "error"),
    [
        ((2, 6, 8, 8), None, ValueError),
        ((2, 6, 8, 8), 3, ValueError),
        ((2, 6, 8, 8), 10, ValueError),
        ((2, 6, 8, 8), -2, ValueError),
        ((2, 6, 8), 4, ValueError),
        ((2, 6, 4, 2, 8), 2, ValueError),
        ((2, 6, 8, 8), "4", TypeError),
    ],
)
def test_badly_packed_tensors_are_named(shape, num_heads_q, error) -> None:
    name = "num_heads_q" if error is TypeError else "^qkv"
    with pytest.raises(error, match=name):
        fa3.flash_attn_qkvpacked_func(torch.zeros(shape), num_heads_q=num_heads_q)


def test_lse_of_rows_without_keys_is_minus_infinity_or_the_sink() -> None:
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 2, 8)
    for module in (fa3, fa4):
        out, lse = with_lse(module, "flash_attn_func", q, k, k, causal=True)
        assert (lse[..., :3] == -torch.inf).all()
        assert lse.dtype == torch.float32
        assert not out[:, :3].any()
    sink = torch.tensor([0.25, -3.0])
    _, lse = fa4.flash_attn_func(q, k, k, causal=True, learnable_sink=sink, return_lse=True)
    assert torch.equal(lse[0, :, :3], sink[:, None].expand(2, 3))


def test_flash_attention_4_returns_a_pair_and_the_lse_where_the_original_does() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in range(3))
    where = {"cu_seqlens_q": offsets(0, 5), "cu_seqlens_k": offsets(0, 5)}
    rows = [x[0] for x in (q, k, v)]
    for call in (
        fa4.flash_attn_func,
        lambda *x, **o: fa4.flash_attn_varlen_func(*(y[0] for y in x), **where, **o),
    ):
        out, lse = call(q, k, v)
        assert lse is None
        assert out.shape[-3:] == (5, 2, 8)
        _, lse = call(q, k, v, return_lse=True)
        assert lse is not None
        learning = q.clone().requires_grad_()
        _, lse = call(learning, k, v)
        assert lse is not None
        assert not lse.requires_grad
        _, lse = call(learning, k, v, return_lse=True)
        assert lse.requires_grad
        _, lse = call(q, k, v, learnable_sink=torch.zeros(2, requires_grad=True))
        assert lse is not None
    assert fa4.flash_attn_varlen_func(*rows, **where)[1] is None


@pytest.mark.parametrize("padded_q", [False, True])
@pytest.mark.parametrize("keys", ["packed", "padded", "paged", "paged and packed", "all pages"])
@pytest.mark.parametrize("lse", [False, True])
def test_flash_attention_4_takes_packed_padded_and_paged_sequences(padded_q, keys, lse) -> None:
    torch.manual_seed(0)
    dense_q, k, v = randn(3, 5, 4, 8), randn(3, 6, 2, 8), randn(3, 6, 2, 6)
    used_q, used_k = offsets(5, 0, 3), offsets(6, 2, 4)
    where = {}
    q = dense_q if padded_q else torch.cat([dense_q[b, :n] for b, n in enumerate(used_q)])
    if padded_q:
        where["seqused_q"] = used_q
    else:
        where["cu_seqlens_q"] = offsets(0, 5, 5, 8)
    our_k, our_v = k, v
    if keys == "packed":
        our_k, our_v = (torch.cat([x[b, :n] for b, n in enumerate(used_k)]) for x in (k, v))
        where["cu_seqlens_k"] = offsets(0, 6, 8, 12)
    elif keys == "padded":
        where["seqused_k"] = used_k
    else:
        our_k, our_v = (x.reshape(9, 2, 2, -1) for x in (k, v))
        where["page_table"] = offsets(*range(9)).view(3, 3)
        if keys == "paged":
            where["seqused_k"] = used_k
        elif keys == "paged and packed":
            where["cu_seqlens_k"] = offsets(0, 6, 8, 12)
        else:
            used_k = offsets(6, 6, 6)
    out, got_lse = fa4.flash_attn_varlen_func(
        q.detach(), our_k.detach(), our_v.detach(), **where, causal=True, return_lse=lse
    )
    trained, _ = fa4.flash_attn_varlen_func(q, our_k, our_v, **where, causal=True)
    torch.testing.assert_close(out, trained.to(out.dtype), atol=1e-6, rtol=1e-6)
    starts = offsets(0, 5, 10, 15), offsets(0, 6, 12, 18)
    expected, expected_lse = reference_attention_varlen(
        *(x.flatten(0, 1) for x in (dense_q, k, v)),
        *starts,
        seqused_q=used_q,
        seqused_k=used_k,
        causal=True,
    )
    expected, expected_lse = expected.unflatten(0, (3, 5)), expected_lse.unflatten(1, (3, 5))
    expected_lse = expected_lse.transpose(0, 1)
    if not padded_q:
        expected = torch.cat([expected[b, :n] for b, n in enumerate(used_q)])
        expected_lse = torch.cat([expected_lse[b, :, :n] for b, n in enumerate(used_q)], dim=1)
    assert_same(out, expected)
    if lse:
        assert_same(got_lse, expected_lse)
    else:
        assert got_lse is None
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(trained, (dense_q, k, v), weights.to(trained.dtype)),
        torch.autograd.grad(expected, (dense_q, k, v), weights),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


Q = torch.zeros(2, 4, 2, 8)
TENSOR = torch.zeros(2, dtype=torch.int32)
VARLEN_4 = {"cu_seqlens_q": offsets(0, 4, 8), "cu_seqlens_k": offsets(0, 4, 8)}
REFUSED = [
    (fa3, "flash_attn_func", {"attention_chunk": 4}),
    (fa3, "flash_attn_func", {"sm_margin": 8}),
    *[
        (fa4, function, {name: value})
        for function in ("flash_attn_func", "flash_attn_varlen_func")
        for name, value in {
            "gather_kv_indices": TENSOR,
            "score_mod": lambda *x: x[0],
            "score_mod_bwd": lambda *x: x[0],
            "mask_mod": lambda *x: True,
            "aux_tensors": [TENSOR],
            "aux_scalars": (1,),
            "block_sparse_tensors": (TENSOR,),
        }.items()
    ],
    (fa4, "flash_attn_func", {"block_sparse_tensors_bwd": (TENSOR,)}),
    (fa4, "flash_attn_varlen_func", {"scheduler_metadata": TENSOR}),
    (fa4, "flash_attn_varlen_func", {"seqlen_k_per_split": 128}),
]


@pytest.mark.parametrize(("module", "function", "change"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(module, function, change) -> None:
    (name,) = change
    where = VARLEN_4 if "varlen" in function else {}
    tensors = [Q.flatten(0, 1)] * 3 if where else [Q] * 3
    with pytest.raises(NotImplementedError, match=rf"^{name}\b"):
        getattr(module, function)(*tensors, **where, **change)
    if module is fa3:
        more = {**VARLEN_4, "max_seqlen_q": 4, "max_seqlen_k": 4}
        with pytest.raises(NotImplementedError, match=rf"^{name}\b"):
            fa3.flash_attn_varlen_func(*[Q.flatten(0, 1)] * 3, **more, **change)
        with pytest.raises(NotImplementedError, match=rf"^{name}\b"):
            fa3.flash_attn_qkvpacked_func(torch.zeros(1, 4, 3, 2, 8), **change)


BAD = [
    (fa3, {"num_splits": -1}, ValueError),
    (fa4, {"num_splits": "2"}, TypeError),
    (fa4, {"pack_gqa": 1}, TypeError),
    (fa3, {"pack_gqa": "yes"}, TypeError),
    (fa3, {"window_size": 5}, TypeError),
    (fa4, {"window_size": (-1, 3)}, ValueError),
    (fa4, {"window_size": (3, -1)}, ValueError),
    (fa4, {"window_size": (None, -1)}, ValueError),
    (fa3, {"softcap": -1.0}, ValueError),
    (fa3, {"return_attn_probs": None}, TypeError),
    (fa4, {"return_lse": None}, TypeError),
    (fa4, {"learnable_sink": torch.zeros(3)}, ValueError),
    (fa4, {"learnable_sink": torch.zeros(2).int()}, TypeError),
    (fa4, {"learnable_sink": 0.0}, TypeError),
    (fa3, {"v_descale": torch.ones(2, 3)}, ValueError),
]


@pytest.mark.parametrize(("module", "change", "error"), BAD)
def test_bad_arguments_are_named(module, change, error) -> None:
    (name,) = change
    with pytest.raises(error, match=rf"\b{name}\b"):
        module.flash_attn_func(Q, Q, Q, **change)
    where = VARLEN_4 if module is fa4 else {**VARLEN_4, "max_seqlen_q": 4, "max_seqlen_k": 4}
    with pytest.raises(error, match=rf"\b{name}\b"):
        module.flash_attn_varlen_func(*[Q.flatten(0, 1)] * 3, **where, **change)


SIZES = {
    "batch_size": 2,
    "max_seqlen_q": 1,
    "max_seqlen_k": 6,
    "num_heads_q": 2,
    "num_heads_kv": 2,
    "headdim": 8,
    "cache_seqlens": TENSOR,
}


def test_metadata_of_the_scheduler_are_what_a_call_with_a_cache_takes() -> None:
    cache, lengths = torch.randn(2, 6, 2, 8), torch.tensor([4, 6], dtype=torch.int32)
    metadata = fa3.get_scheduler_metadata(**{**SIZES, "cache_seqlens": lengths}, causal=True)
    assert (metadata.dtype, metadata.shape) == (torch.int32, (0,))
    q = torch.randn(2, 1, 2, 8)
    plain, planned = (
        fa3.flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, causal=True, scheduler_metadata=given
        )
        for given in (None, metadata)
    )
    assert torch.equal(plain, planned)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("attention_chunk", 4, NotImplementedError),
        ("sm_margin", 8, NotImplementedError),
        ("num_splits", -1, ValueError),
        ("pack_gqa", 1, TypeError),
        ("window_size", 5, TypeError),
        ("causal", 1, TypeError),
        ("has_softcap", None, TypeError),
        ("max_seqlen_k", -1, ValueError),
        ("headdim", "8", TypeError),
        ("cache_seqlens", 6, TypeError),
        ("cache_seqlens", TENSOR.long(), TypeError),
        ("cache_seqlens", TENSOR[:1], ValueError),
    ],
)
def test_bad_sizes_of_the_scheduler_are_named(name, value, error) -> None:
    with pytest.raises(error, match=rf"^{name}\b"):
        fa3.get_scheduler_metadata(**{**SIZES, name: value})


ROWS = Q.flatten(0, 1)
BAD_VARLEN = {
    "q": {"q": ROWS, "cu_seqlens_q": None},
    "k": {"k": ROWS, "cu_seqlens_k": None},
    "k of another batch": {"k": Q[:1], "v": Q[:1], "cu_seqlens_k": None},
    "v": {"k": Q, "v": ROWS, "cu_seqlens_k": None},
    "v of another length": {"k": Q, "v": Q[:, :3], "cu_seqlens_k": None},
    "cu_seqlens_q": {"cu_seqlens_q": [0, 4, 8]},
    "cu_seqlens_k": {"cu_seqlens_k": offsets(0, 4)},
    "page_table": {"k": Q, "v": Q, "cu_seqlens_k": None, "page_table": TENSOR},
    "page_table of no tensor": {"k": Q, "v": Q, "cu_seqlens_k": None, "page_table": 3},
    "seqused_k": {
        "k": Q,
        "v": Q,
        "cu_seqlens_k": None,
        "page_table": TENSOR.view(2, 1),
        "seqused_k": offsets(3, -1),
    },
    "seqused_k of another batch": {
        "k": Q,
        "v": Q,
        "cu_seqlens_k": None,
        "page_table": TENSOR.view(2, 1),
        "seqused_k": offsets(3),
    },
    "min_seqlen_k": {"min_seqlen_k": "1"},
    "disable_scheduler_metadata": {"disable_scheduler_metadata": None},
}


@pytest.mark.parametrize("name", BAD_VARLEN)
def test_bad_sequences_are_named(name) -> None:
    good = {"q": ROWS, "k": ROWS, "v": ROWS, **VARLEN_4}
    fa4.flash_attn_varlen_func(**good)
    with pytest.raises((ValueError, TypeError), match=rf"\b{name.split()[0]}\b"):
        fa4.flash_attn_varlen_func(**{**good, **BAD_VARLEN[name]})


def test_compile_into_one_graph() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, 2, 8) for _ in range(3))
    rows = [x.flatten(0, 1) for x in (q, k, v)]

    def call(q, k, v):
        dense, _ = fa4.flash_attn_func(q, k, v, causal=True, window_size=(3, None))
        packed, _ = fa4.flash_attn_varlen_func(
            *rows, cu_seqlens_q=offsets(0, 5, 12), cu_seqlens_k=offsets(0, 5, 12)
        )
        padded, _ = fa4.flash_attn_varlen_func(q, k, v, seqused_k=offsets(3, 6))
        return dense, packed, padded, fa3.flash_attn_func(q, k, v, window_size=(2, -1))

    compiled = torch.compile(call, backend="eager", fullgraph=True)
    for a, b in zip(compiled(q, k, v), call(q, k, v), strict=True):
        torch.testing.assert_close(a, b)
