"""flashdig.attention_varlen on CPU tensors: against the oracle, sequence by sequence, and what may
lie beside the sequences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdig import attention, attention_varlen
from flashdig.kernels.reference import reference_attention, reference_attention_varlen
from flashdig.packing import values_are_checked
from tests.attention_cases import gradients

BACKENDS = ["auto", "tiled", "reference"]


def offsets(*lengths, start=0):
    return torch.tensor([start, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def lengths_of(*lengths):
    return torch.tensor(lengths, dtype=torch.int32)


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def next_seed():
    """The seed that the next call with dropout will draw."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**63 - 1, (1,)))
    torch.set_rng_state(state)
    return seed


CASES = {
    "plain": {},
    "causal": {"causal": True},
    "top-left window": {"causal": "top-left", "window": (3, None)},
    "window": {"window": (2, 1)},
    "slopes of the heads": {"alibi_slopes": (4,)},
    "slopes of the batch": {"alibi_slopes": (5, 4), "causal": True},
    "sinks and softcap": {"sinks": True, "softcap": 3.0},
    "dropout": {"dropout_p": 0.4},
    "rows in use": {"seqused_q": (4, 0, 0, 130, 3), "seqused_k": (0, 2, 0, 140, 9)},
    "everything": {
        "causal": True,
        "window": (60, None),
        "softmax_scale": 0.4,
        "softcap": 4.0,
        "alibi_slopes": (5, 4),
        "sinks": True,
        "dropout_p": 0.2,
        "seqused_k": (7, 3, 0, 150, 1),
    },
}


