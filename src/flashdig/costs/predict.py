"""Predict one attention call on one chip: a floor, an expected time, and why.

The floor is what no run can beat: the highest roof (memory, products, exponentials) at specified
peaks, for the SMs that the grid reaches. The expected time divides by what matrix products, copies
and exponentials reach on that chip and lets the generation's schedule decide what overlaps.
"""

from __future__ import annotations

import dataclasses

from flashdig.costs.efficiency import efficiency
from flashdig.costs.flops import RULE
from flashdig.costs.predict_decode import predict_decode
from flashdig.costs.predict_tiled import predict_tiled
from flashdig.costs.predict_unfused import predict_unfused
from flashdig.costs.prediction import Prediction, Question
from flashdig.costs.schedules import SCHEDULES, Schedule, Tile, product_path
from flashdig.costs.sentences import describe
from flashdig.hardware.devices import Device
from flashdig.hardware.names import nearest
from flashdig.problem import AttentionProblem

DIRECTIONS = ("forward", "backward", "decode")


class UnknownGenerationError(ValueError):
    """No schedule has this name, or it does not exist for this chip, dtype or direction."""


def predict(
    problem: AttentionProblem,
    device: Device,
    generation: str = "v2",
    direction: str = "forward",
    *,
    clock_hz: float | None = None,
    tile: Tile | None = None,
) -> Prediction:
    """Guess the time, bytes and limiter of one call.

    Args:
        generation: a name of `schedules.SCHEDULES`.
        direction: "forward", "backward" or "decode" (few queries against a long cache, the keys
            split over the SMs).
        clock_hz: the SM clock that was observed. Without it the floor takes the highest clock known
            and the expected time the clock seen under load, or the highest.
        tile: instead of the generation's own.

    Raises UnknownGenerationError with the nearest names, and ValueError for another direction and
    for a dtype that the chip has no known peak for.
    """
    schedule = _schedule(problem, device, generation, direction)
    dtype, passes = problem.dtype, 1
    if dtype == "float32" and schedule.matmul_passes and device.flop_per_s("tfloat32"):
        dtype, passes = "tfloat32", schedule.matmul_passes
    elif dtype == "float32" and problem.allow_tf32:
        dtype = "tfloat32"
    path = product_path(schedule, device.arch, dtype)
    if path == "fma":
        dtype = "float32"
    known = efficiency(device, dtype)
    question = Question(
        problem=problem,
        device=device,
        schedule=schedule,
        direction=direction,
        dtype=dtype,
        path=path,
        matmul_passes=passes,
        known=known,
        floor_clock_hz=clock_hz or device.highest_clock_hz,
        expected_clock_hz=clock_hz or known.clock_hz,
    )
    if schedule.loops == "unfused":
        guess = predict_unfused(question)
    elif direction == "decode":
        guess = predict_decode(question)
    else:
        guess = predict_tiled(question, tile)
    return dataclasses.replace(
        guess, sentences=describe(guess, device), notes=(*guess.notes, f"FLOP: {RULE}")
    )


def _schedule(
    problem: AttentionProblem, device: Device, generation: str, direction: str
) -> Schedule:
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be {', '.join(DIRECTIONS)}, got {direction!r}")
    if generation not in SCHEDULES:
        raise UnknownGenerationError(
            f"unknown generation {generation!r}; nearest: "
            f"{', '.join(nearest(generation, SCHEDULES))} (all: {', '.join(SCHEDULES)})"
        )
    schedule = SCHEDULES[generation]
    if direction not in schedule.directions:
        able = [name for name, other in SCHEDULES.items() if direction in other.directions]
        raise UnknownGenerationError(
            f"{generation} has no {direction} here; those that do: {', '.join(able)}"
        )
    if schedule.only and device.architecture not in schedule.only:
        raise UnknownGenerationError(
            f"{generation} exists for compute capability {', '.join(schedule.only)}; "
            f"{device.name} has {device.architecture}"
        )
    if problem.dtype not in schedule.dtypes:
        raise UnknownGenerationError(
            f"{generation} takes {', '.join(schedule.dtypes)}, not {problem.dtype}"
        )
    return schedule
