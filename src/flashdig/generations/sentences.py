"""Says in a sentence what a rung did against the rung below it, from what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.traffic import compulsory
from flashdig.costs.units import with_unit

if TYPE_CHECKING:
    from flashdig.generations.excavation import CellFindings, Found


def sentence(findings: CellFindings, found: Found) -> str:
    """One or two sentences; numbers come from the findings, causes from the rung's structure."""
    if found.verdict != "ok":
        return _capitalised(f"{found.verdict}.")
    cause = _CAUSES.get(found.generation.name, _fused)(findings, found)
    below = findings.below(found.generation.name)
    speedup = findings.speedup(found)
    if below is None or speedup is None:
        return _capitalised(f"{cause}.")
    return f"{_compared(speedup, below.generation.name)}: {cause}."


def _compared(speedup: float, name: str) -> str:
    if speedup >= 1.02:
        return f"{speedup:.2f}x faster than {name}"
    if speedup <= 0.98:
        return f"{1 / speedup:.2f}x slower than {name}"
    return f"As fast as {name}"


def _naive(findings: CellFindings, found: Found) -> str:
    least = compulsory(findings.problem).total_bytes
    moved = findings.moved_bytes(found)
    return (
        f"every operation reads and writes the whole score matrix: {_bytes(moved)} where "
        f"{_bytes(least)} cannot be avoided"
    )


def _inplace(findings: CellFindings, found: Found) -> str:
    if not findings.problem.causal:
        return "without a mask there is nothing to do in place; the two rungs are one"
    return "the mask is written in place, so the copy of the score matrix and its memory are gone"


def _math(findings: CellFindings, found: Found) -> str:
    launches = ""
    if found.kernels is not None:
        launches = f"{sum(k.count for k in found.kernels if k.is_kernel)} kernels, "
    wide = findings.problem.element_bytes == 2
    reason = "its products and matrices are float32" if wide else "the reference stays careful"
    return f"{launches}{reason}, with a mask made in every call and a guarded softmax"


def _online_softmax(findings: CellFindings, found: Found) -> str:
    return (
        "scale, mask and softmax are one kernel that reads the scores twice and writes them once; "
        "they are still a matrix in memory"
    )


def _v1(findings: CellFindings, found: Found) -> str:
    problem = findings.problem
    programs = problem.batch * problem.num_heads
    return (
        f"the score matrix is gone, but O and its statistics go through memory for every tile of "
        f"keys ({_bytes(_stored(found))} stored for {_bytes(_output(findings))} of "
        f"output) and the grid has only {programs:,} programs, each walking all queries"
    )


def _v2(findings: CellFindings, found: Found) -> str:
    problem = findings.problem
    tile = exhibit_tile(problem.head_dim, problem.element_bytes)
    heads = problem.batch * problem.num_heads
    programs = heads * -(-problem.seqlen_q // tile.block_m)
    skipped = ", hidden tiles are skipped" if problem.causal else ""
    grid = f"the grid grew from {heads:,} to {programs:,} programs"
    if programs == heads:
        grid = f"one tile holds all queries, so the grid keeps its {heads:,} programs"
    return (
        f"O stays in registers and is stored once ({_bytes(_stored(found))}), the "
        f"division left the loop{skipped}, and {grid}"
    )


def _v2_transposed(findings: CellFindings, found: Found) -> str:
    speedup = findings.speedup(found)
    copy = ""
    if found.kernels and len(found.kernels) > 1 and found.timing is not None:
        inside = max(kernel.us for kernel in found.kernels)
        total = sum(kernel.us for kernel in found.kernels)
        copy = f" (the copy takes {100 * (1 - inside / total):.0f} % of the time)"
    on_cuda_cores = findings.cell.precision == "float32"
    if speedup is None:
        return "K is transposed once in memory instead of inside every tile, for one more copy"
    if speedup >= 1.02:
        return f"tiles of K are no longer transposed inside, which pays for the copy{copy}"
    if on_cuda_cores:
        return (
            "this chip and compiler already read K's tile without the conflicts that the article's "
            f"card met, so only the copy is added{copy}"
        )
    return (
        "tensor cores read K from shared memory in either layout, so there is no transpose to "
        f"save and only the copy is added{copy}"
    )


def _fused(findings: CellFindings, found: Found) -> str:
    if findings.device_name == "cpu":
        return "torch's fused CPU kernel: the same tiles and online softmax for a CPU's caches"
    main = ""
    if found.kernels:
        largest = max(found.kernels, key=lambda kernel: kernel.us)
        main = f" ({_short(largest.name)})"
    share = findings.share_of_matmul(found)
    part = "" if share is None else f", {100 * share:.0f} % of the matmul rate of the same run"
    claim = found.generation.claim.rstrip(".").split(";")[0]
    return f"{_lowered(claim)}{main}{part}"


_CAUSES = {
    "naive": _naive,
    "inplace": _inplace,
    "sdpa_math": _math,
    "online_softmax": _online_softmax,
    "v1": _v1,
    "v2": _v2,
    "v2_transposed": _v2_transposed,
}


def _output(findings: CellFindings) -> int:
    problem = findings.problem
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return rows * problem.head_dim_v * problem.element_bytes


def _stored(found: Found) -> int:
    kernel = found.prediction.triton
    return 0 if kernel is None else kernel.store_bytes


def _bytes(amount: int) -> str:
    return with_unit(amount, "B")


def _short(kernel_name: str) -> str:
    """The part of a kernel's name before templates and arguments."""
    name = kernel_name.removeprefix("void ").split("<")[0].split("(")[0]
    return name if len(name) <= 60 else f"{name[:57]}..."


def _capitalised(text: str) -> str:
    return text if text.startswith(("v1", "v2")) else text[:1].upper() + text[1:]


def _lowered(text: str) -> str:
    return text if text[:2].isupper() else text[:1].lower() + text[1:]
