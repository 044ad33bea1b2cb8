"""Guess against found: surprises first, causes sized to the difference, none invented."""

import pytest

from flashdig.findings import find_in_trace
from flashdig.findings.explanation import UNEXPLAINED, Explanation, explain
from flashdig.findings.guess import ASKED, guess
from flashdig.findings.recording import Recording
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem
from flashdig.readers.files import read_traces
from tests.trace_files import recorded

H200, A100 = find_device("h200"), find_device("a100")
ARTICLE = AttentionProblem.dense(4, 16, 2048, 64, "bfloat16", causal=True)


def explained(name: str) -> list[Explanation]:
    (trace,) = read_traces([recorded(name)])
    recording = Recording.of(trace)
    return explain(recording, find_in_trace(trace, recording.summary))


def test_the_guess_needs_no_recording() -> None:
    fused = guess("sdpa_flash", ARTICLE, H200)
    assert (fused.kernels, fused.copies, fused.launches) == (1, 0, 1)
    eager = guess("eager", ARTICLE, H200)
    assert (eager.kernels, eager.copies) == (5, 0)
    assert eager.expected_s is not None
    assert fused.expected_s is not None
    assert eager.expected_s > 5 * fused.expected_s
    assert fused.flops == eager.flops == 4 * 64 * 2048 * 2049 // 2 * 64
    unknown = guess("sdpa", ARTICLE, None)
    assert unknown.expected_s is None
    assert unknown.kernels == 1


def test_what_torch_is_expected_to_choose() -> None:
    assert guess("sdpa", ARTICLE, H200).schedule == "sdpa_cudnn"
    assert guess("sdpa", ARTICLE, A100).schedule == "sdpa_flash"
    assert guess("sdpa", ARTICLE.replace(dtype="float32"), H200).schedule == "sdpa_efficient"
    with pytest.raises(ValueError, match="asked must be sdpa or one of"):
        guess("flash", ARTICLE, H200)
    assert "flash" not in ASKED


def test_surprises_of_the_article() -> None:
    """naive: the copy; math: backend, kernels, times; cuDNN: occupancy. Each with its rule."""
    (naive,) = explained("attn_naive")
    causes = {row.what: row.rule for row in naive.surprises}
    assert causes["copies and fills"] == "hidden-mask-copy"
    (math,) = explained("attn_sdpa_math")
    causes = {row.what: row.rule for row in math.surprises}
    expected = ("backend", "kernels", "device time", "host time")
    assert causes == dict.fromkeys(expected, "math-fallback")
    (cudnn,) = explained("attn_sdpa_cudnn")
    causes = {row.what: row.rule for row in cudnn.surprises}
    assert causes["occupancy as recorded"] == "occupancy-not-measured"
    assert causes["copies and fills"] == "side-jobs"


def test_surprises_come_first() -> None:
    for explanation in explained("attn_sdpa_math"):
        surprises = [row.surprise for row in explanation.rows]
        assert surprises == sorted(surprises, reverse=True)


def test_a_cause_must_account_for_the_difference() -> None:
    """cuDNN's forward with a mask takes more than the model says, and no rule knows why: the copies
    of grouped heads before it are not part of its time."""
    groups = explained("models/gemma2_sdpa_train")
    masked = next(one for one in groups if "cudnn forward" in one.subject and "mask" in one.subject)
    row = next(row for row in masked.rows if row.what == "device time")
    assert row.surprise
    assert row.cause == UNEXPLAINED
    assert row.rule is None


def test_no_device_time_lies_below_its_floor() -> None:
    for name in ("attn_naive", "attn_sdpa_math", "attn_sdpa_cudnn", "attn_fa3", "attn_train_fa4"):
        for explanation in explained(name):
            rows = {row.what: row for row in explanation.rows}
            assert not rows["device time, at least"].surprise, name


def test_plain_values_come_out() -> None:
    import json

    (one,) = explained("attn_sdpa_flash")
    values = json.loads(json.dumps(one.to_dict()))
    assert values["guess"]["problem"]["seqlen_q"] == 2048
    assert {row["what"] for row in values["rows"]} >= {"kernels", "device time", "host time"}
