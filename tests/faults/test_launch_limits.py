"""Sizes that overflow a 32-bit offset or a CUDA grid."""

import functools

import pytest
import torch

from tests.faults.targets import BEYOND_INT32, only_cuda, poisoned, qkv, randn, spread

BF16 = torch.bfloat16


@pytest.mark.parametrize("dim", [0, 1, 2], ids=["batch", "row", "head"])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_strides_that_reach_beyond_int32(attend, device, which, dim) -> None:
    inputs = list(qkv(device, BF16, 2, 33, 33, 2, 2, 64, grad=False))
    expected = attend(*inputs, causal=True)
    inputs[which] = spread(inputs[which], dim)
    assert torch.equal(attend(*inputs, causal=True), expected)


def test_an_upstream_gradient_that_reaches_beyond_int32(attend, device) -> None:
    inputs = qkv(device, BF16, 2, 33, 33, 2, 2, 64)
    out = attend(*inputs, causal=True, deterministic=True)
    upstream = randn(device, BF16, *out.shape, seed=5)
    expected = torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    found = torch.autograd.grad(out, inputs, spread(upstream, 1))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_rows_far_apart_though_a_tiles_are_near(attend, device) -> None:
    """300 rows: offsets inside a tile fit 32 bits, those from the first row do not."""
    inputs = qkv(device, BF16, 1, 300, 300, 1, 1, 64)
    upstream = randn(device, BF16, 1, 300, 1, 64, seed=5)
    found = []
    for far in (False, True):
        some = [(spread(x.detach(), 1) if far else x.detach()).requires_grad_() for x in inputs]
        out = attend(*some, causal=True, deterministic=True)
        dout = spread(upstream, 1) if far else upstream
        found.append((out, *torch.autograd.grad(out, some, dout)))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def sliced(attend, inputs, upstream, options, parts):
    """Compare out, lse, dq, dk, dv of one call with calls on (q index, k index) slices of it."""
    out, lse = attend(*inputs, **options, deterministic=True, return_lse=True)
    grads = torch.autograd.grad(out, inputs, upstream)
    for q_part, k_part in parts:
        some = [
            x.detach()[p].contiguous().requires_grad_()
            for x, p in zip(inputs, (q_part, k_part, k_part), strict=True)
        ]
        some_out, some_lse = attend(*some, **options, deterministic=True, return_lse=True)
        some_grads = torch.autograd.grad(some_out, some, upstream[q_part].contiguous())
        whole = (
            out[q_part],
            lse.transpose(1, 2)[q_part],
            *(g[p] for g, p in zip(grads, (q_part, k_part, k_part), strict=True)),
        )
        yield zip(whole, (some_out, some_lse.transpose(1, 2), *some_grads), strict=True)


@pytest.mark.heavy
@only_cuda
def test_a_batch_of_more_than_2_31_elements(attend, device) -> None:
    shape = (16400, 1024, 1, 128)
    inputs = [torch.randn(shape, device=device, dtype=BF16).requires_grad_() for _ in range(3)]
    assert inputs[0].numel() > BEYOND_INT32
    upstream = torch.randn(shape, device=device, dtype=BF16)
    parts = [(slice(n, n + 1),) * 2 for n in (0, 8191, 16399)]
    for pairs in sliced(attend, inputs, upstream, {"causal": True}, parts):
        for a, b in pairs:
            near(a, b)


@pytest.mark.heavy
@only_cuda
def test_a_sequence_of_more_than_2_31_elements(attend, device) -> None:
    """Through a window, so that the last rows depend on the last keys alone."""
    shape = (1, 131200, 128, 128)
    inputs = [torch.randn(shape, device=device, dtype=BF16).requires_grad_() for _ in range(3)]
    assert inputs[0].numel() > BEYOND_INT32
    upstream = torch.randn(shape, device=device, dtype=BF16)
    options = {"causal": True, "window": (127, 0)}
    parts = []
    for head in (0, 127):
        last = (slice(None), slice(-512, None), slice(head, head + 1))
        parts.append((last, last))
    for pairs in sliced(attend, inputs, upstream, options, parts):
        for a, b in pairs:
            # the slice's first rows see fewer keys; its last 256 rows and keys see the same
            near(a[:, -256:], b[:, -256:])


# name -> (batch, seqlen, num_heads, num_heads_kv) on a GPU and, above the same limit, on a CPU
GRIDS = {
    "batch": ((65537, 16, 1, 1), (65537, 2, 1, 1)),
    "heads": ((1, 16, 65537, 65537), (1, 2, 65537, 65537)),
    "shared heads": ((1, 16, 65537, 1), (1, 2, 65537, 1)),
    "batch times heads": ((2200, 64, 32, 32), (300, 2, 256, 256)),
    "decode": ((70000, 1, 1, 1), (70000, 1, 1, 1)),
}


def near(a, b):
    """The same numbers, computed among others: a few roundings to bfloat16 apart."""
    torch.testing.assert_close(a.float(), b.float(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", GRIDS)
def test_more_programs_than_a_grid_dimension_holds(attend, device, name) -> None:
    """Forward and backward, every index; memory is poisoned, so a launch that failed shows."""
    batch, seqlen, num_heads, num_heads_kv = GRIDS[name][device == "cpu"]
    assert max(batch, num_heads, batch * num_heads) > 65535
    head_dim = 64 if device == "cuda" else 8
    seqlen_k = 16 if name == "decode" else seqlen
    inputs = qkv(device, BF16, batch, seqlen, seqlen_k, num_heads, num_heads_kv, head_dim)
    run = functools.partial(attend, causal=True)
    with poisoned(device):
        out, lse = run(*inputs, return_lse=True)
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for x in (out, lse, *found):
        assert x.isfinite().all()
    for index in (0, 1, batch // 2, batch - 1) if batch > 1 else ():
        part = [x.detach()[index : index + 1].requires_grad_() for x in inputs]
        some = run(*part)
        near(out[index : index + 1], some)
        if num_heads_kv == num_heads:
            some_found = torch.autograd.grad(some, part, torch.ones_like(some))
            for whole, own in zip(found, some_found, strict=True):
                near(whole[index : index + 1], own)
    for head in (0, 1, num_heads // 2, num_heads - 1) if num_heads > 1 else ():
        kv = head // (num_heads // num_heads_kv)
        part = [
            x.detach()[:, :, h : h + 1].requires_grad_()
            for x, h in zip(inputs, (head, kv, kv), strict=True)
        ]
        some = run(*part)
        near(out[:, :, head : head + 1], some)
        near(
            found[0][:, :, head : head + 1],
            torch.autograd.grad(some, part[0], torch.ones_like(some))[0],
        )


def test_a_key_head_shared_by_more_heads_than_a_grid_holds(attend, device) -> None:
    """v's gradient sums over 65537 heads: all upstream gradients are 2^-16, all weights 1."""
    head_dim = 64 if device == "cuda" else 8
    inputs = qkv(device, BF16, 1, 1, 1, 65537, 1, head_dim)
    out = attend(*inputs, causal=True)
    (dv,) = torch.autograd.grad(out, inputs[2], torch.full_like(out, 2.0**-16))
    torch.testing.assert_close(dv, torch.ones_like(dv), atol=0, rtol=1e-2)
