"""Devices: the table of `devices.toml` as values, found by name, with the nearest names on a miss.

Loading needs neither a GPU nor torch. A fact that has no source is absent from the table and None
here.
"""

from __future__ import annotations

import datetime
import functools
import importlib.resources
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdig.hardware.arch import Architecture, architecture
from flashdig.hardware.names import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class UnknownDeviceError(ValueError):
    """No device of the table has this name; the message lists the nearest ones."""


@dataclass(frozen=True)
class Measured:
    """What was measured on one chip.

    Attributes:
        date, source: when, and of what.
        load_clock_hz: mean SM clock while attention kernels were timed.
        matmul_fraction: dtype -> fraction of the peak that a large matrix product reached, at the
            clock seen while it ran.
        mma_sync_fraction: of the peak, what products by `mma.sync` come to beside a newer
            instruction; None where that was not measured.
        copy_bytes_per_s: large element-wise copy, loads and stores added; memcpy_bytes_per_s: the
            same as a copy node of a CUDA graph.
        matmul_stream_bytes_per_s: scores that a matrix product writes or reads.
        tile_update_bytes_per_s: tiles that many programs read, change and write back, for ever.
        strided_elements_per_s: elements of a copy whose neighbours in the output are far apart in
            the input, so that each asks for a sector of its own.
        read_bytes_per_s, read_start_s: time of a read is read_start_s + bytes / read_bytes_per_s.
        broadcast_scores_per_s: of eager attention's masked_fill or broadcast add, where memory is
            not what holds it.
        softmax_scores_per_s: (longest row, rate) of torch's softmax kernels, shortest rows first.
    """

    date: datetime.date
    source: str
    load_clock_hz: float
    matmul_fraction: Mapping[str, float]
    copy_bytes_per_s: float
    memcpy_bytes_per_s: float
    matmul_stream_bytes_per_s: float
    tile_update_bytes_per_s: float
    strided_elements_per_s: float
    read_bytes_per_s: float
    read_start_s: float
    broadcast_scores_per_s: float
    softmax_scores_per_s: tuple[tuple[float, float], ...]
    mma_sync_fraction: float | None = None


@dataclass(frozen=True)
class Device:
    """One device; None is unknown.

    Attributes:
        key: the short name, as typed on the command line.
        driver_names: what the driver calls exactly this product.
        sm_count: streaming multiprocessors (compute units on AMD).
        peak_clock_hz: the clock at which the vendor defines the peaks.
        max_clock_hz: the highest clock that the driver allows.
        memory_bytes: marketed size; memory_bytes_per_s: its peak bandwidth.
        l2_bytes: L2 of the whole device; last_level_cache_bytes: a larger cache behind it.
        nvlink_bytes_per_s, pcie_bytes_per_s: both directions added (xGMI on AMD).
        peak_flop_per_s: dtype -> dense peak with float32 accumulation; "tfloat32" beside "float32".
        peak_clocks_hz: dtype -> the clock of that peak, where it is not peak_clock_hz.
        sources: fact -> citation, for every number above.
    """

    key: str
    name: str
    aliases: tuple[str, ...]
    driver_names: tuple[str, ...]
    architecture: str
    sm_count: int
    peak_clock_hz: float | None
    max_clock_hz: float | None
    memory_bytes: float
    memory_bytes_per_s: float
    l2_bytes: int
    last_level_cache_bytes: int | None
    power_watts: float
    nvlink_bytes_per_s: float | None
    pcie_bytes_per_s: float | None
    peak_flop_per_s: Mapping[str, float]
    peak_clocks_hz: Mapping[str, float]
    sources: Mapping[str, str]
    measured: Measured | None = None

    @property
    def arch(self) -> Architecture:
        return architecture(self.architecture)

    @property
    def clock_hz(self) -> float:
        """Clock of the tensor-core peaks: stated, or implied by the peak, SMs and rate of an SM."""
        if self.peak_clock_hz is not None:
            return self.peak_clock_hz
        rate = self.arch.mma_flop_per_clock["bfloat16"] * self.sm_count
        return self.peak_flop_per_s["bfloat16"] / rate

    @property
    def highest_clock_hz(self) -> float:
        """The highest clock known: what a floor has to be computed at when none was observed."""
        return self.max_clock_hz or self.clock_hz

    @property
    def cache_bytes(self) -> int:
        """The cache that stands between the SMs and memory: the last one."""
        return self.last_level_cache_bytes or self.l2_bytes

    def flop_per_s(self, dtype: str, clock_hz: float | None = None) -> float | None:
        """Dense matmul peak for `dtype`, at `clock_hz` instead of the stated clock if given."""
        peak = self.peak_flop_per_s.get(dtype)
        if peak is None or clock_hz is None:
            return peak
        return peak * clock_hz / self.peak_clocks_hz.get(dtype, self.clock_hz)

    def exp2_per_s(self, clock_hz: float | None = None) -> float | None:
        """Base-2 exponentials of the special function units of the whole device."""
        if self.arch.exp2_per_clock is None:
            return None
        return self.arch.exp2_per_clock * self.sm_count * (clock_hz or self.clock_hz)


