"""The Hopper decoding kernel: pairs of features against float64, and what one launch has to do that
two did before: cut, join, and leave its counters as it found them."""

import random

import pytest
import torch

from flashdig import attention_varlen, attention_with_kvcache, kept_cache_calls, kept_calls
from flashdig.bench.gate import float64_reference
from flashdig.bench.kvcache_cases import make_case
from flashdig.bench.kvcache_conformance import judge
from flashdig.bench.pairwise import covering_array
from flashdig.bench.timing import float32_precision
from flashdig.kernels import plans
from flashdig.kernels.hopper import decode_launch as hopper
from flashdig.kernels.triton import decode_launch

pytestmark = pytest.mark.gpu
KEPT = (kept_cache_calls, kept_calls, plans)
DOMAINS = {
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((128, 128), (64, 64), (80, 80), (96, 72)),
    "cache": ("dense", "page 8", "page 16", "page 48", "page 128"),
    "heads": ((8, 2), (4, 4), (16, 1)),
    "mask": ("full", "causal", "window", "causal window"),
    "tokens": ("one", "few", "packed"),
    "append": ("none", "new", "rotary"),
    "terms": ("none", "softcap and sinks", "leftpad"),
    "pieces": (1, 3),
}


def is_served(chosen) -> bool:
    wide = chosen.get("heads") == (16, 1) and chosen.get("tokens") == "few"  # 96 rows
    padded = chosen.get("terms") == "leftpad" and chosen.get("cache", "dense") != "dense"
    return not (wide or padded)


CASES = covering_array(DOMAINS, is_served)


