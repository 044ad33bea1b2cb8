"""A study of a preset as rows of a record (`benchmarks/results/<gpu>/<suite>.json`)."""

from __future__ import annotations

import json
from typing import Any

from flashdig.findings.explanation import UNEXPLAINED
from flashdig.findings.presets import ArticlePreset
from flashdig.findings.study import Section, Study

# of the manifest, as a record calls them
_TIMING = ("ms", "ms_all", "aa_spread", "sm_clock_mhz", "power_w")


def record_rows(preset: ArticlePreset, study: Study) -> list[dict[str, Any]]:
    """One row a variant: the guess, what was found, surprises with causes, findings."""
    # tuples become lists, as the file will hold them
    return [json.loads(json.dumps(_row(preset, section))) for section in study.sections]


def _row(preset: ArticlePreset, section: Section) -> dict[str, Any]:
    problem, facts = preset.problem, section.facts
    row: dict[str, Any] = {
        "kind": "rung",
        "pass": "forward",
        "batch": problem.batch,
        "num_heads": problem.num_heads,
        "num_heads_kv": problem.num_heads_kv,
        "seqlen_q": problem.seqlen_q,
        "seqlen_k": problem.seqlen_k,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "dtype": problem.dtype,
        "causal": problem.causal,
        "name": section.name,
        "preset": preset.name,
        "gate": str(facts.get("gate") or "not run: not in the manifest"),
        "findings": [finding.to_dict() for finding in section.findings],
        "explained": [one.to_dict() for one in section.explanations],
        "surprises": [
            {
                "what": one.what,
                "predicted": one.guessed,
                "found": one.found,
                "tolerance": 0.3,
                "cause": one.cause or UNEXPLAINED,
            }
            for one in section.surprises
            if isinstance(one.guessed, int | float) and isinstance(one.found, int | float)
        ],
    }
    if section.notes:
        row["notes"] = " ".join(section.notes)
    for name in ("error", "allowed_error", "host_ms"):
        if facts.get(name) is not None:
            row[name] = facts[name]
    if facts.get("ms") is not None and row["gate"] == "ok":
        row |= {name: facts[name] for name in _TIMING if facts.get(name) is not None}
        row |= {"clock": "graph", "l2": "warm", "ms_all": list(facts["ms_all"])}
    return row
