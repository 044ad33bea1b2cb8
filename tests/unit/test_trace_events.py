"""What the events of a trace mean: times, links, anomalies, classes, occupancy, steps."""

import random
from pathlib import Path

import pytest

from flashdig.readers.breakdown import break_down
from flashdig.readers.model import DeviceProperties, Trace
from flashdig.readers.occupancy import judge, mean_percent
from flashdig.readers.steps import find_steps
from flashdig.readers.times import nanoseconds
from flashdig.readers.trace import read_kineto
from tests.trace_files import Event, host, kernel, write


def read(tmp_path: Path, events: list[Event], **metadata: object) -> Trace:
    return read_kineto(write(tmp_path / "t.json", events, **metadata))


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        (0, 0),
        (100.7, 100_700),
        ("100.7", 100_700),
        ("5107937722785.943", 5_107_937_722_785_943),
        (5107937722785.943, 5_107_937_722_785_943),
        ("0.001", 1),
        ("0.0005", 1),
        ("0.00049", 0),
        ("1e3", 1_000_000),
        ("-1.5", -1_500),
        (True, None),
        (None, None),
        ("", None),
        ("12.", 12_000),
        ("abc", None),
        ("1e999", None),
        (float("nan"), None),
        (10**40, None),
        ("9" * 5000, None),
        ([], None),
    ],
)
def test_nanoseconds(recorded: object, expected: int | None) -> None:
    assert nanoseconds(recorded) == expected


@pytest.mark.parametrize("kind", [float, str])
def test_kernels_below_a_microsecond(tmp_path: Path, kind: type) -> None:
    times = [(100.7, 0.2), (101.3, 0.4), (102.0, 0.001)]
    trace = read(tmp_path, [kernel("k", kind(ts), kind(dur)) for ts, dur in times])
    durations = [kernel.duration_ns for kernel in trace.kernels]
    assert durations == [200, 400, 1]
    assert sum(durations) / 3 == pytest.approx(200.33, abs=0.01)
    assert break_down(trace, {})[0].total.busy_ns == 601


