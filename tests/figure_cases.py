"""Rows to draw figures from: of the committed record, and of runs that never were."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from flashdig.bench.results import read_record

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


def without_a_gpu(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a run on the CPU leaves them: no time, no guess of one, no recorded kernels."""
    kept = []
    for row in rows:
        plain = {name: value for name, value in row.items() if name not in (*TIMED, "kernels")}
        known = ("kernels", "load_bytes", "store_bytes", "triton_load_bytes", "triton_store_bytes")
        plain["predicted"] = {name: row["predicted"].get(name) for name in known}
        kept.append(plain)
    return kept
