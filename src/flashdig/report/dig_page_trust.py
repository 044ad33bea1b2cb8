"""Why a page's figures can be trusted: where, how, how often, how steadily they were measured."""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdig.bench.results import Run
from flashdig.costs.units import with_unit
from flashdig.report.dig_page_record import Dig
from flashdig.report.dig_table import Row

# a reading this near to the highest clock is no slowing down: the driver moves in steps of 15 MHz
_FULL_CLOCK = 0.975
Facts = list[tuple[str, str]]


def trust(dig: Dig) -> Facts:
    """(name, value) about the main problem's ladder, as measured."""
    rows = dig.main.ladder or dig.main.rows
    ran = [row for row in rows if row["gate"] == "ok"]
    timed = [row for row in ran if "ms" in row]
    facts = [("gate", _gate(rows, ran)), ("data", _data(dig.main_run))]
    if timed:
        facts += _measurement(dig, timed)
    else:
        facts.append(("times", "none: without a GPU nothing is timed, and no speed is claimed"))
    facts.append(("counts", _counts(ran)))
    if any("counters" in row for row in ran):
        facts.append(("memory counters", _counters(ran)))
    guessed = sorted(r["predicted"]["guessed_at"] for r in rows if _guessed_at(r) is not None)
    if guessed:
        facts.append(("guesses", f"written down from {guessed[0]} on, each before its rung ran"))
    return facts


def _guessed_at(row: Row) -> str | None:
    found: str | None = row.get("predicted", {}).get("guessed_at")
    return found


def _gate(rows: Sequence[Row], ran: Sequence[Row]) -> str:
    refused = [row for row in rows if row["gate"].startswith("not run")]
    wrong = [row["name"] for row in rows if row not in ran and row not in refused]
    said = f"{len(ran)} of {len(rows)} rungs ran and agree with float64"
    if refused:
        said += f"; {len(refused)} could not run here"
    if wrong:
        said += f"; wrong: {', '.join(wrong)}"
    return said


def _data(run: Run) -> str:
    """Where q, k and v came from, as the command says."""
    try:
        words = shlex.split(run.command)
    except ValueError:
        words = run.command.split()
    for option, what in (("--text", "MiniLM's q, k, v of a text"), ("--input", "given q, k, v")):
        if any(word == option or word.startswith(f"{option}=") for word in words):
            return f"{what} (see the command)"
    seed = re.search(r"--seed[ =](-?\d+)", run.command)
    return f"random normal q, k, v, seed {seed[1] if seed else 0}"


def _measurement(dig: Dig, timed: Sequence[Row]) -> Facts:
    clocks = {"graph": "CUDA graph replay", "events": "CUDA events", "host": "the host's clock"}
    how = ", ".join(sorted({clocks[row["clock"]] for row in timed}))
    l2 = " and ".join(sorted({row["l2"] for row in timed}))
    rounds = sorted({len(row["ms_all"]) for row in timed})
    spreads = [float(row["aa_spread"]) for row in timed]
    facts = [
        ("times", f"kernel time by {how}, {l2} L2 cache"),
        (
            "samples",
            f"{' or '.join(map(str, rounds))} rounds, rotated over the rungs, each rung measured "
            "twice a round; the figure is the median",
        ),
        (
            "A/A spread",
            f"{100 * statistics.median(spreads):.2g} % (median of the rungs), "
            f"{100 * max(spreads):.2g} % at most",
        ),
        ("clocks and throttling", _clock(dig, timed)),
    ]
    powers = [float(row["power_w"]) for row in timed if "power_w" in row]
    if powers:
        limit = dig.main_run.environment.get("power_limit_w")
        of = "" if limit is None else f" of at most {limit:g} W"
        facts.append(("power", f"{min(powers):.0f} to {max(powers):.0f} W{of}, as the driver says"))
    rates = sorted(
        set(re.findall(r"same run: ([^;]+)", "; ".join(r.get("notes", "") for r in timed)))
    )
    if rates:
        facts.append(("rates of the same run", "; ".join(rates)))
    return facts


