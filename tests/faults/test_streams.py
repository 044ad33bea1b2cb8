"""The device and the stream that a call runs on."""

import pytest
import torch

from flashdig import attention
from tests.faults.targets import only_cuda, qkv

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def test_tensors_on_two_devices_are_refused() -> None:
    q, k, v = qkv("cpu", torch.float32, 1, 9, 9, 2, 2, 8, grad=False)
    for name, inputs in {"k": (q, k.to("meta"), v), "v": (q, k, v.to("meta"))}.items():
        with pytest.raises(ValueError, match=rf"\b{name} must be on q's device cpu"):
            attention(*inputs)


@only_cuda
@two_gpus
def test_a_key_on_the_other_gpu_is_refused(attend, device) -> None:
    q, k, v = qkv("cuda:0", torch.bfloat16, 1, 70, 70, 2, 2, 64, grad=False)
    with pytest.raises(ValueError, match="k must be on q's device cuda:0"):
        attend(q, k.to("cuda:1"), v)


@only_cuda
@two_gpus
def test_tensors_decide_the_gpu_and_the_current_one_stays(attend, device) -> None:
    inputs = qkv("cuda:0", torch.bfloat16, 1, 70, 70, 2, 2, 64)
    there = [x.detach().to("cuda:1").requires_grad_() for x in inputs]
    results = []
    with torch.cuda.device(0):
        # the first call on the second GPU, before any on the first
        for tensors in (there, inputs, there):
            out = attend(*tensors, causal=True, deterministic=True)
            assert out.device == tensors[0].device
            grads = torch.autograd.grad(out, tensors, torch.ones_like(out))
            assert torch.cuda.current_device() == 0
            results.append([x.detach().cpu() for x in (out, *grads)])
    for found in results[1:]:
        for a, b in zip(found, results[0], strict=True):
            assert torch.equal(a, b)


@only_cuda
def test_inputs_made_late_on_a_side_stream(attend, device) -> None:
    """Each trial writes q behind a long wait on the stream that the call runs on."""
    q, k, v = qkv(device, torch.bfloat16, 1, 300, 300, 2, 2, 64)
    news = [
        qkv(device, torch.bfloat16, 1, 300, 300, 2, 2, 64, seed=n, grad=False)[0] for n in range(20)
    ]
    options = {"causal": True, "deterministic": True}
    expected = []
    for new in news:
        inputs = [new.clone().requires_grad_(), k, v]
        out = attend(*inputs, **options)
        expected.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    found = []
    with torch.cuda.stream(side):
        for new in news:
            inputs = [torch.zeros_like(q), k, v]
            torch.cuda._sleep(2_000_000)
            inputs[0].copy_(new)
            inputs[0].requires_grad_()
            out = attend(*inputs, **options)
            found.append((out, *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    torch.cuda.synchronize()
    for late, want in zip(found, expected, strict=True):
        for a, b in zip(late, want, strict=True):
            assert torch.equal(a, b)


@only_cuda
def test_a_captured_graph_reads_new_inputs_at_each_replay(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 300, 300, 2, 2, 64, grad=False)
    attend(q, k, v, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(q, k, v, causal=True)
    for seed in range(3):
        q.copy_(qkv(device, torch.bfloat16, 1, 300, 300, 2, 2, 64, seed=seed, grad=False)[0])
        graph.replay()
        assert torch.equal(out, attend(q, k, v, causal=True))
