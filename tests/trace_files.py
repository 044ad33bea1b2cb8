"""Small traces in the Chrome/Kineto format, made by hand, and the recorded ones in tests/data."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path

DATA = Path(__file__).parent / "data" / "traces"
RECORDED = sorted(path.name.partition(".")[0] for path in DATA.glob("*.json.?z"))

Event = dict[str, object]


def recorded(name: str) -> str:
    """Path of a recording from a real H200; the larger ones are kept with xz."""
    suffix = "xz" if name.startswith("model") else "gz"
    return str(DATA / f"{name}.json.{suffix}")


def kernel(name: str, ts: object, dur: object, stream: int | None = 7, **args: object) -> Event:
    """A kernel event; times in µs as numbers or text; `args` under their names in the file."""
    if stream is not None:
        args["stream"] = stream
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def host(category: str, name: str, ts: object, dur: object, tid: int = 1, **args: object) -> Event:
    """An event on a host thread: cpu_op, cuda_runtime, user_annotation, …"""
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 100,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def text(events: Iterable[Event], **metadata: object) -> bytes:
    """The file's bytes."""
    return json.dumps({**metadata, "traceEvents": list(events)}).encode()


def write(path: Path, events: Iterable[Event], **metadata: object) -> str:
    """Write a trace, compressed where the name says so; returns the path as text."""
    content = text(events, **metadata)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return str(path)
