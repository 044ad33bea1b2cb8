"""Nsight Compute's own reports (`.ncu-rep`) through the optional package `ncu-report`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from flashdig.readers import ncu_units
from flashdig.readers.ncu_metrics import kernel_from_metrics
from flashdig.readers.ncu_model import NcuKernel
from flashdig.readers.open_file import UnreadableFileError

REPORT_MAGIC = b"NVR\x00"


def read_report(path: str) -> list[NcuKernel]:
    """The kernels of a report, in its order.

    Raises UnreadableFileError when the package is missing, or for a file without kernels.
    """
    library = _library(path)
    try:
        report = library.load_report(path)
    except (OSError, RuntimeError, ValueError) as error:
        raise UnreadableFileError(f"{path}: {error}") from error
    kernels = [
        _kernel(library, action, number, path)
        for number, action in enumerate(action for group in report for action in group)
    ]
    if not kernels:
        raise UnreadableFileError(
            f"{path}: the report holds no kernel; it is empty, damaged or of a newer version"
        )
    return kernels


def _library(path: str) -> ModuleType:
    try:
        import ncu_report
    except ImportError as error:
        raise UnreadableFileError(
            f"{path}: reading a report needs the package ncu-report "
            "(pip install 'flashdig[ncu]'); or export it with: "
            f"ncu --import {Path(path).name} --csv --page raw"
        ) from error
    return ncu_report  # type: ignore[no-any-return]


def _kernel(library: ModuleType, action: Any, number: int, path: str) -> NcuKernel:
    metrics: dict[str, float | str] = {}
    for name in action.metric_names():
        metric = action.metric_by_name(name)
        if metric is None or not metric.has_value():
            continue
        value = metric.value()
        if isinstance(value, str):
            metrics[name] = value
        elif isinstance(value, int | float):
            metrics[name] = float(value) * 10.0 ** ncu_units.power_of_ten(metric.unit() or "")
    return kernel_from_metrics(
        number=number,
        name=action.name(library.IAction.NameBase_DEMANGLED),
        source=path,
        metrics=metrics,
        grid=_dimensions(metrics, "launch__grid_dim_"),
        block=_dimensions(metrics, "launch__block_dim_"),
        device=_whole(metrics, "launch__device_id"),
        compute_capability=_capability(metrics),
    )


def _whole(metrics: dict[str, float | str], name: str) -> int | None:
    value = metrics.get(name)
    return round(value) if isinstance(value, float) else None


def _dimensions(metrics: dict[str, float | str], stem: str) -> tuple[int, int, int] | None:
    x, y, z = (_whole(metrics, stem + axis) for axis in "xyz")
    return None if x is None or y is None or z is None else (x, y, z)


def _capability(metrics: dict[str, float | str]) -> tuple[int, int] | None:
    major = _whole(metrics, "device__attribute_compute_capability_major")
    minor = _whole(metrics, "device__attribute_compute_capability_minor")
    return None if major is None or minor is None else (major, minor)
