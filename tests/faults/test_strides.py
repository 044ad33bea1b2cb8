"""Inputs and upstream gradients that lie in memory in unusual ways."""

import pytest
import torch

from tests.faults.targets import every_backend, qkv, randn

SHAPE = (2, 130, 4, 64)


def upstreams(device):
    """Gradients of the output whose strides are not the output's."""
    dense = randn(device, torch.bfloat16, *SHAPE, seed=9)
    wide = randn(device, torch.bfloat16, *SHAPE[:3], 128, seed=10)
    one = torch.ones((), device=device, dtype=torch.bfloat16)
    return {
        "one number": one.expand(SHAPE),
        "heads before rows": dense.transpose(1, 2).contiguous().transpose(1, 2),
        "every second column": wide[..., ::2],
        "one head for all": dense[:, :, :1].expand(SHAPE),
        "every second row": torch.cat((dense, dense + 1), dim=1)[:, ::2],
        "columns first": dense.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    }


@pytest.mark.parametrize("name", upstreams("cpu"))
def test_any_strides_of_the_upstream_gradient(attend, device, name) -> None:
    inputs = qkv(device, torch.bfloat16, 2, 130, 130, 4, 2, 64)
    out = attend(*inputs, deterministic=True)
    upstream = upstreams(device)[name]
    assert not upstream.is_contiguous()
    found = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(out, inputs, upstream.contiguous()), strict=True):
        assert torch.equal(a, b)


def test_the_gradient_of_a_plain_sum(attend, device) -> None:
    """sum() hands back one number, expanded: all its strides are 0."""
    inputs = qkv(device, torch.bfloat16, 2, 130, 130, 4, 2, 64)
    out = attend(*inputs, deterministic=True)
    found = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    for a, b in zip(found, torch.autograd.grad(out, inputs, torch.ones_like(out)), strict=True):
        assert torch.equal(a, b)


def unusual(x):
    """The same values as x (batch, seqlen, heads, head_dim), laid out in every legal way."""
    batch, seqlen, heads, head_dim = x.shape
    flat = torch.empty(x.numel() + 1, device=x.device, dtype=x.dtype)
    flat[1:] = x.flatten()
    pitched = torch.zeros(batch, seqlen, heads, 68, device=x.device, dtype=x.dtype)
    pitched[..., :head_dim] = x
    wide = torch.zeros(batch, seqlen, heads, 2 * head_dim, device=x.device, dtype=x.dtype)
    wide[..., ::2] = x
    return {
        "two bytes off": flat[1:].view(x.shape),
        "row pitch of 68": pitched[..., :head_dim],
        "every second column": wide[..., ::2],
        "heads before rows": x.transpose(1, 2).contiguous().transpose(1, 2),
        "columns first": x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    }


@every_backend
@pytest.mark.parametrize("name", unusual(torch.zeros(1, 1, 1, 64)))
def test_any_strides_and_offset_of_the_inputs(attend, device, name) -> None:
    inputs = qkv(device, torch.bfloat16, 2, 70, 70, 2, 2, 64, grad=False)
    expected = attend(*inputs, causal=True)
    strided = [unusual(x)[name] for x in inputs]
    # aligned first, then not: what was kept for one must not serve the other
    assert torch.equal(attend(*strided, causal=True), expected)
    for place in range(3):
        mixed = [
            s if n == place else x for n, (s, x) in enumerate(zip(strided, inputs, strict=True))
        ]
        assert torch.equal(attend(*mixed, causal=True), expected)
    assert torch.equal(attend(*inputs, causal=True), expected)


@pytest.mark.parametrize("head_stride", [0, 1, 7])
def test_strides_of_dimensions_of_size_one_mean_nothing(attend, device, head_stride) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 70, 70, 4, 1, 64, grad=False)
    expected = attend(q, k, v, causal=True)
    odd = [x.as_strided(x.shape, (0, 64, head_stride, 1)) for x in (k, v)]
    assert torch.equal(attend(q, *odd, causal=True), expected)


def test_a_batch_that_repeats_one_sequence(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 3, 70, 70, 4, 1, 64, grad=False)
    k, v = (x[:1].expand(3, -1, -1, -1) for x in (k, v))
    expected = attend(q, k.contiguous(), v.contiguous(), causal=True)
    assert torch.equal(attend(q, k, v, causal=True), expected)
    k.requires_grad_()
    (dk,) = torch.autograd.grad(attend(q, k, v, causal=True).float().sum(), k)
    assert dk.shape == k.shape


def test_an_address_that_moves_between_two_calls(attend, device) -> None:
    """Aligned and two bytes off in turn, with the same shapes and strides."""
    q, k, v = qkv(device, torch.bfloat16, 1, 70, 70, 2, 2, 64)
    off = torch.cat([q.flatten()[:1], q.flatten()]).detach()[1:].view(q.shape).requires_grad_()
    assert q.data_ptr() % 16 == 0
    assert off.data_ptr() % 16 == 2
    results = []
    for x in (q, off, q, off, q):
        out = attend(x, k, v, causal=True, deterministic=True)
        results.append((out, *torch.autograd.grad(out, (x, k, v), torch.ones_like(out))))
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert torch.equal(a, b)
