"""The same bits in every run, idle or loaded."""

import contextlib

import pytest
import torch

from tests.faults.targets import every_backend, only_cuda, qkv, randn

# (dtype, batch, seqlen, num_heads, num_heads_kv, head_dim, options)
SMALL = {
    "many heads": (torch.float16, 1, 140, 3, 3, 64, {}),
    "shared heads": (torch.bfloat16, 1, 140, 4, 2, 128, {"causal": True}),
    "window": (torch.bfloat16, 1, 200, 2, 1, 64, {"causal": True, "window": (65, 0)}),
}
LARGE = {
    "many heads": (torch.float16, 2, 1024, 12, 12, 64, {}),
    "shared heads": (torch.bfloat16, 2, 2048, 16, 2, 128, {"causal": True}),
    "window": (torch.bfloat16, 2, 2048, 16, 2, 64, {"causal": True, "window": (65, 0)}),
}


def runs(attend, device, case, count, between=lambda: None, **deterministic):
    """How many of `count` runs differ from the first, in any bit of out, dq, dk or dv."""
    dtype, batch, seqlen, num_heads, num_heads_kv, head_dim, options = case
    inputs = qkv(device, dtype, batch, seqlen, seqlen, num_heads, num_heads_kv, head_dim)
    upstream = randn(device, dtype, batch, seqlen, num_heads, head_dim, seed=8)
    first, different = None, 0
    for _ in range(count):
        between()
        out = attend(*inputs, **options, **deterministic)
        found = (out.detach(), *torch.autograd.grad(out, inputs, upstream))
        first = first or found
        different += not all(torch.equal(a, b) for a, b in zip(found, first, strict=True))
    return different


@every_backend
@pytest.mark.parametrize("name", SMALL)
def test_gradients_are_the_same_bits_when_asked(attend, device, name) -> None:
    case = SMALL[name] if device == "cpu" else LARGE[name]
    count = 3 if device == "cpu" else 30
    assert runs(attend, device, case, count, deterministic=True) == 0


@contextlib.contextmanager
def deterministic_algorithms():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_torchs_own_switch_is_obeyed(attend, device) -> None:
    case = SMALL["shared heads"] if device == "cpu" else LARGE["shared heads"]
    with deterministic_algorithms():
        assert runs(attend, device, case, 3 if device == "cpu" else 30) == 0


def test_the_forward_is_always_the_same_bits(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 300, 300, 4, 2, 128, grad=False)
    first = attend(q, k, v, causal=True, return_lse=True)
    for _ in range(3 if device == "cpu" else 30):
        for a, b in zip(attend(q, k, v, causal=True, return_lse=True), first, strict=True):
            assert torch.equal(a, b)


@pytest.mark.heavy
@only_cuda
@pytest.mark.parametrize("name", LARGE)
def test_two_hundred_runs_beside_a_busy_stream(attend, device, name) -> None:
    other = torch.cuda.Stream()
    matrix = torch.randn(2048, 2048, device=device, dtype=torch.bfloat16)

    def load():
        with torch.cuda.stream(other):
            for _ in range(4):
                torch.mm(matrix, matrix)

    assert runs(attend, device, LARGE[name], 200, load, deterministic=True) == 0
    other.synchronize()
