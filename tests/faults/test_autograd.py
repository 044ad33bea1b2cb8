"""Gradients: of the log-sum-exp, of any subset of the inputs, without recording, under vmap."""

import itertools
import math

import pytest
import torch
from torch.func import grad, vmap

from flashdig import merge_partials
from tests.faults.budget import assert_within_budget
from tests.faults.targets import every_backend, qkv, randn

# a call on a joined batch may choose other tiles than a call a slice
ROUNDING = {"atol": 1e-2, "rtol": 1e-2}


def test_the_lse_has_the_gradient_of_its_formula(attend, device) -> None:
    q, k, v = (torch.zeros(1, n, 1, 64, device=device) for n in (1, 2, 2))
    q[..., 0] = 1
    k[:, 0, :, 0], k[:, 1, :, 0] = 1, -1
    for x in (q, k, v):
        x.requires_grad_()
    _, lse = attend(q, k, v, softmax_scale=1.0, return_lse=True)
    assert float(lse.detach()) == pytest.approx(1.126928, abs=1e-5)
    dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v), materialize_grads=True)
    assert float(dq[0, 0, 0, 0]) == pytest.approx(0.761594, abs=1e-5)
    assert float(dk[0, 0, 0, 0]) == pytest.approx(0.880797, abs=1e-5)
    assert float(dk[0, 1, 0, 0]) == pytest.approx(0.119203, abs=1e-5)
    assert not dv.any()


def test_out_and_lse_together_with_every_mask(attend, device) -> None:
    """The budget's loss weighs the LSE of all rows, the first 30 of which see no key."""
    inputs = qkv(device, torch.bfloat16, 2, 130, 100, 6, 2, 64)
    _, lse, _ = assert_within_budget(attend, *inputs, causal=True, window=(70, 0), softcap=15.0)
    assert torch.isneginf(lse[..., :30]).all()


@every_backend
@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=3))[1:])
def test_every_subset_of_inputs(attend, device, wanted) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 70, 70, 2, 2, 64)
    upstream = randn(device, torch.bfloat16, 1, 70, 2, 64, seed=5)
    expected = torch.autograd.grad(
        attend(*inputs, causal=True, deterministic=True), inputs, upstream
    )
    some = [x.detach().requires_grad_(w) for x, w in zip(inputs, wanted, strict=True)]
    attend(*some, causal=True, deterministic=True).backward(upstream)
    for x, w, gradient in zip(some, wanted, expected, strict=True):
        if w:
            assert torch.equal(x.grad, gradient)
        else:
            assert x.grad is None


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_recording_the_lse_is_that_of_training(attend, device, context) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 70, 70, 2, 2, 64)
    out, lse = attend(*inputs, causal=True, return_lse=True)
    with context():
        again, again_lse = attend(*inputs, causal=True, return_lse=True)
    assert torch.equal(again, out)
    assert torch.equal(again_lse, lse)
    assert not again.requires_grad


@every_backend
def test_one_gradient_asked_for_twice(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 70, 70, 2, 2, 64)
    out = attend(q, k, v, causal=True, deterministic=True)
    upstream = torch.ones_like(out)
    first = torch.autograd.grad(out, v, upstream, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, v, upstream)[0], first)


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, 0), (None, 1, None)])
def test_vmap_equals_a_loop(attend, device, in_dims) -> None:
    q, k, v = (
        randn(device, torch.bfloat16, 3, *shape, seed=n)
        for n, shape in enumerate([(2, 33, 4, 64), (2, 47, 2, 64), (2, 47, 2, 64)])
    )
    inputs = [
        x[0] if d is None else x.movedim(0, d) for x, d in zip((q, k, v), in_dims, strict=True)
    ]

    def one(q, k, v):
        return attend(q, k, v, causal=True, return_lse=True)

    found = vmap(one, in_dims)(*inputs)
    loop = [
        one(*(x if d is None else x.select(d, n) for x, d in zip(inputs, in_dims, strict=True)))
        for n in range(3)
    ]
    for a, b in zip(found, zip(*loop, strict=True), strict=True):
        torch.testing.assert_close(a, torch.stack(b), **ROUNDING)


def test_vmap_of_a_gradient_equals_a_loop(attend, device) -> None:
    q, k, v = (randn(device, torch.bfloat16, 3, 1, 33, 2, 64, seed=n) for n in range(3))

    def loss(q, k, v):
        out, lse = attend(q, k, v, causal=True, deterministic=True, return_lse=True)
        return out.float().square().sum() + lse.sum()

    found = vmap(grad(loss, argnums=(0, 1, 2)))(q, k, v)
    for n in range(3):
        single = grad(loss, argnums=(0, 1, 2))(q[n], k[n], v[n])
        for a, b in zip(found, single, strict=True):
            torch.testing.assert_close(a[n], b, **ROUNDING)


def test_vmap_refuses_dropout_when_randomness_is_an_error(attend, device) -> None:
    q = randn(device, torch.bfloat16, 3, 1, 33, 2, 64)
    with pytest.raises(RuntimeError, match="random"):
        vmap(lambda x: attend(x, x, x, dropout_p=0.5), randomness="error")(q)


def test_differentiating_twice_is_right_or_an_error(attend, device) -> None:
    """Never silently zero."""
    q, k, v = qkv(device, torch.float32, 1, 9, 9, 1, 1, 64)
    out, _ = attend(q, k, v, softmax_scale=0.3, return_lse=True)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(dq.sum(), q)


def test_a_dead_row_hides_even_a_nan_in_the_gradient_of_the_lse(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 50, 21, 2, 2, 64)
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    row_weights = torch.ones_like(lse)
    row_weights[..., :29] = math.nan
    found = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), row_weights))
    assert all(x.isfinite().all() for x in found)
    assert not found[0][:, :29].any()


def test_gradients_through_merged_parts_are_those_of_the_whole(attend, device) -> None:
    """A merge weighs the parts by their LSEs, so it needs their gradient; a part may be empty."""
    inputs = qkv(device, torch.float32, 1, 33, 70, 4, 2, 64)
    q, k, v = inputs
    upstream = randn(device, torch.float32, 1, 33, 4, 64, seed=5)
    whole, whole_lse = attend(*inputs, return_lse=True)
    parts = [
        attend(q, k[:, s], v[:, s], return_lse=True)
        for s in (slice(0, 0), slice(0, 50), slice(50, 70))
    ]
    merged, lse = merge_partials(*zip(*parts, strict=True))
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse, atol=1e-5, rtol=1e-5)
    grads = [
        torch.autograd.grad((out, row), inputs, (upstream, torch.ones_like(row)))
        for out, row in ((merged, lse), (whole, whole_lse))
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


def test_a_part_that_saw_no_key_weighs_exactly_nothing() -> None:
    """Whatever its output holds; a row that no part saw is 0 with LSE -inf."""
    out = torch.ones(2, 1, 3, 1, 8)
    out[1] = math.nan
    lse = torch.tensor([[0.5, 0.5, -math.inf], [-math.inf] * 3]).view(2, 1, 1, 3)
    out[0, :, 2] = math.nan
    merged, merged_lse = merge_partials(out, lse)
    assert torch.equal(merged[0, :, 0, 0], torch.tensor([1.0, 1.0, 0.0]))
    assert torch.equal(merged_lse, lse[0])
