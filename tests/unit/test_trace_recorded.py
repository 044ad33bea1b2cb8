"""The recordings from an H200: counts, links, classes, occupancy, and the texts that are shown.

UPDATE_GOLDEN=1 writes the expected outputs anew.
"""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console

from flashdig.readers.attribution import AttentionCall, MaskUse, Sizes
from flashdig.readers.compare import compare
from flashdig.readers.files import read_traces
from flashdig.readers.model import HostOp, OperatorInputs, Trace
from flashdig.readers.occupancy import judge, resident_warps
from flashdig.readers.summary import AttentionGroup, TraceSummary, summarize
from flashdig.readers.summary_json import summary_to_json
from flashdig.report.trace_terminal import print_comparison, print_summary
from tests.trace_files import RECORDED, recorded

GOLDEN = Path(__file__).parent.parent / "golden" / "traces"

# kernels, copies and memsets, attention calls, steps
COUNTS = {
    "attn_naive": (15, 6, 3, 3),
    "attn_inplace": (15, 3, 3, 3),
    "attn_sdpa_math": (60, 0, 3, 3),
    "attn_sdpa_efficient": (3, 0, 3, 3),
    "attn_sdpa_flash": (3, 0, 3, 3),
    "attn_sdpa_cudnn": (3, 3, 3, 3),
    "attn_fa3": (6, 0, 3, 3),
    "attn_fp32_sdpa_default": (3, 0, 3, 3),
    "attn_train_sdpa_math": (111, 3, 6, 3),
    "attn_train_sdpa_efficient": (27, 3, 6, 3),
    "attn_train_sdpa_flash": (33, 3, 6, 3),
    "attn_train_sdpa_cudnn": (30, 9, 6, 3),
    "attn_train_fa4": (30, 3, 6, 3),
    "attn_train_flex": (27, 3, 6, 3),
    "model_bert_eager_train": (430, 38, 12, 2),
    "model_gpt2_eager_train": (490, 28, 12, 2),
    "model_llama_sdpa_train": (798, 42, 12, 2),
    "model_llama_sdpa_generate": (2720, 144, 48, 2),
}


@pytest.fixture(scope="module")
def summaries() -> dict[str, TraceSummary]:
    return {name: summarize(read_traces([recorded(name)])[0]) for name in RECORDED}


def check_golden(name: str, text: str) -> None:
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def shown(write: Callable[..., None], value: object) -> str:
    console = Console(width=120, color_system=None, record=True, file=io.StringIO())
    write(value, console)
    lines = console.export_text().replace(str(Path(recorded("x")).parent), "traces").splitlines()
    return "\n".join(line.rstrip() for line in lines) + "\n"