@pytest.fixture
def served(monkeypatch):
    """Every call that the kernel can serve goes to it, in served["pieces"] pieces, or as many as it
    chooses; served["calls"] counts them."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    state = {"pieces": 0, "calls": 0}

    def pieces(call, arch, dtype):
        if not hopper.serves(call, call.out_dtype(dtype)):
            return 0
        state["calls"] += 1
        return state["pieces"] or hopper.pieces_of(call, call.out_dtype(dtype)) or 1

    monkeypatch.setattr(decode_launch, "_pieces_on_hopper", pieces)
    for kept in KEPT:  # what was kept without it
        kept.forget()
    yield state
    for kept in KEPT:
        kept.forget()


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number, served) -> None:
    features = {**CASES[number], "schedule": "auto", "fp8": False}
    served["pieces"] = features.pop("pieces")
    for n in range(3):
        draw, kind = random.Random(f"{number} {n}"), random.Random(f"kind {number} {n}")
        with float32_precision("ieee"):
            problem = judge(make_case(features, draw, kind, "cuda"))
        assert problem is None, (features, n, problem)
    assert served["calls"] == 3


def _randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _integers(values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


_NORMAL = torch.randn(40, generator=torch.Generator().manual_seed(1))
LENGTHS = {
    "even": [4096] * 40,
    "one long": [4096] + [17] * 39,
    "log-normal": [int(x) for x in (_NORMAL * 0.8 + 6.5).exp().clamp(0, 4096)],
    "empty": [0] * 40,
    "many": [n % 1500 for n in range(0, 90000, 450)],  # 200 sequences
}


def _cache(lengths, page, room=4096, heads=8):
    """k, v, page table, and the keys and values of each sequence, one behind another."""
    count = len(lengths)
    if not page:
        k, v = _randn(count, room, heads, 128), _randn(count, room, heads, 128)
        return k, v, None, (k, v)
    pages = count * room // page
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(count, -1)
    k, v = _randn(pages, page, heads, 128), _randn(pages, page, heads, 128)
    return k, v, table, tuple(x[table.long()].flatten(1, 2) for x in (k, v))


@pytest.mark.parametrize("pieces", [0, 1, 4])
@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize("kind", LENGTHS)
def test_lengths_of_every_kind(kind, page, pieces, served) -> None:
    """Twice, with the same bits: counters are left as they were found, and the order in which
    pieces end changes nothing."""
    lengths = LENGTHS[kind]
    served["pieces"] = pieces
    k, v, table, rows = _cache(lengths, page, room=1536 if kind == "many" else 4096, heads=2)
    q = _randn(len(lengths), 1, 8, 128)
    options = {"cache_seqlens": _integers(lengths), "page_table": table, "causal": True}
    out, lse = attention_with_kvcache(q, k, v, return_lse=True, **options)
    again, lse_again = attention_with_kvcache(q, k, v, return_lse=True, **options)
    assert served["calls"] > 0
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    for b, length in enumerate(lengths):
        if length == 0:
            assert not out[b].any()
            assert (lse[b] == float("-inf")).all()
        elif b < 8 or b == len(lengths) - 1:
            keys, values = (x[b : b + 1, :length].transpose(1, 2) for x in rows)
            verdict = float64_reference(
                q[b : b + 1].transpose(1, 2), keys, values, causal=False, pairs="all"
            ).check(out[b : b + 1].transpose(1, 2))
            assert verdict.ok, (b, verdict)


def test_a_captured_call_follows_lengths_that_change(served) -> None:
    """From even ones, whose keys are in one piece, to uneven ones and back; in a graph of two calls
    that is replayed beside eager calls on another stream."""
    served["pieces"] = 1
    k, v, table, _ = _cache([4096] * 40, 16)
    q, lengths = _randn(40, 1, 32, 128), _integers([4096] * 40)

    def call(seqlens):
        return attention_with_kvcache(q, k, v, cache_seqlens=seqlens, page_table=table, causal=True)

    kinds = [_integers(LENGTHS[kind]) for kind in ("even", "one long", "log-normal", "even")]
    expected = [call(seqlens) for seqlens in kinds]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first, second = call(lengths), call(lengths)
    beside = torch.cuda.Stream()
    for seqlens, out in zip(kinds, expected, strict=True):
        lengths.copy_(seqlens)
        torch.cuda.synchronize()
        with torch.cuda.stream(beside):
            others = [call(kinds[1]) for _ in range(3)]
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, out)
        assert torch.equal(second, out)
        assert all(torch.equal(other, expected[1]) for other in others)


def test_pages_outside_a_window_are_never_touched(served) -> None:
    """Their entries are no page numbers, and pages that they are clamped to hold NaN."""
    lengths, window, page = [2000, 1500, 700], 100, 16
    k, v = _randn(500, page, 2, 64), _randn(500, page, 2, 64)
    k[0], v[0], k[499], v[499] = (float("nan"),) * 4
    table = (torch.randperm(498, device="cuda")[:384] + 1).to(torch.int32).view(3, 128)
    q = _randn(3, 1, 8, 64)
    options = {"cache_seqlens": _integers(lengths), "causal": True, "window": (window, 0)}
    expected = attention_with_kvcache(q, k, v, page_table=table, **options)
    damaged = table.clone()
    for b, length in enumerate(lengths):
        unseen = (length - 1 - window) // page
        damaged[b, :unseen] = 2**30
        damaged[b, : unseen // 2] = -5
        damaged[b, -(-length // page) :] = 2**30
    out = attention_with_kvcache(q, k, v, page_table=damaged, **options)
    assert served["calls"] > 0
    assert torch.equal(out, expected)
    assert out.isfinite().all()


def test_keys_behind_a_length_may_hold_nan(served) -> None:
    lengths = [100, 0, 65, 1]
    k, v, _, _ = _cache(lengths, 0, room=512)
    q = _randn(4, 1, 8, 128)
    options = {"cache_seqlens": _integers(lengths), "causal": True}
    expected = attention_with_kvcache(q, k, v, **options)
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    assert torch.equal(attention_with_kvcache(q, k, v, **options), expected)
    assert served["calls"] > 0


def _reference(q, keys, values):
    """float64's verdict on causal attention of a sequence's last tokens; (tokens, heads, dim)."""
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    return float64_reference(q, keys, values, causal=True, pairs="all")


QUERIES = {
    "one token each": [1] * 40,
    "some tokens": [n % 6 for n in range(40)],
    "several tiles": [1, 70, 0, 33, 1, 16, 17] + [1] * 20,
    "beside a chunk": [1, 5, 0, 16, 17, 3000, 2, 3, 4] + [1] * 31,
}


@pytest.mark.parametrize("group", [4, 32])
@pytest.mark.parametrize("pieces", [0, 1, 4])
@pytest.mark.parametrize("page", [0, 16])
@pytest.mark.parametrize("kind", QUERIES)
def test_packed_queries(kind, page, pieces, group, served) -> None:
    """Among rows that belong to nobody, twice, with the same bits."""
    queries = QUERIES[kind]
    lengths = [max(tokens, n) for tokens, n in zip(queries, LENGTHS["log-normal"], strict=False)]
    served["pieces"] = pieces
    k, v, table, rows = _cache(lengths, page, heads=2)
    between = [n % 3 if page else 0 for n in range(len(queries))]
    owned = [7, *(tokens + n for n, tokens in zip(between, queries, strict=True))]
    offsets = _integers(owned).cumsum(0).to(torch.int32)
    q = _randn(int(offsets[-1]) + 9, 2 * group, 128)

    def call():
        options = {"page_table": table, "causal": True, "return_lse": True}
        if not page:
            seqlens = _integers(lengths)
            return attention_with_kvcache(
                q, k, v, cache_seqlens=seqlens, cu_seqlens_q=offsets, **options
            )
        offsets_k = _integers([0, *lengths]).cumsum(0).to(torch.int32)
        return attention_varlen(
            q, k, v, offsets, offsets_k, seqused_q=_integers(queries), **options
        )

    out, lse = call()
    again, lse_again = call()
    assert served["calls"] > 0
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)
    slack = torch.ones(q.shape[0], dtype=torch.bool)
    for b, (tokens, length) in enumerate(zip(queries, lengths, strict=True)):
        begin = int(offsets[b])
        mine = slice(begin, begin + tokens)
        slack[mine] = False
        if tokens == 0:
            continue
        if length == 0:
            assert not out[mine].any()
            continue
        keys, values = (x[b, :length] for x in rows)
        verdict = _reference(q[mine], keys, values).check(out[mine].transpose(0, 1)[None])
        assert verdict.ok, (b, verdict)
    assert not out[slack].any()
    assert (lse[:, slack] == float("-inf")).all()


def test_a_captured_packed_call_follows_queries_that_change(served) -> None:
    """Also after offsets that are none: they give no right result, but spoil no later one."""
    k, v, table, _ = _cache([4096] * 40, 16, heads=2)
    q, lengths = _randn(64, 8, 128), _integers(LENGTHS["log-normal"])

    def call(offsets):
        return attention_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=table, causal=True, cu_seqlens_q=offsets
        )

    kinds = [[1] * 40, [0] * 20 + [3] * 20, [24] + [1] * 38 + [2], [0] * 40]
    kinds = [_integers([0, *kind]).cumsum(0).to(torch.int32) for kind in kinds]
    expected = [call(offsets) for offsets in kinds]
    none = _integers([0, 64] * 20 + [0])
    offsets = kinds[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(offsets)
    for _ in range(2):
        for given, right in zip(kinds, expected, strict=True):
            offsets.copy_(given)
            graph.replay()
            assert torch.equal(out, right)
        offsets.copy_(none)
        graph.replay()
    assert served["calls"] > 0
