"""Autocast and mixed dtypes, float32 that is not TF32, fp8 and its factors."""

import contextlib
import functools
import math

import pytest
import torch

from flashdig import attention
from flashdig.kernels.reference import reference_attention
from tests.faults.budget import assert_within_budget
from tests.faults.targets import CPU, every_backend, qkv, randn

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def mixed(device, requires_grad=True):
    """q and k as a float32 norm layer leaves them, v as a bfloat16 projection does."""
    q, k, _ = qkv(device, torch.float32, 1, 70, 70, 2, 2, 64, grad=requires_grad)
    v = randn(device, torch.bfloat16, 1, 70, 2, 64, seed=2).requires_grad_(requires_grad)
    return q, k, v


@every_backend
def test_autocast_computes_in_its_dtype(attend, device) -> None:
    q, k, v = mixed(device)
    with torch.autocast(device, torch.bfloat16):
        out = attend(q, k, v, causal=True, deterministic=True)
    assert out.dtype == torch.bfloat16
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    expected = attend(*half, causal=True, deterministic=True)
    assert torch.equal(out, expected)
    upstream = randn(device, torch.bfloat16, *out.shape, seed=3)
    found = torch.autograd.grad(out, (q, k, v), upstream)
    assert [x.dtype for x in found] == [torch.float32, torch.float32, torch.bfloat16]
    for a, b in zip(found, torch.autograd.grad(expected, half, upstream), strict=True):
        assert torch.equal(a.bfloat16(), b)


@every_backend
def test_the_backward_may_run_inside_autocast_or_outside(attend, device) -> None:
    inputs = mixed(device)
    grads = []
    for inside in (False, True):
        with torch.autocast(device, torch.bfloat16):
            out = attend(*inputs, causal=True, deterministic=True)
            upstream = torch.ones_like(out)
            if inside:
                grads.append(torch.autograd.grad(out, inputs, upstream))
        if not inside:
            grads.append(torch.autograd.grad(out, inputs, upstream))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("path", ["tiled", "reference"])
def test_products_inside_stay_float32_under_autocast(device, path) -> None:
    q, k, v = mixed(device, requires_grad=False)
    half = [x.bfloat16() for x in (q, k, v)]
    expected = attention(*half, return_lse=True, backend=path)
    with torch.autocast(device, torch.bfloat16):
        found = attention(q, k, v, return_lse=True, backend=path)
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_mixed_dtypes_outside_autocast_are_refused_by_name(attend, device) -> None:
    inputs = mixed(device, requires_grad=False)
    message = r"q torch.float32, k torch.float32 and v torch.bfloat16"
    with pytest.raises(TypeError, match=message):
        attend(*inputs)
    with (
        torch.autocast(device, torch.bfloat16),
        torch.autocast(device, enabled=False),
        pytest.raises(TypeError, match=message),
    ):
        attend(*inputs)


def test_float64_stays_float64_under_autocast(device) -> None:
    inputs = qkv(device, torch.float64, 1, 9, 9, 1, 1, 8)
    with torch.autocast(device, torch.bfloat16):
        out = attention(*inputs)
    assert out.dtype == torch.float64
    exact, _ = reference_attention(*inputs)
    torch.testing.assert_close(out, exact)


@pytest.mark.parametrize("sizes", [(1, 128, 1, 32), (2, 1000, 4, 64)], ids=["small", "large"])
def test_float32_is_not_tf32(attend, device, sizes) -> None:
    batch, seqlen, num_heads, head_dim = sizes
    if device == "cpu":
        seqlen, num_heads = min(seqlen, 300), min(num_heads, 2)
    assert not torch.backends.cuda.matmul.allow_tf32
    inputs = qkv(device, torch.float32, batch, seqlen, seqlen, num_heads, num_heads, head_dim)
    out = attend(*inputs, causal=True)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact, _ = reference_attention(*exact_inputs, causal=True)
    assert (out - exact).abs().max() < 1e-5
    upstream = randn(device, torch.float32, *out.shape, seed=4)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(exact, exact_inputs, upstream.double())
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-4 * b.abs().max()


@contextlib.contextmanager
def tf32_allowed():
    matmul = torch.backends.cuda.matmul
    # set back by the newer setting: a False here would outlive it and hide torch.backends' own
    before = matmul.fp32_precision
    matmul.allow_tf32 = True
    try:
        yield
    finally:
        matmul.fp32_precision = before


def test_tf32_follows_torchs_setting_at_every_call(attend, device) -> None:
    """Twice (gradients three times) what eager attention loses with the same setting."""
    inputs = qkv(device, torch.float32, 1, 128, 128, 1, 1, 32)
    before = attend(*inputs, causal=True, return_lse=True)
    with tf32_allowed():
        assert_within_budget(attend, *inputs, causal=True)
    for a, b in zip(attend(*inputs, causal=True, return_lse=True), before, strict=True):
        assert torch.equal(a, b)


# fp8 runs wherever "auto" finds it a backend
fp8_target = pytest.mark.parametrize(
    "target",
    [CPU, pytest.param(("cuda", "auto"), id="cuda-auto", marks=pytest.mark.gpu)],
    indirect=True,
)


@fp8_target
def test_fp8_error_is_no_larger_in_e4m3_and_does_not_grow(attend, device) -> None:
    """Rows whose maximum rises slowly tile after tile: a stale maximum would saturate P."""
    errors = {}
    for dtype in FP8:
        for seqlen in (256, 1024):
            q, k, v = qkv(device, torch.float32, 1, 16, seqlen, 4, 2, 128, grad=False)
            q[..., 0] = 4
            k[..., 0] = torch.linspace(-8, 8, seqlen, device=device)[None, :, None]
            q, k, v = (x.to(dtype) for x in (q, k, v))
            out = attend(q, k, v, out_dtype=torch.float32)
            exact, _ = reference_attention(q, k, v)
            errors[dtype, seqlen] = float((out - exact).abs().max())
    for seqlen in (256, 1024):
        assert errors[FP8[0], seqlen] <= errors[FP8[1], seqlen] + 1e-5
    for dtype in FP8:
        assert errors[dtype, 1024] <= 1.5 * errors[dtype, 256] + 1e-5


@fp8_target
@pytest.mark.parametrize("dtype", FP8)
def test_fp8_factors_of_each_key_head(attend, device, dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(device, torch.float32, 2, 40, 50, 4, 2, 64, grad=False))
    run = functools.partial(attend, q, k, v, out_dtype=torch.float32)
    factors = torch.tensor([[0.5, 2.0], [4.0, 1.0]], device=device)
    ones = torch.ones_like(factors)
    plain = run()
    assert torch.equal(run(q_descale=ones, k_descale=ones, v_descale=ones), plain)
    doubled = run(v_descale=2 * factors)
    assert torch.equal(doubled, 2 * run(v_descale=factors))
    per_head = factors.repeat_interleave(2, dim=1)[:, None, :, None]
    torch.testing.assert_close(run(v_descale=factors), plain * per_head)
    assert torch.equal(run(q_descale=2 * factors, k_descale=1 / (2 * factors)), plain)
    exact, _ = reference_attention(q, k, v, q_descale=factors, k_descale=factors)
    found = run(q_descale=factors, k_descale=factors)
    assert math.isfinite(float(found.abs().max()))
    torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-5)


def test_fp8_gradients_are_refused() -> None:
    q, k, v = (x.to(FP8[0]) for x in qkv("cpu", torch.float32, 1, 5, 5, 1, 1, 8, grad=False))
    with pytest.raises(ValueError, match="v requires a gradient"):
        attention(q, k, v.requires_grad_())
