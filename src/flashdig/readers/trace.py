"""Chrome/Kineto traces (torch.profiler, plain or gzip) into the model.

Source of the format: the Chrome trace event format, and the categories and argument names that
PyTorch's Kineto writes (old spellings included). Device-side annotations and synchronisation events
stand among the device events there; they are no kernels and are kept apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from flashdig.readers.json_stream import JsonDamageError, JsonStream
from flashdig.readers.linking import link
from flashdig.readers.model import (
    Copy,
    DeviceAnnotation,
    DeviceProperties,
    Dimensions,
    HostKind,
    HostOp,
    Kernel,
    Launch,
    LaunchConfiguration,
    OperatorInputs,
    ReadWarning,
    Trace,
)
from flashdig.readers.open_file import ByteReader, UnreadableFileError
from flashdig.readers.times import nanoseconds

_HOST_KINDS: dict[str, HostKind] = {
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "python_function": "python",
}
_COPY_CATEGORIES = {
    "gpu_memcpy": "memcpy",
    "memcpy": "memcpy",
    "gpu_memset": "memset",
    "memset": "memset",
}
_OCCUPANCY_KEYS = (
    # name, factor to percent; the key without the sign is a fraction
    ("est. achieved occupancy %", 1.0),
    ("est. achieved occupancy", 100.0),
)
_MAX_NESTING = 4
_INT64 = 1 << 63


def read_kineto(
    path: str,
    *,
    allow_large: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read one Chrome/Kineto trace, linked.

    Args:
        path: file name, or "-" for standard input.
        allow_large: also read gzip members beyond the safety limits.
        progress: called with the number of file bytes read so far.

    Raises UnreadableFileError, with the byte offset, for a file that is no trace or is damaged
    anywhere but at its end. A file that ends early is read up to there and marked `incomplete`.
    """
    source = ByteReader(path, allow_large=allow_large, progress=progress)
    stream = JsonStream(source)
    builder = _Builder(Trace(source.name, "kineto"))
    try:
        with _without_collector():
            for event in stream.events():
                builder.add(event)
            builder.finish(stream, source)
            link(builder.trace)
    except JsonDamageError as error:
        where = " (of the decompressed text)" if source.is_gzip else ""
        raise UnreadableFileError(
            f"{source.name}: damaged at byte {error.offset}{where}: {error.reason}"
        ) from error
    return builder.trace


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of long-lived objects without cycles: the cyclic collector would walk them often."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Builder:
    """Turns events into the model; shares what repeats; counts what cannot be used."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._names: dict[str, str] = {}
        self._configurations: dict[tuple[object, ...], LaunchConfiguration] = {}
        self._inputs: dict[str, OperatorInputs] = {}
        self._no_time = 0
        self._not_events = 0

    def add(self, event: object) -> None:
        if not isinstance(event, dict):
            self._not_events += 1
            return
        phase = event.get("ph")
        if phase == "X":
            self._add_duration(event)
        elif phase == "i" and event.get("name") == "[memory]":
            self._add_memory(event)

    def _add_duration(self, event: dict[str, object]) -> None:
        category = event.get("cat")
        if not isinstance(category, str):
            return
        category = category.lower()
        kind = _HOST_KINDS.get(category)
        is_call = category.endswith(("_runtime", "_driver")) or category == "runtime"
        if not (
            kind is not None
            or is_call
            or category in {"kernel", "gpu_user_annotation"}
            or category in _COPY_CATEGORIES
        ):
            return
        start = nanoseconds(event.get("ts"))
        duration = nanoseconds(event.get("dur"))
        if start is None or duration is None or duration < 0:
            self._no_time += 1
            return
        args = event.get("args")
        if not isinstance(args, dict):
            args = {}
        if kind is not None:
            self._add_host_op(event, args, kind, start, duration)
        elif is_call:
            self.trace.launches.append(
                Launch(
                    self._name(event),
                    start,
                    duration,
                    _integer(event.get("tid")) or 0,
                    _integer(args.get("correlation")),
                    _integer(args.get("External id")),
                )
            )
        elif category == "kernel":
            self._add_kernel(event, args, start, duration)
        elif category == "gpu_user_annotation":
            self.trace.device_annotations.append(
                DeviceAnnotation(
                    self._name(event), start, duration, _device(event, args), _stream(event, args)
                )
            )
        else:
            self.trace.copies.append(
                Copy(
                    self._name(event),
                    "memset" if _COPY_CATEGORIES[category] == "memset" else "memcpy",
                    start,
                    duration,
                    _device(event, args) or 0,
                    _stream(event, args),
                    _integer(args.get("bytes")),
                    _integer(args.get("correlation")),
                    _integer(args.get("External id", args.get("external id"))),
                )
            )

    def _add_host_op(
        self,
        event: dict[str, object],
        args: dict[str, object],
        kind: HostKind,
        start: int,
        duration: int,
    ) -> None:
        stack = args.get("Call stack")
        self.trace.host_ops.append(
            HostOp(
                self._name(event),
                kind,
                start,
                duration,
                _integer(event.get("tid")) or 0,
                self._operator_inputs(args) if kind == "operator" else None,
                _integer(args.get("External id", args.get("external id"))),
                _integer(args.get("Sequence number")),
                _integer(args.get("Fwd thread id")),
                self._shared(stack) if isinstance(stack, str) and stack else None,
            )
        )

    def _add_kernel(
        self, event: dict[str, object], args: dict[str, object], start: int, duration: int
    ) -> None:
        self.trace.kernels.append(
            Kernel(
                self._name(event),
                start,
                duration,
                _device(event, args) or 0,
                _stream(event, args),
                self._configuration(args),
                _integer(args.get("correlation")),
                _integer(args.get("External id", args.get("external id"))),
                _integer(args.get("graph id")),
            )
        )

    def _add_memory(self, event: dict[str, object]) -> None:
        args = event.get("args")
        if not isinstance(args, dict) or _integer(args.get("Device Type")) in {None, 0}:
            return  # 0 is the host's allocator
        total = _integer(args.get("Total Allocated"))
        if total is not None:
            self.trace.peak_allocated_bytes = max(total, self.trace.peak_allocated_bytes or 0)

    def _configuration(self, args: dict[str, object]) -> LaunchConfiguration:
        grid = _dimensions(args.get("grid"))
        block = _dimensions(args.get("block"))
        registers = _integer(args.get("registers per thread"))
        shared_memory = _integer(args.get("shared memory"))
        occupancy = _occupancy(args)
        key = (grid, block, registers, shared_memory, occupancy)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = LaunchConfiguration(grid, block, registers, shared_memory, occupancy)
            self._configurations[key] = configuration
        return configuration

    def _operator_inputs(self, args: dict[str, object]) -> OperatorInputs | None:
        recorded = (
            args.get("Input Dims", args.get("Input dims")),
            args.get("Input type"),
            args.get("Input Strides"),
            args.get("Concrete Inputs"),
        )
        if recorded == (None, None, None, None):
            return None
        key = repr(recorded)
        inputs = self._inputs.get(key)
        if inputs is None:
            shapes, dtypes, strides, values = recorded
            inputs = OperatorInputs(
                _sizes(shapes), self._texts(dtypes), _sizes(strides), self._texts(values)
            )
            self._inputs[key] = inputs
        return inputs

    def _texts(self, values: object) -> tuple[str, ...]:
        if not isinstance(values, list):
            return ()
        return tuple(self._shared(value) if isinstance(value, str) else "" for value in values)

    def _name(self, event: dict[str, object]) -> str:
        name = event.get("name")
        return self._shared(name) if isinstance(name, str) else "(unnamed)"

    def _shared(self, text: str) -> str:
        """One object for equal strings; what is no Unicode becomes replacement characters."""
        known = self._names.get(text)
        if known is None:
            try:
                text.encode("utf-8")
                known = text
            except UnicodeEncodeError:
                known = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in text)
            self._names[text] = known
        return known

    def finish(self, stream: JsonStream, source: ByteReader) -> None:
        """What the whole file says: ranks, devices, base time, and what was wrong with it."""
        trace = self.trace
        if not stream.is_trace:
            if stream.truncated and stream.offset == 0:
                raise UnreadableFileError(f"{source.name}: the file is empty")
            if stream.truncated:
                raise UnreadableFileError(
                    f"{source.name}: ends at byte {stream.offset}, before the first event"
                )
            raise UnreadableFileError(f"{source.name}: JSON, but no trace (no traceEvents list)")
        if stream.truncated or source.truncated:
            trace.incomplete = True
            trace.warnings.append(
                ReadWarning(
                    "truncated",
                    f"the file ends early, at byte {stream.offset} of its text; the events before "
                    "that were read, so totals are too low",
                )
            )
        if stream.bad_bytes:
            trace.warnings.append(
                ReadWarning(
                    "bad_bytes",
                    f"{stream.bad_bytes} bytes are no UTF-8; they are shown as \ufffd",
                )
            )
        if self._no_time:
            trace.warnings.append(
                ReadWarning(
                    "no_time",
                    f"{self._no_time} events without a usable start and duration were left out",
                )
            )
        if self._not_events:
            trace.warnings.append(
                ReadWarning("not_events", f"{self._not_events} entries are no events")
            )
        self._read_metadata(stream.metadata)

    def _read_metadata(self, metadata: dict[str, object]) -> None:
        trace = self.trace
        trace.base_time_ns = _integer(metadata.get("baseTimeNanoseconds"))
        distributed = metadata.get("distributedInfo")
        if isinstance(distributed, dict):
            rank = _integer(distributed.get("rank"))
            if rank is not None and rank >= 0:
                trace.rank = rank
                trace.rank_is_recorded = True
            trace.world_size = _integer(distributed.get("world_size"))
        devices = metadata.get("deviceProperties")
        if isinstance(devices, list):
            trace.devices = [
                _device_properties(device) for device in devices if isinstance(device, dict)
            ]
        for key, value in metadata.items():
            if isinstance(value, str | int):
                trace.metadata[self._shared(key)] = (
                    self._shared(value) if isinstance(value, str) else value
                )


def _device_properties(recorded: dict[str, object]) -> DeviceProperties:
    major, minor = _integer(recorded.get("computeMajor")), _integer(recorded.get("computeMinor"))
    name = recorded.get("name")
    return DeviceProperties(
        index=_integer(recorded.get("id")) or 0,
        name=name if isinstance(name, str) and name.isprintable() else None,
        compute_capability=None if major is None or minor is None else (major, minor),
        num_sms=_positive(recorded.get("numSms")),
        max_threads_per_sm=_positive(recorded.get("maxThreadsPerMultiprocessor")),
        registers_per_sm=_positive(
            recorded.get("regsPerMultiprocessor", recorded.get("regsPerBlock"))
        ),
        shared_memory_per_sm=_positive(recorded.get("sharedMemPerMultiprocessor")),
        max_shared_memory_per_block=_positive(
            recorded.get("sharedMemPerBlockOptin", recorded.get("sharedMemPerBlock"))
        ),
        warp_size=_positive(recorded.get("warpSize")),
        memory_bytes=_positive(recorded.get("totalGlobalMem")),
    )


def _integer(value: object) -> int | None:
    if type(value) is int:
        return value if -_INT64 <= value < _INT64 else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return None


def _positive(value: object) -> int | None:
    number = _integer(value)
    return number if number is not None and number > 0 else None


def _device(event: dict[str, object], args: dict[str, object]) -> int | None:
    device = _integer(args.get("device"))
    return _integer(event.get("pid")) if device is None else device


def _stream(event: dict[str, object], args: dict[str, object]) -> int | None:
    stream = _integer(args.get("stream"))
    return _integer(event.get("tid")) if stream is None else stream


def _dimensions(value: object) -> Dimensions | None:
    if isinstance(value, list) and len(value) == 3:
        x, y, z = (_integer(size) for size in value)
        if x is not None and y is not None and z is not None:
            return (x, y, z)
    return None


def _occupancy(args: dict[str, object]) -> float | None:
    for key, factor in _OCCUPANCY_KEYS:
        value = args.get(key)
        if isinstance(value, str):  # numbers with a fraction arrive as text
            try:
                value = float(value)
            except ValueError:
                continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            percent = value * factor
            # a negative estimate is the recorder's way to say that it has none
            return float(percent) if 0 <= percent <= 100 else None
    return None


def _sizes(value: object, depth: int = 0) -> tuple[tuple[object, ...], ...]:
    """Nested lists of integers as nested tuples, one entry an argument."""
    if not isinstance(value, list):
        return ()
    return tuple(_size(item, depth + 1) for item in value)


def _size(value: object, depth: int) -> tuple[object, ...]:
    if not isinstance(value, list) or depth > _MAX_NESTING:
        return ()
    return tuple(
        _size(item, depth + 1) if isinstance(item, list) else _integer(item) for item in value
    )