def test_every_recording_is_checked() -> None:
    assert set(RECORDED) == set(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_counts(summaries: dict[str, TraceSummary], name: str) -> None:
    summary = summaries[name]
    found = (
        summary.kernel_count,
        summary.copies,
        len(summary.attention_calls),
        len(summary.breakdowns[0].steps),
    )
    assert found == COUNTS[name]
    assert not summary.warnings
    assert not summary.incomplete


@pytest.mark.parametrize("name", COUNTS)
def test_device_time_is_accounted_for(summaries: dict[str, TraceSummary], name: str) -> None:
    (breakdown,) = summaries[name].breakdowns
    total = breakdown.total
    known = sum(time for key, time in total.by_class.items() if key not in {"unknown", "other"})
    assert known >= 0.99 * total.busy_ns
    assert sum(total.by_class.values()) == total.busy_ns
    assert sum(step.shares.busy_ns for step in breakdown.steps) == total.busy_ns
    assert sum(step.shares.elapsed_ns for step in breakdown.steps) == total.elapsed_ns
    assert breakdown.outside_steps == 0


@pytest.mark.parametrize("name", COUNTS)
def test_every_kernel_has_its_launch_and_operator(name: str) -> None:
    (trace,) = read_traces([recorded(name)])
    assert all(kernel.launch is not None for kernel in trace.kernels)
    assert all(kernel.op is not None and kernel.op.kind == "operator" for kernel in trace.kernels)
    assert not trace.clipped
    launches = [launch for launch in trace.launches if launch.is_kernel_launch]
    assert all(launch.device_events for launch in launches)


def test_recorded_occupancy_is_reproduced_where_it_was_measured() -> None:
    """A launch as recorded, with the estimate blanked out as "not measured", is worked out."""
    not_measured = 0
    for name in RECORDED:
        (trace,) = read_traces([recorded(name)])
        device = trace.device(0)
        assert device is not None
        for kernel in trace.kernels:
            if (kernel.shared_memory_bytes or 0) > 48 * 1024:
                not_measured += 1
                assert kernel.occupancy_percent == 0
                assert judge(kernel, device).source == "computed"
            else:
                residency = resident_warps(kernel.configuration, device)
                assert residency is not None
                assert residency.percent == pytest.approx(kernel.occupancy_percent, abs=0.51)
    assert not_measured == 801


@pytest.mark.parametrize("name", COUNTS)
def test_terminal_output(summaries: dict[str, TraceSummary], name: str) -> None:
    check_golden(f"{name}.txt", shown(print_summary, summaries[name]))


@pytest.mark.parametrize("name", ["attn_naive", "attn_train_sdpa_flash", "attn_fa3"])
def test_json_output(summaries: dict[str, TraceSummary], name: str) -> None:
    answer = summary_to_json(summaries[name])
    text = json.dumps(answer, indent=1, ensure_ascii=False).replace(
        str(Path(recorded("x")).parent), "traces"
    )
    check_golden(f"{name}.json", text + "\n")


def test_comparison_output(summaries: dict[str, TraceSummary]) -> None:
    comparison = compare(summaries["attn_sdpa_math"], summaries["attn_sdpa_flash"])
    assert comparison.per_step
    busy = next(entry for entry in comparison.times if entry.name == "busy")
    assert busy.ratio == pytest.approx(1 / 32.15, rel=0.01)
    counts = {entry.name: (entry.before, entry.after) for entry in comparison.counts}
    assert counts["kernels"] == (20, 1)
    check_golden("comparison.txt", shown(print_comparison, comparison))


def test_comparison_with_itself_changes_nothing(summaries: dict[str, TraceSummary]) -> None:
    summary = summaries["model_bert_eager_train"]
    comparison = compare(summary, summary)
    entries = [*comparison.times, *comparison.attention, *comparison.kernels]
    assert {entry.ratio for entry in entries} == {1.0}


@pytest.mark.parametrize(
    ("sizes", "causal", "pass_", "flops"),
    [
        ((2, 16, 4, 4096, 4096, 128, 128), False, "forward", 274_877_906_944),
        ((2, 16, 4, 4096, 4096, 128, 128), True, "forward", 137_472_507_904),
        ((2, 16, 4, 4096, 4096, 128, 128), False, "backward", 687_194_767_360),
        ((2, 16, 4, 1024, 4096, 128, 128), True, "forward", 60_137_930_752),
        ((2, 16, 4, 4096, 4096, 192, 128), False, "forward", 343_597_383_680),
        ((2, 16, 4, 4096, 4096, 192, 128), False, "backward", 893_353_197_568),
    ],
)
def test_flops_of_a_call(
    sizes: tuple[int, ...], causal: bool, pass_: Literal["forward", "backward"], flops: int
) -> None:
    mask = MaskUse("causal", "bottom-right") if causal else MaskUse("none")
    call = AttentionCall("flash", pass_, Sizes(*sizes, dtype="bfloat16"), mask, ())
    assert AttentionGroup([call]).flops == flops


def test_decoding_calls_are_together_while_their_cache_grows() -> None:
    """Self-attention of a decoder and its cross attention differ in nothing but the key length."""
    trace = Trace("made", "kineto")
    for at, seqlen_k in enumerate([5, 300, 6, 300, 7, 300]):
        shapes = ((2, 4, 1, 64), *[(2, 4, seqlen_k, 64)] * 2, (), (), ())
        values = ("", "", "", "", "0.", "False")
        inputs = OperatorInputs(shapes, ("float",) * 3 + ("",) * 3, (), values)
        name = "aten::scaled_dot_product_attention"
        trace.host_ops.append(HostOp(name, "operator", 10 * at, 5, 1, inputs=inputs))
    lengths = [
        [call.sizes.seqlen_k for call in group.calls] for group in summarize(trace).attention
    ]
    assert lengths == [[5, 6, 7], [300, 300, 300]]


def test_flops_are_unknown_where_a_mask_tensor_or_a_size_is(
    summaries: dict[str, TraceSummary],
) -> None:
    (group,) = summaries["attn_naive"].attention
    assert group.flops is None
    assert group.tflop_per_s is None
    call = AttentionCall("flash", "forward", Sizes(batch=2), MaskUse("none"), ())
    assert AttentionGroup([call]).flops is None
