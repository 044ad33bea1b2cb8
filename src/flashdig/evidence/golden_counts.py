"""Interpreter counts of the presets' problems, kept in a file for machines without an interpreter.

    python -m flashdig.evidence.golden_counts            counts again and rewrites the file

Counts are those of one (batch, head) pair; all pairs of a problem do the same work.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    from flashdig.evidence.interpreter import Counts

FILE = Path(__file__).with_name("golden_counts.json")
# longer problems would take the interpreter minutes
LONGEST_SEQLEN = 4096


def key(name: str, problem: AttentionProblem) -> str:
    """What the counts of one (batch, head) pair depend on."""
    mask = "causal" if problem.causal else "full"
    lengths = f"q{problem.seqlen_q}_k{problem.seqlen_k}"
    return f"{name}/{lengths}_d{problem.head_dim}_{problem.element_bytes}bytes_{mask}"


def golden_counts(name: str, problem: AttentionProblem) -> Counts | None:
    """The kept counts of an exhibit, for the whole problem; None where there are none."""
    from flashdig.evidence.interpreter import Counts

    found = json.loads(FILE.read_text())["per_head"].get(key(name, problem))
    if found is None:
        return None
    return Counts(**found).times(problem.batch * problem.num_heads)


def count_presets() -> dict[str, dict[str, int]]:
    """Count every preset problem up to LONGEST_SEQLEN in the interpreter."""
    import dataclasses

    import torch

    from flashdig.evidence.interpreter import Job, run_in_interpreter
    from flashdig.generations.ladder import RUNGS, generation
    from flashdig.generations.presets import PRESETS

    names = tuple(name for name in RUNGS if generation(name).is_triton)
    problems = {
        cell.problem.replace(
            batch=1,
            num_heads=1,
            num_heads_kv=1,
            dtype="float32" if cell.problem.element_bytes == 4 else "float16",
        )
        for preset in PRESETS.values()
        for cell in preset.cells
        if cell.problem.seqlen_q <= LONGEST_SEQLEN
    }
    counted = {}
    for problem in sorted(problems, key=lambda p: (p.seqlen_q, p.head_dim, p.dtype, p.causal)):
        q = torch.randn(1, 1, problem.seqlen_q, problem.head_dim).to(getattr(torch, problem.dtype))
        print(problem.describe(), flush=True)
        job = Job(names, q, q, q, problem.causal)
        (runs,) = run_in_interpreter([job], timeout_s=3600)
        for name, run in runs.items():
            counted[key(name, problem)] = dataclasses.asdict(run.counts)
    return counted


if __name__ == "__main__":
    text = {"per_head": dict(sorted(count_presets().items()))}
    FILE.write_text(json.dumps(text, indent=1) + "\n")
