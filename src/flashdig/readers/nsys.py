"""Nsight Systems recordings, from their SQLite export, into the model.

Source of the schema: NVIDIA's "SQLite Export Schema Reference" of Nsight Systems. Tables are made
only when they have rows, and columns come and go between releases, so each is asked for before it
is read. One process of the recording becomes one trace.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from flashdig.readers.linking import link
from flashdig.readers.model import (
    Copy,
    DeviceProperties,
    HostOp,
    Kernel,
    Launch,
    LaunchConfiguration,
    OperatorInputs,
    ReadWarning,
    Trace,
)
from flashdig.readers.open_file import UnreadableFileError

_PUSH_POP_RANGE, _START_END_RANGE = 59, 60
_KERNEL_TABLES = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL")
_API_VERSION = re.compile(r"_v\d+(?=$|_)")
# how torch.autograd.profiler.emit_nvtx writes an operator into a range's text
_TORCH_RANGE = re.compile(r"^(?P<name>[^,]+), (?:seq|op_id|sizes|input_op_ids) = ")
_SEQUENCE = re.compile(r", seq = (\d+)")
_SIZES = re.compile(r", sizes = (\[.*?\])(?:, input_op_ids|$)")
_MEMCPY_KINDS = {
    1: "HtoD (Host -> Device)",
    2: "DtoH (Device -> Host)",
    8: "DtoD (Device -> Device)",
    10: "PtoP (Peer -> Peer)",
}

Row = dict[str, object]


def read_nsys(path: str) -> list[Trace]:
    """Read an SQLite export, one linked trace a process, in order of process number.

    A recording without device work gives one trace with the host side alone. Raises
    UnreadableFileError for a database that is damaged or is no Nsight Systems export.
    """
    try:
        uri = Path(path).absolute().as_uri() + "?mode=ro&immutable=1"
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            return _Export(path, connection).read()
    except (sqlite3.Error, OverflowError) as error:
        raise UnreadableFileError(f"{path}: the SQLite database is damaged ({error})") from error


class _Export:
    def __init__(self, path: str, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection
        self._tables = {
            str(name)
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")
        }
        if "StringIds" not in self._tables:
            raise UnreadableFileError(
                f"{path}: an SQLite database, but no Nsight Systems export (no table StringIds)"
            )
        self._strings = {
            row.get("id"): row.get("value") for row in self._rows("StringIds", ("id", "value"))
        }
        self._traces: dict[int, Trace] = {}
        self._configurations: dict[LaunchConfiguration, LaunchConfiguration] = {}
        self._no_time = 0

    def read(self) -> list[Trace]:
        for table in _KERNEL_TABLES:
            self._read_kernels(table)
        self._read_whole_graphs()
        self._read_copies("CUPTI_ACTIVITY_KIND_MEMCPY", "memcpy")
        self._read_copies("CUPTI_ACTIVITY_KIND_MEMSET", "memset")
        for table in ("CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_DRIVER"):
            self._read_launches(table)
        self._read_ranges()
        traces = [self._traces[process] for process in sorted(self._traces)]
        # processes that only hold host ranges (shells, launchers) say nothing beside real ones
        working = [trace for trace in traces if trace.kernels or trace.copies]
        chosen = working or traces[:1] or [Trace(self.path, "nsight-systems")]
        devices = self._devices()
        for trace in chosen:
            trace.devices = devices
            if self._no_time:
                trace.warnings.append(
                    ReadWarning(
                        "no_time",
                        f"{self._no_time} events without a usable start and end were left out",
                    )
                )
            link(trace)
        return chosen

    def _rows(self, table: str, columns: tuple[str, ...]) -> Iterator[Row]:
        """Rows as dictionaries of the wanted columns that exist."""
        if table not in self._tables:
            return
        existing = {row[1] for row in self._connection.execute(f'PRAGMA table_info("{table}")')}
        wanted = [column for column in columns if column in existing]
        if not wanted:
            return
        quoted = ", ".join(f'"{column}"' for column in wanted)
        for values in self._connection.execute(f'SELECT {quoted} FROM "{table}"'):
            yield dict(zip(wanted, values, strict=True))

    def _timed_rows(
        self, table: str, columns: tuple[str, ...]
    ) -> Iterator[tuple[Row, Trace, int, int]]:
        """Rows with their process's trace, start and duration; rows without times are counted."""
        for row in self._rows(table, ("start", "end", *columns)):
            start, end = _integer(row.get("start")), _integer(row.get("end"))
            if start is None or end is None or end < start:
                self._no_time += 1
                continue
            # bits 24 and up of both identifiers are the process; the low ones are the thread
            identifier = _integer(row.get("globalPid", row.get("globalTid"))) or 0
            process = identifier >> 24
            trace = self._traces.get(process)
            if trace is None:
                trace = self._traces[process] = Trace(self.path, "nsight-systems")
            yield row, trace, start, end - start

    def _text(self, *identifiers: object) -> str:
        for identifier in identifiers:
            text = self._strings.get(identifier)
            if isinstance(text, str) and text:
                return text
        return "(unnamed)"

    def _read_kernels(self, table: str) -> None:
        columns = (
            *("deviceId", "streamId", "correlationId", "globalPid", "graphId"),
            *("demangledName", "mangledName", "shortName"),
            *("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ"),
            *("registersPerThread", "staticSharedMemory", "dynamicSharedMemory"),
        )
        for row, trace, start, duration in self._timed_rows(table, columns):
            trace.kernels.append(
                Kernel(
                    self._text(
                        row.get("demangledName"), row.get("mangledName"), row.get("shortName")
                    ),
                    start,
                    duration,
                    _integer(row.get("deviceId")) or 0,
                    _integer(row.get("streamId")),
                    self._configuration(row),
                    _integer(row.get("correlationId")),
                    graph_id=_integer(row.get("graphId")),
                )
            )

    def _configuration(self, row: Row) -> LaunchConfiguration:
        grid = tuple(_integer(row.get(f"grid{axis}")) for axis in "XYZ")
        block = tuple(_integer(row.get(f"block{axis}")) for axis in "XYZ")
        static = _integer(row.get("staticSharedMemory"))
        dynamic = _integer(row.get("dynamicSharedMemory"))
        configuration = LaunchConfiguration(
            grid=None if None in grid else grid,  # type: ignore[arg-type]
            block=None if None in block else block,  # type: ignore[arg-type]
            registers_per_thread=_integer(row.get("registersPerThread")),
            shared_memory_bytes=(
                None if static is None and dynamic is None else (static or 0) + (dynamic or 0)
            ),
        )
        return self._configurations.setdefault(configuration, configuration)

    def _read_whole_graphs(self) -> None:
        """Graphs recorded as one piece (the recorder's default): time without kernel names."""
        columns = ("deviceId", "streamId", "correlationId", "globalPid", "graphId", "graphExecId")
        counted: dict[int, int] = {}
        for row, trace, start, duration in self._timed_rows(
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", columns
        ):
            graph = _integer(row.get("graphId"))
            trace.kernels.append(
                Kernel(
                    f"(CUDA graph {graph}, kernels not recorded)",
                    start,
                    duration,
                    _integer(row.get("deviceId")) or 0,
                    _integer(row.get("streamId")),
                    self._configuration({}),
                    _integer(row.get("correlationId")),
                    graph_id=graph,
                )
            )
            counted[id(trace)] = counted.get(id(trace), 0) + 1
        for trace in self._traces.values():
            if id(trace) in counted:
                trace.warnings.append(
                    ReadWarning(
                        "whole_graphs",
                        f"{counted[id(trace)]} CUDA graphs were recorded as one piece each; record "
                        "with --cuda-graph-trace=node to see their kernels",
                    )
                )

    def _read_copies(self, table: str, kind: str) -> None:
        labels = {
            row.get("id"): row.get("label")
            for row in self._rows("ENUM_CUDA_MEMCPY_OPER", ("id", "label"))
        }
        columns = ("deviceId", "streamId", "correlationId", "globalPid", "bytes", "copyKind")
        for row, trace, start, duration in self._timed_rows(table, columns):
            direction = row.get("copyKind")
            known = _MEMCPY_KINDS.get(direction) if isinstance(direction, int) else None
            name = "Memset" if kind == "memset" else f"Memcpy {known or labels.get(direction, '')}"
            trace.copies.append(
                Copy(
                    name.strip(),
                    "memset" if kind == "memset" else "memcpy",
                    start,
                    duration,
                    _integer(row.get("deviceId")) or 0,
                    _integer(row.get("streamId")),
                    _integer(row.get("bytes")),
                    _integer(row.get("correlationId")),
                )
            )

    def _read_launches(self, table: str) -> None:
        for row, trace, start, duration in self._timed_rows(
            table, ("globalTid", "correlationId", "nameId")
        ):
            trace.launches.append(
                Launch(
                    _API_VERSION.sub("", self._text(row.get("nameId"))),
                    start,
                    duration,
                    _thread(row.get("globalTid")),
                    _integer(row.get("correlationId")),
                )
            )

    def _read_ranges(self) -> None:
        columns = ("globalTid", "eventType", "text", "textId")
        for row in self._rows("NVTX_EVENTS", ("start", "end", *columns)):
            kind = row.get("eventType", _PUSH_POP_RANGE)
            start, end = _integer(row.get("start")), _integer(row.get("end"))
            if kind not in {_PUSH_POP_RANGE, _START_END_RANGE} or start is None or end is None:
                continue  # marks, names of threads, ranges that were never closed
            if end < start:
                self._no_time += 1
                continue
            text = row.get("text")
            name = text if isinstance(text, str) and text else self._text(row.get("textId"))
            process = (_integer(row.get("globalTid")) or 0) >> 24
            trace = self._traces.setdefault(process, Trace(self.path, "nsight-systems"))
            trace.host_ops.append(_host_op(name, start, end - start, _thread(row.get("globalTid"))))

    def _devices(self) -> list[DeviceProperties]:
        columns = (
            *("id", "cuDevice", "name", "totalMemory", "smCount", "computeMajor", "computeMinor"),
            *("threadsPerWarp", "maxWarpsPerSm", "maxRegistersPerSm", "maxShmemPerSm"),
            *("maxShmemPerBlockOptin", "maxShmemPerBlock"),
        )
        devices = []
        for row in self._rows("TARGET_INFO_GPU", columns):
            major, minor = _integer(row.get("computeMajor")), _integer(row.get("computeMinor"))
            warps, warp_size = _positive(row, "maxWarpsPerSm"), _positive(row, "threadsPerWarp")
            name = row.get("name")
            index = _integer(row.get("cuDevice"))
            devices.append(
                DeviceProperties(
                    index=index if index is not None else _integer(row.get("id")) or 0,
                    name=name if isinstance(name, str) and name else None,
                    compute_capability=(None if major is None or minor is None else (major, minor)),
                    num_sms=_positive(row, "smCount"),
                    max_threads_per_sm=warps * warp_size if warps and warp_size else None,
                    registers_per_sm=_positive(row, "maxRegistersPerSm"),
                    shared_memory_per_sm=_positive(row, "maxShmemPerSm"),
                    max_shared_memory_per_block=(
                        _positive(row, "maxShmemPerBlockOptin")
                        or _positive(row, "maxShmemPerBlock")
                    ),
                    warp_size=warp_size,
                    memory_bytes=_positive(row, "totalMemory"),
                )
            )
        return devices


def _host_op(text: str, start: int, duration: int, thread: int) -> HostOp:
    """A range: an operator where torch's emit_nvtx wrote it, else an annotation."""
    torch_range = _TORCH_RANGE.match(text)
    if torch_range is None:
        return HostOp(text, "annotation", start, duration, thread)
    sequence = _SEQUENCE.search(text)
    sizes = _SIZES.search(text)
    return HostOp(
        torch_range["name"],
        "operator",
        start,
        duration,
        thread,
        _inputs(sizes[1]) if sizes else None,
        sequence=int(sequence[1]) if sequence and len(sequence[1]) < 19 else None,
    )


def _inputs(text: str) -> OperatorInputs | None:
    try:
        sizes = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(sizes, list):
        return None
    return OperatorInputs(
        shapes=tuple(
            tuple(_integer(size) for size in shape) if isinstance(shape, list) else ()
            for shape in sizes
        )
    )


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _positive(row: Row, column: str) -> int | None:
    value = _integer(row.get(column))
    return value if value is not None and value > 0 else None


def _thread(global_thread: object) -> int:
    return (_integer(global_thread) or 0) & 0xFFFFFF
