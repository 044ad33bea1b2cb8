"""Attention over a cache: rows without keys, far pages, hidden slots, units, scales."""

import functools
import math

import pytest
import torch

from flashdig import attention_varlen, attention_with_kvcache
from tests.faults.targets import (
    BEYOND_INT32,
    equal_scores,
    offsets,
    only_cuda,
    poisoned,
    qkv,
    randn,
)

BF16 = torch.bfloat16
LN_2, LN_4, LN_5, LN_7, LN_8 = (math.log(n) for n in (2, 4, 5, 7, 8))


@pytest.fixture
def attend(backend):
    return functools.partial(attention_with_kvcache, backend=backend, return_lse=True)


def in_pages(x, size):
    """A dense cache (batch, seqlen, ..) as pages in reversed order, and their table."""
    batch, seqlen = x.shape[:2]
    pages = x.reshape(batch * seqlen // size, size, *x.shape[2:]).flip(0)
    table = torch.arange(len(pages), dtype=torch.int32, device=x.device).flip(0)
    return pages, table.view(batch, -1)


@pytest.mark.parametrize("paged", [False, True])
def test_rows_that_see_no_key(attend, device, paged) -> None:
    q, cache = torch.zeros(1, 4, 1, 16, device=device), torch.zeros(1, 2, 1, 16, device=device)
    values = torch.tensor([1.0, 3.0], device=device)[None, :, None, None].expand(1, 2, 1, 16)
    table = None
    values = values.contiguous()
    if paged:
        cache, table = in_pages(cache, 1)
        values, table = in_pages(values, 1)
    with poisoned(device):
        out, lse = attend(q, cache, values, cache_seqlens=2, page_table=table, causal=True)
    assert out[0, :, 0, 0].tolist() == [0, 0, 1, 2]
    torch.testing.assert_close(lse[0, 0].cpu(), torch.tensor([-math.inf, -math.inf, 0, LN_2]))


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_very_low_scores_are_not_taken_for_hidden_ones(attend, device, dtype, num_splits) -> None:
    q = torch.full((1, 1, 1, 128), 16.0, device=device, dtype=dtype)
    k = torch.full((1, 64, 1, 128), -120.0, device=device, dtype=dtype)
    v = equal_scores(device, dtype, 1, 64, 128)[2]
    for sign in (1, -1):
        out, lse = attend(q, k * sign, v, cache_seqlens=64, num_splits=num_splits)
        assert (out == 31.5).all()
        exact = -sign * 245760 * 128**-0.5 + math.log(64)
        torch.testing.assert_close(float(lse), exact, atol=0.01, rtol=0)


def test_a_hidden_key_beats_no_low_one(attend, device) -> None:
    q, k = torch.zeros(1, 1, 1, 16, device=device), torch.zeros(1, 2, 1, 16, device=device)
    q[..., 0], k[0, 0, 0, 0] = -200.0, 100.0
    v = torch.tensor([1.0, 100.0], device=device)[None, :, None, None].expand(1, 2, 1, 16)
    out, lse = attend(q, k, v.contiguous(), cache_seqlens=1, softmax_scale=1.0)
    assert (out == 1).all()
    assert float(lse) == -20000


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "means", "lses"),
    [
        (2, 5, [1.5, 2.0], [LN_4, LN_5]),
        (5, 2, [0, 0, 0, 0, 0.5], [-math.inf] * 3 + [0, LN_2]),
        (1, 7, [3.0], [LN_7]),
    ],
)
def test_masks_align_to_the_last_key(attend, device, seqlen_q, seqlen_k, means, lses) -> None:
    q, k, v = equal_scores(device, torch.float32, seqlen_q, seqlen_k)
    out, lse = attend(q, k, v, cache_seqlens=seqlen_k, causal=True)
    torch.testing.assert_close(out[0, :, 0, 0].cpu(), torch.tensor(means))
    torch.testing.assert_close(lse[0, 0].cpu(), torch.tensor(lses))