def build(name):
    """q, k, v, offsets and options: five sequences, some empty, with slack rows around them."""
    torch.manual_seed(7)
    lengths_q, lengths_k = offsets(5, 1, 0, 140, 3, start=2), offsets(7, 4, 6, 150, 9)
    q, k, v = randn(160, 4, 8), randn(180, 2, 8), randn(180, 2, 6)
    options = dict(CASES[name])
    for key in ("seqused_q", "seqused_k"):
        if key in options:
            options[key] = lengths_of(*options[key])
    if "alibi_slopes" in options:
        options["alibi_slopes"] = torch.rand(*options["alibi_slopes"])
    if "sinks" in options:
        options["sinks"] = randn(4)
    return q, k, v, lengths_q, lengths_k, options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name, backend) -> None:
    q, k, v, cu_q, cu_k, options = build(name)
    seed = next_seed()
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, backend=backend)
    expected, expected_lse = reference_attention_varlen(
        q, k, v, cu_q, cu_k, **options, dropout_seed=seed
    )
    assert (out.shape, lse.shape) == ((160, 4, 6), (4, 160))
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-5)
    inputs = [q, k, v, *([options["sinks"]] if "sinks" in options else [])]
    ours = gradients(out, lse, inputs)
    for a, b in zip(ours, gradients(expected, expected_lse, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=0, max_size=4),
    slack=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    causal=st.sampled_from([False, True, "top-left"]),
    window=st.sampled_from([None, (1, 2), (0, None)]),
    dropout_p=st.sampled_from([0.0, 0.5]),
    group_size=st.integers(1, 3),
    half=st.booleans(),
)
def test_each_sequence_is_a_dense_call(
    lengths, slack, causal, window, dropout_p, group_size, half
) -> None:
    dtype = torch.float16 if half else torch.float64
    cu_q = offsets(*(m for m, _ in lengths), start=slack[0])
    cu_k = offsets(*(n for _, n in lengths), start=slack[1])
    q = randn(int(cu_q[-1]) + slack[1], 2 * group_size, 4, dtype=dtype)
    k, v = (randn(int(cu_k[-1]) + slack[0], 2, d, dtype=dtype) for d in (4, 3))
    options = {"causal": causal, "window": window}
    seed = next_seed()
    out, lse = attention_varlen(
        q, k, v, cu_q, cu_k, **options, dropout_p=dropout_p, return_lse=True
    )
    covered = torch.zeros(q.shape[0], dtype=torch.bool)
    for b in range(len(lengths)):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        covered[rows] = True
        alone = (q[None, rows], k[None, keys], v[None, keys])
        expected, expected_lse = reference_attention(
            *alone, **options, dropout_p=dropout_p, dropout_seed=seed, first_sequence=b
        )
        torch.testing.assert_close(out[rows].double(), expected[0], atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(lse[:, rows].double(), expected_lse[0], atol=1e-5, rtol=1e-5)
        if dropout_p == 0.0:
            dense, dense_lse = attention(*alone, **options, return_lse=True, backend="tiled")
            assert torch.equal(out[rows], dense[0])
            assert torch.equal(lse[:, rows], dense_lse[0])
    assert not out[~covered].any()
    assert (lse[:, ~covered] == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_lies_outside_the_sequences_never_shows(backend) -> None:
    q, k, v, cu_q, cu_k, options = build("rows in use")
    clean = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, backend=backend)
    clean_gradients = gradients(*clean, [q, k, v])
    # the last: rows of queries without a key are hidden too
    hidden_q, hidden_k = (torch.ones(x.shape[0], dtype=torch.bool) for x in (q, k))
    for b, (used_q, used_k) in enumerate(zip((4, 0, 0, 130, 3), (0, 2, 0, 140, 9), strict=True)):
        hidden_q[cu_q[b] : cu_q[b] + (used_q if used_k else 0)] = False
        hidden_k[cu_k[b] : cu_k[b] + (used_k if used_q else 0)] = False
    noisy = []
    for x, hidden in ((q, hidden_q), (k, hidden_k), (v, hidden_k)):
        spoilt = x.detach().clone()
        spoilt[hidden] = math.nan
        noisy.append(spoilt.requires_grad_())
    out, lse = attention_varlen(*noisy, cu_q, cu_k, **options, return_lse=True, backend=backend)
    assert torch.equal(out, clean[0])
    assert torch.equal(lse, clean[1])
    upstream, row_upstream = torch.ones_like(out), torch.ones_like(lse)
    upstream[hidden_q] = math.nan
    row_upstream[:, hidden_q] = math.nan
    for gradient, hidden in zip(
        torch.autograd.grad((out, lse), noisy, (upstream, row_upstream)),
        (hidden_q, hidden_k, hidden_k),
        strict=True,
    ):
        assert not gradient[hidden].any()
        assert gradient.isfinite().all()
    for a, b in zip(
        gradients(
            *attention_varlen(*noisy, cu_q, cu_k, **options, return_lse=True, backend=backend),
            noisy,
        ),
        clean_gradients,
        strict=True,
    ):
        assert torch.equal(a, b)


def into_pages(k, cu_k, page_size, num_pages, max_pages):
    """k in pages in a shuffled order, NaN where no sequence is, and the page table."""
    pages = torch.full((num_pages, page_size, *k.shape[1:]), math.nan, dtype=k.dtype)
    order = torch.randperm(num_pages).tolist()
    table = torch.full((len(cu_k) - 1, max_pages), num_pages + 99, dtype=torch.int32)
    for b in range(len(cu_k) - 1):
        rows = k.detach()[cu_k[b] : cu_k[b + 1]]
        for i, part in enumerate(rows.split(page_size)):
            if len(part):
                table[b, i] = order.pop()
                pages[table[b, i], : len(part)] = part
    return pages.requires_grad_(), table


def from_pages(pages, table, cu_k):
    parts = []
    for b in range(len(cu_k) - 1):
        length = int(cu_k[b + 1] - cu_k[b])
        used = table[b, : -(-length // pages.shape[1])].long()
        parts.append(pages[used].flatten(0, 1)[:length])
    return torch.cat(parts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_equal_packed_sequences(backend) -> None:
    q, k, v, cu_q, cu_k, options = build("everything")
    options.pop("dropout_p")
    state = torch.get_rng_state()
    k_pages, table = into_pages(k, cu_k, 16, 20, 11)
    torch.set_rng_state(state)
    v_pages, same = into_pages(v, cu_k, 16, 20, 11)
    assert torch.equal(table, same)
    inputs, paged = [q, k, v], [q, k_pages, v_pages]
    expected = attention_varlen(*inputs, cu_q, cu_k, **options, return_lse=True)
    got = attention_varlen(
        *paged, cu_q, cu_k, page_table=table, **options, return_lse=True, backend=backend
    )
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)
    dq, dk, dv = gradients(*expected, inputs)
    dq_paged, dk_pages, dv_pages = gradients(*got, paged)
    torch.testing.assert_close(dq_paged, dq)
    torch.testing.assert_close(from_pages(dk_pages, table, cu_k), dk[: cu_k[-1]])
    torch.testing.assert_close(from_pages(dv_pages, table, cu_k), dv[: cu_k[-1]])
    assert not dk_pages[k_pages.isnan()].any()
    assert not dv_pages[v_pages.isnan()].any()


def test_gradients_of_a_shared_page_add_up_in_float32() -> None:
    sequences = 64
    q = randn(sequences, 1, 8, dtype=torch.bfloat16)
    k, v = (randn(1, 4, 1, 8, dtype=torch.bfloat16) for _ in range(2))
    cu_q, cu_k = offsets(*[1] * sequences), offsets(*[4] * sequences)
    table = torch.zeros(sequences, 1, dtype=torch.int32)
    out = attention_varlen(q, k, v, cu_q, cu_k, page_table=table)
    assert out.dtype == torch.bfloat16
    exact_v = v.detach().double().requires_grad_()
    exact, _ = reference_attention_varlen(q, k, exact_v, cu_q, cu_k, page_table=table)
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    (expected,) = torch.autograd.grad(exact, exact_v, torch.ones_like(exact))
    assert dv.dtype == torch.bfloat16
    assert ((dv - expected).abs() <= 1.01 * 2**-8 * expected).all()


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("paged", [False, True])
def test_fp8_with_descale_factors_of_each_sequence(paged, backend) -> None:
    cu_q, cu_k = offsets(3, 0, 4, start=1), offsets(5, 2, 6)
    q, k, v = (torch.randn(n, h, 8).to(torch.float8_e4m3fn) for n, h in ((9, 4), (13, 2), (13, 2)))
    factors = {f"{name}_descale": torch.rand(3, 2) + 0.5 for name in "qkv"}
    expected, _ = reference_attention_varlen(q, k, v, cu_q, cu_k, **factors)
    options = {}
    if paged:
        k, v = (torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, 3)) for x in (k, v))
        k, v = (x.to(torch.float8_e4m3fn).unflatten(0, (4, 4)) for x in (k, v))
        k, v = (torch.stack([x.flatten(0, 1)[i : i + 4] for i in (0, 4, 5, 7, 11)]) for x in (k, v))
        options["page_table"] = torch.tensor([[0, 1], [2, 0], [3, 4]], dtype=torch.int32)
    out = attention_varlen(q, k, v, cu_q, cu_k, **factors, **options, backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)


def tensor(*shape, **options):
    return torch.zeros(*shape, **options)


PAGED = {
    "k": tensor(3, 4, 2, 8),
    "v": tensor(3, 4, 2, 8),
    "page_table": torch.tensor([[0, 2], [1, 7]], dtype=torch.int32),
}
BAD = {
    "q": [({"q": tensor(1, 6, 4, 8)}, ValueError)],
    "k": [
        ({"k": tensor(9, 3, 8)}, ValueError),
        ({"k": tensor(9, 2, 7)}, ValueError),
        ({**PAGED, "k": tensor(9, 2, 8)}, ValueError),
    ],
    "v": [({"v": tensor(8, 2, 8)}, ValueError), ({**PAGED, "v": tensor(3, 5, 2, 8)}, ValueError)],
    "cu_seqlens_q": [
        ({"cu_seqlens_q": None}, ValueError),
        ({"cu_seqlens_q": [0, 2, 6]}, TypeError),
        ({"cu_seqlens_q": torch.tensor([0, 2, 6])}, TypeError),
        ({"cu_seqlens_q": offsets(1, 2)[:, None]}, ValueError),
        ({"cu_seqlens_q": torch.zeros(0, dtype=torch.int32)}, ValueError),
        ({"cu_seqlens_q": lengths_of(0, 4, 3)}, ValueError),
        ({"cu_seqlens_q": lengths_of(-1, 2, 6)}, ValueError),
        ({"cu_seqlens_q": lengths_of(0, 2, 7)}, ValueError),
    ],
    "cu_seqlens_k": [
        ({"cu_seqlens_k": offsets(3, 3, 3)}, ValueError),
        ({"cu_seqlens_k": offsets(3, 7)}, ValueError),
        ({"cu_seqlens_k": offsets(3, 6).to("meta")}, ValueError),
    ],
    "max_seqlen_q": [
        ({"max_seqlen_q": -1}, ValueError),
        ({"max_seqlen_q": 3}, ValueError),
        ({"max_seqlen_q": 4.0}, TypeError),
    ],
    "max_seqlen_k": [({"max_seqlen_k": True}, TypeError), ({"max_seqlen_k": 5}, ValueError)],
    "seqused_q": [
        ({"seqused_q": lengths_of(1)}, ValueError),
        ({"seqused_q": lengths_of(3, 1)}, ValueError),
        ({"seqused_q": torch.zeros(2)}, TypeError),
    ],
    "seqused_k": [({"seqused_k": lengths_of(0, -1)}, ValueError)],
    "page_table": [
        ({**PAGED, "page_table": lengths_of(0, 1)}, ValueError),
        ({**PAGED, "page_table": lengths_of(0, 1)[None]}, ValueError),
        ({**PAGED, "page_table": PAGED["page_table"].long()}, TypeError),
        ({**PAGED, "page_table": PAGED["page_table"] + 1}, ValueError),
        ({**PAGED, "page_table": PAGED["page_table"][:, :1]}, ValueError),
    ],
    "alibi_slopes": [({"alibi_slopes": tensor(3, 4)}, ValueError)],
    "q_descale": [({"q_descale": tensor(1, 2)}, ValueError)],
    "softcap": [({"softcap": "5"}, TypeError)],
    "causal": [({"causal": "left"}, ValueError)],
    "backend": [({"backend": "cudnn"}, ValueError)],
}


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [(name, change, error) for name, cases in BAD.items() for change, error in cases],
)
def test_bad_arguments_are_named(argument, change, error) -> None:
    arguments = {
        "q": tensor(6, 4, 8),
        "k": tensor(9, 2, 8),
        "v": tensor(9, 2, 8),
        "cu_seqlens_q": offsets(2, 4),
        "cu_seqlens_k": offsets(3, 6),
    }
    if "page_table" in change:
        arguments["cu_seqlens_k"] = offsets(8, 3)
        attention_varlen(**{**arguments, **PAGED})
    else:
        attention_varlen(**arguments)
    with pytest.raises(error, match=rf"\b{argument}\b"):
        attention_varlen(**{**arguments, **change})


