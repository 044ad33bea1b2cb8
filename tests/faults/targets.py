"""Devices and backends under test, and how inputs are made for them."""

import contextlib
import gc

import pytest
import torch

from flashdig.bench.gate import poison, poisoned_allocator

CPU = pytest.param(("cpu", "auto"), id="cpu")
CPU_TILED = pytest.param(("cpu", "tiled"), id="cpu-tiled")
CUDA = pytest.param(("cuda", "triton"), id="cuda", marks=pytest.mark.gpu)

BEYOND_INT32 = 2**31

# for problems that torch's fused CPU attention serves, so that the tiled walk sees them too
every_backend = pytest.mark.parametrize("target", [CPU, CPU_TILED, CUDA], indirect=True)
only_cuda = pytest.mark.parametrize("target", [CUDA], indirect=True)


def randn(device, dtype, *shape, seed=0, scale=1.0):
    """The same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float32) * scale
    return x.to(device, dtype)


def qkv(
    device,
    dtype,
    batch,
    seqlen_q,
    seqlen_k,
    num_heads,
    num_heads_kv,
    head_dim,
    head_dim_v=None,
    *,
    seed=0,
    scale=1.0,
    grad=True,
):
    """Random q, k, v that ask for gradients; `scale` multiplies q alone."""
    shapes = (
        (batch, seqlen_q, num_heads, head_dim),
        (batch, seqlen_k, num_heads_kv, head_dim),
        (batch, seqlen_k, num_heads_kv, head_dim_v or head_dim),
    )
    return tuple(
        randn(
            device, dtype, *shape, seed=3 * seed + n, scale=scale if n == 0 else 1.0
        ).requires_grad_(grad)
        for n, shape in enumerate(shapes)
    )


def offsets(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def packed(device, dtype, total_q, total_k, num_heads, num_heads_kv, head_dim, *, seed=0):
    shapes = ((total_q, num_heads), (total_k, num_heads_kv), (total_k, num_heads_kv))
    return [
        randn(device, dtype, *shape, head_dim, seed=3 * seed + n).requires_grad_()
        for n, shape in enumerate(shapes)
    ]


def equal_scores(device, dtype, seqlen_q, seqlen_k, head_dim=64):
    """q = k = 0 and v[j] = j: an output is the mean index of the keys that the row sees."""
    q = torch.zeros(1, seqlen_q, 1, head_dim, device=device, dtype=dtype)
    k = torch.zeros(1, seqlen_k, 1, head_dim, device=device, dtype=dtype)
    v = torch.arange(seqlen_k, device=device, dtype=dtype)[None, :, None, None]
    return q, k, v.expand(1, seqlen_k, 1, head_dim).contiguous()


def spread(x, dim):
    """The values of x (1 or 2 entries in `dim` far apart): the last lie beyond 2^31 elements."""
    strides = list(torch.empty(x.shape).stride())
    strides[dim] = -(-BEYOND_INT32 // (x.shape[dim] - 1)) // 64 * 64 + 64
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    # memory that is never touched is never backed on a CPU
    far = torch.empty(size, device=x.device, dtype=x.dtype).as_strided(x.shape, strides)
    far.copy_(x)
    return far


@contextlib.contextmanager
def poisoned(device, nbytes=2**28):
    """Memory that is handed out holds NaN, so that what a kernel leaves unwritten shows."""
    if device == "cpu":
        with poisoned_allocator():
            yield
    else:
        gc.collect()
        poison(nbytes, device)
        yield
