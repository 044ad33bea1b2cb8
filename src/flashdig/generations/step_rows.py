"""The steps from v1 to v2 as rows: what each is worth on the way, and what v2 loses without it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashdig.bench.rows import check_row
from flashdig.evidence.offline import Compiled, OfflineError, Request, compile_exhibits
from flashdig.generations.dig_rows import row_of
from flashdig.generations.excavation import speedup_over
from flashdig.generations.guesses import guess
from flashdig.generations.ladder import PAIR
from flashdig.generations.steps_paths import CUMULATIVE, LEAVE_ONE_OUT, NO_STEP, step_generations

if TYPE_CHECKING:
    from flashdig.generations.excavation import CellFindings, Found
    from flashdig.problem import AttentionProblem

# instructions by which warps of a block wait for each other and exchange data
EXCHANGE = ("BAR", "SHFL", "LDS", "LDSM", "STS", "STSM", "HMMA")


def step_exhibits(problem: AttentionProblem, device_type: str) -> list[str]:
    """Names of both paths, and on a GPU of the pair split-Q and split-K."""
    names = [exhibit.name for exhibit in step_generations(problem)]
    return names + (list(PAIR) if device_type == "cuda" else [])


def step_rows_of(findings: CellFindings, run_id: str, preset: str | None) -> list[dict[str, Any]]:
    """Rows of kind "step" in the order of `step_exhibits`.

    A cumulative step carries its `speedup` over the step before and its `share_of_gain`: its part
    of the logarithm of v1's time over v2's, so that the parts add up to 1. A left-out step carries
    as `speedup` v2's time over its own, split-Q its own over split-K's.
    """
    by_name = {found.generation.name: found for found in findings.rungs}
    instructions = _instructions(findings)
    rows = []
    for found in findings.rungs:
        name = found.generation.name
        row = row_of(findings, found, run_id, preset)
        row["kind"] = "step"
        row.pop("speedup", None)
        row["features"] = {**row["features"], "path": path_of(name), **instructions.get(name, {})}
        _add_floor(row, findings, found)
        compared = _compared_with(name, by_name, [f.generation.name for f in findings.rungs])
        speedup = speedup_over(compared, found)
        if speedup is not None:
            row["speedup"] = speedup
        share = _share_of_gain(found, compared, by_name, findings.problem)
        if share is not None:
            row["share_of_gain"] = share
        row["sentence"] = _sentence(found, row, compared)
        rows.append(row)
        check_row(row, [run_id], f"step {name}")
    return rows


def path_of(name: str) -> str:
    if name.startswith(CUMULATIVE):
        return "cumulative"
    return "leave-one-out" if name.startswith(LEAVE_ONE_OUT) else "pair"


def v2_step(problem: AttentionProblem) -> str:
    """The cumulative step that completes v2."""
    return f"{CUMULATIVE}{'causal_skipping' if problem.causal else 'lse'}"


def _compared_with(name: str, by_name: dict[str, Found], names: list[str]) -> Found | None:
    """The step before on the path, v2 for a left-out step, split-K for split-Q."""
    if name == "split_q":
        return by_name.get("split_k")
    if name.startswith(LEAVE_ONE_OUT):
        completed = [n for n in names if n.startswith(CUMULATIVE) and not n.endswith("k_layout")]
        return by_name[completed[-1]] if completed else None
    position = names.index(name)
    if path_of(name) == "cumulative" and position > 0:
        return by_name[names[position - 1]]
    return None


def _share_of_gain(
    found: Found, before: Found | None, by_name: dict[str, Found], problem: AttentionProblem
) -> float | None:
    first = by_name.get(f"{CUMULATIVE}{NO_STEP}")
    last = by_name.get(v2_step(problem))
    name = found.generation.name
    if path_of(name) != "cumulative" or name.endswith("k_layout") or before is None:
        return None
    timings = [f.timing if f is not None else None for f in (first, last, before, found)]
    if any(timing is None for timing in timings):
        return None
    v1, v2, previous, own = (timing.ms for timing in timings if timing is not None)
    return math.log(previous / own) / math.log(v1 / v2) if v1 != v2 else None


def _add_floor(row: dict[str, Any], findings: CellFindings, found: Found) -> None:
    """The floor at the observed clock; a set of steps has no expected time of its own."""
    if findings.device is None or found.timing is None or found.timing.sm_clock_mhz is None:
        return
    problem = findings.problem.replace(allow_tf32=findings.cell.tf32)
    at_clock = guess(
        "v2",  # the chip's roofs alone: v1's floor is higher where its grid reaches fewer SMs
        problem,
        findings.device,
        clock_hz=found.timing.sm_clock_mhz * 1e6,
    )
    if at_clock is not None:
        row["predicted"]["at_observed_clock"] = {
            "floor_ms": at_clock.floor_s * 1e3,
            "limiter": at_clock.limiter,
        }


def _instructions(findings: CellFindings) -> dict[str, dict[str, Any]]:
    """Static counts of the pair, compiled for the GPU at hand."""
    if findings.device is None:
        return {}
    arch = f"sm_{findings.device.architecture.replace('.', '')}"
    ran = [f for f in findings.rungs if f.generation.name in PAIR and f.verdict == "ok"]
    requests = [Request(f.generation.name, findings.problem, arch) for f in ran]
    if not requests:
        return {}
    compiled: list[list[Compiled]]
    try:
        compiled = compile_exhibits(requests)
    except OfflineError as error:
        findings.notes.append(f"the pair's instructions were not counted: {error}")
        return {}
    return {
        request.exhibit: {
            "instructions": {family: kernels[0].count(family) for family in EXCHANGE},
            "registers": kernels[0].registers,
        }
        for request, kernels in zip(requests, compiled, strict=True)
    }


def _sentence(found: Found, row: dict[str, Any], compared: Found | None) -> str:
    if found.verdict != "ok":
        return f"{found.verdict[:1].upper()}{found.verdict[1:]}."
    speedup = row.get("speedup")
    if speedup is None or compared is None:
        return found.generation.claim
    if path_of(found.generation.name) == "leave-one-out":
        return f"v2 without it is {1 / speedup:.2f}x slower."
    share = row.get("share_of_gain")
    part = "" if share is None else f", {100 * share:.0f} % of the way from v1 to v2"
    name = compared.generation.name
    return f"{speedup:.2f}x over {name}{part}. {found.generation.claim}"