def _clock(dig: Dig, timed: Sequence[Row]) -> str:
    """The SM clock under each rung; a throttled chip shows as one that fell."""
    seen = {row["name"]: float(row["sm_clock_mhz"]) for row in timed if "sm_clock_mhz" in row}
    if not seen:
        return "not read: NVML was not there, so that a slowed-down chip would not be noticed"
    low, high = min(seen.values()), max(seen.values())
    span = f"{low:.0f} MHz" if low == high else f"{low:.0f} to {high:.0f} MHz"
    said = f"SM clock {span} while the rungs ran"
    device = dig.device
    if device is None:
        return f"{said}; the highest clock of this chip is not known"
    highest = device.highest_clock_hz / 1e6
    if low >= _FULL_CLOCK * highest:
        return f"{said}, of at most {highest:.0f} MHz: no sign of throttling"
    slowed = ", ".join(name for name, clock in seen.items() if clock < _FULL_CLOCK * highest)
    return f"{said}, of at most {highest:.0f} MHz: slowed down (by power or heat) in {slowed}"


def _counts(ran: Sequence[Row]) -> str:
    sources = sorted({row["counted"]["source"] for row in ran if "counted" in row})
    if not sources:
        return "none: bytes are predicted alone"
    words = {"interpreter": "Triton's interpreter, in this run", "golden file": "a committed file"}
    named = " and ".join(words.get(source, source) for source in sources)
    return f"of the Triton rungs, by {named}; each must equal its closed form to the byte"


def _counters(ran: Sequence[Row]) -> str:
    read = [row for row in ran if "counters" in row]
    sources = " and ".join(sorted({row["counters"]["source"] for row in read}))
    return (
        f"of {len(read)} of {len(ran)} rungs, by {sources}, in a run of their own: each kernel "
        "alone and from a cold L2 cache"
    )


@dataclass(frozen=True)
class Machine:
    """Runs that were made in one environment.

    Attributes:
        runs: (run_id, when, command and revision), oldest first.
        environment: what they ran on.
    """

    runs: Sequence[tuple[str, Facts]]
    environment: Facts


def machines(runs: Mapping[str, Run]) -> list[Machine]:
    """The runs by environment, in the order of their first run."""
    groups: list[tuple[Mapping[str, Any], list[Run]]] = []
    for run in runs.values():
        known = next((own for environment, own in groups if environment == run.environment), None)
        if known is None:
            groups.append((run.environment, [run]))
        else:
            known.append(run)
    return [
        Machine([(run.run_id, _run_facts(run)) for run in own], _environment_facts(environment))
        for environment, own in groups
    ]


def _run_facts(run: Run) -> Facts:
    return [
        ("started", run.started),
        ("command", run.command),
        ("revision", run.revision or "not known: no git checkout"),
    ]


def _environment_facts(seen: Mapping[str, Any]) -> Facts:
    facts: Facts = [] if seen.get("gpu") is not None else [("GPU", "none")]
    for name, words in _ENVIRONMENT.items():
        value = seen.get(name)
        if value is None:
            continue
        if name == "memory_bytes" and isinstance(value, int | float):
            value = with_unit(value, "B")
        facts.append((words, f"{value:g} W" if name == "power_limit_w" else str(value)))
    return facts


_ENVIRONMENT = {
    "gpu": "GPU",
    "compute_capability": "compute capability",
    "sm_count": "SMs",
    "memory_bytes": "GPU memory",
    "power_limit_w": "power limit",
    "driver": "driver",
    "nvml": "NVML",
    "torch": "torch",
    "triton": "Triton",
    "cuda": "CUDA",
    "cudnn": "cuDNN",
    "numpy": "numpy",
    "python": "Python",
    "flashdig": "flashdig",
    "platform": "platform",
    "cpu": "CPU",
    "cpu_count": "CPU cores",
}
