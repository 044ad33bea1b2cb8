"""Recordings of ViT, Qwen3, Gemma 2, Whisper and T5 against what their configurations say.

`benchmarks/record_models.py` made the traces in `tests/data/traces/models`;
`benchmarks/expected_attention.py` holds the attention calls, derived by hand.
UPDATE_GOLDEN=1 writes the expected texts anew.
"""

import io
import json
import lzma
import os
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.expected_attention import EXPECTED, STEPS, differences
from flashdig.costs.flops import direction_flops
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Trace
from flashdig.readers.steps import find_steps
from flashdig.readers.summary import AttentionGroup, TraceSummary, summarize
from flashdig.readers.trace import read_kineto
from flashdig.report.trace_terminal import print_summary
from tests.trace_files import DATA

MODELS = DATA / "models"
GOLDEN = Path(__file__).parent.parent / "golden" / "traces"
MANIFEST = json.loads((MODELS / "manifest.json").read_text())
NAMES = sorted(path.name.removesuffix(".json.xz") for path in MODELS.glob("*.json.xz"))

# kernels, copies and memsets; kernels and copies inside of attention calls
COUNTS = {
    "gemma2_eager_train": (970, 24, 104, 0),
    "gemma2_sdpa_generate": (1250, 30, 30, 4),
    "gemma2_sdpa_train": (866, 28, 26, 8),
    "qwen3_sdpa_generate": (1886, 40, 24, 4),
    "qwen3_sdpa_train": (760, 30, 24, 8),
    "t5_eager_generate": (1414, 42, 164, 0),
    "t5_eager_train": (1086, 40, 146, 0),
    "t5_sdpa_train": (1132, 42, 218, 4),
    "vit_eager_train": (298, 2, 76, 0),
    "vit_sdpa_train": (222, 10, 16, 8),
    "whisper_sdpa_decode": (668, 12, 44, 12),
    "whisper_sdpa_train": (712, 24, 48, 24),
}
# what the attentions ran on, and in how many calls (forward and backward)
BACKENDS = {
    "gemma2_eager_train": {"eager": 8},
    "gemma2_sdpa_generate": {"cudnn": 12},
    "gemma2_sdpa_train": {"cudnn": 8},
    "qwen3_sdpa_generate": {"cudnn": 24},
    "qwen3_sdpa_train": {"cudnn": 8},
    "t5_eager_generate": {"eager": 28},
    "t5_eager_train": {"eager": 16},
    "t5_sdpa_train": {"math": 12, "cudnn": 4},
    "vit_eager_train": {"eager": 8},
    "vit_sdpa_train": {"cudnn": 8},
    "whisper_sdpa_decode": {"cudnn": 44},
    "whisper_sdpa_train": {"cudnn": 24},
}


@cache
def loaded(name: str) -> tuple[Trace, TraceSummary]:
    trace = read_kineto(str(MODELS / f"{name}.json.xz"))
    return trace, summarize(trace)


each_model: Callable[..., pytest.MarkDecorator] = pytest.mark.parametrize("name", NAMES)


def in_attention(calls: list[AttentionCall]) -> Counter[int]:
    """How many calls each device event is in, by the event's identity."""
    return Counter(id(event) for call in calls for event in call.events)


def test_each_model_is_there_in_each_mode() -> None:
    assert set(NAMES) == set(COUNTS) == set(BACKENDS)
    assert set(NAMES) <= set(EXPECTED) == set(MANIFEST["traces"])
    kept = {(name.split("_")[0], name.rsplit("_", 1)[1]) for name in NAMES}
    assert kept == {(name.split("_")[0], name.rsplit("_", 1)[1]) for name in EXPECTED}
    assert {name.split("_")[1] for name in NAMES} == {"eager", "sdpa"}
    assert MANIFEST["device"] == "NVIDIA H200"