def test_query_heads_meet_their_own_kv_head(attend, device) -> None:
    q = randn(device, BF16, 2, 1, 6, 64)
    cache = randn(device, BF16, 2, 9, 2, 64, seed=1)
    v = torch.ones_like(cache)
    v[:, :, 1] = 2
    out, _ = attend(q, cache, v, cache_seqlens=9)
    assert out[:, 0, :, 0].tolist() == [[1, 1, 1, 2, 2, 2]] * 2


@pytest.mark.parametrize("seqlen_q", [1, 33])
def test_new_keys_go_to_a_page_beyond_2_31_elements_and_nowhere_else(
    attend, device, seqlen_q
) -> None:
    shape = (131200, 16, 8, 128)
    assert math.prod(shape) > BEYOND_INT32
    # memory that is never touched is never backed on a CPU
    pools = [torch.empty(shape, device=device, dtype=BF16) for _ in range(2)]
    far = 131190 + torch.arange(8, dtype=torch.int32, device=device)
    table = torch.stack((far, torch.zeros_like(far)))
    watched = [0, *range(131189, 131200)]
    for n, pool in enumerate(pools):
        pool[watched] = randn(device, BF16, len(watched), *shape[1:], seed=n)
    before = [pool[watched].clone() for pool in pools]
    q = randn(device, BF16, 1, seqlen_q, 16, 128, seed=3)
    new = [randn(device, BF16, 1, seqlen_q, 8, 128, seed=n) for n in (4, 5)]
    lengths = offsets(device, 47)
    out, _ = attend(q, *pools, *new, cache_seqlens=lengths, page_table=table[:1], causal=True)
    small = [x[1:].clone() for x in before]
    small_table = torch.arange(1, 9, dtype=torch.int32, device=device)[None]
    expected, _ = attend(
        q, *small, *new, cache_seqlens=lengths, page_table=small_table, causal=True
    )
    assert torch.equal(out, expected)
    for pool, old, x, right in zip(pools, before, new, small, strict=True):
        assert torch.equal(pool[watched[1:]], right)
        assert torch.equal(pool[0], old[0])
        rows = right[1:].flatten(0, 1)[47 : 47 + seqlen_q]
        assert torch.equal(rows, x[0])


