"""Fields of Kineto events: names of categories and arguments, and values of the right type.

Old spellings are known too. What has the wrong type counts as not recorded.
"""

from __future__ import annotations

from typing import Literal

from flashdig.readers.model import DeviceProperties, Dimensions, HostKind

Event = dict[str, object]
CopyKind = Literal["memcpy", "memset"]

HOST_KINDS: dict[str, HostKind] = {
    "cpu_op": "operator",
    "operator": "operator",
    "user_annotation": "annotation",
    "python_function": "python",
}
COPY_KINDS: dict[str, CopyKind] = {
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


def device_properties(recorded: Event) -> DeviceProperties:
    major, minor = integer(recorded.get("computeMajor")), integer(recorded.get("computeMinor"))
    name = recorded.get("name")
    return DeviceProperties(
        index=integer(recorded.get("id")) or 0,
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


def integer(value: object) -> int | None:
    if type(value) is int:
        return value if -_INT64 <= value < _INT64 else None
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    return None


def _positive(value: object) -> int | None:
    number = integer(value)
    return number if number is not None and number > 0 else None


def device(event: Event, args: Event) -> int | None:
    device = integer(args.get("device"))
    return integer(event.get("pid")) if device is None else device


def stream(event: Event, args: Event) -> int | None:
    stream = integer(args.get("stream"))
    return integer(event.get("tid")) if stream is None else stream


def dimensions(value: object) -> Dimensions | None:
    if isinstance(value, list) and len(value) == 3:
        x, y, z = (integer(size) for size in value)
        if x is not None and y is not None and z is not None:
            return (x, y, z)
    return None


def occupancy(args: Event) -> float | None:
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


def sizes(value: object, depth: int = 0) -> tuple[tuple[object, ...], ...]:
    """Nested lists of integers as nested tuples, one entry an argument."""
    if not isinstance(value, list):
        return ()
    return tuple(_size(item, depth + 1) for item in value)


def _size(value: object, depth: int) -> tuple[object, ...]:
    if not isinstance(value, list) or depth > _MAX_NESTING:
        return ()
    return tuple(
        _size(item, depth + 1) if isinstance(item, list) else integer(item) for item in value
    )