@each_model
def test_every_attention_call_is_found_and_named(name: str) -> None:
    _, summary = loaded(name)
    assert differences(summary.attention_calls, EXPECTED[name]) == []
    recorded_with = {
        key: value
        for key, value in MANIFEST["traces"][name].items()
        if key not in {"bytes", "stacks"}
    }
    assert recorded_with == json.loads(json.dumps(EXPECTED[name].as_json()))


@each_model
def test_what_ran(name: str) -> None:
    _, summary = loaded(name)
    assert Counter(call.backend for call in summary.attention_calls) == BACKENDS[name]


@each_model
def test_every_backward_has_a_forward_of_its_own(name: str) -> None:
    _, summary = loaded(name)
    backwards = [call for call in summary.attention_calls if call.pass_ == "backward"]
    assert len({id(call.forward) for call in backwards}) == len(backwards)
    for call in backwards:
        assert call.forward is not None
        assert call.forward.start_ns < call.start_ns
        assert call.forward.backend == call.backend
        assert call.forward.sizes == call.sizes
        assert not call.forward.recomputed


@each_model
def test_counts(name: str) -> None:
    trace, summary = loaded(name)
    with lzma.open(MODELS / f"{name}.json.xz") as file:
        recorded = Counter(event.get("cat") for event in json.load(file)["traceEvents"])
    assert summary.kernel_count == recorded["kernel"]
    assert summary.copies == recorded["gpu_memcpy"] + recorded["gpu_memset"]
    calls = summary.attention_calls
    kernels = {id(kernel) for kernel in trace.kernels}
    inside = in_attention(calls)
    found = (
        summary.kernel_count,
        summary.copies,
        sum(event in kernels for event in inside),
        sum(event not in kernels for event in inside),
    )
    assert found == COUNTS[name]
    assert not summary.warnings
    assert not summary.incomplete
    assert not trace.clipped


@each_model
def test_each_event_is_in_one_call_and_no_attention_is_left_out(name: str) -> None:
    trace, summary = loaded(name)
    inside = in_attention(summary.attention_calls)
    assert set(inside.values()) == {1}
    losses = 0
    for kernel in trace.kernels:
        decoded = decode(kernel.name)
        is_loss = "log-softmax" in decoded.words
        if decoded.is_attention or (decoded.role == "softmax" and not is_loss):
            assert id(kernel) in inside, kernel.name
        if is_loss:
            losses += 1
            assert id(kernel) not in inside
    # one loss a training step, forward and backward
    assert losses == (2 * STEPS if name.endswith("_train") else 0)


@each_model
def test_every_part_has_a_label_that_says_what_it_is(name: str) -> None:
    _, summary = loaded(name)
    for call in summary.attention_calls:
        labels = Counter(part.label for part in call.parts)
        assert not labels["other"], [p.event.name for p in call.parts if p.label == "other"]
        if call.backend in ("eager", "math"):
            for label in ("scores", "values", "softmax"):
                assert labels[label], (call.describe(), label)
        else:
            assert labels["attention"] == 1


