"""What figures read from the rows of one problem: its rungs, steps, times, guesses and looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashdig.costs.predict import UnknownGenerationError, predict
from flashdig.costs.prediction import Prediction
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem, Mask
from flashdig.report.figures.style import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    bar_style,
    hollow_style,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

LONGEST_NAME = 22


@dataclass(frozen=True)
class Look:
    """How a rung looks in every figure: the colour of its family, a marker of its own."""

    family: str
    colour: str
    marker: str


_UNFUSED = ("scores in memory", VERMILLION)
_V1 = ("keys outside, O in memory", ORANGE)
_V2 = ("queries outside, O in registers", BLUE)
_LIBRARY = ("library kernel", GREEN)
_OTHER = ("other", PURPLE)
_LOOKS = {
    "naive": Look(*_UNFUSED, "o"),
    "inplace": Look(*_UNFUSED, "s"),
    "sdpa_math": Look(*_UNFUSED, "X"),
    "online_softmax": Look(*_UNFUSED, "D"),
    "v1": Look(*_V1, "^"),
    "v2": Look(*_V2, "v"),
    "v2_transposed": Look(*_V2, "<"),
    "sdpa_efficient": Look(*_LIBRARY, "P"),
    "sdpa_flash": Look(*_LIBRARY, "h"),
    "sdpa_cudnn": Look(*_LIBRARY, "*"),
    "v3": Look("asynchronous", SKY, "p"),
    "v4": Look("asynchronous", SKY, ">"),
}


def look_of(name: str) -> Look:
    return _LOOKS.get(name, Look(*_OTHER, "d"))


def rungs_of(rows: Sequence[Row]) -> list[Row]:
    """Rows of kind "rung" that passed the gate, lowest rung first."""
    return [row for row in rows if row["kind"] == "rung" and row["gate"] == "ok"]


def problem_of(row: Row) -> AttentionProblem:
    """The problem of a row; TF32 where the row says so."""
    return AttentionProblem(
        batch=row["batch"],
        num_heads=row["num_heads"],
        num_heads_kv=row["num_heads_kv"],
        seqlen_q=row["seqlen_q"],
        seqlen_k=row["seqlen_k"],
        head_dim=row["head_dim"],
        head_dim_v=row["head_dim_v"],
        dtype=row["dtype"],
        mask=Mask.from_arguments(row["causal"]),
        allow_tf32=bool(row["features"].get("tf32")),
    )


def one_problem(rows: Sequence[Row]) -> AttentionProblem:
    """The problem of all these rows. Raises ValueError when they are of several, or none."""
    problems = {problem_of(row) for row in rows}
    if len(problems) != 1:
        raise ValueError(f"rows must be of one problem, got {len(problems)}")
    return problems.pop()


def guess_of(row: Row, device: Device | None) -> Prediction | None:
    """What the cost models say of a row's rung, at the clock that was observed; None where they
    know no such rung or no peak of the chip."""
    if device is None:
        return None
    clock_mhz = row.get("sm_clock_mhz")
    clock_hz = None if not clock_mhz else clock_mhz * 1e6
    try:
        return predict(problem_of(row), device, row["name"], clock_hz=clock_hz)
    except UnknownGenerationError:
        return None
    except ValueError:  # no known peak for this dtype
        if device.flop_per_s(row["dtype"]) is not None:
            raise
        return None


def expected_ms(row: Row, device: Device | None) -> float | None:
    """The guess as the record keeps it (at the observed clock if there was one), else anew."""
    predicted = row.get("predicted", {})
    for kept in (predicted.get("at_observed_clock", {}), predicted):
        if kept.get("expected_ms") is not None:
            return float(kept["expected_ms"])
    guess = guess_of(row, device)
    return None if guess is None else guess.expected_s * 1e3


def family_legend(figure: Figure, names: Sequence[str], *, hollow: bool) -> None:
    """What the colours of these rungs' bars mean, below a figure."""
    from matplotlib.patches import Patch

    style = hollow_style if hollow else bar_style
    looks = {(look := look_of(name)).family: look for name in names}
    handles = [Patch(**style(look.colour), label=family) for family, look in looks.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
