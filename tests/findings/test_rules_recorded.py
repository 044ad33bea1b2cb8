"""Each rule on real recordings: one that shows it, and one that is alike and does not."""

import functools

import pytest

from flashdig.findings import Finding, find_in_trace
from flashdig.findings.rules import TRACE_RULES
from flashdig.readers.files import read_traces
from tests.trace_files import recorded

# rule -> (recordings that show it, recordings that do not)
CASES = {
    "hidden-mask-copy": (["attn_naive"], ["attn_inplace", "models/gemma2_eager_train"]),
    "copy-before-kernel": (
        ["findings/contiguous.before", "models/whisper_sdpa_train"],
        ["findings/contiguous.after", "model_llama_sdpa_train"],
    ),
    "repeated-heads": (
        ["findings/repeated_heads.before", "models/gemma2_eager_train"],
        ["findings/repeated_heads.after", "model_llama_sdpa_train"],
    ),
    "math-fallback": (
        ["attn_sdpa_math", "models/t5_sdpa_train"],
        ["attn_sdpa_flash", "models/gemma2_sdpa_train"],
    ),
    "unfused-attention": (
        ["attn_naive", "model_bert_eager_train"],
        ["attn_sdpa_math", "model_llama_sdpa_train"],
    ),
    "slower-backend": (
        ["attn_sdpa_flash", "attn_sdpa_efficient"],
        ["attn_sdpa_cudnn", "attn_fp32_sdpa_default", "findings/window_as_tensor.before"],
    ),
    "products-on-cuda-cores": (
        ["attn_sdpa_math", "findings/float32_products.before"],
        ["attn_naive", "findings/float32_products.after"],
    ),
    "mask-rebuilt": (
        ["attn_sdpa_math", "attn_train_sdpa_math", "findings/mask_in_every_call.before"],
        ["findings/mask_in_every_call.after", "model_gpt2_eager_train"],
    ),
    "mask-converted": (
        ["findings/window_as_tensor.before"],
        ["model_llama_sdpa_train", "models/gemma2_sdpa_train"],
    ),
    "quadratic-mask": (["findings/window_as_tensor.before"], ["models/gemma2_sdpa_train"]),
    "padding": (["findings/padded_batch.before"], ["findings/window_as_tensor.before"]),
    "safe-softmax": (["attn_sdpa_math"], ["attn_naive"]),
    "launch-bound": (
        ["model_bert_eager_train", "findings/launch_bound.before"],
        ["findings/launch_bound.after", "attn_sdpa_math"],
    ),
    "host-bound-call": (["attn_fa3"], ["attn_sdpa_flash", "attn_sdpa_cudnn"]),
    "cudnn-planning": (["attn_sdpa_cudnn", "models/vit_sdpa_train"], ["attn_sdpa_flash"]),
    "wrapper-cost": (["attn_fa3"], ["attn_sdpa_cudnn", "attn_train_flex"]),
    "decode-without-split": (
        ["findings/decode.before"],
        ["findings/decode.after", "model_llama_sdpa_generate"],
    ),
    "occupancy-by-design": (["attn_sdpa_flash", "attn_fa3"], ["attn_naive"]),
    "occupancy-not-measured": (["attn_sdpa_cudnn", "attn_fa3"], ["attn_sdpa_flash"]),
    "occupancy-of-small-grid": (["model_llama_sdpa_generate"], ["attn_sdpa_flash"]),
    "padded-head-dim": (["findings/padded_head_dim.before"], ["attn_sdpa_flash"]),
    "float32-attention": (["attn_fp32_sdpa_default"], ["attn_sdpa_efficient"]),
    "attention-not-the-bottleneck": (["model_llama_sdpa_train"], ["attn_sdpa_flash"]),
}
# the others are tried on recordings made by hand
MADE = {
    *("compiled-in-loop", "small-grid", "tail-wave", "causal-imbalance", "misaligned-rows"),
    "slowing-down",
}


@functools.lru_cache(maxsize=64)
def findings_of(name: str) -> tuple[Finding, ...]:
    (trace,) = read_traces([recorded(name)])
    return tuple(find_in_trace(trace))


