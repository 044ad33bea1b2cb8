"""The short way on a GPU: kept plans and handles against the operator, graphs, streams, threads."""

import functools

import pytest
import torch

from flashdig import attention, attention_varlen, kept_calls
from flashdig.kernels import launch
from tests.attention_cases import build, taking_gradients
from tests.faults.targets import offsets, packed, poisoned, qkv
from tests.gpu.kept import (
    captured,
    forget,
    graph_inputs,
    heard_launches,
    in_threads,
    new_values,
    step,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def nothing_kept():
    forget()
    yield
    forget()


def attend(*args, **options):
    return attention(*args, backend="triton", **options)


causal_attend = functools.partial(attend, causal=True)


def to_gpu(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.detach().cuda().requires_grad_(x.requires_grad)


def is_kept(out):
    return "Planned" in type(out.grad_fn).__name__


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("causal more queries", torch.bfloat16),
        ("window both sides", torch.float16),
        ("bias broadcast", torch.bfloat16),
        ("bool bias of keys", torch.bfloat16),
        ("alibi per batch", torch.float32),
        ("everything, small", torch.bfloat16),
    ],
)
def test_a_kept_call_gives_the_bits_of_the_operator(name, dtype) -> None:
    q, k, v, options = build(name, dtype)
    q, k, v = to_gpu(q), to_gpu(k), to_gpu(v)
    options = {key: to_gpu(value) for key, value in options.items()}
    results = []
    for kept in (False, True, True):
        torch.cuda.manual_seed(7)
        with poisoned("cuda", nbytes=2**22):
            out, lse = attend(q, k, v, **options, return_lse=True)
        assert is_kept(out) == kept
        results.append([out, lse, *on_gpu(out, lse, taking_gradients(q, k, v, options))])
    equal(results[1], results[0])
    equal(results[2], results[0])


def on_gpu(out, lse, inputs):
    generator = torch.Generator("cuda").manual_seed(1)
    weights = [torch.randn(x.shape, generator=generator, device="cuda") for x in (out, lse)]
    finite = torch.where(torch.isneginf(lse), torch.zeros_like(lse), lse)
    loss = (out * weights[0]).sum() + (finite * weights[1]).sum()
    return torch.autograd.grad(loss, inputs)


def test_packed_calls_follow_lengths_that_change_on_the_device() -> None:
    inputs = packed("cuda", torch.bfloat16, 62, 62, 4, 2, 64)
    cu = offsets("cuda", 0, 17, 17, 60)
    for cuts in ((0, 17, 17, 60), (0, 1, 30, 62), (5, 9, 11, 40)):
        cu.copy_(torch.tensor(cuts))
        results = []
        for keep in (True, False):
            if not keep:
                forget()
            out = attention_varlen(*inputs, cu, cu, causal=True, backend="triton")
            results.append((out, *torch.autograd.grad(out.sum(), inputs)))
        equal(*results)
        assert torch.equal(results[0][0][cuts[-1] :], torch.zeros_like(results[0][0][cuts[-1] :]))
        attention_varlen(*inputs, cu, cu, causal=True, backend="triton")


def test_a_new_length_compiles_nothing() -> None:
    k, v = (x.detach() for x in qkv("cuda", torch.bfloat16, 1, 200, 200, 2, 2, 64)[1:])
    counts = []
    for seqlen in range(1, 200):
        q = k[:, :seqlen].clone().requires_grad_()
        out = attend(q, k[:, :seqlen], v[:, :seqlen], causal=True)
        torch.autograd.grad(out.sum(), q)
        counts.append(len(launch._kernels))
    # one forward, delta and dQ for strides in whole vectors, whatever the length
    assert counts[-1] == counts[0]


def test_plans_hold_no_memory() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    inputs = qkv("cuda", torch.bfloat16, 1, 300, 300, 2, 2, 64)
    for _ in range(3):
        out = attend(*inputs, causal=True, dropout_p=0.1)
        torch.autograd.grad(out.sum(), inputs)
    del inputs, out
    assert torch.cuda.memory_allocated() == before
    assert len(kept_calls._kept) == 1


def test_listeners_of_triton_hear_kept_launches() -> None:
    q, k, v = qkv("cuda", torch.bfloat16, 1, 70, 70, 2, 2, 64, grad=False)
    expected = [attend(q, k, v) for _ in range(2)][1]
    found = []
    heard = heard_launches(lambda: found.append(attend(q, k, v)))
    assert len(heard) == 1
    assert heard[0].startswith("flashdig_forward")
    found.append(attend(q, k, v))
    assert len(heard) == 1
    assert all(torch.equal(out, expected) for out in found)