def test_a_duration_that_overruns_its_successors_is_cut_and_reported(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", 0, 1_000_000), kernel("b", 100, 50), kernel("c", 200, 100)])
    assert [kernel.duration_ns for kernel in trace.kernels] == [100_000, 50_000, 100_000]
    assert [clipped.recorded_duration_ns for clipped in trace.clipped] == [1_000_000_000]
    assert [warning.code for warning in trace.warnings] == ["clipped_duration"]
    total = break_down(trace, {})[0].total
    assert (total.elapsed_ns, total.busy_ns, total.idle_ns) == (300_000, 250_000, 50_000)


def test_two_overruns_in_a_row(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", 0, 900), kernel("b", 100, 1900), kernel("c", 200, 100)])
    assert [kernel.duration_ns for kernel in trace.kernels] == [100_000, 100_000, 100_000]


def test_steps_without_device_work_are_counted(tmp_path: Path) -> None:
    steps = [host("user_annotation", f"ProfilerStep#{i}", i * 1000, 1000) for i in range(32)]
    events = [
        *steps,
        host("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
        host("cuda_runtime", "cudaLaunchKernel", 31_200, 5, correlation=2),
        kernel("late_stamp", 100, 31_000, correlation=1),
        kernel("b", 31_300, 100, correlation=2),
    ]
    breakdown = break_down(read(tmp_path, events), {})[0]
    counts = [step.window.kernels for step in breakdown.steps]
    assert counts == [1, *[0] * 30, 1]
    assert breakdown.notes[0] == "30 of 32 steps have no device work."
    assert "late stamp" in breakdown.notes[1]
    assert sum(step.shares.busy_ns for step in breakdown.steps) == breakdown.total.busy_ns


def test_overlap_by_programmatic_launch_is_no_anomaly(tmp_path: Path) -> None:
    trace = read(tmp_path, [kernel("a", 0, 12), kernel("b", 10, 20)])
    assert not trace.clipped
    assert not trace.warnings
    assert break_down(trace, {})[0].total.busy_ns == 30_000


GRAPH_EVENTS = [
    host("cuda_runtime", "cudaGraphLaunch", 10, 4, correlation=77),
    host("cuda_runtime", "cudaLaunchKernel", 50, 4, correlation=99),
    *(kernel(f"graph_{i}", 20 + 10 * i, 10, correlation=77) for i in range(3)),
    kernel("no_correlation", 60, 5),
    kernel("no_launch", 5, 3, correlation=12),
]


@pytest.mark.parametrize("seed", range(6))
def test_graph_launches_and_missing_launches(tmp_path: Path, seed: int) -> None:
    events = GRAPH_EVENTS[:]
    random.Random(seed).shuffle(events)
    trace = read(tmp_path, events)
    assert len(trace.kernels) == 5
    assert break_down(trace, {})[0].total.busy_ns == 38_000
    by_graph = [kernel.name for kernel in trace.kernels if kernel.graph_launch is not None]
    assert by_graph == ["graph_0", "graph_1", "graph_2"]
    unattributed = [kernel.name for kernel in trace.kernels if kernel.launch is None]
    assert unattributed == ["no_launch", "no_correlation"]
    without = [launch.correlation for launch in trace.launches if not launch.device_events]
    assert without == [99]


def test_kernels_side_by_side_in_a_graph_are_no_anomaly(tmp_path: Path) -> None:
    events = [
        host("cuda_runtime", "cudaGraphLaunch", 0, 4, correlation=7),
        kernel("long", 10, 100, correlation=7),
        kernel("short", 20, 10, correlation=7),
    ]
    assert not read(tmp_path, events).clipped


def test_compute_communication_and_memory(tmp_path: Path) -> None:
    copy = kernel("Memcpy DtoH", 90, 10) | {"cat": "gpu_memcpy"}
    annotations = [
        kernel("step", 0, 200, stream=stream) | {"cat": "gpu_user_annotation"}
        for stream in (7, None)
    ]
    events = [
        kernel("gemm", 0, 50),
        kernel("ncclDevKernel_AllReduce_Sum", 30, 40, stream=20),
        copy,
        kernel("Stream Synchronize", 0, 100) | {"cat": "cuda_sync"},
        *annotations,
    ]
    trace = read(tmp_path, events)
    breakdown = break_down(trace, {})[0]
    kinds = breakdown.kinds
    assert len(trace.kernels) == 2
    assert len(trace.device_annotations) == 2
    assert kinds.compute_ns == 50_000
    assert kinds.communication_ns == 40_000
    assert kinds.memory_ns == 10_000
    assert kinds.hidden_communication_ns == 20_000
    assert kinds.hidden_fraction == 0.5
    total = breakdown.total
    assert (total.elapsed_ns, total.busy_ns, total.idle_ns) == (100_000, 80_000, 20_000)


@pytest.mark.parametrize(
    ("name", "is_communication"),
    [
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", True),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True),
        ("rcclGenericKernel", True),
        ("my_nccl_like_gemm", False),
    ],
)
def test_what_communication_is(tmp_path: Path, name: str, is_communication: bool) -> None:
    kinds = break_down(read(tmp_path, [kernel(name, 0, 10)]), {})[0].kinds
    assert (kinds.communication_ns == 10_000) == is_communication
    assert (kinds.compute_ns == 10_000) == (not is_communication)
    assert (kinds.hidden_fraction is None) == (not is_communication)


H200 = DeviceProperties(0, "H200", (9, 0), 132, 2048, 65536, 233472, 232448, 32)


def test_occupancy_estimates(tmp_path: Path) -> None:
    def launch(ts: int, block: int, grid: int, shared: int, **fields: object) -> Event:
        fields |= {"grid": [grid, 1, 1], "block": [block, 1, 1], "shared memory": shared}
        return kernel(f"k{ts}", ts, 10, **fields)

    events = [
        launch(0, 128, 132, 200 * 1024, **{"est. achieved occupancy %": 6}),
        launch(20, 32, 1, 0, **{"est. achieved occupancy %": 0}),
        launch(40, 128, 132, 0),
        launch(60, 128, 132, 0, **{"est. achieved occupancy %": -1}),
        launch(80, 128, 132, 0, **{"est. achieved occupancy": 0.5}),
    ]
    trace = read(tmp_path, events)
    recorded = [kernel.occupancy_percent for kernel in trace.kernels]
    assert recorded == [6.0, 0.0, None, None, 50.0]
    assert mean_percent(trace.kernels, trace) == pytest.approx((6 + 0 + 50) / 3)
    first, second, third, fourth, _ = (judge(kernel, H200) for kernel in trace.kernels)
    assert first.limit == "shared memory"
    assert "1 block = 4 of 64 warps = 6.25 %" in first.explanation
    assert second.limit == "grid"
    assert "1 of 132 SMs" in second.explanation
    assert third.percent is fourth.percent is None
    assert third.source == "unknown"


def test_zero_with_much_shared_memory_means_not_measured(tmp_path: Path) -> None:
    fields = {"est. achieved occupancy %": 0, "shared memory": 134144}
    event = kernel("k", 0, 10, grid=[132, 1, 1], block=[384, 1, 1], **fields)
    trace = read(tmp_path, [event])
    occupancy = judge(trace.kernels[0], H200)
    assert (occupancy.percent, occupancy.source) == (18.75, "computed")
    assert judge(trace.kernels[0], None).percent is None
    assert mean_percent(trace.kernels, trace) is None


def test_base_time_behind_the_events_is_used(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(
        '{"traceEvents": [{"ph":"X","cat":"kernel","name":"k","ts":1,"dur":2,"pid":0,"tid":7}],'
        ' "baseTimeNanoseconds": 1790857026000000000}'
    )
    trace = read_kineto(str(path))
    assert trace.base_time_ns == 1790857026000000000
    assert trace.kernels[0].stream == 7


def test_events_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    events: list[object] = [
        kernel("ok", 1, 2),
        kernel("no duration", 1, None),
        kernel("negative", 1, -2),
        kernel("no start", "soon", 2),
        3,
        None,
        {"ph": "X", "cat": 5},
        {"ph": ["X"], "cat": "kernel"},
    ]
    trace = read(tmp_path, events)  # type: ignore[arg-type]
    assert [kernel.name for kernel in trace.kernels] == ["ok"]
    messages = {warning.code: warning.message for warning in trace.warnings}
    assert messages["no_time"].startswith("3 events")
    assert messages["not_events"].startswith("2 entries")


def test_launching_operator_nesting_and_backward_links(tmp_path: Path) -> None:
    dims = {"Input Dims": [[2, 3], [], [[4], [5, 6]]], "Input type": ["float", "Scalar", ""]}
    events = [
        host("user_annotation", "ProfilerStep#1", 0, 1000),
        host("python_function", "nn.Module: Block_0", 5, 100),
        host("python_function", "model.py(7): forward", 6, 90),
        host("cpu_op", "aten::matmul", 10, 50, **{"Sequence number": 4}),
        host("cpu_op", "aten::mm", 12, 40, **{"External id": 9, "Sequence number": 4}, **dims),
        host("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=1),
        kernel("gemm", 40, 10, correlation=1, **{"External id": 9}),
        host(
            "cpu_op",
            "autograd::engine::evaluate_function: MmBackward0",
            200,
            50,
            tid=2,
            **{"Sequence number": 4, "Fwd thread id": 1},
        ),
        host("cpu_op", "aten::mm", 210, 30, tid=2, **{"External id": 11}),
        host("cuda_runtime", "cudaLaunchKernel", 215, 5, tid=2, correlation=2),
        kernel("gemm_backward", 240, 10, correlation=2),
    ]
    trace = read(tmp_path, events)
    forward, backward = trace.kernels
    assert forward.op is not None
    assert forward.op.name == "aten::mm"
    assert forward.op.inputs is not None
    assert forward.op.inputs.shapes == ((2, 3), (), ((4,), (5, 6)))
    assert forward.op.root().name == "aten::matmul"
    assert forward.op.module_path() == ("Block_0",)
    assert forward.op.annotations() == ("ProfilerStep#1",)
    assert forward.op.stack_frames() == ("nn.Module: Block_0", "model.py(7): forward")
    assert backward.op is not None
    assert backward.op.name == "aten::mm"
    node = backward.op.root()
    assert node.is_backward
    assert node.forward is forward.op
    assert backward.op.module_path() == ("Block_0",)


def test_steps_without_profiler_marks(tmp_path: Path) -> None:
    events = [host("user_annotation", "train", 0, 900)]
    for i in range(3):
        events += [
            host("user_annotation", "iteration", 300 * i, 250),
            host("user_annotation", "forward", 300 * i + 10, 100),
            host("cuda_runtime", "cudaLaunchKernel", 300 * i + 20, 5, correlation=i),
            kernel("k", 300 * i + 200, 150, correlation=i),
        ]
    trace = read(tmp_path, events)
    assert [step.name for step in find_steps(trace)] == [f"iteration {i}" for i in range(3)]
    steps = break_down(trace, {})[0].steps
    assert [(step.window.start_ns // 1000, step.window.end_ns // 1000) for step in steps] == [
        (0, 350),
        (350, 650),
        (650, 950),
    ]
    assert [step.shares.busy_ns for step in steps] == [150_000] * 3


def test_empty_trace_has_no_breakdown(tmp_path: Path) -> None:
    trace = read(tmp_path, [])
    assert break_down(trace, {}) == []
    assert mean_percent(trace.kernels, trace) is None


@pytest.mark.parametrize("work", [None, "operator", "kernel"])
def test_the_range_that_the_last_step_call_opens_is_no_step(
    tmp_path: Path, work: str | None
) -> None:
    """Three steps are marked by three calls of `step()`; the third opens a range of its own."""
    events = []
    for i in range(3):
        events.append(host("user_annotation", f"ProfilerStep#{i}", 1000 * i, 1000))
        if i < 2 or work is not None:
            at = 1000 * i + 10
            if i < 2 or work == "operator":
                events.append(host("cpu_op", "aten::add", at, 50))
            if i < 2 or work == "kernel":
                events.append(host("cuda_runtime", "cudaLaunchKernel", at, 5, correlation=i))
                events.append(kernel("k", at + 20, 10, correlation=i))
    trace = read(tmp_path, events)
    expected = ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"][: 2 if work is None else 3]
    assert [step.name for step in find_steps(trace)] == expected


def test_a_range_outlasts_the_frame_that_opened_it(tmp_path: Path) -> None:
    """`step()` closes one range and opens the next: neither frame nor range encloses the other."""
    frame = "profiler.py(900): step"
    events = [
        host("python_function", "train.py(3): main", 0, 10_000),
        host("python_function", frame, 10, 30),
        host("user_annotation", "ProfilerStep#0", 20, 1000),
        host("python_function", "model.py(1): forward", 100, 800),
        host("cpu_op", "aten::mm", 110, 20),
        host("python_function", frame, 1010, 30),
        host("user_annotation", "ProfilerStep#1", 1025, 1000),
        host("python_function", "model.py(1): forward", 1100, 800),
        # whole microseconds: ends with the frame, give or take one
        host("cpu_op", "aten::mm", 1880, 21),
    ]
    first, second = (op for op in read(tmp_path, events).host_ops if op.name == "aten::mm")
    assert first.annotations() == ("ProfilerStep#0",)
    assert second.annotations() == ("ProfilerStep#1",)
    for op in (first, second):
        assert op.stack_frames() == ("train.py(3): main", "model.py(1): forward")
