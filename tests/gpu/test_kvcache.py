"""Attention over a cache on a GPU: graphs with new lengths, invariance, fp8, latent attention."""

import math

import pytest
import torch

from flashdig import attention_varlen, attention_with_kvcache
from flashdig.bench.gate import float64_reference

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def randn(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda").to(dtype)


def paged(batch, capacity, page_size, heads_kv, dim):
    pages = batch * capacity // page_size
    table = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
    return randn(pages, page_size, heads_kv, dim), randn(pages, page_size, heads_kv, dim), table


def assert_is_exact(out, q, k, v, lengths):
    """Within what eager attention loses, for one query token a sequence."""
    group = q.shape[2] // k.shape[2]
    for b, length in enumerate(lengths):
        for h in range(k.shape[2]):
            heads = slice(h * group, (h + 1) * group)
            reference = float64_reference(
                q[b : b + 1, :, heads].transpose(1, 2),
                k[b : b + 1, :length, h : h + 1].transpose(1, 2),
                v[b : b + 1, :length, h : h + 1].transpose(1, 2),
                causal=False,
                pairs="all",
            )
            verdict = reference.check(out[b : b + 1, :, heads].transpose(1, 2))
            assert verdict.ok, (b, h, verdict)


def test_a_captured_step_follows_lengths_and_pages() -> None:
    k, v, table = paged(4, 2048, 16, 8, 128)
    q, new = randn(4, 1, 32, 128), [randn(4, 1, 8, 128) for _ in range(2)]
    lengths = torch.tensor([0, 5, 1000, 2046], dtype=torch.int32, device="cuda")
    keywords = {"cache_seqlens": lengths, "page_table": table, "causal": True}

    def step():
        return attention_with_kvcache(q, k, v, *new, **keywords)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for now in ([0, 5, 1000, 2046], [2047, 1999, 3, 64], [1, 0, 0, 0]):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        table.copy_(table.flatten()[torch.randperm(table.numel(), device="cuda")].view_as(table))
        for x in (q, *new):
            x.normal_()
        captured.fill_(math.nan)
        graph.replay()
        gathered = [x[table.long()].flatten(1, 2) for x in (k, v)]
        assert_is_exact(captured, q, *gathered, [n + 1 for n in now])
        for cache, x in zip(gathered, new, strict=True):
            for b, n in enumerate(now):
                assert torch.equal(cache[b, n], x[b, 0])


@pytest.mark.parametrize("page_size", [None, 16])
def test_batch_invariance_to_the_bit(page_size) -> None:
    lengths = torch.tensor([700, 4096, 1, 2047], dtype=torch.int32, device="cuda")
    if page_size is None:
        k, v, table = randn(4, 4096, 8, 128), randn(4, 4096, 8, 128), None
    else:
        k, v, table = paged(4, 4096, page_size, 8, 128)
    q = randn(4, 150, 32, 128)
    options = {"causal": True, "batch_invariant": True, "return_lse": True}
    out, lse = attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, **options)
    for b in range(4):
        own = (k[b : b + 1], v[b : b + 1]) if table is None else (k, v)
        rows = None if table is None else table[b : b + 1]
        for first in (0, 1, 100, 149):
            found, found_lse = attention_with_kvcache(
                q[b : b + 1, first:], *own, cache_seqlens=lengths[b : b + 1], page_table=rows,
                **options,
            )  # fmt: skip
            assert torch.equal(found, out[b : b + 1, first:])
            assert torch.equal(found_lse, lse[b : b + 1, :, first:])
    cu = torch.tensor([0, 150, 300, 450, 600], dtype=torch.int32, device="cuda")
    packed, packed_lse = attention_with_kvcache(
        q.flatten(0, 1), k, v, cache_seqlens=lengths, page_table=table, cu_seqlens_q=cu, **options
    )
    assert torch.equal(packed, out.flatten(0, 1))
    assert torch.equal(packed_lse, lse.transpose(0, 1).flatten(1))
    whole = attention_with_kvcache(q, k, v, cache_seqlens=lengths, page_table=table, causal=True)
    torch.testing.assert_close(whole, out, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("page_size", [None, 16])
def test_chunks_beside_decoding_follow_lengths(page_size) -> None:
    """Two launches that overlap, in a graph: other lengths, other queries, the same bits again."""
    if page_size is None:
        k, v, table = randn(12, 4096, 8, 128), randn(12, 4096, 8, 128), None
    else:
        k, v, table = paged(12, 4096, page_size, 8, 128)
    q = randn(900, 32, 128)
    cu, lengths = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (13, 12))
    keywords = {"cache_seqlens": lengths, "page_table": table, "cu_seqlens_q": cu}
    keywords |= {"causal": True, "return_lse": True}

    def set_step(seed) -> None:
        generator = torch.Generator().manual_seed(seed)
        queries = torch.ones(12, dtype=torch.int32)
        queries[seed % 12], queries[3], queries[8] = 300 + 250 * (seed % 3), seed % 20, 0
        now = torch.randint(0, 3000, (12,), generator=generator).to(torch.int32)
        lengths.copy_(now + queries)
        cu[1:].copy_(queries.cumsum(0))

    set_step(0)
    attention_with_kvcache(q, k, v, **keywords)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attention_with_kvcache(q, k, v, **keywords)
    for seed in range(24):
        set_step(seed)
        out.fill_(math.nan)
        graph.replay()
        first, first_lse = out.clone(), lse.clone()
        expected, expected_lse = attention_with_kvcache(q, k, v, **keywords, num_splits=1)
        torch.testing.assert_close(first, expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(first_lse, expected_lse, atol=1e-3, rtol=1e-3)
        for _ in range(5):
            out.fill_(math.nan)
            graph.replay()
            assert torch.equal(out, first)
            assert torch.equal(lse, first_lse)


@pytest.mark.parametrize("heads", [16, 128])
def test_latent_attention_reads_values_out_of_the_keys(heads) -> None:
    cache = randn(3, 640, 1, 576)
    q = randn(3, 1, heads, 576)
    lengths = [1, 640, 333]
    seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out = attention_with_kvcache(q, cache, cache[..., :512], cache_seqlens=seqlens)
    assert out.shape == (3, 1, heads, 512)
    assert_is_exact(out, q, cache, cache[..., :512], lengths)


def test_an_fp8_cache_is_exact_over_what_it_stores() -> None:
    k, v = (randn(2, 1000, 8, 128).to(torch.float8_e4m3fn) for _ in range(2))
    scales = [torch.rand(2, 8, device="cuda") + 0.5 for _ in range(2)]
    q = randn(2, 1, 32, 128)
    out = attention_with_kvcache(
        q, k, v, cache_seqlens=1000, k_descale=scales[0], v_descale=scales[1]
    )
    plain = [x.float() * s[:, None, :, None] for x, s in zip((k, v), scales, strict=True)]
    exact = attention_with_kvcache(q.float(), *plain, cache_seqlens=1000, backend="reference")
    torch.testing.assert_close(out.float(), exact, atol=5e-3, rtol=1e-2)


def test_a_compiled_step_equals_an_eager_one() -> None:
    caches = [randn(2, 64, 2, 64) for _ in range(2)]
    q, k, v = randn(2, 1, 4, 64), randn(2, 1, 2, 64), randn(2, 1, 2, 64)
    lengths = torch.tensor([3, 60], dtype=torch.int32, device="cuda")

    @torch.compile(fullgraph=True)
    def step(q, k_cache, v_cache, k, v, lengths):
        return attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True)

    copies = [x.clone() for x in caches]
    with torch.no_grad():
        expected = attention_with_kvcache(q, *copies, k, v, cache_seqlens=lengths, causal=True)
        assert torch.equal(step(q, *caches, k, v, lengths), expected)
    for a, b in zip(caches, copies, strict=True):
        assert torch.equal(a, b)