def test_bias_is_no_argument_of_packed_input() -> None:
    q, cu = tensor(6, 4, 8), offsets(2, 4)
    with pytest.raises(TypeError, match="bias"):
        attention_varlen(q, q, q, cu, cu, bias=tensor(1, 1, 1, 1))


def test_lengths_on_a_gpu_are_read_only_on_demand(monkeypatch) -> None:
    monkeypatch.delenv("FLASHDIG_CHECK", raising=False)
    assert values_are_checked("cpu")
    assert not values_are_checked("cuda")
    monkeypatch.setenv("FLASHDIG_CHECK", "1")
    assert values_are_checked("cuda")


def test_backends_that_do_not_serve_say_why() -> None:
    q, cu = tensor(6, 2, 8), offsets(2, 4)
    with pytest.raises(ValueError, match="no packed input"):
        attention_varlen(q, q, q, cu, cu, backend="fused_cpu")
    table = torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="not on cpu"):
        attention_varlen(q, q[None], q[None], cu, cu, page_table=table, backend="triton")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("total_q", "total_k", "heads", "batch"),
    [(0, 0, 2, 0), (3, 4, 2, 0), (0, 4, 2, 2), (3, 0, 2, 2), (3, 4, 0, 2)],
)
def test_zero_sizes(total_q, total_k, heads, batch, backend) -> None:
    q, k, v = randn(total_q, heads, 8), randn(total_k, heads, 8), randn(total_k, heads, 6)
    cu_q, cu_k = (
        offsets(*[total // batch] * batch) if batch else offsets() for total in (total_q, total_k)
    )
    out, lse = attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, backend=backend)
    assert (out.shape, lse.shape) == ((total_q, heads, 6), (heads, total_q))
    if not (batch and total_q and total_k and heads):
        assert not out.any()
        assert (lse == -math.inf).all()
    if batch == 0 and backend == "reference":
        return  # written out, nothing of q is used
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_compiled_without_a_graph_break_equals_eager() -> None:
    q, k, v = randn(9, 4, 8), randn(9, 2, 8), randn(9, 2, 6)
    cu_q, cu_k = offsets(2, 0, 6), offsets(3, 1, 4, start=1)
    options = {"causal": True, "softcap": 2.0, "dropout_p": 0.5, "seqused_k": lengths_of(1, 1, 4)}

    def call(q, k, v, cu_q, cu_k):
        return attention_varlen(q, k, v, cu_q, cu_k, 6, 4, **options, return_lse=True)

    torch.manual_seed(1)
    eager = call(q, k, v, cu_q, cu_k)
    expected = gradients(*eager, [q, k, v])
    torch.manual_seed(1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, cu_q, cu_k)
    for a, b in zip(
        (*compiled, *gradients(*compiled, [q, k, v])), (*eager, *expected), strict=True
    ):
        assert torch.equal(a, b)


def test_vmap_over_queries() -> None:
    q, k, v, cu_q, cu_k, _ = build("causal")
    many = torch.stack((q, 2 * q)).detach()

    def call(q):
        return attention_varlen(q, k.detach(), v.detach(), cu_q, cu_k, causal=True)

    torch.testing.assert_close(torch.vmap(call)(many), torch.stack([call(x) for x in many]))


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v, cu_q, cu_k, _ = build("plain")
    with torch.autocast("cpu", torch.bfloat16):
        out = attention_varlen(q, k, v, cu_q, cu_k)
    assert out.dtype == torch.bfloat16
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert dq.dtype == torch.float32
