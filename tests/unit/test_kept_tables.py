"""What is kept: what was called last is asked first, tables are bounded, threads share them."""

import contextlib
import threading
from unittest import mock

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flashdig import attention, kept_calls, kept_keys
from flashdig.kernels import plans
from flashdig.kernels.plans import Kept
from flashdig.ops import eager
from tests.short_way import inputs, results, short_way, tiled


@pytest.fixture
def counted():
    with short_way() as counts:
        yield counts


def test_what_was_called_last_is_asked_first(counted, monkeypatch) -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    for _ in range(2):
        expected = tiled(q, k, v, causal=True)
    keys = []
    whole = kept_keys.dense_key
    monkeypatch.setattr(kept_keys, "dense_key", lambda *a: keys.append(1) or whole(*a))
    assert torch.equal(tiled(q, k, v, causal=True), expected)
    assert not keys
    # other strides, another length, another class of tensor, out of line: by the key
    tiled(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, causal=True)
    tiled(q, k[:, :5], v[:, :5], causal=True)
    tiled(torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape), k, v, causal=True)
    assert len(keys) == 3
    with torch.inference_mode():
        assert torch.equal(tiled(q, k, v, causal=True), expected)
    tiled(q, k, v, causal=True)
    monkeypatch.setattr(kept_keys, "is_here", lambda device, options: False)
    assert torch.equal(tiled(q, k, v, causal=True), expected)
    assert len(keys) >= 5


@pytest.fixture
def asked(monkeypatch):
    """Counts the calls whose key was built."""
    keys = []
    whole = kept_keys.dense_key
    monkeypatch.setattr(kept_keys, "dense_key", lambda *a: keys.append(1) or whole(*a))
    return keys


def test_calls_that_take_turns_are_all_known(counted, asked) -> None:
    """Four of them: other lengths, other options, other wishes for gradients."""
    q, k, v = inputs(dtype=torch.bfloat16)
    leaf = q.clone().requires_grad_()
    calls = [
        lambda: tiled(q, k, v, causal=True),
        lambda: tiled(q, k, v),
        lambda: tiled(q[:, :5], k, v, return_lse=True)[1],
        lambda: tiled(leaf, k, v),
    ]
    for _ in range(2):
        expected = [call() for call in calls]
    asked.clear()
    for _ in range(3):
        for call, result in zip(calls, expected, strict=True):
            assert torch.equal(call(), result)
    assert not asked
    assert calls[3]().requires_grad
    with torch.no_grad():
        assert not calls[3]().requires_grad
    assert not calls[1]().requires_grad
    assert not asked
    tiled(q, k[:, :4], v[:, :4])
    tiled(q, k[:, :4], v[:, :4])
    assert len(asked) == 2
    assert len(kept_calls._latest.calls) == kept_calls.RECENT


def test_options_of_equal_value_are_the_same_call_if_their_types_are(counted, asked) -> None:
    q, k, v = inputs()
    for _ in range(2):
        expected = tiled(q, k, v, softmax_scale=float("0.5"), softcap=float("2"))
    asked.clear()
    assert torch.equal(tiled(q, k, v, softmax_scale=float("0.5"), softcap=float("2")), expected)
    assert not asked
    assert not torch.equal(tiled(q, k, v, softmax_scale=float("0.25"), softcap=2.0), expected)
    assert torch.equal(tiled(q, k, v, softmax_scale=float("0.5"), softcap=int("2")), expected)
    assert len(asked) == 2
    with pytest.raises(TypeError, match="dropout_p"):
        tiled(q, k, v, softmax_scale=0.5, softcap=2.0, dropout_p=False)