def test_the_last_token_of_a_prefill_is_a_decoding_step() -> None:
    k, v, table = paged(2, 512, 64, 4, 128)
    q = randn(2, 100, 16, 128)
    lengths = torch.tensor([512, 350], dtype=torch.int32, device="cuda")
    options = {"cache_seqlens": lengths, "page_table": table, "causal": True}
    whole = attention_with_kvcache(q, k, v, **options)
    last = attention_with_kvcache(q[:, -1:], k, v, **options)
    torch.testing.assert_close(whole[:, -1:], last, atol=5e-3, rtol=1e-2)
    gathered = [x[table.long()].flatten(1, 2) for x in (k, v)]
    assert_is_exact(last, q[:, -1:], *gathered, lengths.tolist())


def test_packed_queries_over_pages_copy_no_page() -> None:
    k, v, table = paged(4, 16384, 16, 8, 128)
    lengths = [16384, 300, 1, 9000]
    cu_k = torch.tensor([0, 16384, 16684, 16685, 25685], dtype=torch.int32, device="cuda")
    cu_q = torch.arange(5, dtype=torch.int32, device="cuda")
    q = randn(4, 32, 128)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out = attention_varlen(q, k, v, cu_q, cu_k, page_table=table, causal=True)
    assert torch.cuda.max_memory_allocated() - before < k.nbytes / 4
    gathered = [x[table.long()].flatten(1, 2) for x in (k, v)]
    assert_is_exact(out[:, None], q[:, None], *gathered, lengths)


def test_parts_of_eager_calls_and_graphs_side_by_side() -> None:
    """No call joins what another stream or a replayed graph left."""
    cases = []
    for batch, length in ((1, 4000), (3, 700), (2, 2500)):
        q, k, v = randn(batch, 1, 16, 64), randn(batch, length, 2, 64), randn(batch, length, 2, 64)
        lengths = torch.tensor([length - 13 * b for b in range(batch)], device="cuda").int()

        def call(q=q, k=k, v=v, lengths=lengths):
            return attention_with_kvcache(q, k, v, cache_seqlens=lengths)

        call()
        cases.append((call, (q, k, v), lengths.tolist()))
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    graphs = []
    for call, _, _ in cases:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=streams[0]):
            out = call()
        graphs.append((graph, out))
    eager = []
    for n in range(60):
        with torch.cuda.stream(streams[n % 4]):
            graph, _ = graphs[n % 3]
            if n % 4 == n % 3:
                graph.replay()
            eager.append((n % 3, cases[n % 3][0]()))
    torch.cuda.synchronize()
    for (call, inputs, lengths), (graph, out) in zip(cases, graphs, strict=True):
        graph.replay()
        torch.cuda.synchronize()
        assert_is_exact(out, *inputs, lengths)
        assert torch.equal(call(), out)
    for case, found in eager:
        assert torch.equal(found, graphs[case][1])