@each_model
def test_steps(name: str) -> None:
    trace, summary = loaded(name)
    assert [step.name for step in find_steps(trace)] == ["ProfilerStep#0", "ProfilerStep#1"]
    (breakdown,) = summary.breakdowns
    assert not breakdown.notes
    assert breakdown.outside_steps == 0
    shares = [step.shares for step in breakdown.steps]
    assert sum(step.busy_ns for step in shares) == breakdown.total.busy_ns
    assert sum(step.elapsed_ns for step in shares) == breakdown.total.elapsed_ns
    kernels = [step.window.kernels for step in breakdown.steps]
    assert kernels == [summary.kernel_count // STEPS] * STEPS
    in_step = Counter(call.annotations[0] for call in summary.attention_calls)
    half = len(summary.attention_calls) // STEPS
    assert in_step == {"ProfilerStep#0": half, "ProfilerStep#1": half}


@each_model
def test_device_time_is_accounted_for(name: str) -> None:
    _, summary = loaded(name)
    total = summary.breakdowns[0].total
    assert sum(total.by_class.values()) == total.busy_ns
    known = sum(time for key, time in total.by_class.items() if key not in {"unknown", "other"})
    assert known >= 0.99 * total.busy_ns
    assert {row.family for row in summary.kernels}.isdisjoint({"unknown"})


@each_model
def test_every_kernel_has_its_launch_and_operator(name: str) -> None:
    trace, _ = loaded(name)
    assert all(kernel.launch is not None for kernel in trace.kernels)
    assert all(kernel.op is not None and kernel.op.kind == "operator" for kernel in trace.kernels)
    launches = [launch for launch in trace.launches if launch.is_kernel_launch]
    assert all(launch.device_events for launch in launches)


@each_model
def test_module_paths(name: str) -> None:
    _, summary = loaded(name)
    paths = {call.module_path for call in summary.attention_calls}
    if not MANIFEST["traces"][name]["stacks"]:
        assert paths == {()}
        return
    outer = ("ViTForImageClassification_0", "ViTModel_0")
    assert paths == {(*outer, f"ViTLayer_{i}", f"ViTAttention_{i}") for i in range(2)}
    for call in summary.attention_calls:
        layer = call.annotations[-1].split(".")[2]
        assert call.module_path[-1] == f"ViTAttention_{layer}"


@each_model
def test_operations_are_known_where_no_tensor_hides_keys(name: str) -> None:
    _, summary = loaded(name)
    for call in summary.attention_calls:
        flops = AttentionGroup([call]).flops
        if call.mask.kind == "tensor":
            assert flops is None
            continue
        problem = call.problem()
        assert problem is not None
        assert flops == direction_flops(problem, call.pass_)


def test_operations_of_cross_attention() -> None:
    _, summary = loaded("whisper_sdpa_train")
    cross = [
        group
        for group in summary.attention
        if group.first.pass_ == "forward"
        and (group.first.sizes.seqlen_q, group.first.sizes.seqlen_k) == (32, 300)
    ]
    # 2 x batch x products x queries x keys x heads x head_dim
    assert [group.flops for group in cross] == [2 * 2 * 2 * 32 * 300 * 4 * 64]
    assert cross[0].flops == 19_660_800


def test_self_attention_and_cross_attention_are_groups_of_their_own() -> None:
    _, summary = loaded("whisper_sdpa_decode")
    lengths = {
        (group.first.sizes.seqlen_q, *sorted({call.sizes.seqlen_k for call in group.calls}))
        for group in summary.attention
    }
    assert lengths == {(300, 300), (4, 4), (4, 300), (1, 5, 6, 7, 8), (1, 300)}


def test_softcap_is_seen_in_eager_code_and_ignored_by_sdpa() -> None:
    for name, softcaps in (("gemma2_eager_train", True), ("gemma2_sdpa_train", False)):
        _, summary = loaded(name)
        for call in summary.attention_calls:
            assert ("softcap" in {part.label for part in call.parts}) == softcaps


def test_a_bias_that_learns_goes_to_the_math_backend() -> None:
    """T5's position bias needs a gradient; the zeros in its cross attention do not."""
    _, summary = loaded("t5_sdpa_train")
    for call in summary.attention_calls:
        is_cross = call.annotations[-1].endswith("EncDecAttention")
        assert call.backend == ("cudnn" if is_cross else "math")
        labels = {part.label for part in call.parts}
        assert ("dropout" in labels) != is_cross
        assert ("mask" in labels) != is_cross


@pytest.mark.parametrize(
    "name", ["gemma2_sdpa_train", "whisper_sdpa_decode", "t5_sdpa_train", "vit_eager_train"]
)
def test_terminal_output(name: str) -> None:
    console = Console(width=120, color_system=None, record=True, file=io.StringIO())
    print_summary(loaded(name)[1], console)
    lines = console.export_text().replace(str(MODELS), "traces").splitlines()
    text = "\n".join(line.rstrip() for line in lines) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