def test_autocast_and_inference_have_a_guard_of_their_own(counted, asked) -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    expected = tiled(q, k, v)
    tiled(q, k, v)
    for _ in range(2):  # what was known before is still known after
        for mode in (torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode()):
            with mode:
                tiled(q, k, v)
                asked.clear()
                assert torch.equal(tiled(q, k, v), expected)
                assert not asked
        asked.clear()
        assert torch.equal(tiled(q, k, v), expected)
        assert not asked
    with torch.autocast("cpu", dtype=torch.float16):  # keys are alike, and it casts
        assert tiled(q, k, v).dtype == torch.float16


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Overridden(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def tf32():
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@contextlib.contextmanager
def elsewhere():
    with mock.patch.object(kept_keys, "is_here", return_value=False):
        yield


def known(q, k, v, backend="tiled"):
    return kept_calls.again(q, k, v, False, None, 0.0, 0.0, None, False, False, backend)


@pytest.mark.parametrize(
    "surroundings",
    [
        Watched,
        Overridden,
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
        forward_ad.dual_level,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        deterministic,
        tf32,
        elsewhere,
    ],
)
def test_what_is_known_is_not_asked_for_where_somebody_watches(counted, surroundings) -> None:
    q, k, v = inputs()
    for _ in range(2):
        tiled(q, k, v)
    assert known(q, k, v) is not None
    with surroundings():
        assert known(q, k, v) is None
    assert known(q, k, v) is not None


def test_what_is_known_is_asked_for_by_tensors_like_those_alone(counted) -> None:
    q, k, v = inputs()
    for _ in range(2):
        expected = tiled(q, k, v)
    assert torch.equal(known(q, k, v), expected)
    others = [
        torch.complex(k, q).conj().imag,
        torch._efficientzerotensor(q.shape),
        q.as_subclass(type("Subclass", (torch.Tensor,), {})),
        torch.nn.Parameter(q),
        q.to("meta"),
        torch.cat([q.flatten()[:1], q.flatten()])[1:].view(q.shape),
        q[:, :5],
        q.double(),
        q.clone().requires_grad_(),
        None,
        7,
    ]
    for other in others:
        assert known(other, k, v) is None
        assert known(q, k, other) is None
    seen = []
    torch.vmap(lambda x: seen.append(known(x, k, v)) or x)(torch.stack([q, q]))
    torch.func.grad(lambda x: seen.append((known(x, k, v), known(q, k, v))) or x.sum())(q)
    assert seen == [None, (None, None)]
    assert known(q, k, v, "".join(["ti", "led"])) is not None
    for _ in range(2):  # the same tensors, and the lse: another call
        out, lse = tiled(q, k, v, return_lse=True)
        assert torch.equal(out, tiled(q, k, v))
        assert lse.shape == (1, 2, 9)


def test_memory_that_was_given_up_is_never_read(counted) -> None:
    q, k, v = inputs()
    for _ in range(3):
        expected = tiled(q, k, v)
    full = k.clone()
    k.untyped_storage().resize_(0)
    assert known(q, k, v) is None
    assert torch.equal(tiled(q, full, v), expected)


def test_without_torchs_guards_the_key_says_all(counted, monkeypatch) -> None:
    monkeypatch.setattr(kept_calls, "same_as", lambda *tensors: None)
    first, _, third = (results("causal") for _ in range(3))
    assert "Planned" in type(third[0].grad_fn).__name__
    for a, b in zip(first, third, strict=True):
        assert torch.equal(a, b)
    assert counted.made == {"forward": 1, "backward": 1}


def test_a_guard_of_another_release_is_not_trusted(monkeypatch) -> None:
    assert eager._guards_are_known()

    class Other:
        def __init__(self, *tensors, **sizes):
            self.check = lambda *others: True

    monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", Other)
    assert not eager._guards_are_known.__wrapped__()
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not eager._guards_are_known.__wrapped__()


def test_a_table_is_bounded_and_drops_the_oldest() -> None:
    table = Kept(3)
    for n in range(10):
        table.keep(n, str(n))
    assert len(table) == 3
    assert [table.get(n) for n in (6, 7, 8, 9)] == [None, "7", "8", "9"]
    table.clear()
    assert table.get(9) is None


def test_new_lengths_for_ever_keep_a_bounded_number_of_calls(counted, monkeypatch) -> None:
    monkeypatch.setattr(kept_calls._kept, "_limit", 5)
    monkeypatch.setattr(plans._plans, "_limit", 5)
    q, k, v = inputs(seqlen=30)
    for seqlen in (*range(1, 30), *range(1, 4)):
        out = tiled(q[:, -1:], k[:, :seqlen], v[:, :seqlen])
        assert torch.equal(out, attention(q[:, -1:], k[:, :seqlen], v[:, :seqlen], backend="tiled"))
    assert len(kept_calls._kept) <= 5
    assert len(plans._plans) <= 5


def test_threads_share_the_tables(counted, monkeypatch) -> None:
    monkeypatch.setattr(kept_calls._kept, "_limit", 4)
    q, k, v = inputs(seqlen=12)
    expected = [tiled(q[:, :n], k[:, :n], v[:, :n]) for n in range(1, 9)]
    wrong = []

    def work(first):
        for step in range(40):
            n = (first + 3 * step) % 8 + 1
            if not torch.equal(tiled(q[:, :n], k[:, :n], v[:, :n]), expected[n - 1]):
                wrong.append(n)

    threads = [threading.Thread(target=work, args=[first]) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
