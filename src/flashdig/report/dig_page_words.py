"""Sentences of a dig's page that are not in the record: its verdict and what each section shows."""

from __future__ import annotations

from collections.abc import Sequence

from flashdig.costs.units import with_unit
from flashdig.report.dig_page_findings import Comparison
from flashdig.report.dig_page_record import Dig, Problem
from flashdig.report.dig_table import Row

SECTIONS = {
    "ladder": "Each rung does what one generation of attention did, in as little code as shows it. "
    "It was first predicted, then checked against float64, then measured.",
    "ladder_untimed": "Each rung does what one generation of attention did, in as little code as "
    "shows it. It was first predicted, then checked against float64; its bytes were counted where "
    "Triton's interpreter can run it.",
    "guesses": "Guesses of times are at the clock that was observed. Surprises come first, the "
    "largest on top; below them is what came as guessed.",
    "guesses_untimed": "Without a GPU only counts can be compared. Surprises come first, the "
    "largest on top; below them is what came as guessed.",
    "no_guesses": "Nothing here could be compared with a guess.",
    "roofs": "What holds each rung back: the lowest roof above it. A point far below all roofs "
    "waits for something else.",
    "memory": "What moves between memory and the chip, tensor by tensor: what is compulsory, what "
    "the kernels ask for (issued, and counted in the interpreter), what is expected to be left "
    "behind the L2 cache, and what was measured where a counter was read.",
    "grid": "Which program works on which tile, and how the grids of v1 and v2 fill the chip's SMs "
    "wave by wave.",
    "pipes": "How long one tile of scores keeps each pipe of an SM busy. The longest bar is what "
    "the loop waits for, however short the others are.",
    "sass": "What the compiler made of the two kernels for this chip: figures of a thread and a "
    "block, instructions of the whole kernel and of its inner loop, and the cycles that the loop "
    "keeps each pipe busy.",
    "steps": "v2 differs from v1 by several changes. Taken one at a time, each shows what it is "
    "worth: first on the way from v1 to v2, then as what v2 loses without it.",
    "no_steps": "This record took no steps apart; flashdig dig --steps does.",
    "walk": "The loop that all fused generations share, on numbers small enough to check by hand, "
    "and what goes wrong when one of its formulas slips.",
    "errors": "The largest difference of any output element from float64. A rung whose error is "
    "beyond the gate has no time on this page.",
    "others": "The same ladder on every other problem of the record. Each opens to its rungs, what "
    "changed, and what surprised.",
}


def machine(dig: Dig) -> str:
    return dig.gpu or "no GPU"


def verdict(dig: Dig, problem: Problem, compared: Sequence[Comparison]) -> list[str]:
    """What matters most on one problem, a sentence each; of the main one, where it was met."""
    rows = problem.ladder
    timed = [row for row in rows if "ms" in row]
    on = f"On {dig.gpu}, " if problem is dig.main and dig.gpu is not None else ""
    said = _speed(timed, on) if timed else _counts(rows, dig.gpu)
    surprising = [one for one in compared if one.is_surprise]
    if surprising:
        worst = surprising[0]
        said.append(
            f"{len(surprising)} of {len(compared)} guesses missed their tolerance, most of all "
            f"{worst.rung}'s {worst.what}: {worst.guessed} guessed, {worst.found} found."
        )
    elif compared:
        said.append(f"All {len(compared)} guesses hold within their tolerance.")
    return [*said, _agreement(rows)] if rows else said


def _speed(timed: Sequence[Row], on: str) -> list[str]:
    fastest, bottom = min(timed, key=lambda row: float(row["ms"])), timed[0]
    said = f"{on}{fastest['name']} is the fastest rung: {_ms(fastest['ms'])}"
    if "tflops" in fastest:
        said += f", {fastest['tflops']:.0f} TFLOP/s"
    if "share_of_matmul" in fastest:
        said += f", {100 * fastest['share_of_matmul']:.0f} % of the matmul rate of the same run"
    if fastest is not bottom:
        said += f", {_times(bottom['ms'] / fastest['ms'])} as fast as {bottom['name']}"
    sentences = [f"{said}."]
    by_name = {row["name"]: row for row in timed}
    if "v1" in by_name and "v2" in by_name:
        v1, v2 = by_name["v1"]["ms"], by_name["v2"]["ms"]
        how = "faster" if v2 <= v1 else "slower"
        ratio = max(v1, v2) / min(v1, v2)
        sentences.append(f"v2 takes {_ms(v2)}, {ratio:.3g} times {how} than v1.")
    return sentences


def _counts(rows: Sequence[Row], gpu: str | None) -> list[str]:
    where = "No GPU: no time was measured." if gpu is None else "No time was measured."
    counted = {row["name"]: row["counted"]["store_bytes"] for row in rows if "counted" in row}
    v1, v2 = counted.get("v1"), counted.get("v2")
    if v1 is None or v2 is None:
        return [where]
    return [
        where,
        f"As counted, v2 stores {with_unit(v2, 'B')} where v1 stores {with_unit(v1, 'B')}: "
        "O and its statistics no longer go through memory for every tile of keys.",
    ]


def _agreement(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if not row["gate"].startswith("not run")]
    wrong = [row["name"] for row in ran if row["gate"] != "ok"]
    if wrong:
        return f"Wrong results, which have no times: {', '.join(wrong)}."
    if not ran:
        return "No rung could run here."
    if len(ran) < len(rows):
        return f"{len(ran)} of {len(rows)} rungs ran here, and all agree with float64."
    return f"All {len(rows)} rungs agree with float64."


def is_timed(rows: Sequence[Row]) -> bool:
    return any("ms" in row for row in rows)


def tiles(dig: Dig, compared: Sequence[Comparison]) -> list[tuple[str, str]]:
    """(value, words) of the figures at the top."""
    rows = dig.main.ladder
    timed = [row for row in rows if "ms" in row]
    found = []
    if timed:
        fastest = min(timed, key=lambda row: float(row["ms"]))
        found += [
            (_ms(fastest["ms"]), f"fastest: {fastest['name']}"),
            (_times(timed[0]["ms"] / fastest["ms"]), f"as fast as {timed[0]['name']}"),
        ]
        if "tflops" in fastest:
            found.append((f"{fastest['tflops']:.0f} TFLOP/s", fastest["name"]))
    errors = [float(row["error"]) for row in rows if "error" in row and row["gate"] == "ok"]
    if errors:
        found.append((f"{max(errors):.1e}", "largest error against float64"))
    if compared:
        surprising = sum(one.is_surprise for one in compared)
        found.append((f"{surprising} of {len(compared)}", "guesses surprised"))
    return found


def share_words(fraction: float) -> str:
    return f"{whole_percent(fraction)} of the gain"


def whole_percent(fraction: float) -> str:
    """Without a sign before 0."""
    return f"{round(100 * fraction)} %"


def _times(ratio: float) -> str:
    return f"{ratio:.3g} times"


def _ms(ms: float) -> str:
    return f"{ms:.3f} ms" if ms < 100 else f"{ms:.0f} ms"
