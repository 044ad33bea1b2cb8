"""Nsight Systems exports: files made to the documented schema, older and damaged ones."""

import sqlite3
from pathlib import Path

import pytest

from flashdig.readers.breakdown import break_down
from flashdig.readers.files import read_traces
from flashdig.readers.nsys import read_nsys
from flashdig.readers.occupancy import judge
from flashdig.readers.open_file import UnreadableFileError
from tests.nsys_files import GRAPH_SCHEMA, Export


def two_steps(path: Path) -> str:
    export = Export(path)
    export.insert(
        "TARGET_INFO_GPU",
        name="NVIDIA H200",
        cuDevice=0,
        smCount=132,
        computeMajor=9,
        computeMinor=0,
        threadsPerWarp=32,
        maxWarpsPerSm=64,
        maxShmemPerSm=233472,
        maxRegistersPerSm=65536,
        maxShmemPerBlockOptin=232448,
        totalMemory=150109880320,
    )
    for step in range(2):
        at = step * 10_000
        export.range("step", at, at + 9_000, registered=True)
        export.range(
            "aten::mm, seq = 3, op_id = 1, sizes = [[64, 128], [128, 64]], input_op_ids = []",
            at + 100,
            at + 900,
        )
        export.call("cudaLaunchKernel_v7000", at + 200, at + 300, 10 * step + 1)
        export.kernel("nvjet_sm90_tst_256x128", at + 500, at + 2_500, correlation=10 * step + 1)
        export.call("cudaMemcpyAsync_v3020", at + 3_000, at + 3_100, 10 * step + 2)
        export.insert(
            "CUPTI_ACTIVITY_KIND_MEMCPY",
            start=at + 3_500,
            end=at + 4_000,
            streamId=7,
            correlationId=10 * step + 2,
            globalPid=1 << 24,
            bytes=4096,
            copyKind=8,
        )
    export.range("never closed", 50, None)
    export.range("a mark", 60, 60, kind=34)
    export.close()
    return str(path)


def test_kernels_copies_calls_and_ranges(tmp_path: Path) -> None:
    (trace,) = read_traces([two_steps(tmp_path / "report.sqlite")])
    assert trace.format == "nsight-systems"
    first = trace.kernels[0]
    assert (first.name, first.start_ns, first.duration_ns) == ("nvjet_sm90_tst_256x128", 500, 2000)
    assert first.grid == (132, 1, 1)
    assert first.shared_memory_bytes == 101_024
    assert first.occupancy_percent is None
    assert first.launch is not None
    assert first.launch.name == "cudaLaunchKernel"
    assert first.op is not None
    assert (first.op.name, first.op.sequence, first.op.kind) == ("aten::mm", 3, "operator")
    assert first.op.inputs is not None
    assert first.op.inputs.shapes == ((64, 128), (128, 64))
    copy = trace.copies[0]
    assert (copy.name, copy.num_bytes) == ("Memcpy DtoD (Device -> Device)", 4096)
    assert [op.name for op in trace.annotations] == ["step", "step"]
    breakdown = break_down(trace, {})[0]
    assert [step.window.name for step in breakdown.steps] == ["step 0", "step 1"]
    assert breakdown.total.by_class == {"matmul": 4_000, "copy": 1_000}
    assert judge(first, trace.device(0)).limit == "grid"


def test_graphs_recorded_whole_count_as_busy_and_are_reported(tmp_path: Path) -> None:
    export = Export(tmp_path / "g.sqlite")
    export.connection.executescript(GRAPH_SCHEMA)
    export.call("cudaGraphLaunch_v10000", 10, 20, 5)
    export.insert(
        "CUPTI_ACTIVITY_KIND_GRAPH_TRACE",
        start=100,
        end=900,
        streamId=7,
        correlationId=5,
        globalPid=1 << 24,
        graphId=3,
    )
    export.close()
    (trace,) = read_nsys(str(tmp_path / "g.sqlite"))
    assert trace.kernels[0].graph_launch is trace.launches[0]
    assert break_down(trace, {})[0].total.busy_ns == 800
    assert [warning.code for warning in trace.warnings] == ["whole_graphs"]


def test_one_trace_a_process(tmp_path: Path) -> None:
    export = Export(tmp_path / "p.sqlite")
    for process in (40, 41):
        export.call("cudaLaunchKernel_v7000", 10, 20, 1, process=process)
        export.kernel(f"of_{process}", 30, 50, correlation=1, process=process)
    export.range("launcher only", 0, 100, process=39)
    export.close()
    traces = read_traces([str(tmp_path / "p.sqlite")])
    assert [trace.rank for trace in traces] == [0, 1]
    assert [trace.kernels[0].name for trace in traces] == ["of_40", "of_41"]
    assert all(trace.kernels[0].launch is not None for trace in traces)


def test_columns_of_other_releases(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
        "INSERT INTO StringIds VALUES (1, 'k');"
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, shortName INT);"
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (5, 9, 1), (9, 5, 1), ('x', 3, 1);"
    )
    connection.commit()
    connection.close()
    (trace,) = read_nsys(str(path))
    assert [(kernel.name, kernel.duration_ns) for kernel in trace.kernels] == [("k", 4)]
    assert trace.kernels[0].grid is None
    assert trace.kernels[0].stream is None
    assert trace.warnings[0].message.startswith("2 events")


def test_recording_without_a_device(tmp_path: Path) -> None:
    export = Export(tmp_path / "cpu.sqlite")
    export.range("work", 0, 100)
    export.close()
    (trace,) = read_nsys(str(tmp_path / "cpu.sqlite"))
    assert not trace.kernels
    assert [op.name for op in trace.host_ops] == ["work"]


def test_foreign_and_damaged_databases(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.sqlite"
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(UnreadableFileError, match="no Nsight Systems export"):
        read_nsys(str(foreign))
    whole = Path(two_steps(tmp_path / "whole.sqlite")).read_bytes()
    damaged = tmp_path / "damaged.sqlite"
    messages = []
    for cut in range(16, len(whole), len(whole) // 23):
        damaged.write_bytes(whole[:cut])
        try:
            read_traces([str(damaged)])
        except UnreadableFileError as error:
            messages.append(str(error))
    assert len(messages) > 10
    assert all(message.startswith(str(damaged)) for message in messages)


def test_reports_that_were_not_exported(tmp_path: Path) -> None:
    path = tmp_path / "report.nsys-rep"
    path.write_bytes(b"\x01\x02binary")
    with pytest.raises(UnreadableFileError, match="nsys export --type sqlite"):
        read_traces([str(path)])
