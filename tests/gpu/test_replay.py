"""Kept calls of q, k and v alone on a GPU: launches replayed with kept arguments."""

import functools

import pytest
import torch

from flashdig import attention
from flashdig.kernels import plans, replay
from tests.faults.targets import poisoned, qkv
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

BACKENDS = ["triton", "hopper"]


@pytest.fixture(autouse=True)
def nothing_kept():
    forget()
    yield
    forget()


def needs_hopper(backend):
    if backend != "triton" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def attend(q, k, v, backend, **options):
    return attention(q, k, v, causal=True, backend=backend, **options)


def long_way(q, k, v, backend, **options):
    forget()
    return attend(q, k, v, backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_at_old_and_new_addresses(backend) -> None:
    """Tensors that come back, tensors that never came, memory that holds NaN."""
    needs_hopper(backend)
    sets = [qkv("cuda", torch.bfloat16, 2, 130, 130, 4, 2, 64, seed=seed) for seed in range(6)]
    upstream = torch.randn_like(sets[0][0])
    expected = []
    for inputs in sets:
        out = long_way(*inputs, backend)
        expected.append((out.detach(), *torch.autograd.grad(out, inputs, upstream)))
    before = len(plans.kept_arguments)
    for turn in range(4):
        for number in (0, 1, 0, 2, 3, 4, 5, turn):
            inputs = sets[number]
            with poisoned("cuda", nbytes=2**22):
                out, lse = attend(*inputs, backend, return_lse=True)
                found = attend(*inputs, backend)
                with torch.no_grad():
                    bare = attend(*inputs, backend)
            assert torch.equal(bare, expected[number][0])
            assert torch.equal(out, bare)
            assert torch.equal(found, bare)
            assert torch.isfinite(lse).all()
            with poisoned("cuda", nbytes=2**22):
                gradients = torch.autograd.grad(found, inputs, upstream)
            for a, b in zip(gradients, expected[number][1:], strict=True):
                if backend == "hopper":  # dq is added up in any order
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
                else:
                    assert torch.equal(a, b)
    assert len(plans.kept_arguments) > before


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_captured_where_calls_were_replayed(backend) -> None:
    """The graph writes its own memory only, and is right while other calls run beside it."""
    needs_hopper(backend)
    inputs = graph_inputs(grad=False)
    with torch.no_grad():
        graph, outs = captured(lambda: [attend(*inputs, backend) for _ in range(3)], warmings=4)
    for seed in range(3):
        news = new_values(inputs, seed)
        torch.cuda.synchronize()
        graph.replay()
        beside = [attend(*news, backend) for _ in range(5)]
        torch.cuda.synchronize()
        expected = long_way(*news, backend)
        for out in (*outs, *beside):
            assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_graph_of_gradients_captured_where_they_were_replayed(backend) -> None:
    needs_hopper(backend)
    inputs = graph_inputs()
    upstream = torch.randn_like(inputs[0])
    run = functools.partial(step, lambda *x: attend(*x, backend), inputs, upstream)
    graph, in_graph = captured(run, warmings=4)
    for seed in range(3):
        new_values((*inputs, upstream), seed)
        torch.cuda.synchronize()
        graph.replay()
        beside = run()
        torch.cuda.synchronize()
        forget()
        expected = run()
        for found in (in_graph, beside):
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
        for _ in range(3):
            run()


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_an_lse_that_nobody_reads_costs_its_memory_once(backend) -> None:
    needs_hopper(backend)
    small = qkv("cuda", torch.bfloat16, 1, 200, 200, 2, 2, 64, grad=False)
    large = qkv("cuda", torch.bfloat16, 1, 200_000, 3, 2, 2, 8, grad=False)
    streams = [torch.cuda.Stream() for _ in range(3)]
    for tensors in (small, large):
        expected = attention(*tensors, backend=backend, return_lse=True)
        torch.cuda.synchronize()
        for _ in range(3):
            for stream in streams:
                with torch.cuda.stream(stream):
                    out = attention(*tensors, backend=backend)
                torch.cuda.synchronize()
                assert torch.equal(out, expected[0])
                del out
        again = attention(*tensors, backend=backend, return_lse=True)
        assert torch.equal(again[1], expected[1])
    held = torch.cuda.memory_allocated()
    for _ in range(5):
        attention(*small, backend=backend)
    assert torch.cuda.memory_allocated() == held
    assert replay._unread[torch.cuda.current_device()].nbytes == replay.UNREAD_BYTES


def test_threads_replay_on_streams_of_their_own() -> None:
    calls = {n: qkv("cuda", torch.bfloat16, 1, n, n, 2, 2, 64, grad=False) for n in (65, 130, 200)}
    expected = {n: attention(*tensors) for n, tensors in calls.items()}
    torch.cuda.synchronize()

    def work(number):
        for turn in range(30):
            n = list(calls)[(number + turn) % len(calls)]
            out = attention(*calls[n])
            torch.cuda.current_stream().synchronize()
            assert torch.equal(out, expected[n])

    in_threads(work)


def test_listeners_hear_replayed_launches() -> None:
    q, k, v = qkv("cuda", torch.bfloat16, 1, 70, 70, 2, 2, 64, grad=False)
    expected = [attend(q, k, v, "triton") for _ in range(4)][3]
    found = []
    heard = heard_launches(lambda: found.append(attend(q, k, v, "triton")))
    assert len(heard) == 1
    found.append(attend(q, k, v, "triton"))
    assert len(heard) == 1
    assert all(torch.equal(out, expected) for out in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_gpu_replays_its_own_calls() -> None:
    here = qkv("cuda:0", torch.bfloat16, 1, 90, 90, 4, 2, 64, grad=False)
    there = [x.to("cuda:1") for x in here]
    results = []
    for _ in range(4):
        for current in (0, 1):
            with torch.cuda.device(current):
                for tensors in (here, there):
                    out = attention(*tensors, causal=True)
                    assert out.device == tensors[0].device
                    results.append(out.cpu())
    for out in results[1:]:
        assert torch.equal(out, results[0])
