"""Scores far from zero, softcap, and the log-sum-exp's unit and layout."""

import math

import pytest
import torch

from flashdig import attention, merge_partials
from tests.faults.budget import assert_within_budget
from tests.faults.targets import equal_scores, qkv


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float32, 64)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_equal_scores_far_from_zero(attend, device, dtype, head_dim, sign) -> None:
    """A maximum that starts at some large negative number would win against these."""
    q, k, v = equal_scores(device, dtype, 1, 64, head_dim)
    q += 16
    k += sign * 120 * 128 / head_dim
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    expected = torch.full_like(out, 31.5)
    torch.testing.assert_close(out, expected, atol=2e-4, rtol=0)
    exact = sign * 245760 / head_dim**0.5 + math.log(64)
    assert abs(float(lse) - exact) <= 0.004


@pytest.mark.parametrize(
    ("hidden_by", "dtype"),
    [("bool bias", torch.bfloat16), ("float bias", torch.float32), ("top-left", torch.bfloat16)],
)
def test_a_hidden_key_never_beats_a_very_negative_score(attend, device, dtype, hidden_by) -> None:
    q, k, v = (torch.zeros(1, n, 1, 64, device=device, dtype=dtype) for n in (1, 2, 2))
    q[..., 0] = -200
    k[:, 0, :, 0] = 100
    v[:, 0], v[:, 1] = 1, 100
    visible = torch.tensor([True, False], device=device).view(1, 1, 1, 2)
    float_bias = torch.zeros(1, 1, 1, 2, device=device).masked_fill(~visible, -math.inf)
    options = {
        "bool bias": {"bias": visible},
        "float bias": {"bias": float_bias},
        "top-left": {"causal": "top-left"},
    }[hidden_by]
    out, lse = attend(q, k, v, softmax_scale=1.0, return_lse=True, **options)
    assert torch.equal(out, torch.ones_like(out))
    assert abs(float(lse) + 20000) <= 0.004


def test_the_lse_is_a_natural_logarithm_in_float32(attend, device) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        _, lse = attend(*equal_scores(device, dtype, 3, 8), return_lse=True)
        assert lse.dtype == torch.float32
        assert lse.shape == (1, 1, 3)
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(8)), atol=1e-6, rtol=0)


def test_every_path_returns_the_same_lse(attend, device) -> None:
    """Each backend, and the merge of two halves of the keys."""
    q, k, v = qkv(device, torch.float32, 2, 33, 130, 4, 2, 64, grad=False)
    out, lse = attend(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 33)
    paths = [attention(q, k, v, return_lse=True, backend=b) for b in ("tiled", "reference")]
    halves = [attend(q, k[:, s], v[:, s], return_lse=True) for s in (slice(50), slice(50, None))]
    paths.append(merge_partials(*zip(*halves, strict=True)))
    for path_out, path_lse in paths:
        torch.testing.assert_close(path_lse, lse, atol=1e-5, rtol=0)
        torch.testing.assert_close(path_out, out, atol=1e-5, rtol=0)


# q = [4, 0, ..], k0 = [1, 0, ..], k1 = 0, scale 1, v[j] = j in 16 columns, dout = 1
SOFTCAP = {
    2.0: {"p0": 0.873034, "lse": 2.063836, "dq": -0.125301, "dk0": -0.501205},
    30.0: {"p0": 0.981593, "lse": 3.995042, "dq": -0.284007},
    0.0: {"p0": 0.982014, "lse": 4.018150},
}


def test_each_softcap_has_its_own_formula_and_gradient(attend, device) -> None:
    """The caps follow one another in one process: none may use what another left."""
    for cap in (2.0, 30.0, 0.0, 2.0):
        expected = SOFTCAP[cap]
        q, k, v = (torch.zeros(1, n, 1, 64, device=device) for n in (1, 2, 2))
        q[..., 0] = 4
        k[:, 0, :, 0] = 1
        v[:, 1, :, :16] = 1
        for x in (q, k, v):
            x.requires_grad_()
        out, lse = attend(q, k, v, softmax_scale=1.0, softcap=cap, return_lse=True)
        assert float(out.detach()[0, 0, 0, 0]) == pytest.approx(1 - expected["p0"], abs=1e-5)
        assert float(lse.detach()) == pytest.approx(expected["lse"], abs=1e-5)
        dq, dk = torch.autograd.grad(out[..., :16].sum(), (q, k))
        if "dq" in expected:
            assert float(dq[0, 0, 0, 0]) == pytest.approx(expected["dq"], abs=1e-5)
        if "dk0" in expected:
            assert float(dk[0, 0, 0, 0]) == pytest.approx(expected["dk0"], abs=1e-5)


def test_softcap_with_scores_up_to_two_hundred(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 2, 130, 130, 6, 2, 64, scale=40.0)
    scores = torch.einsum("bihd,bjhd->bhij", q[:, :, ::3].float(), k.float()) / 8
    assert scores.abs().max() > 150
    assert_within_budget(attend, q, k, v, causal=True, window=(70, 0), softcap=15.0)


def test_a_negative_softcap_is_refused() -> None:
    q, k, v = qkv("cpu", torch.float32, 1, 5, 5, 1, 1, 8)
    with pytest.raises(ValueError, match="softcap"):
        attention(q, k, v, softcap=-1.0)
