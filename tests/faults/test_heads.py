"""Head dimensions that fill no tile, and query heads that share keys."""

import pytest
import torch

from flashdig import attention
from flashdig.kernels.reference import reference_attention
from tests.faults.budget import assert_within_budget
from tests.faults.targets import CPU, CUDA, only_cuda, poisoned, qkv

# compiling every size takes a GPU machine minutes; these pad to two tile widths, one oddly
QUICK = (72, 104, 63)
MORE = (36, 40, 80, 96, 112, 160, 192)
SHAPES = [
    *(pytest.param(CPU.values[0], d, id=f"cpu-{d}") for d in QUICK + MORE),
    *(pytest.param(CUDA.values[0], d, marks=CUDA.marks, id=f"cuda-{d}") for d in QUICK),
    *(
        pytest.param(CUDA.values[0], d, marks=[*CUDA.marks, pytest.mark.heavy], id=f"cuda-{d}")
        for d in MORE
    ),
]


@pytest.mark.parametrize(("target", "head_dim"), SHAPES, indirect=["target"])
def test_padding_a_head_never_shows(attend, device, head_dim) -> None:
    """float16, whose padding of NaN would show at once; the scale uses the true head_dim."""
    q, k, v = qkv(device, torch.float16, 1, 140, 140, 2, 2, head_dim)
    first, first_lse, _ = assert_within_budget(attend, q, k, v)
    for _ in range(4):
        with poisoned(device), torch.no_grad():
            out, lse = attend(q, k, v, return_lse=True)
        assert torch.equal(out, first)
        assert torch.equal(lse, first_lse)


@pytest.mark.heavy
@only_cuda
@pytest.mark.parametrize("head_dim", [72, 104, 192])
def test_padding_a_head_at_size(attend, device, head_dim) -> None:
    inputs = qkv(device, torch.float16, 1, 512, 512, 16, 16, head_dim)
    with poisoned(device):
        assert_within_budget(attend, *inputs)


def test_the_upper_half_of_a_head_counts(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 33, 47, 2, 2, 128, grad=False)
    q[..., :64] = 0
    k[..., :64] = 0
    upper = attend(q, k, v, causal=True)
    half, _ = reference_attention(q[..., 64:], k[..., 64:], v, causal=True, softmax_scale=128**-0.5)
    torch.testing.assert_close(upper.double(), half, atol=1e-2, rtol=1e-2)
    uniform = attend(torch.zeros_like(q), k, v, causal=True)
    assert (upper.float() - uniform.float()).abs().max() > 0.1


def test_query_heads_use_their_own_key_head(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 9, 9, 6, 2, 64, grad=False)
    v[:, :, 0], v[:, :, 1] = 1, 2
    out = attend(q, k, v).float()
    expected = torch.tensor([1.0, 1, 1, 2, 2, 2], device=device)
    torch.testing.assert_close(out, expected[None, None, :, None].expand_as(out), atol=0.01, rtol=0)


@pytest.mark.parametrize("heads", [(32, 8), (8, 1), (12, 3), (15, 5)])
def test_shared_heads_forward_and_backward(attend, device, heads) -> None:
    assert_within_budget(attend, *qkv(device, torch.bfloat16, 2, 40, 50, *heads, 64))


def test_gradients_of_a_shared_head_add_up_in_float32(attend, device) -> None:
    """256 + 63 ones: a sum kept in bfloat16 would stay at 256."""
    q, k, v = qkv(device, torch.bfloat16, 1, 1, 1, 64, 1, 64)
    upstream = torch.ones(1, 1, 64, 64, device=device, dtype=torch.bfloat16)
    upstream[:, :, 0] = 256
    (dv,) = torch.autograd.grad(attend(q, k, v), v, upstream)
    assert torch.equal(dv, torch.full_like(dv, 256 + 63))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (4, 8), (4, 0)])
def test_heads_that_do_not_divide_are_refused(heads) -> None:
    num_heads, num_heads_kv = heads
    q = torch.zeros(1, 5, num_heads, 8)
    kv = torch.zeros(1, 5, num_heads_kv, 8)
    with pytest.raises(ValueError, match=r"k and v must have a number of heads"):
        attention(q, kv, kv)