def the(name: str, rule: str) -> Finding:
    (found,) = [finding for finding in findings_of(name) if finding.rule == rule]
    return found


def test_every_rule_is_tried() -> None:
    assert set(CASES) | MADE == set(TRACE_RULES)


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, (shown, _) in CASES.items() for name in shown]
)
def test_a_recording_that_shows_it(rule, name) -> None:
    found = [finding for finding in findings_of(name) if finding.rule == rule]
    assert found
    for finding in found:
        assert finding.claim.endswith((".", ")"))
        assert finding.where
        assert finding.numbers
        assert all(number.value >= 0 for number in finding.numbers)
        if finding.gain is not None:
            assert finding.gain.seconds > 0
            assert finding.gain.basis


@pytest.mark.parametrize(
    ("rule", "name"), [(rule, name) for rule, (_, not_shown) in CASES.items() for name in not_shown]
)
def test_a_recording_that_does_not(rule, name) -> None:
    assert [finding for finding in findings_of(name) if finding.rule == rule] == []


def test_a_number_stands_where_it_says() -> None:
    """The place of the copy is its time stamp in the file."""
    number = the("attn_naive", "hidden-mask-copy").numbers[0]
    (trace,) = read_traces([recorded("attn_naive")])
    copy = next(c for c in trace.copies if c.kind == "memcpy")
    stamp = f"{copy.start_ns // 1000}.{copy.start_ns % 1000:03d}"
    assert number.place == f"{copy.name} at ts {stamp}"
    assert number.value == copy.duration_ns


def test_reasons_of_the_math_fallback() -> None:
    """Pinned to math where nothing forbids the others; a mask that is strided where it is."""
    assert "switched off" in the("attn_sdpa_math", "math-fallback").claim
    strided = the("models/t5_sdpa_train", "math-fallback")
    assert "last dimension has stride 4" in strided.claim
    assert strided.advice is not None
    assert "contiguous()" in strided.advice.code


def test_capped_scores_are_not_sent_to_a_kernel_without_softcap() -> None:
    capped = the("models/gemma2_eager_train", "unfused-attention").advice
    plain = the("model_bert_eager_train", "unfused-attention").advice
    assert capped is not None
    assert plain is not None
    assert "softcap=50.0" in capped.code
    assert "F.scaled_dot_product_attention" in plain.code


def test_parts_of_the_fallback_do_not_promise_more_than_it() -> None:
    whole = the("attn_sdpa_math", "math-fallback")
    parts = [f for f in findings_of("attn_sdpa_math") if f.part_of == "math-fallback"]
    assert {f.rule for f in parts} == {"mask-rebuilt", "safe-softmax", "products-on-cuda-cores"}
    assert whole.gain is not None
    for part in parts:
        assert part.gain is not None
        assert part.gain.seconds < whole.gain.seconds


def test_occupancy_is_the_same_whichever_way_a_kernel_is_launched() -> None:
    """cudaLaunchKernel and cuLaunchKernelEx, both recorded as 0 and both with over 48 KB."""
    by_runtime = the("attn_fa3", "occupancy-not-measured")
    by_driver = the("attn_sdpa_cudnn", "occupancy-not-measured")
    assert "cudaLaunchKernel" in by_runtime.claim
    assert "cuLaunchKernelEx" in by_driver.claim
    assert by_driver.verdict == by_runtime.verdict == "not measured"


def test_what_costs_most_comes_first() -> None:
    order = [finding.verdict for finding in findings_of("models/t5_sdpa_train")]
    ranks = ["slow", "check", "elsewhere", "not measured", "fine"]
    assert [ranks.index(verdict) for verdict in order] == sorted(map(ranks.index, order))
    gains = [
        0.0 if finding.gain is None else finding.gain.seconds
        for finding in findings_of("models/t5_sdpa_train")
        if finding.verdict == "slow"
    ]
    assert gains == sorted(gains, reverse=True)


def test_a_recording_without_attention_or_device_finds_nothing(tmp_path) -> None:
    from tests.trace_files import host, write

    (trace,) = read_traces([write(tmp_path / "t.json", [host("cpu_op", "aten::mm", 1, 2)])])
    assert find_in_trace(trace) == []