def test_a_graph_of_forward_and_backward_replays_with_new_inputs() -> None:
    inputs = graph_inputs()
    upstream = torch.randn_like(inputs[0])
    run = functools.partial(step, causal_attend, inputs, upstream)
    graph, in_graph = captured(run, warmings=2)
    for seed in range(3):
        new_values((*inputs, upstream), seed)
        graph.replay()
        equal(in_graph, run())


def test_each_replay_of_a_graph_draws_another_dropout_mask() -> None:
    """q = k = 0 and v = identity show the mask; the gradient of v is that of the same mask."""
    seqlen = head_dim = 64
    q, k = (torch.zeros(1, 160, 2, head_dim, device="cuda", dtype=torch.float16) for _ in range(2))
    k = k[:, :seqlen].contiguous()
    v = torch.eye(seqlen, device="cuda", dtype=torch.float16)[None, :, None]
    v = v.expand(1, seqlen, 2, head_dim).contiguous().requires_grad_()
    upstream = torch.randn(1, 160, 2, head_dim, device="cuda", dtype=torch.float16)

    def run():
        out = attend(q, k, v, dropout_p=0.25)
        return out, torch.autograd.grad(out, v, upstream)[0]

    graph, (out, dv) = captured(run, warmings=2)
    masks = []
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        masks.append(out != 0)
        assert 0.7 < masks[-1].float().mean() < 0.8
        expected = torch.einsum("bihj,bihd->bjhd", out.double(), upstream.double())
        torch.testing.assert_close(dv.double(), expected, rtol=2e-2, atol=2e-2)
    assert not torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[1], masks[2])


def test_threads_on_streams_of_their_own() -> None:
    calls = {
        seqlen: qkv("cuda", torch.bfloat16, 1, seqlen, seqlen, 2, 2, 64)
        for seqlen in (65, 130, 200)
    }

    expected = {seqlen: step(causal_attend, inputs) for seqlen, inputs in calls.items()}
    torch.cuda.synchronize()
    forget()

    def work(number):
        for turn in range(12):
            seqlen = list(calls)[(number + turn) % len(calls)]
            found = step(causal_attend, calls[seqlen])
            torch.cuda.current_stream().synchronize()
            equal(found, expected[seqlen])

    in_threads(work)


def test_twenty_lengths_compile_at_most_twice_forward_and_backward() -> None:
    """By Inductor, to the same bits as eager calls that were kept."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(lambda q, k, v: attend(q, k, v, causal=True), fullgraph=True)
    for seqlen in range(100, 120):
        inputs = qkv("cuda", torch.bfloat16, 1, seqlen, seqlen, 4, 2, 64)
        upstream = torch.randn_like(inputs[0])
        results = []
        for call in (causal_attend, run):
            results += [step(call, inputs, upstream) for _ in range(2)]
        for found in results[1:]:
            equal(found, results[0])
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_gradients_of_any_subset_of_a_kept_call() -> None:
    q, k, v = qkv("cuda", torch.bfloat16, 1, 90, 90, 4, 2, 64, grad=False)
    sinks = torch.randn(4, device="cuda")
    tensors = [q, k, v, sinks]
    everything = [x.clone().requires_grad_() for x in tensors]
    out = attend(*everything[:3], sinks=everything[3])
    expected = torch.autograd.grad(out.float().sum(), everything)
    for wanted in range(1, 16):
        some = [x.clone().requires_grad_(bool(wanted >> n & 1)) for n, x in enumerate(tensors)]
        leaves = [x for x in some if x.requires_grad]
        out = attend(*some[:3], sinks=some[3])
        assert is_kept(out)
        found = torch.autograd.grad(out.float().sum(), leaves)
        for a, b in zip(found, [e for n, e in enumerate(expected) if wanted >> n & 1], strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_keeps_calls_of_its_own() -> None:
    """The same shapes on both GPUs, each the current one in turn; gradients with another current
    device than the forward's."""
    here = qkv("cuda:0", torch.bfloat16, 1, 90, 90, 4, 2, 64)
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    results = []
    for turn in range(3):
        for current in (0, 1):
            for tensors in (here, there):
                with torch.cuda.device(current):
                    out = attend(*tensors, causal=True)
                with torch.cuda.device(1 - current):
                    grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
                assert out.device == tensors[0].device
                if turn > 0:  # another current device takes the long way
                    assert is_kept(out) == (out.device.index == current)
                results.append([x.detach().cpu() for x in (out, *grads)])
    for found in results[1:]:
        equal(found, results[0])
