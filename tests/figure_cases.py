"""Rows to draw figures from: of the committed record, and of runs that never were."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from flashdig.bench.results import read_record
from flashdig.generations.walk_data import Walk
from flashdig.hardware.devices import Device
from flashdig.report.figures import Missing, Picture
from flashdig.report.figures.errors import errors
from flashdig.report.figures.ladder import ladder
from flashdig.report.figures.memory_ledger import memory_ledger
from flashdig.report.figures.pipes import pipes
from flashdig.report.figures.roofline import roofline
from flashdig.report.figures.steps import steps
from flashdig.report.figures.walk_picture import walk_picture
from flashdig.report.figures.waves import waves

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "nvidia-h200" / "dig.json"
TIMED = ("ms", "ms_all", "aa_spread", "clock", "l2", "tflops", "sm_clock_mhz", "power_w", "speedup")
TIMED += ("share_of_matmul", "share_of_copy", "share_of_gain", "fwd_bwd_ms", "fwd_bwd_tflops")


@functools.cache
def recorded() -> tuple[dict[str, Any], ...]:
    return read_record(RECORD).rows


def rows_where(kinds: tuple[str, ...] = ("rung", "step"), **fields: Any) -> list[dict[str, Any]]:
    """Rows with these fields, TF32 rows apart, of the first run that has all kinds asked for."""
    found = [
        row
        for row in recorded()
        if not row["features"].get("tf32")
        and all(row.get(name) == value for name, value in fields.items())
    ]
    for run in dict.fromkeys(row["run_id"] for row in found):
        own = [row for row in found if row["run_id"] == run]
        if {row["kind"] for row in own} == set(kinds):
            return own
    raise LookupError(f"the record has no run with {kinds} and {fields}")


def default_rows() -> list[dict[str, Any]]:
    return rows_where(("rung",), preset=None, dtype="bfloat16")


def archaeology_rows() -> list[dict[str, Any]]:
    return rows_where(("rung",), preset="archaeology", dtype="float32")


def step_rows(causal: bool = False) -> list[dict[str, Any]]:
    return rows_where(preset="fa2-paper", seqlen_q=4096, head_dim=64, causal=causal)


def with_counters(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a run under Nsight Compute leaves them; the bytes are made up, another number each."""
    kept = []
    for number, row in enumerate(rows, start=1):
        bytes_moved = {
            "dram_read_bytes": 100_000_000 * number,
            "dram_write_bytes": 60_000_000 + number,
            "l2_bytes": 900_000_000,
        }
        kernel = {"name": "k<int>", "count": 2, "us": 10.0, **bytes_moved}
        counters = {**bytes_moved, "cache": "cold", "source": "Nsight Compute 2026.1"}
        kept.append({**row, "counters": {**counters, "kernels": [kernel]}})
    return kept


def without_a_gpu(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a run on the CPU leaves them: no time, no guess of one, no recorded kernels."""
    kept = []
    for row in rows:
        plain = {name: value for name, value in row.items() if name not in (*TIMED, "kernels")}
        known = ("kernels", "load_bytes", "store_bytes", "triton_load_bytes", "triton_store_bytes")
        plain["predicted"] = {name: row["predicted"].get(name) for name in known}
        kept.append(plain)
    return kept


def pictures_of(
    rows: list[dict[str, Any]], device: Device | None, walk: Walk | None = None, prefix: str = ""
) -> list[Picture | Missing]:
    """Every figure of one problem."""
    figures = [
        ladder(rows, device, f"{prefix}ladder"),
        steps(rows, f"{prefix}steps"),
        roofline(rows, device, f"{prefix}roofline"),
        memory_ledger(rows, device, f"{prefix}memory_ledger"),
        waves(rows, device, f"{prefix}waves"),
        pipes(rows, device, f"{prefix}pipes"),
        errors(rows, f"{prefix}errors"),
    ]
    return figures if walk is None else [*figures, walk_picture(walk, f"{prefix}online_softmax")]
