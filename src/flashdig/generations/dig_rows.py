"""Findings as rows of a record: plain values, one row a rung."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flashdig.bench.results import timing_fields
from flashdig.bench.rows import check_row
from flashdig.costs.prediction import Prediction
from flashdig.generations.guesses import guess, surprises
from flashdig.generations.sentences import sentence

if TYPE_CHECKING:
    from flashdig.generations.excavation import CellFindings, Found


def rows_of(findings: CellFindings, run_id: str, preset: str | None) -> list[dict[str, Any]]:
    """Rows of kind "rung", bottom rung first; unknown values are left out."""
    rows = [row_of(findings, found, run_id, preset) for found in findings.rungs]
    for row in rows:  # a row that no record would take must show before the next hour's work
        check_row(row, [run_id], f"rung {row['name']}")
    return rows


def row_of(findings: CellFindings, found: Found, run_id: str, preset: str | None) -> dict[str, Any]:
    """One rung of the ladder; unknown values are left out."""
    problem = findings.problem
    prediction = found.prediction
    traffic, kernel = prediction.traffic, prediction.triton
    tf32_problem = problem.replace(allow_tf32=findings.cell.tf32)
    row: dict[str, Any] = {
        "run_id": run_id,
        "kind": "rung",
        "pass": "forward",
        "preset": preset,
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_heads_kv": problem.num_heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "dtype": problem.dtype,
        "causal": problem.causal,
        "features": {"tf32": True} if findings.cell.tf32 else {},
        "name": found.generation.name,
        "gate": found.verdict,
        "predicted": {
            "kernels": prediction.kernels,
            "load_bytes": None if traffic is None else traffic.load_bytes,
            "store_bytes": None if traffic is None else traffic.store_bytes,
            "triton_load_bytes": None if kernel is None else kernel.load_bytes,
            "triton_store_bytes": None if kernel is None else kernel.store_bytes,
            "matmul_flops": prediction.matmul_flops,
            "scratch_bytes": prediction.scratch_bytes,
            "guessed_at": found.guessed_at,
            **_guessed_time(found.guess),
        },
        "sentence": sentence(findings, found),
        "peak_bytes": found.peak_bytes,
        "notes": _notes(findings, found),
    }
    if found.gate is not None:
        row["error"] = found.gate.error
        row["allowed_error"] = found.gate.budget
        row["eager_difference"] = found.eager_difference
    if found.counted is not None:
        counts = found.counted.counts
        row["counted"] = {
            "load_bytes": counts.load_bytes,
            "store_bytes": counts.store_bytes,
            "matmul_flops": counts.matmul_flops,
            "source": found.counted.source,
        }
    if found.kernels is not None:
        row["kernels"] = [
            {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in asdict(kernel).items()
                if value is not None
            }
            for kernel in found.kernels
        ]
    if found.counters is not None:
        row["counters"] = found.counters.to_dict()
    if found.verdict == "ok":
        row["surprises"] = [
            surprise.to_dict() for surprise in surprises(tf32_problem, findings.device, found)
        ]
    if found.timing is not None:
        row |= timing_fields(found.timing)
        row["tflops"] = findings.tflops(found)
        row["share_of_matmul"] = findings.share_of_matmul(found)
        row["share_of_copy"] = findings.share_of_copy(found)
        row["speedup"] = findings.speedup(found)
        if findings.device is not None and found.timing.sm_clock_mhz is not None:
            clock_hz = found.timing.sm_clock_mhz * 1e6
            name = found.generation.name
            at_clock = guess(name, tf32_problem, findings.device, clock_hz=clock_hz)
            row["predicted"]["at_observed_clock"] = _guessed_time(at_clock)
    if found.forward_backward is not None:
        row["fwd_bwd_ms"] = found.forward_backward.ms
        row["fwd_bwd_tflops"] = 3.5 * findings.flops / found.forward_backward.ms / 1e9
    if found.published is not None:
        row["paper_tflops"] = found.published.forward_backward_tflops
    return {name: value for name, value in row.items() if value is not None}


def _guessed_time(guessed: Prediction | None) -> dict[str, Any]:
    if guessed is None:
        return {}
    return {
        "floor_ms": guessed.floor_s * 1e3,
        "expected_ms": guessed.expected_s * 1e3,
        "limiter": guessed.limiter,
        "expected_limiter": guessed.expected_limiter,
        "clock_mhz": guessed.expected_clock_hz / 1e6,
        "memory_load_bytes": guessed.memory.load_bytes,
        "memory_store_bytes": guessed.memory.store_bytes,
        "programs": guessed.programs,
        "occupancy": guessed.occupancy,
        "waves": guessed.waves,
    }


def _notes(findings: CellFindings, found: Found) -> str | None:
    """What a reader must know beside the figures, one line."""
    notes = []
    if found.untimed is not None:
        notes.append(found.untimed)
    if found.uncounted is not None:
        notes.append(f"not counted: {found.uncounted}")
    published = found.published
    if published is not None and published.ms is not None:
        notes.append(f"the article measured {published.ms:g} ms on {published.chip}")
    if published is not None and published.forward_backward_tflops is not None:
        notes.append(
            f"the paper's {published.forward_backward_tflops:g} TFLOP/s are forward plus backward "
            f"on {published.chip}"
        )
    if found.timing is not None and findings.ceilings is not None:
        rate = findings.ceilings.matmul_tflops.get(findings.cell.precision)
        copy = findings.ceilings.copy_tb_per_s
        if rate is not None and copy is not None:
            notes.append(f"same run: matmul {rate:.0f} TFLOP/s, copy {copy:.2f} TB/s")
    return "; ".join(notes) or None
