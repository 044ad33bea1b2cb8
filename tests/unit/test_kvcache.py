"""flashdig.attention_with_kvcache on the CPU: what it computes, what it writes, what it refuses."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flashdig import attention, attention_with_kvcache, kept_cache_calls
from flashdig.costs.flops import forward_flops
from flashdig.facades import flash_attn, flash_attn_3
from flashdig.kernels.cache_plain import rotate
from flashdig.problem import AttentionProblem, Mask

BATCH, HEADS, HEADS_KV, DIM, SIZE = 2, 4, 2, 16, 12
CACHES = ("k_cache", "v_cache")


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def given(tokens=3, new=0, **changes):
    found = {
        "q": randn(BATCH, tokens, HEADS, DIM, seed=1),
        "k_cache": randn(BATCH, SIZE, HEADS_KV, DIM, seed=2),
        "v_cache": randn(BATCH, SIZE, HEADS_KV, DIM, seed=3),
        "cache_seqlens": integers(5, 8),
    }
    if new:
        found["k"] = randn(BATCH, new, HEADS_KV, DIM, seed=4)
        found["v"] = randn(BATCH, new, HEADS_KV, DIM, seed=5)
    return {**found, **changes}


def over_keys(q, k, v, length, first=0, **options):
    """Plain attention of one sequence over keys first to length."""
    return attention(
        q[None], k[None, first:length], v[None, first:length], return_lse=True,
        backend="reference", **options,
    )  # fmt: skip


def assert_is_attention(out, lse, arguments, lengths, first=(0, 0), **options):
    for b, length in enumerate(lengths):
        k, v = arguments["k_cache"][b], arguments["v_cache"][b]
        expected = over_keys(arguments["q"][b], k, v, length, first[b], **options)
        torch.testing.assert_close((out[b : b + 1], lse[b : b + 1]), expected)


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (4, 1), "softcap": 3.0}, {"causal": True, "window": (2, 0)}],
)
def test_it_is_attention_over_the_keys_in_the_cache(options, backend) -> None:
    options = {**options, "sinks": randn(HEADS, seed=9)}
    arguments = given()
    out, lse = attention_with_kvcache(**arguments, **options, return_lse=True, backend=backend)
    assert_is_attention(out, lse, arguments, (5, 8), **options)


def test_new_keys_are_appended_in_place_and_seen() -> None:
    arguments = given(new=3)
    before = arguments["k_cache"].clone()
    out, lse = attention_with_kvcache(**arguments, causal=True, return_lse=True)
    for b, length in enumerate((5, 8)):
        added = slice(length, length + 3)
        assert torch.equal(arguments["k_cache"][b, added], arguments["k"][b])
        assert torch.equal(arguments["v_cache"][b, added], arguments["v"][b])
        before[b, added] = arguments["k"][b]
    assert torch.equal(arguments["k_cache"], before)
    assert_is_attention(out, lse, arguments, (8, 11), causal=True)


def test_rows_of_the_cache_left_padding_and_an_int_as_length() -> None:
    arguments = given(cache_batch_idx=integers(1, 0), cache_leftpad=integers(2, 4))
    arguments["cache_seqlens"] = 7
    out, lse = attention_with_kvcache(**arguments, causal=True, return_lse=True)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].flip(0)
    assert_is_attention(out, lse, arguments, (7, 7), (2, 4), causal=True)


def test_a_full_cache_needs_no_lengths() -> None:
    arguments = given(cache_seqlens=None)
    out, lse = attention_with_kvcache(**arguments, return_lse=True)
    assert_is_attention(out, lse, arguments, (SIZE, SIZE))


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_keys_and_queries_turn_by_their_positions(causal, interleaved) -> None:
    angles = torch.outer(torch.arange(SIZE + 1), torch.tensor([1.0, 0.3, 0.05]))
    turning = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    arguments = given(new=2, tokens=2)
    out = attention_with_kvcache(
        **arguments, **turning, causal=causal, rotary_interleaved=interleaved
    )
    tables = (angles.cos(), angles.sin(), interleaved)
    for b, length in enumerate((5, 8)):
        k = rotate(arguments["k"][b], tables, length, advances=True)
        torch.testing.assert_close(arguments["k_cache"][b, length : length + 2], k)
        # by complex numbers: the first pair of the first new token
        one, two = (0, 1) if interleaved else (0, 3)
        pair = torch.complex(arguments["k"][b, 0, 0, one], arguments["k"][b, 0, 0, two])
        turned = pair * torch.exp(1j * angles[length, 0])
        torch.testing.assert_close(torch.view_as_real(turned), k[0, 0, [one, two]])
        assert torch.equal(k[..., 6:], arguments["k"][b][..., 6:])
        arguments["q"][b] = rotate(arguments["q"][b], tables, length, advances=causal)
    plain = {**arguments, "k": None, "v": None, "cache_seqlens": integers(7, 10)}
    torch.testing.assert_close(out, attention_with_kvcache(**plain, causal=causal))


def test_rotation_may_start_elsewhere() -> None:
    angles = torch.rand(40, 8)
    turning = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    first, second = given(new=1, tokens=1), given(new=1, tokens=1)
    attention_with_kvcache(**first, **turning, rotary_seqlens=integers(30, 2))
    attention_with_kvcache(**second, **turning)
    assert not torch.equal(first["k_cache"], second["k_cache"])
    expected = rotate(first["k"][0], (angles.cos(), angles.sin(), True), 30, advances=True)
    torch.testing.assert_close(first["k_cache"][0, 5:6], expected)


def test_packed_queries_append_packed_keys() -> None:
    arguments = given()
    rows = slice(0, 4)
    arguments |= {"q": randn(5, HEADS, DIM), "cu_seqlens_q": integers(0, 3, 4)}
    arguments |= {"k": randn(5, HEADS_KV, DIM, seed=6), "v": randn(5, HEADS_KV, DIM, seed=7)}
    out, lse = attention_with_kvcache(**arguments, causal=True, return_lse=True)
    assert torch.equal(arguments["k_cache"][0, 5:8], arguments["k"][:3])
    assert torch.equal(arguments["v_cache"][1, 8:9], arguments["v"][3:4])
    for b, (begin, end, length) in enumerate(((0, 3, 8), (3, 4, 9))):
        k, v = arguments["k_cache"][b], arguments["v_cache"][b]
        expected, expected_lse = over_keys(arguments["q"][begin:end], k, v, length, causal=True)
        torch.testing.assert_close(out[begin:end], expected[0])
        torch.testing.assert_close(lse[:, begin:end], expected_lse[0])
    assert not out[rows.stop :].any()
    assert lse[:, rows.stop :].isneginf().all()


def test_an_fp8_cache_stores_scaled_keys_and_takes_any_queries() -> None:
    arguments = given(new=2)
    for name in ("k_cache", "v_cache"):
        arguments[name] = arguments[name].to(torch.float8_e4m3fn)
    scales = {"k_descale": torch.full((BATCH, HEADS_KV), 0.5), "v_descale": torch.rand(2, 2) + 1}
    arguments["v"][0, 0] = 1e6  # saturates
    out = attention_with_kvcache(**arguments, **scales, causal=True)
    wanted = (arguments["k"][0] / 0.5).to(torch.float8_e4m3fn)
    assert torch.equal(arguments["k_cache"][0, 5:7].float(), wanted.float())
    assert (arguments["v_cache"][0, 5].float() == 448).all()
    plain = {**arguments, "k": None, "v": None, "cache_seqlens": integers(7, 10)}
    for name in ("k", "v"):
        factors = scales[f"{name}_descale"][:, None, :, None]
        plain[f"{name}_cache"] = arguments[f"{name}_cache"].float() * factors
    torch.testing.assert_close(out, attention_with_kvcache(**plain, causal=True))


def test_there_is_no_backward_and_the_error_says_so() -> None:
    arguments = given()
    arguments["q"].requires_grad_()
    out = attention_with_kvcache(**arguments)
    with pytest.raises(RuntimeError, match="attention over a cache has no backward"):
        out.sum().backward()
    with torch.no_grad():
        assert not attention_with_kvcache(**arguments).requires_grad


def test_a_compiled_step_writes_the_cache_too(monkeypatch) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(q, k_cache, v_cache, k, v, lengths):
        out = attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)
        return out, k_cache.sum()

    eager, compiled = given(new=1, tokens=1), given(new=1, tokens=1)
    version = eager["k_cache"]._version
    expected = attention_with_kvcache(**eager, causal=True)
    assert eager["k_cache"]._version > version
    lengths = compiled.pop("cache_seqlens")
    # what is kept of eager calls is not looked at: an object that is no call would raise
    monkeypatch.setattr(kept_cache_calls._latest, "calls", (object(),), raising=False)
    out, total = step(*compiled.values(), lengths)
    assert torch.equal(out, expected)
    assert torch.equal(compiled["k_cache"], eager["k_cache"])
    assert total == eager["k_cache"].sum()


def test_flash_attentions_functions_hand_everything_on() -> None:
    table = torch.tensor([[3, 1, 0], [2, 5, 4]], dtype=torch.int32)
    pages = {n: given()[n].view(6, 4, HEADS_KV, DIM) for n in ("k_cache", "v_cache")}
    shared = {**given(), **pages, "causal": True, "softcap": 2.0}
    options = {"window": (3, 0), "alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    expected = attention_with_kvcache(**shared, **options, page_table=table, return_lse=True)
    found = flash_attn.flash_attn_with_kvcache(
        **shared, block_table=table, window_size=(3, -1), alibi_slopes=options["alibi_slopes"],
        return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)
    plain = attention_with_kvcache(**shared, page_table=table, window=(3, 0), return_lse=True)
    found = flash_attn_3.flash_attn_with_kvcache(
        **shared, page_table=table, window_size=(3, -1), return_softmax_lse=True
    )
    torch.testing.assert_close(found, plain)
    arguments = given(cache_seqlens=integers(0, 8))
    out, lse = flash_attn.flash_attn_with_kvcache(**arguments, return_softmax_lse=True)
    assert lse[0].isposinf().all()
    assert not out[0].any()
    causal = {"alibi_slopes": options["alibi_slopes"], "causal": True}
    _, lse = flash_attn.flash_attn_with_kvcache(**given(), **causal, return_softmax_lse=True)
    _, ours = attention_with_kvcache(**given(), **causal, return_lse=True)
    positions = torch.arange(3) + (integers(5, 8)[:, None, None] - 3)
    torch.testing.assert_close(lse, ours + causal["alibi_slopes"][:, None] * positions)


REFUSED = {
    "k must come with v": ({"k": randn(2, 1, 2, 16)}, "k and v must be given together"),
    "k of other heads": ({"k": randn(2, 1, 3, 16), "v": randn(2, 1, 3, 16)}, "k must have"),
    "lengths": ({"cache_seqlens": torch.tensor([5, 8])}, "cache_seqlens must be int32"),
    "length": ({"cache_seqlens": 13}, "cache_seqlens must be between 0 and 12"),
    "too long": ({"cache_seqlens": integers(5, 13)}, "cache_seqlens must leave"),
    "no room": (
        {"cache_seqlens": integers(5, 12), "k": randn(2, 1, 2, 16), "v": randn(2, 1, 2, 16)},
        "cache_seqlens must leave every sequence between 0 and 12",
    ),
    "no place": (
        {"cache_seqlens": None, "k": randn(2, 1, 2, 16), "v": randn(2, 1, 2, 16)},
        "cache_seqlens must say where",
    ),
    "left padding": ({"cache_leftpad": integers(0, 9)}, "cache_leftpad must be between 0 and"),
    "index": ({"cache_batch_idx": integers(0, 2)}, "cache_batch_idx must be between 0 and 1"),
    "both": (
        {"cache_batch_idx": integers(0, 1), "page_table": integers(0, 1)[:, None]},
        "cache_batch_idx must be None with page_table",
    ),
    "page": ({"page_table": integers(0, 2)[:, None]}, "page_table must hold page numbers"),
    "batch": (
        {"k_cache": randn(3, 12, 2, 16), "v_cache": randn(3, 12, 2, 16)},
        "k_cache must have",
    ),
    "head_dim": ({"k_cache": randn(2, 12, 2, 8)}, "k_cache must have head_dim 16"),
    "sizes": ({"v_cache": randn(2, 11, 2, 16)}, "v_cache must have all sizes but the last"),
    "dtype": ({"k_cache": randn(2, 12, 2, 16).half()}, "k_cache must have the dtype of q"),
    "rotary": ({"rotary_cos": randn(20, 4), "rotary_sin": randn(20, 4)}, "need k and v"),
    "cos alone": ({"rotary_cos": randn(20, 4)}, "must be given together"),
    "splits": ({"num_splits": -1}, "num_splits must be >= 0"),
    "splits and invariance": ({"num_splits": 2, "batch_invariant": True}, "num_splits must be 0"),
    "descale": ({"k_descale": torch.ones(2)}, "k_descale must be"),
    "window": ({"window": (-2, 0)}, "window"),
    "backend": ({"backend": "hopper"}, "backend must be 'auto' or one of"),
    "triton on the CPU": ({"backend": "triton"}, "backend 'triton' cannot serve this call"),
    "not a tensor": ({"v_cache": None}, "v_cache must be a tensor"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_arguments_are_refused_by_name(change, message, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((ValueError, TypeError), match=message):
        attention_with_kvcache(**given(**change))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("new", [0, 3])
def test_flop_are_those_of_the_keys_that_are_there(new, paged) -> None:
    arguments = given(new=new, cache_leftpad=integers(1, 0), causal=True)
    if paged:
        caches = (arguments[name].reshape(BATCH * 3, 4, HEADS_KV, DIM) for name in CACHES)
        arguments |= dict(zip(CACHES, caches, strict=True))
        arguments["page_table"] = torch.arange(6, dtype=torch.int32).view(BATCH, 3)
    with FlopCounterMode(display=False) as counter:
        attention_with_kvcache(**arguments)
    problems = [
        AttentionProblem(
            batch=1,
            num_heads=HEADS,
            num_heads_kv=HEADS_KV,
            seqlen_q=3,
            seqlen_k=keys + new,
            head_dim=DIM,
            head_dim_v=DIM,
            dtype="float32",
            mask=Mask(None, 0),
        )
        for keys in (4, 8)
    ]
    assert counter.get_total_flops() == sum(map(forward_flops, problems))
