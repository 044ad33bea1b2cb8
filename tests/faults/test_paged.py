"""Keys in pages: any page size, shared pages, pages far into a large pool."""

import itertools
import math

import pytest
import torch

from flashdig import attention_varlen
from tests.faults.targets import BEYOND_INT32, CPU, offsets, randn

BF16 = torch.bfloat16
# paged input runs wherever "auto" finds it a backend
paged_target = pytest.mark.parametrize(
    "target",
    [CPU, pytest.param(("cuda", "auto"), id="cuda-auto", marks=pytest.mark.gpu)],
    indirect=True,
)


def lengths_to_offsets(device, lengths):
    return offsets(device, 0, *itertools.accumulate(lengths))


def in_order(pool, table, length):
    """The first `length` keys of a sequence, copied out of its pages."""
    return pool[table.long()].flatten(0, 1)[:length]


def assert_equals_gathered(pools, table, q, lengths_q, lengths_k, backend):
    """Paged attention against the same keys packed without pages; returns (out, lse)."""
    cu_q, cu_k = (lengths_to_offsets(q.device, lengths) for lengths in (lengths_q, lengths_k))
    options = {"causal": True, "return_lse": True, "backend": backend}
    found = attention_varlen(q, *pools, cu_q, cu_k, page_table=table, **options)
    gathered = [
        torch.cat([in_order(pool, *pair) for pair in zip(table, lengths_k, strict=True)])
        for pool in pools
    ]
    expected = attention_varlen(q, *gathered, cu_q, cu_k, **options)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-2, rtol=1e-2)
        assert not a.isnan().any()
    return found


@paged_target
@pytest.mark.parametrize("seqlen_q", [1, 6])
@pytest.mark.parametrize("page_size", [1, 3, 16, 19, 48, 256, 768])
def test_any_page_size(device, backend, page_size, seqlen_q) -> None:
    """Shuffled pages, a prefix that two sequences share, a wide table, NaN in unused slots."""
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 200]
    max_pages = -(-max(lengths) // page_size) + 3
    pool_size = len(lengths) * max_pages
    generator = torch.Generator().manual_seed(page_size)
    table = torch.randperm(pool_size, generator=generator).to(torch.int32)
    table = table.view(len(lengths), max_pages).to(device)
    table[4, 0] = table[3, 0]
    used = torch.zeros(pool_size * page_size, dtype=torch.bool, device=device)
    for pages, length in zip(table.long(), lengths, strict=True):
        slots = pages[:, None] * page_size + torch.arange(page_size, device=device)
        used[slots.flatten()[:length]] = True
    used = used.view(pool_size, page_size, 1, 1)
    pools = [
        randn(device, BF16, pool_size, page_size, 2, 64, seed=n).masked_fill(~used, math.nan)
        for n in (1, 2)
    ]
    q = randn(device, BF16, seqlen_q * len(lengths), 8, 64, seed=3)
    lengths_q = [seqlen_q] * len(lengths)
    out, lse = assert_equals_gathered(pools, table, q, lengths_q, lengths, backend)
    assert not out[:seqlen_q].any()
    assert torch.isneginf(lse[:, :seqlen_q]).all()


@paged_target
@pytest.mark.parametrize("seqlen_q", [1, 33])
def test_pages_that_lie_beyond_2_31_elements(device, backend, seqlen_q) -> None:
    shape = (131200, 16, 8, 128)
    assert math.prod(shape) > BEYOND_INT32
    # memory that is never touched is never backed on a CPU
    pools = [torch.empty(shape, device=device, dtype=BF16) for _ in range(2)]
    lengths = [1, 17, 64, 100]
    table = torch.zeros(4, 7, dtype=torch.int32, device=device)
    table[1:] = 131179 + torch.arange(21, device=device).view(3, 7)
    for n, pool in enumerate(pools):
        pool[table.long().unique()] = randn(device, BF16, 22, *shape[1:], seed=n)
    q = randn(device, BF16, 4 * seqlen_q, 8, 128, seed=3)
    assert_equals_gathered(pools, table, q, [seqlen_q] * 4, lengths, backend)


@paged_target
def test_a_page_that_two_sequences_share_takes_both_gradients(device, backend) -> None:
    table = torch.tensor([[2, 0], [2, 1]], dtype=torch.int32, device=device)
    pools = [randn(device, BF16, 3, 16, 2, 64, seed=n).requires_grad_() for n in (1, 2)]
    q = randn(device, BF16, 12, 4, 64, seed=3)
    cu_q, cu_k = offsets(device, 0, 6, 12), offsets(device, 0, 30, 50)
    out = attention_varlen(q, *pools, cu_q, cu_k, page_table=table, causal=True, backend=backend)
    upstream = randn(device, BF16, *out.shape, seed=4)
    found = torch.autograd.grad(out, pools, upstream)
    in_float32 = [
        torch.cat([in_order(pool.float(), table[b], n) for b, n in enumerate((30, 20))])
        for pool in pools
    ]
    exact = attention_varlen(q.float(), *in_float32, cu_q, cu_k, causal=True, backend=backend)
    wanted = torch.autograd.grad(exact, pools, upstream.float())
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
    assert not found[0][0, 14:].any()
    assert not found[0][1, 4:].any()
