"""The operators: what torch.library checks, torch.compile, torch.func, checkpointing, FLOP.

Everything runs on the CPU with the launcher "tiled"; the operators are the same for every backend.
"""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashdig import attention
from flashdig.costs.flops import backward_flops, forward_flops
from flashdig.kernels.reference import reference_attention
from flashdig.ops.attention import INPUTS, TENSORS
from flashdig.problem import AttentionProblem, Mask
from tests.attention_cases import build, gradients, taking_gradients

FORWARD = torch.ops.flashdig.attention_forward.default
BACKWARD = torch.ops.flashdig.attention_backward.default


def randn(*shape, dtype=torch.float32, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def settings(softmax_scale=0.3, softcap=0.0, dropout_p=0.0, left=-1, right=-1, top_left=False):
    return [softmax_scale, softcap, dropout_p, left, right, top_left, False]


def dense(grad=True, dtype=torch.float32):
    return [
        randn(2, 7, 4, 8, dtype=dtype, grad=grad),
        randn(2, 9, 2, 8, dtype=dtype, grad=grad),
        randn(2, 9, 2, 6, dtype=dtype, grad=grad),
        *[None] * 8,
    ]


def with_everything(grad=True):
    tensors = dense(grad)
    tensors[3] = randn(1, 4, 7, 1, grad=grad)
    tensors[4] = torch.rand(2, 4)
    tensors[5] = randn(4, grad=grad)
    tensors[6] = torch.tensor([77])
    return tensors


def packed(grad=True):
    offsets = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    tensors = [randn(10, 4, 8, grad=grad), randn(12, 2, 8, grad=grad), randn(12, 2, 6, grad=grad)]
    tensors += [None, torch.rand(3, 4), randn(4, grad=grad), torch.tensor([5])]
    return [*tensors, offsets, offsets + 1, torch.tensor([2, 0, 5], dtype=torch.int32), None]


CALLS = {
    "dense": (dense, settings()),
    "half": (lambda grad=True: dense(grad, torch.float16), settings(right=0)),
    "everything": (
        with_everything,
        settings(softcap=3.0, dropout_p=0.3, left=4, right=0, top_left=True),
    ),
    "packed": (packed, settings(dropout_p=0.2, right=0)),
}
# without Inductor: its C++ would be compiled for each call
CHECKS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
)


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_passes_opcheck(name) -> None:
    make, options = CALLS[name]
    tensors = make()
    assert len(tensors) == TENSORS
    arguments = (*tensors, *options, None, "tiled")
    assert len(arguments) == INPUTS
    torch.library.opcheck(FORWARD, arguments, test_utils=(*CHECKS, "test_aot_dispatch_dynamic"))


@pytest.mark.parametrize("name", CALLS)
def test_the_backward_passes_opcheck(name) -> None:
    make, options = CALLS[name]
    tensors = make(grad=False)
    out, lse = FORWARD(*tensors, *options, None, "tiled")
    # the last: no upstream gradient of out, and what has no input is not wanted
    wanted = [True, True, True, tensors[3] is not None, tensors[5] is not None]
    for grad_out, grad_lse, w in (
        (torch.randn_like(out), torch.randn_like(lse), wanted),
        (torch.randn_like(out).transpose(0, 1).contiguous().transpose(0, 1), None, wanted),
        (None, torch.randn_like(lse), [False, True, False, False, False]),
    ):
        arguments = (grad_out, grad_lse, *tensors, out, lse, *options, w, "tiled")
        torch.library.opcheck(BACKWARD, arguments, test_utils=CHECKS)
        assert len(BACKWARD(*arguments)) == sum(w)


def test_results_are_contiguous_whatever_the_strides_of_the_inputs() -> None:
    tensors = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in dense(grad=False)[:3]]
    rest = [None] * 8
    out, lse = FORWARD(*tensors, *rest, *settings(), torch.float64, "tiled")
    assert out.dtype == torch.float64
    assert out.is_contiguous()
    assert lse.is_contiguous()
    wanted = [True, True, True, False, False]
    for gradient in BACKWARD(out, lse, *tensors, *rest, out, lse, *settings(), wanted, "tiled"):
        assert gradient.is_contiguous()


