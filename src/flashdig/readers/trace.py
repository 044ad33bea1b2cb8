"""Chrome/Kineto traces (torch.profiler; plain, gzip or xz) into the model.

Source of the format: the Chrome trace event format, and the categories and argument names that
PyTorch's Kineto writes (old spellings included). Device-side annotations and synchronisation events
stand among the device events there; they are no kernels and are kept apart.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from flashdig.readers.json_stream import JsonDamageError, JsonStream
from flashdig.readers.kineto_fields import (
    COPY_KINDS,
    HOST_KINDS,
    CopyKind,
    Event,
    device,
    device_properties,
    dimensions,
    integer,
    occupancy,
    sizes,
    stream,
)
from flashdig.readers.linking import link
from flashdig.readers.model import (
    Copy,
    DeviceAnnotation,
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

_Adder = Callable[[Event, Event, int, int], None]


def read_kineto(
    path: str,
    *,
    allow_large: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Trace:
    """Read one Chrome/Kineto trace, linked.

    Args:
        path: file name, or "-" for standard input.
        allow_large: also read compressed members beyond the safety limits.
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
        where = " (of the decompressed text)" if source.is_compressed else ""
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
        self._adders: dict[str, _Adder | None] = {}
        self._no_time = 0
        self._not_events = 0

    def add(self, event: object) -> None:
        if not isinstance(event, dict):
            self._not_events += 1
            return
        phase = event.get("ph")
        if phase == "X":
            category = event.get("cat")
            if isinstance(category, str):
                try:
                    adder = self._adders[category]
                except KeyError:
                    adder = self._adders[category] = self._adder(category.lower())
                if adder is not None:
                    self._add_duration(event, adder)
        elif phase == "i" and event.get("name") == "[memory]":
            self._add_memory(event)

    def _adder(self, category: str) -> _Adder | None:
        """What takes the events of a category; None for those that say nothing here."""
        if category in HOST_KINDS:
            return partial(self._add_host_op, HOST_KINDS[category])
        if category.endswith(("_runtime", "_driver")) or category == "runtime":
            return self._add_launch
        if category in COPY_KINDS:
            return partial(self._add_copy, COPY_KINDS[category])
        return {"kernel": self._add_kernel, "gpu_user_annotation": self._add_annotation}.get(
            category
        )

    def _add_duration(self, event: Event, adder: _Adder) -> None:
        start = nanoseconds(event.get("ts"))
        duration = nanoseconds(event.get("dur"))
        if start is None or duration is None or duration < 0:
            self._no_time += 1
            return
        args = event.get("args")
        adder(event, args if isinstance(args, dict) else {}, start, duration)

    def _add_launch(self, event: Event, args: Event, start: int, duration: int) -> None:
        self.trace.launches.append(
            Launch(
                self._name(event),
                start,
                duration,
                integer(event.get("tid")) or 0,
                integer(args.get("correlation")),
                integer(args.get("External id")),
            )
        )

    def _add_annotation(self, event: Event, args: Event, start: int, duration: int) -> None:
        self.trace.device_annotations.append(
            DeviceAnnotation(
                self._name(event), start, duration, device(event, args), stream(event, args)
            )
        )

    def _add_copy(
        self, kind: CopyKind, event: Event, args: Event, start: int, duration: int
    ) -> None:
        self.trace.copies.append(
            Copy(
                self._name(event),
                kind,
                start,
                duration,
                device(event, args) or 0,
                stream(event, args),
                integer(args.get("bytes")),
                integer(args.get("correlation")),
                integer(args.get("External id", args.get("external id"))),
            )
        )

    def _add_host_op(
        self, kind: HostKind, event: Event, args: Event, start: int, duration: int
    ) -> None:
        stack = args.get("Call stack")
        self.trace.host_ops.append(
            HostOp(
                self._name(event),
                kind,
                start,
                duration,
                integer(event.get("tid")) or 0,
                self._operator_inputs(args) if kind == "operator" else None,
                integer(args.get("External id", args.get("external id"))),
                integer(args.get("Sequence number")),
                integer(args.get("Fwd thread id")),
                self._shared(stack) if isinstance(stack, str) and stack else None,
            )
        )

    def _add_kernel(self, event: Event, args: Event, start: int, duration: int) -> None:
        self.trace.kernels.append(
            Kernel(
                self._name(event),
                start,
                duration,
                device(event, args) or 0,
                stream(event, args),
                self._configuration(args),
                integer(args.get("correlation")),
                integer(args.get("External id", args.get("external id"))),
                integer(args.get("graph id")),
            )
        )

    def _add_memory(self, event: Event) -> None:
        args = event.get("args")
        if not isinstance(args, dict) or integer(args.get("Device Type")) in {None, 0}:
            return  # 0 is the host's allocator
        total = integer(args.get("Total Allocated"))
        if total is not None:
            self.trace.peak_allocated_bytes = max(total, self.trace.peak_allocated_bytes or 0)

    def _configuration(self, args: Event) -> LaunchConfiguration:
        grid = dimensions(args.get("grid"))
        block = dimensions(args.get("block"))
        registers = integer(args.get("registers per thread"))
        shared_memory = integer(args.get("shared memory"))
        percent = occupancy(args)
        key = (grid, block, registers, shared_memory, percent)
        configuration = self._configurations.get(key)
        if configuration is None:
            configuration = LaunchConfiguration(grid, block, registers, shared_memory, percent)
            self._configurations[key] = configuration
        return configuration

    def _operator_inputs(self, args: Event) -> OperatorInputs | None:
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
                sizes(shapes), self._texts(dtypes), sizes(strides), self._texts(values)
            )
            self._inputs[key] = inputs
        return inputs

    def _texts(self, values: object) -> tuple[str, ...]:
        if not isinstance(values, list):
            return ()
        return tuple(self._shared(value) if isinstance(value, str) else "" for value in values)

    def _name(self, event: Event) -> str:
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

    def _read_metadata(self, metadata: Event) -> None:
        trace = self.trace
        trace.base_time_ns = integer(metadata.get("baseTimeNanoseconds"))
        distributed = metadata.get("distributedInfo")
        if isinstance(distributed, dict):
            rank = integer(distributed.get("rank"))
            if rank is not None and rank >= 0:
                trace.rank = rank
                trace.rank_is_recorded = True
            trace.world_size = integer(distributed.get("world_size"))
        devices = metadata.get("deviceProperties")
        if isinstance(devices, list):
            trace.devices = [
                device_properties(device) for device in devices if isinstance(device, dict)
            ]
        for key, value in metadata.items():
            if isinstance(value, str | int):
                trace.metadata[self._shared(key)] = (
                    self._shared(value) if isinstance(value, str) else value
                )
