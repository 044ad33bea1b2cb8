"""flashdig.attention on CUDA tensors equals the oracle, gradients included."""

import pytest
import torch

from flashdig import attention
from flashdig.kernels.reference import reference_attention
from tests.attention_cases import CASES, build, taking_gradients

pytestmark = pytest.mark.gpu


def on_gpu(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().cuda().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name) -> None:
    q, k, v, options = build(name)
    options.pop("dropout_p", None)
    q, k, v = on_gpu(q), on_gpu(k), on_gpu(v)
    options = {key: on_gpu(value) for key, value in options.items()}
    out, lse = attention(q, k, v, **options, return_lse=True)
    expected, expected_lse = reference_attention(q, k, v, **options)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    inputs = taking_gradients(q, k, v, options)
    finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    expected_finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), expected_lse)
    ours = torch.autograd.grad(out.sum() + finite.sum(), inputs)
    wanted = torch.autograd.grad(expected.sum() + expected_finite.sum(), inputs)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_dropout_follows_the_cuda_generator() -> None:
    q = torch.randn(1, 64, 2, 16, device="cuda")
    torch.cuda.manual_seed(0)
    first, second = (attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.cuda.manual_seed(0)
    assert torch.equal(attention(q, q, q, dropout_p=0.5), first)
    assert not torch.equal(first, second)


def test_tensors_on_two_devices_are_refused() -> None:
    q = torch.randn(1, 8, 2, 16, device="cuda")
    with pytest.raises(ValueError, match="k must be on q's device"):
        attention(q, q.cpu(), q)
