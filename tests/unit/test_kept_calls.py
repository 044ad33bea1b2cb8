"""Calls served the short way give what the long way gives, whatever changes between two calls."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flashdig import attention_varlen, kept_calls, kept_keys
from tests.attention_cases import CASES
from tests.short_way import forget, inputs, results, short_way, tiled


@pytest.fixture
def counted():
    with short_way() as counts:
        yield counts


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("dropout", "everything")])
def test_a_repeated_call_gives_the_same_bits(counted, name) -> None:
    first, second, third = (results(name) for _ in range(3))
    # the first call's plan was made while it went through the operator
    assert counted.made == {"forward": 1, "backward": 1}
    assert counted.served == {"forward": 3, "backward": 3}
    assert len(kept_calls._kept) == 1
    assert "Planned" in type(second[0].grad_fn).__name__
    assert "Planned" not in type(first[0].grad_fn).__name__
    for a, b, c in zip(first, second, third, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


CHANGES = {
    "batch": lambda q, k, v: (q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1),
                              v.expand(2, -1, -1, -1), {}),
    "queries": lambda q, k, v: (q[:, :5], k, v, {}),
    "keys": lambda q, k, v: (q, k[:, :7], v[:, :7], {}),
    "heads": lambda q, k, v: (q[:, :, :1], k[:, :, :1], v[:, :, :1], {}),
    "shared heads": lambda q, k, v: (q, k[:, :, :1], v[:, :, :1], {}),
    "head_dim": lambda q, k, v: (q[..., :4], k[..., :4], v, {}),
    "head_dim_v": lambda q, k, v: (q, k, v[..., :4], {}),
    "strides": lambda q, k, v: (q.transpose(1, 2).contiguous().transpose(1, 2), k, v, {}),
    "dtype": lambda q, k, v: (q.double(), k.double(), v.double(), {}),
    "causal": lambda q, k, v: (q, k, v, {"causal": True}),
    "top-left": lambda q, k, v: (q, k[:, :7], v[:, :7], {"causal": "top-left"}),
    "bottom-right": lambda q, k, v: (q, k[:, :7], v[:, :7], {"causal": "bottom-right"}),
    "window": lambda q, k, v: (q, k, v, {"window": (2, 1)}),
    "window as a list": lambda q, k, v: (q, k, v, {"window": [2, 1]}),
    "another window": lambda q, k, v: (q, k, v, {"window": (1, 2)}),
    "open window": lambda q, k, v: (q, k, v, {"window": (None, 1)}),
    "scale": lambda q, k, v: (q, k, v, {"softmax_scale": 0.1}),
    "another scale": lambda q, k, v: (q, k, v, {"softmax_scale": 0.2}),
    "softcap": lambda q, k, v: (q, k, v, {"softcap": 2.0}),
    "another softcap": lambda q, k, v: (q, k, v, {"softcap": 30.0}),
    "out_dtype": lambda q, k, v: (q, k, v, {"out_dtype": torch.float64}),
    "lse": lambda q, k, v: (q, k, v, {"return_lse": True}),
    "bias": lambda q, k, v: (q, k, v, {"bias": torch.ones(1, 1, 9, 9).tril()}),
    "bias of keys": lambda q, k, v: (q, k, v, {"bias": torch.arange(9.0).expand(1, 1, 1, 9)}),
    "bool bias": lambda q, k, v: (q, k, v, {"bias": torch.eye(9, dtype=torch.bool)[None, None]}),
    "alibi": lambda q, k, v: (q, k, v, {"alibi_slopes": torch.tensor([0.1, 0.2])}),
    "alibi per batch": lambda q, k, v: (q, k, v, {"alibi_slopes": torch.tensor([[0.1, 0.2]])}),
    "sinks": lambda q, k, v: (q, k, v, {"sinks": torch.tensor([0.1, 0.2])}),
    "sinks as parameter": lambda q, k, v: (
        q, k, v, {"sinks": torch.nn.Parameter(torch.tensor([0.3, 0.2]))}),
    "misaligned": lambda q, k, v: (
        torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape), k, v, {}),
}  # fmt: skip


def test_no_change_of_an_argument_meets_another_ones_plan(counted) -> None:
    """Every call once the long way, then all in turn, three times over."""
    q, k, v = inputs()
    calls = {"plain": (q, k, v, {})}
    calls |= {name: change(q, k, v) for name, change in CHANGES.items()}
    long_way = {}
    for name, (a, b, c, options) in calls.items():
        forget()
        long_way[name] = tiled(a, b, c, **options)
    forget()
    for _ in range(3):
        for name, (a, b, c, options) in calls.items():
            torch.testing.assert_close(
                tiled(a, b, c, **options), long_way[name], rtol=0, atol=0, msg=name
            )
    # a window is a window, list or tuple; sinks are sinks, tensor or parameter
    assert len(kept_calls._kept) == len(calls) - 2
    torch.testing.assert_close(tiled(q, k, v, dropout_p=1.0), torch.zeros_like(q))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"deterministic": True}, {"deterministic": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"window": (1, 0)}, {"window": (True, 0)}),
        ({"window": (1, 0)}, {"window": (1.0, 0)}),
        ({"window": (1, 0)}, {"window": {1, 0}}),
        ({}, {"causal": []}),
        ({}, {"out_dtype": []}),
        ({}, {"softcap": torch.ones(())}),
        ({}, {"q_descale": 1.0}),
        ({}, {"sinks": [0.0, 0.0]}),
    ],
)
def test_what_is_refused_stays_refused_after_its_equal_was_kept(counted, right, wrong) -> None:
    q, k, v = inputs()
    tiled(q, k, v, **right)
    with pytest.raises((TypeError, ValueError), match=next(iter(wrong))):
        tiled(q, k, v, **wrong)
    with pytest.raises(TypeError, match="k must be a tensor"):
        tiled(q, None, v, **right)


def test_slopes_that_ask_for_a_gradient_are_refused_after_others_were_kept(counted) -> None:
    q, k, v = inputs()
    slopes = torch.tensor([0.1, 0.2])
    expected = tiled(q, k, v, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="alibi_slopes requires a gradient"):
        tiled(q, k, v, alibi_slopes=slopes.requires_grad_())
    with torch.no_grad():
        assert torch.equal(tiled(q, k, v, alibi_slopes=slopes), expected)


def test_settings_of_torch_are_part_of_the_key(counted) -> None:
    q, k, v = inputs()
    torch.use_deterministic_algorithms(True)
    try:
        first = kept_keys.dense_key(q, k, v, None, None, None, None, False, "tiled")
    finally:
        torch.use_deterministic_algorithms(False)
    plain = kept_keys.dense_key(q, k, v, None, None, None, None, False, "tiled")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        tf32 = kept_keys.dense_key(q, k, v, None, None, None, None, False, "tiled")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert len({first, plain, tf32}) == 3
    assert kept_keys.dense_key(q, k, v, None, None, None, None, False, "tiled") == plain


def test_gradients_follow_what_each_call_asks_for(counted) -> None:
    q, k, v = inputs()
    tiled(q, k, v)
    for wanted in range(8):
        tensors = [x.clone().requires_grad_(bool(wanted >> n & 1)) for n, x in enumerate((q, k, v))]
        out = tiled(*tensors)
        assert out.requires_grad == (wanted > 0)
        leaves = [x for x in tensors if x.requires_grad]
        if not leaves:
            continue
        found = torch.autograd.grad(out, leaves, torch.ones_like(out))
        forget()
        expected = torch.autograd.grad(tiled(*tensors), leaves, torch.ones_like(out))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    with torch.no_grad():
        assert not tiled(*tensors).requires_grad
    with torch.inference_mode():
        assert tiled(*tensors).is_inference()
    assert tiled(*tensors).requires_grad


@pytest.mark.parametrize(
    "upstream",
    [
        lambda out: torch.ones(()).expand(out.shape),
        lambda out: torch.randn_like(out.transpose(1, 2)).transpose(1, 2),
        lambda out: torch.randn(*out.shape[:-1], 16)[..., ::2],
        lambda out: (torch.randn(out.shape) + 1j * torch.randn(out.shape)).conj().imag,
    ],
    ids=["expanded", "transposed", "every other", "lazily negated"],
)
def test_upstream_gradients_of_any_kind(counted, upstream) -> None:
    tensors = inputs(grad=True)
    tiled(*tensors)
    out = tiled(*tensors)
    grad = upstream(out)
    found = torch.autograd.grad(out, tensors, grad, retain_graph=True)
    again = torch.autograd.grad(out, tensors, grad.contiguous().clone())
    for a, b in zip(found, again, strict=True):
        assert torch.equal(a, b)


def test_a_loss_of_the_lse_alone(counted) -> None:
    tensors = inputs(grad=True)
    found = []
    for _ in range(2):
        _, lse = tiled(*tensors, return_lse=True)
        found.append(torch.autograd.grad(lse.sum(), tensors))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][0].abs().max() > 0


def test_a_second_differentiation_is_the_same_error(counted) -> None:
    tensors = inputs(grad=True)
    for _ in range(2):
        out = tiled(*tensors)
        (dq,) = torch.autograd.grad(out.square().sum(), tensors[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="not twice differentiable"):
            dq.sum().backward()


def test_a_changed_input_is_noticed_before_its_backward(counted) -> None:
    tensors = inputs(grad=True)
    tiled(*tensors)
    k = tensors[1].clone()
    out = tiled(tensors[0], k, tensors[2])
    k.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_saved_tensors_that_come_back_with_other_strides(counted) -> None:
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in inputs())
    out = tiled(q, k, v)
    expected = torch.autograd.grad(out.square().sum(), (q, k, v))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.contiguous().clone()):
        found = torch.autograd.grad(tiled(q, k, v).square().sum(), (q, k, v))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_a_kept_call_with_dropout(counted, use_reentrant) -> None:
    def step(*tensors):
        return tiled(*tensors, dropout_p=0.5)

    def trained(forward):
        tensors = inputs(grad=True)
        torch.manual_seed(1)
        out = forward(*tensors)
        out.sum().backward()
        return [out, *(x.grad for x in tensors)]

    found = [trained(step)]
    for keep in (False, True):
        if not keep:
            forget()
        found.append(trained(lambda *x: checkpoint(step, *x, use_reentrant=use_reentrant)))
    for a, b, c in zip(*found, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("return_lse", [False, True])
def test_checkpointing_the_call_that_is_kept(counted, return_lse) -> None:
    """Its recomputation is the first to take the short way, and saves what the long way saved."""
    expected = None
    for _ in range(3):
        tensors = inputs(grad=True)
        out = checkpoint(tiled, *tensors, use_reentrant=False, return_lse=return_lse)
        loss = sum(x.sum() for x in out) if return_lse else out.sum()
        found = torch.autograd.grad(loss, tensors)
        expected = expected or found
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


def test_dropout_draws_a_new_mask_at_every_call(counted) -> None:
    q, k, v = inputs(seqlen=40)
    torch.manual_seed(0)
    drawn = [tiled(q, k, v, dropout_p=0.5) for _ in range(3)]
    assert not torch.equal(drawn[1], drawn[2])
    torch.manual_seed(0)
    for expected in drawn:
        assert torch.equal(tiled(q, k, v, dropout_p=0.5), expected)


def test_autocast_that_casts_takes_the_long_way(counted) -> None:
    q, k, v = inputs(grad=True)
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    tiled(*half)
    tiled(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = tiled(q, k, v)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, tiled(*half))
        assert "Planned" in type(tiled(*half).grad_fn).__name__
        with torch.autocast("cpu", enabled=False):
            assert tiled(q, k, v).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.float16):
            assert tiled(*half).dtype == torch.float16
        forget()
        for _ in range(2):
            assert tiled(*half).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert tiled(*half).dtype == torch.float16
    (dq,) = torch.autograd.grad(out.float().sum(), q)
    assert dq.dtype == torch.float32


class Subclass(torch.Tensor):
    pass


def test_whoever_watches_a_call_sees_the_operator(counted) -> None:
    tensors = inputs(grad=True)
    expected = tiled(*tensors)
    served = counted.served["forward"]
    with FlopCounterMode(display=False) as counter:
        tiled(*tensors).sum().backward()
    assert counter.get_total_flops() > 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tiled(*tensors)
    assert "flashdig::attention_forward" in {event.name for event in profile.events()}
    assert counted.served["forward"] == served + 2
    assert isinstance(tiled(*(x.as_subclass(Subclass) for x in tensors)), torch.Tensor)

    names = []

    class Seen(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Seen():
        tiled(*tensors)
    assert any("attention_forward" in name for name in names)
    assert torch.equal(tiled(*tensors), expected)


def test_a_backward_that_is_watched_goes_through_its_operator(counted) -> None:
    tensors = inputs(grad=True)
    tiled(*tensors)
    out = tiled(*tensors)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    assert counter.get_total_flops() > 0


def test_transforms_and_fake_tensors(counted) -> None:
    q, k, v = inputs()
    expected = tiled(q, k, v)
    stacked = torch.stack([q, 2 * q])
    mapped = torch.vmap(lambda x: tiled(x, k, v))(stacked)
    torch.testing.assert_close(mapped[0], expected)
    dq = torch.func.grad(lambda x: tiled(x, k, v).sum())(q)
    leaf = q.clone().requires_grad_()
    torch.testing.assert_close(dq, torch.autograd.grad(tiled(leaf, k, v).sum(), leaf)[0])
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(x) for x in (q, k, v)]
        assert tiled(*fake).shape == expected.shape
    assert isinstance(tiled(*fake), torch._subclasses.FakeTensor)


def test_a_tangent_is_never_dropped(counted) -> None:
    q, k, v = inputs()
    expected = tiled(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(RuntimeError, match="jvp"):
            tiled(dual, k, v)
        assert torch.equal(tiled(q, k, v), expected)


def test_compiled_code_holds_the_operator_whatever_was_kept_before(counted) -> None:
    tensors = inputs(grad=True)
    expected = tiled(*tensors)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(tiled, fullgraph=True, backend=backend)
    assert torch.equal(compiled(*tensors), expected)
    assert any("attention_forward" in str(node.target) for node in graphs[0].graph.nodes)


def test_lazily_negated_inputs(counted) -> None:
    q, k, v = inputs()
    tiled(q, k, v)
    negated = torch.complex(k, q).conj().imag
    assert negated.is_neg()
    assert torch.equal(negated, -q)
    plain = tiled(-q, k, v)
    torch.testing.assert_close(tiled(negated, k, v), plain)


def test_tensors_without_memory_of_their_own(counted) -> None:
    """A wrapper that escaped from torch.func, and zeros that are stored nowhere."""
    q, k, v = inputs()
    tiled(q, k, v)
    escaped = []
    torch.func.grad(lambda x: escaped.append(x * 2) or x.sum())(q)
    assert torch._C._functorch.is_functorch_wrapped_tensor(escaped[0])
    torch.testing.assert_close(tiled(escaped[0], k, v), tiled(2 * q, k, v))
    zeros = torch._efficientzerotensor(q.shape)
    torch.testing.assert_close(tiled(zeros, k, v), tiled(torch.zeros_like(q), k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = tiled(*leaves)
    for x in torch.autograd.grad(out, leaves, torch._efficientzerotensor(out.shape)):
        assert torch.equal(x, torch.zeros_like(x))


def test_packed_calls_are_kept_and_their_lengths_are_not(counted, monkeypatch) -> None:
    monkeypatch.setattr(kept_keys, "values_are_checked", lambda device: False)
    torch.manual_seed(0)
    q, k, v = (torch.randn(10, 2, 8).requires_grad_() for _ in range(3))
    found = []
    for cuts in ([0, 4, 10], [0, 7, 10], [0, 1, 2]):
        cu = torch.tensor(cuts, dtype=torch.int32)
        for used in (None, torch.tensor([1, 1], dtype=torch.int32)):
            for keep in (False, True):
                if not keep:
                    forget()
                    attention_varlen(q, k, v, cu, cu, seqused_q=used, backend="tiled")
                out = attention_varlen(q, k, v, cu, cu, seqused_q=used, backend="tiled")
                found.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
            for a, b in zip(*found[-2:], strict=True):
                assert torch.equal(a, b)
    assert not torch.equal(found[0][0], found[4][0])
    monkeypatch.undo()
    wrong = torch.tensor([0, 5, 2], dtype=torch.int32)
    monkeypatch.setenv("FLASHDIG_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q must not decrease"):
        attention_varlen(q, k, v, wrong, cu, backend="tiled")


def test_another_current_device_takes_the_long_way(monkeypatch) -> None:
    for current in (0, 1):
        monkeypatch.setattr(kept_keys, "current_device", lambda current=current: current)
        for index in (0, 1):
            device = torch.device("cuda", index)
            assert kept_keys.is_here(device, ("auto",)) == (index == current)
    assert not kept_keys.is_here(torch.device("cpu"), ("auto",))
