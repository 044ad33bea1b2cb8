"""What is kept: what was called last is asked first, tables are bounded, threads share them."""

import threading

import pytest
import torch

from flashdig import attention, kept_calls
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
    whole = kept_calls.dense_key
    monkeypatch.setattr(kept_calls, "dense_key", lambda *a: keys.append(1) or whole(*a))
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
    monkeypatch.setattr(kept_calls, "_is_here", lambda device, options: False)
    assert torch.equal(tiled(q, k, v, causal=True), expected)
    assert len(keys) >= 5


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
