"""Damaged and hostile traces: a trace or one clear error, never anything else."""

import gzip
import io
import json
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from flashdig.readers.compare import compare
from flashdig.readers.model import Trace
from flashdig.readers.open_file import UnreadableFileError
from flashdig.readers.summary import summarize
from flashdig.readers.summary_json import summaries_to_json
from flashdig.readers.trace import read_kineto
from flashdig.report.trace_page import render_trace_page
from flashdig.report.trace_terminal import print_comparison, print_summary
from tests.trace_files import recorded

RECORDED = gzip.decompress(Path(recorded("attn_train_sdpa_flash")).read_bytes())
PACKED = Path(recorded("attn_train_sdpa_flash")).read_bytes()
# a longer search: FUZZ_EXAMPLES=2000
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="FUZZ_EXAMPLES" not in os.environ,
)


def outcome(content: bytes) -> Trace | str:
    """Read and analyse; only the one documented error may come out."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        file.write(content)
        file.flush()
        try:
            trace = read_kineto(file.name)
        except UnreadableFileError as error:
            message = str(error)
            trace = None
    if trace is None:
        assert file.name in message
        assert "\n" not in message
        return message
    summary = summarize(trace)
    for breakdown in summary.breakdowns:
        total = breakdown.total
        assert sum(total.by_class.values()) == total.busy_ns
        assert 0 <= total.busy_ns <= total.elapsed_ns
        assert all(step.shares.idle_ns >= 0 for step in breakdown.steps)
    assert all(kernel.duration_ns >= 0 for kernel in trace.kernels)
    mean = summary.mean_occupancy
    assert mean is None or 0 <= mean <= 100
    # whatever was read can be shown in every way
    comparison = compare(summary, summary)
    json.dumps(summaries_to_json([summary], comparison), allow_nan=False).encode()
    render_trace_page([trace, trace], [summary, summary], comparison).encode()
    console = Console(file=io.StringIO())
    print_summary(summary, console)
    print_comparison(comparison, console)
    return trace


@SETTINGS
@given(cut=st.integers(0, len(RECORDED)))
def test_cut_text(cut: int) -> None:
    result = outcome(RECORDED[:cut])
    if cut > RECORDED.index(b"traceEvents") + 20:
        assert isinstance(result, Trace)


@SETTINGS
@given(cut=st.integers(0, len(PACKED)))
def test_cut_gzip(cut: int) -> None:
    result = outcome(PACKED[:cut])
    if cut < len(PACKED) and isinstance(result, Trace):
        assert result.incomplete


@SETTINGS
@given(flips=st.lists(st.tuples(st.integers(0, len(RECORDED) - 1), st.integers(0, 7)), max_size=5))
def test_flipped_bits_in_text(flips: list[tuple[int, int]]) -> None:
    content = bytearray(RECORDED)
    for at, bit in flips:
        content[at] ^= 1 << bit
    outcome(bytes(content))


@SETTINGS
@given(at=st.integers(0, len(PACKED) - 1), bit=st.integers(0, 7))
def test_flipped_bit_in_gzip(at: int, bit: int) -> None:
    content = bytearray(PACKED)
    content[at] ^= 1 << bit
    outcome(bytes(content))


@SETTINGS
@given(content=st.binary(max_size=300))
def test_any_bytes(content: bytes) -> None:
    outcome(content)


WORDS = st.sampled_from(
    [
        *("ph", "X", "i", "cat", "kernel", "cpu_op", "cuda_runtime", "gpu_memcpy", "name", "args"),
        *("user_annotation", "python_function", "gpu_user_annotation", "[memory]", "ts", "dur"),
        *("stream", "device", "correlation", "External id", "Input Dims", "Input type", "grid"),
        *("Sequence number", "Fwd thread id", "block", "shared memory", "ProfilerStep#1", "pid"),
        *("est. achieved occupancy %", "registers per thread", "Total Allocated", "Call stack"),
    ]
)
VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(10**25), 10**25),
        st.floats(),
        st.text(max_size=8),
        WORDS,
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(WORDS, st.text(max_size=4)), inner)
    ),
    max_leaves=12,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=8)
EVENT = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.one_of(st.just("X"), st.just("i"), VALUES),
        "cat": st.one_of(WORDS, VALUES),
        "name": st.one_of(WORDS, VALUES),
        "ts": st.one_of(st.integers(0, 50), st.floats(0, 50), VALUES),
        "dur": st.one_of(st.integers(0, 50), st.floats(0, 50), VALUES),
        "pid": VALUES,
        "tid": st.one_of(st.integers(0, 3), VALUES),
        "args": st.one_of(ARGUMENTS, VALUES),
    },
)


@settings(SETTINGS, max_examples=4 * EXAMPLES)
@given(
    events=st.lists(st.one_of(EVENT, VALUES), max_size=12),
    metadata=st.dictionaries(
        st.sampled_from(["deviceProperties", "distributedInfo", "baseTimeNanoseconds", "x"]), VALUES
    ),
)
def test_wrong_types_everywhere(events: list[object], metadata: dict[str, object]) -> None:
    assert isinstance(outcome(json.dumps({"traceEvents": events, **metadata}).encode()), Trace)


@SETTINGS
@given(depth=st.integers(1, 3000), opening=st.sampled_from(["[", '{"a":']), at=st.booleans())
def test_deep_nesting(depth: int, opening: str, at: bool) -> None:
    closing = "]" if opening == "[" else "}"
    value = opening * depth + "1" + closing * depth
    event = f'{{"ph":"X","cat":"cpu_op","ts":1,"dur":1,"args":{{"Input Dims":{value}}}}}'
    text = f'{{"traceEvents":[{event}]}}' if at else f'{{"m":{value},"traceEvents":[{event}]}}'
    outcome(text.encode())