@pytest.mark.parametrize("name", ["everything", "causal more queries", "plain"])
def test_compiled_without_a_graph_break_equals_eager(name) -> None:
    q, k, v, options = build(name, torch.float32)

    def call(q, k, v):
        return attention(q, k, v, **options, return_lse=True)

    torch.manual_seed(1)
    eager = call(q, k, v)
    inputs = taking_gradients(q, k, v, options)
    expected = gradients(*eager, inputs)
    torch.manual_seed(1)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    for a, b in zip(compiled, eager, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
    for a, b in zip(gradients(*compiled, inputs), expected, strict=True):
        assert torch.equal(a, b)


def test_new_lengths_compile_once_more_and_no_more() -> None:
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    call = torch.compile(
        lambda q, k: attention(q, k, k, causal=True, softcap=2.0), fullgraph=True, backend=count
    )
    for seqlen in range(5, 105, 5):
        q, k = randn(2, seqlen, 4, 8, grad=False), randn(2, seqlen + 3, 2, 8, grad=False)
        eager = attention(q, k, k, causal=True, softcap=2.0)
        assert torch.equal(call(q, k), eager)
    assert len(graphs) <= 2


def test_compiled_by_inductor() -> None:
    q = randn(1, 16, 2, 8)

    def loss(x):
        out, lse = attention(2 * x, x, x, causal=True, return_lse=True)
        return out.sum() + lse.sin().sum()

    (expected,) = torch.autograd.grad(loss(q), q)
    (got,) = torch.autograd.grad(torch.compile(loss, fullgraph=True)(q), q)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_draws_the_same_dropout_again(use_reentrant) -> None:
    q, k, v, _ = build("plain", torch.float32)

    def call(q, k, v):
        return attention(q, k, v, dropout_p=0.4)

    torch.manual_seed(3)
    expected = torch.autograd.grad(call(q, k, v).pow(2).sum(), (q, k, v))
    torch.manual_seed(3)
    # the reentrant kind only fills .grad
    checkpoint(call, q, k, v, use_reentrant=use_reentrant).pow(2).sum().backward()
    for x, b in zip((q, k, v), expected, strict=True):
        assert torch.equal(x.grad, b)


def test_only_wanted_gradients_are_computed() -> None:
    calls = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is BACKWARD:
                calls.append(args[-2])
            return func(*args, **(kwargs or {}))

    for wanted in itertools.product([False, True], repeat=3):
        if not any(wanted):
            continue
        q, k, v = (x.requires_grad_(w) for x, w in zip(dense(False)[:3], wanted, strict=True))
        out = attention(q, k, v, softcap=1.0)
        with Watch():
            out.sum().backward()
        assert calls.pop() == [*wanted, False, False]
        assert [x.grad is not None for x in (q, k, v)] == list(wanted)
    q, k, v = dense(False)[:3]
    sinks = torch.zeros(4, requires_grad=True)
    lse = attention(q, k, v, sinks=sinks, return_lse=True)[1]
    with Watch():
        (dsinks,) = torch.autograd.grad(lse.sum(), sinks)
    assert calls == [[False, False, False, False, True]]
    assert (dsinks > 0).all()


def test_a_second_differentiation_is_one_clear_error() -> None:
    q, k, v = dense()[:3]
    (dq,) = torch.autograd.grad(attention(q, k, v, softcap=1.0).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not twice differentiable with backend 'tiled'"):
        torch.autograd.grad(dq.sum(), q)

    def twice(q):
        inner = torch.func.grad(lambda q: attention(q, k, v, softcap=1.0).sum())
        return inner(q).sum()

    with pytest.raises(RuntimeError, match="not twice differentiable"):
        torch.func.grad(twice)(q.detach())


def stacked(function, in_dims, *inputs):
    """What vmap should give."""
    size = next(x.shape[d] for x, d in zip(inputs, in_dims, strict=True) if d is not None)
    slices = [
        function(
            *(x if d is None else x.select(d, i) for x, d in zip(inputs, in_dims, strict=True))
        )
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*slices, strict=True))


Q, K = (3, 2, 7, 4, 8), (3, 2, 9, 2, 8)
VMAPS = {
    "all": ((0, 0, 0), [Q, K, K], ()),
    "queries": ((0, None, None), [Q, K[1:], K[1:]], ()),
    "values, another dimension": ((None, None, 2), [Q[1:], K[1:], (2, 9, 3, 2, 8)], ()),
    "bias": ((0, 0, 0, 1), [Q, K, K, (1, 3, 4, 7, 9)], ("bias",)),
    "bias of all": ((0, 0, 0, None), [Q, K, K, (1, 4, 1, 9)], ("bias",)),
    "bias of the batch": ((0, 0, 0, None), [Q, K, K, (2, 1, 7, 9)], ("bias",)),
    "sinks": ((0, 0, None, 0), [Q, K, K[1:], (3, 4)], ("sinks",)),
    "sinks of all": ((0, 0, 0, None), [Q, K, K, (4,)], ("sinks",)),
    "slopes": ((0, 0, 0, 0), [Q, K, K, (3, 4)], ("alibi_slopes",)),
    "slopes of the batch": ((0, 0, 0, None), [Q, K, K, (2, 4)], ("alibi_slopes",)),
    "slopes of all": ((0, 0, 0, None), [Q, K, K, (4,)], ("alibi_slopes",)),
}


@pytest.mark.parametrize("name", VMAPS)
def test_vmap_and_vmap_of_grad(name) -> None:
    in_dims, shapes, names = VMAPS[name]
    inputs = [randn(*shape, grad=False) for shape in shapes]

    def call(q, k, v, *more):
        options = dict(zip(names, more, strict=True))
        return attention(q, k, v, **options, causal=True, return_lse=True, backend="tiled")

    def loss(*inputs):
        out, lse = call(*inputs)
        return (out.sin()).sum() + torch.where(lse > -50, lse, 0.0).pow(2).sum()

    for got, want in zip(
        torch.vmap(call, in_dims)(*inputs), stacked(call, in_dims, *inputs), strict=True
    ):
        torch.testing.assert_close(got, want)
    positions = (0, 1, 2) if names in ((), ("alibi_slopes",)) else (0, 1, 2, 3)
    gradient = torch.func.grad(loss, positions)
    for got, want in zip(
        torch.vmap(gradient, in_dims)(*inputs), stacked(gradient, in_dims, *inputs), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_transforms_under_compile_break_the_graph_and_are_right() -> None:
    q, k, v = (randn(*shape, grad=False) for shape in (Q, K, K))

    def loss(q, k, v):
        return attention(q, k, v, causal=True, softcap=2.0).sin().sum()

    for transformed in (torch.vmap(loss), torch.vmap(torch.func.grad(loss))):
        got = torch.compile(transformed, backend="aot_eager")(q, k, v)
        torch.testing.assert_close(got, transformed(q, k, v))


def test_grad_of_vmap_and_jacobian() -> None:
    q, k, v = (randn(*shape, grad=False) for shape in (Q, K, K))

    def total(q):
        return torch.vmap(lambda q, k, v: attention(q, k, v, softcap=3.0))(q, k, v).sin().sum()

    inputs = q.clone().requires_grad_()
    loss = sum(attention(*x, softcap=3.0).sin().sum() for x in zip(inputs, k, v, strict=True))
    (expected,) = torch.autograd.grad(loss, inputs)
    torch.testing.assert_close(torch.func.grad(total)(q), expected)

    def one(q):
        return attention(q, k[0, :1, :3], v[0, :1, :3], softcap=3.0)

    def oracle(q):
        return reference_attention(q, k[0, :1, :3], v[0, :1, :3], softcap=3.0)[0].float()

    small = q[0, :1, :2]
    torch.testing.assert_close(
        torch.func.jacrev(one)(small), torch.func.jacrev(oracle)(small), atol=1e-5, rtol=1e-4
    )


def test_vmap_with_dropout_follows_its_randomness() -> None:
    q, k, v = (randn(*shape, grad=False) for shape in (Q, K, K))

    def call(q):
        return attention(q, k[0], v[0], dropout_p=0.5)

    same = q[:1].expand_as(q)
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(call)(same)
    out = torch.vmap(call, randomness="same")(same)
    assert torch.equal(out[0], out[1])
    out = torch.vmap(call, randomness="different")(same)
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize(
    ("causal", "window"), [(False, None), (True, None), ("top-left", (3, None)), (False, (2, 1))]
)
def test_flop_are_those_of_the_visible_pairs(causal, window) -> None:
    q, k, v = dense()[:3]
    problem = AttentionProblem(
        2, 4, 2, 7, 9, 8, 6, "float32", mask=Mask.from_arguments(causal, window)
    )
    with FlopCounterMode(display=False) as counter:
        out = attention(q, k, v, causal=causal, window=window, backend="tiled")
        assert counter.get_total_flops() == forward_flops(problem)
        out.sum().backward()
    assert counter.get_total_flops() == forward_flops(problem) + backward_flops(problem)


def test_flop_of_packed_input_sum_over_the_sequences() -> None:
    tensors, options = packed(), settings(right=0)
    with FlopCounterMode(display=False) as counter:
        FORWARD(*tensors, *options, None, "tiled")
    sizes = [(2, 4 - 1), (0, 0), (5, 9 - 4)]  # rows in use, keys
    problems = [
        AttentionProblem(1, 4, 2, m, n, 8, 6, "float32", mask=Mask(window_right=0))
        for m, n in sizes
    ]
    assert counter.get_total_flops() == sum(map(forward_flops, problems))