_FACTS = (
    "sm_count",
    "peak_clock_hz",
    "max_clock_hz",
    "memory_bytes",
    "memory_bytes_per_s",
    "l2_bytes",
    "last_level_cache_bytes",
    "power_watts",
    "nvlink_bytes_per_s",
    "pcie_bytes_per_s",
)


@functools.cache
def load_devices() -> Mapping[str, Device]:
    """All devices of the table, by key."""
    text = importlib.resources.files("flashdig.hardware").joinpath("devices.toml").read_text()
    table = tomllib.loads(text)
    citations = table["sources"]
    measured = table["measured"]
    return {
        key: _device(key, row, citations, measured.get(key))
        for key, row in table["devices"].items()
    }


def find_device(name: str) -> Device:
    """The device called `name`: its key, an alias or its full name, in any case and spelling.

    Raises UnknownDeviceError with the nearest names.
    """
    devices = load_devices()
    wanted = _plain(name)
    for device in devices.values():
        known_names = (device.key, device.name, *device.aliases, *device.driver_names)
        if wanted in {_plain(known) for known in known_names}:
            return device
    names = [known for device in devices.values() for known in (device.key, *device.aliases)]
    raise UnknownDeviceError(
        f"unknown device {name!r}; nearest: {', '.join(nearest(name, names))}"
        f" (all: {', '.join(devices)})"
    )


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def _device(
    key: str, row: dict[str, Any], citations: dict[str, str], measured: dict[str, Any] | None
) -> Device:
    facts = row["facts"]
    peaks = row["peak_flop_per_s"]
    unknown = set(facts) - set(_FACTS)
    if unknown:
        raise ValueError(f"devices.toml: {key} has facts with unknown names: {sorted(unknown)}")
    sources = {name: citations[entry["source"]] for name, entry in facts.items()}
    for dtype, entry in peaks.items():
        sources[f"peak_flop_per_s.{dtype}"] = citations[entry["source"]]
    values: dict[str, Any] = {
        name: facts[name]["value"] if name in facts else None for name in _FACTS
    }
    if measured is not None:
        rates = tuple((longest, rate) for longest, rate in measured["softmax_scores_per_s"])
        source = citations[measured["source"]]
        measured = {**measured, "source": source, "softmax_scores_per_s": rates}
    return Device(
        key=key,
        name=row["name"],
        aliases=tuple(row["aliases"]),
        driver_names=tuple(row["driver_names"]),
        architecture=row["architecture"],
        peak_flop_per_s={dtype: entry["value"] for dtype, entry in peaks.items()},
        peak_clocks_hz={
            dtype: entry["clock_hz"] for dtype, entry in peaks.items() if "clock_hz" in entry
        },
        sources=sources,
        measured=None if measured is None else Measured(**measured),
        **values,
    )
