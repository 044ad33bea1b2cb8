"""NaN and infinity stored where no query looks: unused cache slots, keys outside every mask."""

import math

import pytest
import torch

from tests.faults.targets import every_backend, qkv, randn

LENGTHS = (32, 64, 96, 48)


def cache_case(device):
    """One query against caches of 128 slots of which some are used: (q, k, v, visible)."""
    q, k, v = qkv(device, torch.bfloat16, 4, 1, 128, 8, 8, 64, grad=False)
    lengths = torch.tensor(LENGTHS, device=device)
    visible = torch.arange(128, device=device) < lengths[:, None]
    return q, k, v, visible


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["k", "v", "k and v"])
def test_unused_slots_of_a_cache(attend, device, where, value) -> None:
    q, k, v, visible = cache_case(device)
    unused = ~visible[..., None, None]
    found = {}
    for fill in (0.0, value):
        k_fill = k.masked_fill(unused, fill if "k" in where else 0.0).requires_grad_()
        v_fill = v.masked_fill(unused, fill if "v" in where else 0.0).requires_grad_()
        inputs = (q.detach().requires_grad_(), k_fill, v_fill)
        out, lse = attend(*inputs, bias=visible[:, None, None], return_lse=True)
        upstream = randn(device, torch.bfloat16, *out.shape, seed=4)
        grads = torch.autograd.grad((out, lse), inputs, (upstream, torch.ones_like(lse)))
        found[fill] = (out, lse, *grads)
    for clean, dirty in zip(*found.values(), strict=True):
        assert torch.equal(dirty, clean)
        assert dirty.isfinite().all()
    _, dk, dv = found[value][2:]
    assert not dk.masked_select(unused).any()
    assert not dv.masked_select(unused).any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"causal": "top-left"}, slice(0, 40)),
        ({"causal": True, "window": (16, 0)}, slice(300 - 40 - 16, 300)),
    ],
    ids=["beyond the diagonal", "left of every window"],
)
def test_keys_outside_every_mask(attend, device, options, seen, value) -> None:
    q, k, v = qkv(device, torch.bfloat16, 2, 40, 300, 4, 2, 64, grad=False)
    hidden = torch.ones(300, dtype=torch.bool, device=device)
    hidden[seen] = False
    found = []
    for fill in (0.0, value):
        inputs = [
            q.detach().requires_grad_(),
            *(x.masked_fill(hidden[:, None, None], fill).requires_grad_() for x in (k, v)),
        ]
        out, lse = attend(*inputs, **options, return_lse=True)
        upstream = randn(device, torch.bfloat16, *out.shape, seed=4)
        grads = torch.autograd.grad((out, lse), inputs, (upstream, torch.ones_like(lse)))
        found.append((out, lse, *grads))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(dirty, clean)
    for gradient in found[1][3:]:
        assert not gradient[:, hidden].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_queries_that_see_no_key(attend, device, value) -> None:
    """Neither what they hold nor the gradient that comes down to them shows in any key's."""
    q, k, v = qkv(device, torch.bfloat16, 2, 50, 21, 4, 2, 64, grad=False)
    dead = 50 - 21
    found = []
    for fill in (0.0, value):
        dirty = q.clone()
        dirty[:, :dead] = fill
        inputs = [x.detach().requires_grad_() for x in (dirty, k, v)]
        out, lse = attend(*inputs, causal=True, return_lse=True)
        upstream, row_upstream = torch.ones_like(out), torch.ones_like(lse)
        upstream[:, :dead] = fill
        row_upstream[..., :dead] = fill
        found.append((out, lse, *torch.autograd.grad((out, lse), inputs, (upstream, row_upstream))))
    for clean, other in zip(*found, strict=True):
        assert torch.equal(other, clean)
    for x in (found[1][0], found[1][2]):
        assert not x[:, :dead].any()


@every_backend
def test_a_visible_nan_reaches_the_output(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 40, 40, 2, 2, 64, grad=False)
    for x in (k, v):
        kept = x[0, 7, 0, 3].clone()
        x[0, 7, 0, 3] = math.nan
        out = attend(q, k, v, causal=True)
        x[0, 7, 0, 3] = kept
        assert out[0, 7:, 0].isnan().any(dim=-1).all()
        assert out[0, :, 1].isfinite().all()
