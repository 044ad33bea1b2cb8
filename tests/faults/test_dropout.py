"""Dropout: one mask for forward and backward and for every tile size, and its edges."""

import math

import pytest
import torch

import flashdig.kernels.tiled as tiled_module
from flashdig import attention
from flashdig.kernels.reference import reference_attention
from tests.faults.budget import assert_error
from tests.faults.targets import qkv, randn

P_DROP = 0.25
SEQLEN_Q, SEQLEN_K = 160, 64


def shown_mask(attend, device, seed, *, batch=2, heads=(2, 2), head_dim=64, **options):
    """(mask, out, v): with equal scores and v the identity, the output is the mask, scaled.

    The mask is bool (batch, seqlen_q, num_heads, seqlen_k).
    """
    num_heads, num_heads_kv = heads
    dtype = torch.bfloat16
    q = torch.zeros(batch, SEQLEN_Q, num_heads, head_dim, device=device, dtype=dtype)
    k = torch.zeros(batch, SEQLEN_K, num_heads_kv, head_dim, device=device, dtype=dtype)
    v = torch.zeros_like(k)
    v[..., :SEQLEN_K] = torch.eye(SEQLEN_K, device=device, dtype=dtype)[:, None]
    v.requires_grad_()
    torch.manual_seed(seed)
    out = attend(q, k, v, dropout_p=P_DROP, **options)
    return out.detach()[..., :SEQLEN_K] != 0, out, v


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_the_backward_drops_what_the_forward_dropped(attend, device, heads) -> None:
    _, out, v = shown_mask(attend, device, 0, heads=heads)
    upstream = randn(device, torch.bfloat16, *out.shape, seed=7)
    (dv,) = torch.autograd.grad(out, v, upstream)
    exact = torch.einsum("bihj,bihd->bhjd", out.double(), upstream.double())
    exact = exact.unflatten(1, (heads[1], -1)).sum(2).transpose(1, 2)
    # out and dv are each rounded to bfloat16
    torch.testing.assert_close(dv.double(), exact, atol=2e-2, rtol=2e-2)


def test_kept_values_are_scaled_up_and_kept_at_their_share(attend, device) -> None:
    mask, out, _ = shown_mask(attend, device, 0)
    kept = out.detach()[mask].float()
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (64 * 0.75)), atol=0, rtol=4e-3)
    pairs = mask.numel()
    sigma = math.sqrt(P_DROP * (1 - P_DROP) / pairs)
    assert abs(float(mask.double().mean()) - 0.75) <= 4 * sigma


def test_heads_and_sequences_draw_independently(attend, device) -> None:
    mask, _, _ = shown_mask(attend, device, 0)
    flat = mask.transpose(1, 2).flatten(0, 1).flatten(1).double()
    agree = 0.75**2 + 0.25**2
    sigma = math.sqrt(agree * (1 - agree) / flat.shape[1])
    for a in range(len(flat)):
        for b in range(a):
            found = float((flat[a] == flat[b]).double().mean())
            assert abs(found - agree) <= 4.5 * sigma


def test_the_mask_depends_on_the_seed_alone(attend, device) -> None:
    """Not on head_dim, sharing of heads, or what else is masked; another seed draws another."""
    mask, _, _ = shown_mask(attend, device, 3)
    assert torch.equal(shown_mask(attend, device, 3)[0], mask)
    assert torch.equal(shown_mask(attend, device, 3, heads=(2, 1))[0], mask)
    rows = torch.arange(SEQLEN_Q, device=device)[:, None] + SEQLEN_K - SEQLEN_Q
    visible = (torch.arange(SEQLEN_K, device=device) <= rows)[None, :, None]
    for head_dim in (64, 128):
        causal, _, _ = shown_mask(attend, device, 3, head_dim=head_dim, causal=True)
        assert torch.equal(causal, mask & visible)
    assert not torch.equal(shown_mask(attend, device, 4)[0], mask)


def test_no_tile_size_shows_in_the_mask(monkeypatch) -> None:
    def tiled(*args, **options):
        return attention(*args, backend="tiled", **options)

    mask, _, _ = shown_mask(tiled, "cpu", 3)
    for tile_m, tile_n in ((32, 16), (64, 128), (40, 24)):
        monkeypatch.setattr(tiled_module, "TILE_M", tile_m)
        monkeypatch.setattr(tiled_module, "TILE_N", tile_n)
        assert torch.equal(shown_mask(tiled, "cpu", 3)[0], mask)


@pytest.mark.parametrize("causal", [False, True])
def test_random_inputs_with_the_mask_that_was_shown(attend, device, causal) -> None:
    """Output and gradients against P * mask / (1 - p) @ v in float64."""
    mask, _, _ = shown_mask(attend, device, 5, causal=causal)
    inputs = qkv(device, torch.bfloat16, 2, SEQLEN_Q, SEQLEN_K, 2, 2, 64)
    torch.manual_seed(5)
    out, lse = attend(*inputs, causal=causal, dropout_p=P_DROP, return_lse=True)
    # the same sums in tiles of another size
    undropped = attend(*inputs, causal=causal, return_lse=True)[1]
    torch.testing.assert_close(lse, undropped, atol=1e-6, rtol=1e-6)
    upstream = randn(device, torch.bfloat16, *out.shape, seed=6)
    found = torch.autograd.grad(out, inputs, upstream)
    results = {}
    for precision in (torch.float64, torch.bfloat16):
        leaves = [x.detach().to(precision).requires_grad_() for x in inputs]
        q, k, v = (x.double() for x in leaves)
        identity = torch.eye(SEQLEN_K, device=device).double()[None, :, None]
        identity = identity.expand(2, -1, 2, -1)
        probs, _ = reference_attention(q, k, identity, causal=causal)
        probs = (probs * mask / (1 - P_DROP)).to(precision).double()
        value = torch.einsum("bihj,bjhd->bihd", probs, v).to(precision)
        results[precision] = (value, *torch.autograd.grad(value, leaves, upstream.to(precision)))
    for n, (got, exact, rounded) in enumerate(zip((out, *found), *results.values(), strict=True)):
        assert_error(got, exact, rounded, 2.0 if n == 0 else 3.0, ("out", "dq", "dk", "dv")[n])


def test_nothing_dropped_and_everything_dropped(attend, device) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 70, 70, 2, 2, 64)
    none, none_lse = attend(*inputs, dropout_p=0.0, return_lse=True)
    plain, lse = attend(*inputs, return_lse=True)
    assert torch.equal(none, plain)
    assert torch.equal(none_lse, lse)
    out, all_lse = attend(*inputs, dropout_p=1.0, return_lse=True)
    assert not out.any()
    torch.testing.assert_close(all_lse, lse, atol=1e-6, rtol=1e-6)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert not gradient.any()


@pytest.mark.parametrize("dropout_p", [-0.1, 1.5, math.nan])
def test_probabilities_outside_zero_and_one_are_refused(dropout_p) -> None:
    q, k, v = qkv("cpu", torch.float32, 1, 5, 5, 1, 1, 8)
    with pytest.raises(ValueError, match="dropout_p"):
        attention(q, k, v, dropout_p=dropout_p)
