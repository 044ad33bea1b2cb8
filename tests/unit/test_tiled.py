"""The tiled walk equals the oracle, forward and backward, and keeps O(seqlen) memory."""

import math

import pytest
import torch

import flashdig.kernels.tiled as tiled_module
from flashdig.kernels.reference import reference_attention
from flashdig.ops.attention import attention_op
from flashdig.problem import Mask
from tests.attention_cases import CASES, build, gradients, taking_gradients
from tests.faults.budget import eager_rounded


def tiled(q, k, v, *, dropout_seed=0, **options):
    mask = Mask.from_arguments(options.get("causal", False), options.get("window"))
    return attention_op(
        q,
        k,
        v,
        options.get("bias"),
        options.get("alibi_slopes"),
        options.get("sinks"),
        torch.tensor([dropout_seed]),
        *(None,) * 4,
        options.get("softmax_scale", q.shape[-1] ** -0.5),
        options.get("softcap", 0.0),
        options.get("dropout_p", 0.0),
        -1 if mask.window_left is None else mask.window_left,
        -1 if mask.window_right is None else mask.window_right,
        mask.alignment == "top-left",
        False,
        None,
        "tiled",
    )


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name) -> None:
    q, k, v, options = build(name)
    out, lse = tiled(q, k, v, dropout_seed=11, **options)
    expected, expected_lse = reference_attention(q, k, v, dropout_seed=11, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    inputs = taking_gradients(q, k, v, options)
    ours = gradients(out, lse, inputs)
    for a, b in zip(ours, gradients(expected, expected_lse, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("tile", [1, 3, 64])
@pytest.mark.parametrize("name", ["everything", "window both sides", "causal more queries"])
def test_no_tile_size_shows(name, tile, monkeypatch) -> None:
    q, k, v, options = build(name)
    q, k, v = (x.detach()[:1, :40].requires_grad_() for x in (q, k, v))
    options.pop("alibi_slopes", None)
    if "bias" in options:
        options["bias"] = options["bias"].detach()[..., :40, :40].requires_grad_()
    expected = reference_attention(q, k, v, dropout_seed=3, **options)
    monkeypatch.setattr(tiled_module, "TILE_M", tile)
    monkeypatch.setattr(tiled_module, "TILE_N", tile + 1)
    got = tiled(q, k, v, dropout_seed=3, **options)
    inputs = taking_gradients(q, k, v, options)
    pairs = [*zip(got, expected, strict=True)]
    pairs += zip(gradients(*got, inputs), gradients(*expected, inputs), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "everything", "head_dim_v"])
def test_half_precision_keeps_to_the_budget(name, dtype) -> None:
    """At most 2x (gradients 3x) the error of eager attention that rounds QK^T, P and O."""
    q, k, v, options = build(name, dtype)
    options = {n: o for n, o in options.items() if n in ("causal", "window", "softcap")}
    inputs = [q, k, v]
    exact, exact_lse = reference_attention(q, k, v, **options)
    rounded, rounded_lse = eager_rounded(q, k, v, **options)
    out, lse = tiled(q, k, v, **options)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert (out - exact).abs().max() <= 2 * (rounded - exact).abs().max() + 1e-5
    exact_grads = gradients(exact, exact_lse, inputs)
    rounded_grads = gradients(rounded, rounded_lse, inputs)
    for got, want, naive in zip(
        gradients(out, lse, inputs), exact_grads, rounded_grads, strict=True
    ):
        error = (got.double() - want.double()).abs().max()
        assert error <= 3 * (naive.double() - want.double()).abs().max() + 1e-5


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["top-left", "window hides keys", "bool bias of keys"])
def test_what_is_hidden_from_all_never_shows(name, value) -> None:
    q, k, v, options = build(name)
    (dv,) = torch.autograd.grad(tiled(q, k, v, **options)[0].abs().sum(), v)
    hidden = (dv == 0).all(dim=-1)
    assert hidden.any()
    clean_out, clean_lse = tiled(q, k, v, **options)
    clean = gradients(clean_out, clean_lse, [q, k, v])
    k_noisy, v_noisy = (x.detach().clone() for x in (k, v))
    k_noisy[hidden] = value
    v_noisy[hidden] = value
    k_noisy.requires_grad_()
    v_noisy.requires_grad_()
    out, lse = tiled(q, k_noisy, v_noisy, **options)
    assert torch.equal(out, clean_out)
    for a, b in zip(gradients(out, lse, [q, k_noisy, v_noisy]), clean, strict=True):
        assert torch.equal(a, b)


def test_dead_queries_and_their_upstream_gradients_do_not_spread() -> None:
    q, k, v, options = build("causal more queries")
    dead = 50 - 21
    with torch.no_grad():
        q[:, :dead] = math.nan
    out, lse = tiled(q, k, v, **options)
    assert not out[:, :dead].any()
    assert (lse[..., :dead] == -math.inf).all()
    upstream = torch.ones_like(out)
    upstream[:, :dead] = math.nan
    row_upstream = torch.full_like(lse, math.nan)
    row_upstream[..., dead:] = 1
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (upstream, row_upstream))
    assert not dq[:, :dead].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


def test_memory_grows_with_the_length_not_with_its_square() -> None:
    peak = {}
    for seqlen in (1024, 4096):
        q = torch.randn(1, seqlen, 1, 8, requires_grad=True)
        largest = LargestTensor()
        with largest:
            out, _ = tiled(q, q, q, causal=True)
            out.sum().backward()
        peak[seqlen] = largest.elements
    assert peak[4096] <= 4 * peak[1024]
    assert peak[4096] < 4096 * 4096 / 8


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Records the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, torch.Tensor):
                self.elements = max(self.elements, x.numel())
        return result


def test_twice_differentiating_is_one_clear_error() -> None:
    q, k, v, _ = build("plain")
    out, _ = tiled(q, k, v)
    (dq,) = torch.autograd.grad(out.pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.autograd.grad(dq.sum(), q, allow_unused=True)
