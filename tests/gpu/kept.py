"""What the tests of kept and replayed calls share: steps forward and backward, alone, in a graph
and in threads."""

import threading

import torch

from flashdig import kept_calls
from flashdig.kernels import launch, plans
from tests.faults.targets import qkv


def forget():
    """No plan, call or kernel is kept any more."""
    kept_calls.forget()
    plans.forget()
    launch._kernels.clear()


def step(attend, inputs, upstream=None):
    """(out, dq, dk, dv) of `attend(*inputs)`; upstream is ones where none is given."""
    out = attend(*inputs)
    upstream = torch.ones_like(out) if upstream is None else upstream
    return out, *torch.autograd.grad(out, inputs, upstream)


def captured(run, warmings):
    """A CUDA graph of `run()`, which ran so often before, and what the capture returned."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(warmings):
            run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = run()
    return graph, results


def graph_inputs(**options):
    """q, k and v of the problem that graphs are made of; options of `qkv`."""
    return qkv("cuda", torch.bfloat16, 1, 150, 150, 4, 2, 64, **options)


def new_values(tensors, seed):
    """Other numbers for a captured step's q, k and v, and upstream gradient where it has one."""
    news = graph_inputs(seed=seed, grad=False)
    with torch.no_grad():
        for x, new in zip(tensors, (*news, news[0].flip(1)), strict=False):
            x.copy_(new)
    return news


def in_threads(work, count=6):
    """`work(number)` in threads, each on a stream of its own; their errors come here."""
    errors = []

    def run(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def heard_launches(call):
    """Names of the kernels whose launch Triton told its listeners of during `call()`."""
    from triton import knobs

    heard = []

    def listener(metadata):
        heard.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(listener)
    try:
        call()
    finally:
        knobs.runtime.launch_enter_hook.remove(listener)
    return heard
