"""An article's figures against a recording of the same attention, and why they differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdig.costs.predict import predict
from flashdig.costs.prediction import Prediction
from flashdig.costs.traffic import compulsory
from flashdig.costs.units import seconds, with_unit
from flashdig.findings.finding import Unit
from flashdig.findings.guess import ASKED
from flashdig.findings.presets import ArticlePreset, Published
from flashdig.findings.recording import Recording, main_kernel
from flashdig.hardware.devices import Device, find_device
from flashdig.readers.model import Copy, Kernel
from flashdig.readers.ncu_model import NcuKernel
from flashdig.readers.occupancy import resident_warps

_EQUAL = 0.02
_EXHIBIT_NAMES = {
    "v1": "flash_fwd_v1_",
    "v2": "flash_fwd_v2_fp",
    "v2_transposed": "flash_fwd_v2_ktransposed",
}
OVER_NAIVE = "device time over naive's"


@dataclass(frozen=True)
class ArticleRow:
    """One published figure, the same quantity here, and why they differ."""

    variant: str
    what: str
    published: float
    found: float | None
    unit: Unit
    why: str

    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def against_article(
    preset: ArticlePreset,
    recordings: Mapping[str, Recording],
    counters: Mapping[str, NcuKernel],
    device: Device | None,
) -> list[ArticleRow]:
    """Every published figure whose variant was recorded.

    Args:
        recordings: variant -> its trace.
        counters: variant -> the counters of its main kernel.
    """
    rows = []
    for figure in preset.published:
        recording, kernel = recordings.get(figure.variant), counters.get(figure.variant)
        if recording is None and kernel is None:
            continue
        found = None
        if kernel is not None:
            found = counted(kernel, figure.what)
        if found is None and recording is not None:
            found = recorded(recording, figure.what)
        if figure.what == OVER_NAIVE and "naive" in recordings and recording is not None:
            found = _ratio(recording, recordings["naive"])
        why = _why(preset, figure, found, recording, device)
        rows.append(ArticleRow(figure.variant, figure.what, figure.value, found, figure.unit, why))
    return rows


def recorded(recording: Recording, what: str) -> float | None:
    """A quantity of the typical call of a trace."""
    group = next(iter(recording.groups), None)
    if group is None:
        return None
    call = group.calls[len(group.calls) // 2]
    if what == "kernels":
        return float(sum(isinstance(event, Kernel) for event in call.events))
    if what == "memcpys":
        copies = [e for e in call.events if isinstance(e, Copy) and e.kind == "memcpy"]
        return float(len(copies))
    if what == "transposes":
        inside = [
            op
            for op in recording.trace.host_ops
            if op.name == "aten::transpose" and any(o is call.op for o in op.ancestors())
        ]
        return float(len(inside))
    if what == "device time":
        return group.median_device_ns
    if what == "host time":
        return group.median_host_ns
    if what == "host time in cuDNN itself":
        own = [o for o in recording.trace.host_ops if o.name == "aten::_cudnn_attention_forward"]
        inside = [o for o in own if any(outer is call.op for outer in o.ancestors())]
        if not inside or not call.host_ns:
            return None
        return 100 * recording.own_ns(inside[0]) / call.host_ns
    main = main_kernel(call)
    if main is None:
        return None
    kernel = main[0]
    if what == "registers":
        return kernel.registers_per_thread
    if what == "threads":
        return kernel.configuration.threads_per_block
    if what == "occupancy":
        resident = resident_warps(kernel.configuration, recording.properties(kernel))
        return None if resident is None else resident.percent
    return None


def counted(kernel: NcuKernel, what: str) -> float | None:
    """A quantity of a kernel's counters."""
    if what == "bytes read":
        return kernel.dram_read_bytes
    if what == "bytes written":
        return kernel.dram_write_bytes
    if what == "occupancy":
        return kernel.occupancy.theoretical_percent
    if what == "bank conflicts":
        share = kernel.shared.conflict_share
        return None if share is None else 100 * share
    if what == "conflict slow-down":
        return kernel.shared.slow_down
    if what == "MIO throttle, cycles":
        return kernel.stalls.cycles.get("mio_throttle")
    if what == "tensor cores":
        return kernel.pipes.tensor
    return None


