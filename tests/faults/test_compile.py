"""torch.compile and the operators' registrations; what is compiled, and how often."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdig
import flashdig.kernels.tiled as tiled_module
from flashdig import attention
from tests.faults.budget import assert_within_budget
from tests.faults.targets import CPU_TILED, CUDA, offsets, packed, poisoned, qkv, randn

# the CPU's fused attention is torch's own operator
own_operators = pytest.mark.parametrize("target", [CPU_TILED, CUDA], indirect=True)


@pytest.fixture
def compiled():
    """A function traced whole: a graph break is an error. The code around it is not compiled."""
    torch._dynamo.reset()
    yield functools.partial(torch.compile, fullgraph=True, backend="aot_eager", dynamic=False)
    torch._dynamo.reset()


@own_operators
@pytest.mark.parametrize(
    ("seqlen", "head_dim", "dtype"),
    [
        (128, 64, torch.bfloat16),
        (196, 64, torch.bfloat16),
        (257, 64, torch.bfloat16),
        (196, 72, torch.float16),
    ],
)
def test_compiled_equals_eager(attend, device, compiled, seqlen, head_dim, dtype) -> None:
    """Lengths that are no multiple of a tile, q from (batch, heads, seqlen, head_dim)."""
    options = {"causal": head_dim == 64, "deterministic": True}
    _, k, v = qkv(device, dtype, 2, seqlen, seqlen, 4, 2, head_dim)
    q = randn(device, dtype, 2, 4, seqlen, head_dim, seed=9).requires_grad_()
    results = []

    def eager(q, k, v):
        return attend(q, k, v, return_lse=True, **options)

    for run in (eager, compiled(eager)):
        out, lse = run(q.transpose(1, 2), k, v)
        upstream = randn(device, dtype, *out.shape, seed=5)
        grads = torch.autograd.grad((out, lse), (q, k, v), (upstream, torch.ones_like(lse)))
        results.append((out, lse, *grads))
    for plain, traced in zip(*results, strict=True):
        assert torch.equal(traced, plain)
        assert traced.stride() == plain.stride()


@own_operators
def test_compiled_packed_equals_eager(attend_packed, device, compiled) -> None:
    cu = offsets(device, 0, 17, 17, 60)
    inputs = packed(device, torch.bfloat16, 62, 62, 4, 2, 64)
    results = []

    def eager(q, k, v, cu):
        return attend_packed(q, k, v, cu, cu, causal=True, deterministic=True, return_lse=True)

    for run in (eager, compiled(eager)):
        out, lse = run(*inputs, cu)
        upstream = (torch.ones_like(out), torch.ones_like(lse))
        results.append((out, lse, *torch.autograd.grad((out, lse), inputs, upstream)))
    for plain, traced in zip(*results, strict=True):
        assert torch.equal(traced, plain)
        assert traced.stride() == plain.stride()


@own_operators
def test_twenty_lengths_compile_at_most_twice(attend, device) -> None:
    torch._dynamo.reset()
    graphs = 0

    def count(graph, example_inputs):
        nonlocal graphs
        graphs += 1
        return graph.forward

    run = torch.compile(
        lambda q, k, v: attend(q, k, v, causal=True), fullgraph=True, backend=count, dynamic=True
    )
    for seqlen in range(100, 120):
        q, k, v = qkv(device, torch.bfloat16, 1, seqlen, seqlen, 2, 2, 64, grad=False)
        assert torch.equal(run(q, k, v), attend(q, k, v, causal=True))
    assert 1 <= graphs <= 2
    torch._dynamo.reset()


class _Recorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects the calls of flashdig's operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "flashdig":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@own_operators
@pytest.mark.parametrize(
    "options",
    [{"causal": True, "window": (20, 0), "softcap": 15.0}, {"sinks": True}],
    ids=["masks", "sinks"],
)
def test_operators_are_registered_as_they_behave(attend, device, options) -> None:
    """Schema, fake results, autograd and AOT dispatch, by torch.library.opcheck."""
    inputs = qkv(device, torch.bfloat16, 1, 33, 40, 4, 2, 64)
    if "sinks" in options:
        options = {"sinks": randn(device, torch.float32, 4).requires_grad_()}
    recorder = _Recorder()
    with recorder:
        out, lse = attend(*inputs, **options, return_lse=True)
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    check_calls(recorder)


@own_operators
def test_packed_operators_are_registered_as_they_behave(attend_packed, device) -> None:
    cu = offsets(device, 0, 17, 17, 60)
    inputs = packed(device, torch.bfloat16, 62, 62, 4, 2, 64)
    recorder = _Recorder()
    with recorder:
        out, lse = attend_packed(*inputs, cu, cu, causal=True, return_lse=True)
        torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    check_calls(recorder)


def check_calls(recorder):
    """One forward and one backward, each by torch.library.opcheck."""
    assert len(recorder.calls) == 2
    for n, (operator, args, kwargs) in enumerate(recorder.calls):
        detached = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in args]
        if n == 0:
            detached[:3] = [x.requires_grad_() for x in detached[:3]]
        torch.library.opcheck(operator, tuple(detached), kwargs)


@own_operators
def test_a_first_call_equals_the_second(attend, device) -> None:
    """Nothing is tried out on the caller's tensors, and no output relies on what was there."""
    inputs = qkv(device, torch.bfloat16, 1, 140, 140, 2, 1, 64)
    results = []
    for _ in range(2):
        with poisoned(device):
            out = attend(*inputs, causal=True, deterministic=True)
            grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        results.append((out, *grads))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("tile", [(16, 48), (64, 32), (256, 256)])
def test_each_tile_choice_alone_is_right(monkeypatch, tile) -> None:
    monkeypatch.setattr(tiled_module, "TILE_M", tile[0])
    monkeypatch.setattr(tiled_module, "TILE_N", tile[1])
    inputs = qkv("cpu", torch.float32, 1, 140, 170, 2, 1, 64)

    def tiled(*args, **options):
        return attention(*args, backend="tiled", **options)

    with poisoned("cpu"):
        assert_within_budget(tiled, *inputs, causal=True, window=(70, 0))


SOURCE = str(Path(flashdig.__file__).parents[1])
LENGTHS = """
import json, os, pathlib, torch
from flashdig import attention
cache = pathlib.Path(os.environ["TRITON_CACHE_DIR"])

def compiled():
    return len(list(cache.glob("**/*.cubin")))

counts, first = [], None
for seqlen in range(513, 577):
    generator = torch.Generator("cuda").manual_seed(seqlen)
    inputs = [torch.randn(1, seqlen, 2, 64, device="cuda", dtype=torch.bfloat16,
                          generator=generator, requires_grad=True) for _ in range(3)]
    results = []
    for _ in range(2):
        out = attention(*inputs, causal=True, deterministic=True, backend="triton")
        results.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    assert all(torch.equal(a, b) for a, b in zip(*results)), seqlen
    counts.append(compiled())
print(json.dumps(counts))
"""


@pytest.mark.gpu
def test_lengths_compile_a_small_fixed_number_of_kernels(tmp_path) -> None:
    """From an empty cache: two calls agree at every length; a second length adds at most the
    variants for lengths that are no multiple of a tile, and nothing is compiled later."""
    done = subprocess.run(
        [sys.executable, "-c", LENGTHS],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": SOURCE, "TRITON_CACHE_DIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    # 528 is the first length that 16 divides
    assert counts[15] == counts[-1]
    assert counts[-1] <= 3 * counts[0]
