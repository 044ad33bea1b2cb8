"""Measured memory traffic of the rungs that ran: the chip's own counters, by Nsight Compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashdig.evidence.counters import Plan, read_counters

if TYPE_CHECKING:
    from flashdig.generations.excavation import CellFindings, Progress
    from flashdig.generations.inputs import QKV


def read_memory_counters(findings: CellFindings, inputs: QKV, progress: Progress) -> None:
    """Fill in `counters` of each rung that passed its gate; what could not be read is a note."""
    if inputs.q.device.type != "cuda":
        findings.notes.append("Memory counters are a GPU's: none were read.")
        return
    ready = {found.generation.name: found for found in findings.rungs if found.verdict == "ok"}
    if not ready:
        return
    progress("memory counters, under Nsight Compute")
    launched = {
        name: sum(kernel.count for kernel in found.kernels or () if kernel.is_kernel)
        for name, found in ready.items()
    }
    plan = Plan(launched, inputs.q, inputs.k, inputs.v, findings.problem.causal, findings.cell.tf32)
    counters, notes = read_counters(plan)
    for name, counted in counters.items():
        ready[name].counters = counted
    findings.notes += notes