def _why(
    preset: ArticlePreset,
    figure: Published,
    found: float | None,
    recording: Recording | None,
    device: Device | None,
) -> str:
    if found is None:
        return "Not recorded here."
    least = 0.5 if figure.unit == "percent" else 1e-12
    if abs(found - figure.value) <= max(_EQUAL * abs(figure.value), least):
        return "As published."
    chip = find_device(preset.chip)
    schedule = (
        ASKED[preset.variants[figure.variant]].schedule
        if figure.variant in (preset.variants) and preset.variants[figure.variant] in ASKED
        else None
    )
    there = _prediction(preset, chip, schedule)
    here = _prediction(preset, device, schedule)
    if figure.what == "device time" and there is not None and here is not None:
        return (
            f"Another chip: the model gives {seconds(there.expected_s)} on the {chip.name} (held "
            f"back by {there.expected_limiter}) and {seconds(here.expected_s)} here (by "
            f"{here.expected_limiter})."
        )
    if figure.what in ("bytes read", "bytes written") and there is not None and here is not None:
        return _traffic_words(preset, figure, found, chip, device, there, here)
    if figure.what == OVER_NAIVE:
        return _ratio_words(preset, chip, device)
    if figure.what == "host time in cuDNN itself":
        return (
            "The article's share is of the whole run, and stands at the outermost operator; here "
            "it is of one call, and stands at _cudnn_attention_forward."
        )
    if figure.what in ("registers", "threads", "occupancy") and recording is not None:
        return _kernel_words(recording)
    if figure.what == "host time":
        return (
            "Another host and another PyTorch; the profiler's own cost is in both figures. Only "
            "the order of the backends compares."
        )
    if figure.what in ("bank conflicts", "conflict slow-down", "MIO throttle, cycles"):
        return (
            "Another architecture: the compiler lays the tile out and loads it for "
            f"{'this chip' if device is None else device.architecture} otherwise than for "
            f"{chip.architecture}."
        )
    return "Another PyTorch, another chip."


def _ratio(recording: Recording, other: Recording) -> float | None:
    mine, theirs = recorded(recording, "device time"), recorded(other, "device time")
    return mine / theirs if mine and theirs else None


def _ratio_words(preset: ArticlePreset, chip: Device, device: Device | None) -> str:
    """The ratio by the models of both chips."""
    words = []
    for one in (chip, device):
        math, naive = _prediction(preset, one, "sdpa_math"), _prediction(preset, one, "naive")
        if one is not None and math is not None and naive is not None:
            words.append(f"{math.expected_s / naive.expected_s:.3g} on the {one.name}")
    return f"Another chip: the models give {' and '.join(words)}." if words else "Another chip."


def _traffic_words(
    preset: ArticlePreset,
    figure: Published,
    found: float,
    chip: Device,
    device: Device | None,
    there: Prediction,
    here: Prediction,
) -> str:
    side = "load_bytes" if figure.what == "bytes read" else "store_bytes"
    least = getattr(compulsory(preset.problem), side)
    words = (
        f"The model expects {with_unit(getattr(there.memory, side), 'B')} behind the "
        f"{with_unit(chip.cache_bytes, 'B')} cache of the {chip.name} and "
        f"{with_unit(getattr(here.memory, side), 'B')} here"
    )
    if device is not None:
        words += f" behind {with_unit(device.cache_bytes, 'B')}"
    if figure.value < 0.98 * least:
        words += (
            f". The published figure is below the {with_unit(least, 'B')} that any kernel must "
            "move, so part of the input still stood in the cache"
        )
    if found < 0.98 * least:
        words += ". Here part of what was written had not left the cache when the kernel ended"
    return words + "."


def _kernel_words(recording: Recording) -> str:
    main = next((m for c in recording.calls if (m := main_kernel(c)) is not None), None)
    if main is None:
        return "Another kernel."
    kernel, name = main
    resident = resident_warps(kernel.configuration, recording.properties(kernel))
    fits = "" if resident is None else f" {resident.sentence}"
    return f"Another kernel serves this chip: {name.words}{fits}"


def _prediction(
    preset: ArticlePreset, device: Device | None, schedule: str | None
) -> Prediction | None:
    if device is None or schedule is None:
        return None
    try:
        return predict(preset.problem, device, schedule)
    except ValueError:
        return None


def of_variant(kernels: Sequence[NcuKernel], variant: str) -> list[NcuKernel]:
    """The kernels of a variant, the longest first: by NVTX range, else its main one by name."""
    if any(kernel.ranges for kernel in kernels):
        own = [kernel for kernel in kernels if f"flashdig-rung-{variant}" in kernel.ranges]
    else:
        own = [kernel for kernel in kernels if _EXHIBIT_NAMES.get(variant, "?") in kernel.name]
    return sorted(own, key=lambda kernel: -(kernel.duration_ns or 0))
