"""Attention's time by step, from recordings: an H200's, and one of a tiny GPT on the CPU."""

import pytest

from flashdig.bench.training import attach_times, row_of
from flashdig.bench.training_cells import GPTSize, TrainingCell
from flashdig.bench.training_entries import Entry, attention_of
from flashdig.bench.training_model import Training
from flashdig.bench.training_trace import (
    AttentionTime,
    attention_by_step,
    mean_time,
    record_steps,
)
from flashdig.readers.attribution import attention_calls
from flashdig.readers.steps import find_steps
from flashdig.readers.trace import read_kineto
from tests.trace_files import recorded

TINY = TrainingCell(GPTSize("tiny", layers=2, hidden=32, num_heads=2, vocabulary=320), 16, 32)


@pytest.mark.parametrize(
    ("name", "main", "kernels"),
    [
        ("attn_train_fa4", "FlashAttentionBackwardSm90", 4),
        ("attn_train_sdpa_cudnn", "flash_bprop", 4),
        ("attn_train_sdpa_flash", "flash_bwd_dq_dk_dv", 4),
    ],
)
def test_every_step_has_its_own_attention(name, main, kernels) -> None:
    trace = read_kineto(recorded(name))
    found = attention_by_step(trace)
    assert len(found) == 3
    calls = attention_calls(trace)
    for number, time in enumerate(found):
        forward, backward = calls[2 * number : 2 * number + 2]
        assert time.calls == (1, 1)
        assert time.forward_ms == pytest.approx(forward.device_ns / 1e6)
        assert time.backward_ms == pytest.approx(backward.device_ns / 1e6)
        assert len(time.kernels) == kernels
        (longest,) = [name for name in time.kernels if main in name]
        assert time.kernels[longest][0] == 1
    assert mean_time(found).ms == pytest.approx(sum(time.ms for time in found) / 3)


def test_times_go_to_whose_step_it_was() -> None:
    a, b = Entry("a"), Entry("b")
    times = [AttentionTime(i, 10 * i, (2, 2), {f"kernel {i}": (2, 1.5)}) for i in range(4)]
    attach_times([a, b, a, b], times)
    assert (a.attention_time.forward_ms, b.attention_time.forward_ms) == (1, 2)
    assert a.attention_time.kernels == {"kernel 0": (1, 0.75), "kernel 2": (1, 0.75)}
    row = row_of(TINY, a, "run")
    assert row["attention_ms"] == {"forward": 1, "backward": 10}
    assert "recorded:" not in row.get("notes", "")


def test_steps_that_are_missing_or_differ_leave_no_time() -> None:
    a, b = Entry("a"), Entry("b")
    times = [AttentionTime(1.0, 2.0, (2, number), {}) for number in (2, 1, 1)]
    attach_times([a, b], times)
    assert a.untraced == "3 of 2 steps are in the recording"
    attach_times([a, b, a], times)
    assert "equally many attention calls, got (2, 2), (2, 1)" in a.untraced
    assert "recorded: 2 forward and 1 backward calls of 2 layers" in row_of(TINY, b, "run")["notes"]


@pytest.mark.parametrize(("name", "backend"), [("tiled", "flashdig"), ("unfused", "eager")])
def test_the_reader_finds_every_layer_of_a_step(name, backend, tmp_path) -> None:
    training = Training(TINY, "cpu")
    training.restart()
    attention = attention_of(Entry(name, backend=name if name == "tiled" else None), None)
    trace = record_steps([lambda: training.step(attention)] * 2, tmp_path / "steps.json")
    assert len(find_steps(trace)) == 2
    found = [(call.backend, call.pass_) for call in attention_calls(trace)]
    assert found.count((backend, "forward")) == 2 * 2
    assert found.count((backend, "backward")) == 2 * 2