@only_cuda
def test_a_batch_beyond_a_grids_y_dimension(attend, device) -> None:
    q, k, v = qkv(device, BF16, 70000, 1, 4, 4, 2, 64, grad=False)
    lengths = torch.arange(70000, device=device, dtype=torch.int32) % 5
    with poisoned(device):
        out, lse = attend(q, k, v, cache_seqlens=lengths)
    for b in (0, 1, 35003, 69998, 69999):
        one = slice(b, b + 1)
        expected, expected_lse = attend(q[one], k[one], v[one], cache_seqlens=b % 5)
        torch.testing.assert_close(out[one], expected, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(lse[one], expected_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v", "both"])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_what_lies_behind_a_length_never_shows(attend, device, value, where, seqlen_q) -> None:
    lengths = (32, 64, 96, 48)
    q, k, v = qkv(device, BF16, 4, seqlen_q, 128, 8, 8, 64, grad=False)
    behind = torch.arange(128, device=device) >= offsets(device, *lengths)[:, None]
    results = []
    for filler in (0.0, value):
        caches = {
            name: x.masked_fill(behind[..., None, None], filler if where in (name, "both") else 0)
            for name, x in (("k", k), ("v", v))
        }
        seqlens = offsets(device, *lengths)
        results.append(attend(q, *caches.values(), cache_seqlens=seqlens, causal=True))
        pages, tables = zip(*(in_pages(x, 16) for x in caches.values()), strict=True)
        results.append(attend(q, *pages, cache_seqlens=seqlens, page_table=tables[0], causal=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])
        assert out.isfinite().all()
    k[1, 63, 0, 0] = math.nan  # a visible one still does
    out, _ = attend(q, k, v, cache_seqlens=offsets(device, *lengths), causal=True)
    assert out[1, -1, 0].isnan().any()


def test_what_no_window_reaches_never_shows(attend, device) -> None:
    q, k, v = qkv(device, BF16, 1, 3, 200, 4, 2, 64, grad=False)
    options = {"cache_seqlens": 150, "window": (20, 0)}
    expected = attend(q, k, v, **options)
    k[:, :127], v[:, :127], k[:, 150:], v[:, 150:] = (math.nan,) * 4
    found = attend(q, k, v, **options)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    pages, table = in_pages(k[:, :192], 16)
    values, _ = in_pages(v[:, :192], 16)
    table[0, :7], table[0, 10:] = 10**6, -5  # pages that no query sees
    if device != "cpu":  # where values of the table are checked
        found = attend(q, pages, values, page_table=table, **options)
        assert torch.equal(found[0], expected[0])


@pytest.mark.parametrize("seqlen_q", [1, 6])
@pytest.mark.parametrize("page_size", [1, 3, 16, 19, 48, 256, 768])
def test_any_page_size(attend, device, page_size, seqlen_q) -> None:
    lengths = [0, 1, page_size - 1, page_size, page_size + 1, 1000]
    pages = -(-1000 // page_size) + 2
    generator = torch.Generator().manual_seed(page_size)
    table = torch.randperm(6 * pages, generator=generator).to(device, torch.int32).view(6, pages)
    table[4, 0] = table[3, 0]
    pools = [randn(device, BF16, 6 * pages, page_size, 2, 64, seed=n) for n in (1, 2)]
    q = randn(device, BF16, 6, seqlen_q, 8, 64, seed=3)
    seqlens = offsets(device, *lengths)
    out, lse = attend(q, *pools, cache_seqlens=seqlens, page_table=table, causal=True)
    gathered = [pool[table.long()].flatten(1, 2) for pool in pools]
    expected, expected_lse = attend(q, *gathered, cache_seqlens=seqlens, causal=True)
    torch.testing.assert_close(out, expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse, expected_lse, atol=1e-3, rtol=1e-4)
    assert not out[0].any()
    assert lse[0].isneginf().all()


def test_every_path_gives_the_natural_logarithm(attend, device, backend) -> None:
    q, cache = torch.zeros(3, 1, 2, 64, device=device), torch.zeros(3, 8, 2, 64, device=device)
    pages, table = in_pages(cache, 4)
    cu = offsets(device, 0, 1, 2, 3)
    found = [
        attend(q, cache, cache, cache_seqlens=8)[1],
        attend(q, cache, cache, cache_seqlens=8, num_splits=4)[1],
        attend(q, cache, cache, cache_seqlens=8, batch_invariant=True)[1],
        attend(q, pages, pages, cache_seqlens=8, page_table=table)[1],
        attend(q[:, 0], cache, cache, cache_seqlens=8, cu_seqlens_q=cu)[1].T[..., None],
        attention_varlen(
            q[:, 0], pages, pages, cu, 8 * cu, page_table=table, return_lse=True, backend=backend
        )[1].T[..., None],
    ]
    for lse in found:
        assert lse.shape == (3, 2, 1)
        torch.testing.assert_close(lse, torch.full_like(lse, LN_8), atol=1e-5, rtol=0)


def test_scales_of_fp8_caches(attend, device) -> None:
    q = randn(device, BF16, 2, 1, 8, 128)
    k, v = (randn(device, BF16, 2, 100, 2, 128, seed=n).to(torch.float8_e4m3fn) for n in (1, 2))
    ones = torch.ones(2, 2, device=device)
    scales = torch.tensor([[0.5, 2.0], [4.0, 1.0]], device=device)
    plain = attend(q, k, v, cache_seqlens=100)
    assert torch.equal(attend(q, k, v, cache_seqlens=100, k_descale=ones)[0], plain[0])
    doubled = attend(q, k, v, cache_seqlens=100, v_descale=2 * ones)
    assert torch.equal(doubled[0], 2 * plain[0])
    one = attend(q, k, v, cache_seqlens=100, q_descale=ones, k_descale=scales)
    two = attend(q, k, v, cache_seqlens=100, q_descale=2 * ones, k_descale=scales / 2)
    assert torch.equal(one[0], two[0])
    exact = attend(q.float(), k.float() * scales[:, None, :, None], v.float(), cache_seqlens=100)
    torch.testing.assert_close(one[0].float(), exact[0], atol=2e-2, rtol=2e-2)
