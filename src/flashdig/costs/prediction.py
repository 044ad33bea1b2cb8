"""Prediction: what one attention call is guessed to take on one chip, as a value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flashdig.costs.efficiency import Efficiency
from flashdig.costs.pipes import Path
from flashdig.costs.roofline import Roofs
from flashdig.costs.schedules import Schedule
from flashdig.costs.traffic import Traffic
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem


@dataclass(frozen=True)
class Question:
    """What is to be guessed, with everything looked up.

    Attributes:
        dtype: whose peak the products run at: the input's, "tfloat32", or "float32" on FMA units.
        path: the unit that multiplies.
        matmul_passes: products of `dtype` for one product of the input's.
        known: efficiencies of the chip for `dtype`.
        floor_clock_hz, expected_clock_hz: SM clocks of the two times.
    """

    problem: AttentionProblem
    device: Device
    schedule: Schedule
    direction: str
    dtype: str
    path: Path
    matmul_passes: int
    known: Efficiency
    floor_clock_hz: float
    expected_clock_hz: float


@dataclass(frozen=True)
class Prediction:
    """A guess that is written down before anything runs.

    Attributes:
        device, generation, direction: short names.
        floor_s: no run is faster: specified peaks at `floor_clock_hz`, perfect overlap, each input
            read and each output written once (from memory: a warm cache can beat a memory roof).
        expected_s: with the efficiencies of this chip and the generation's own schedule, at
            `expected_clock_hz`.
        limiter, expected_limiter: what sets each of the two.
        flops: of the visible pairs; executed_flops: with the masked parts of visited tiles.
        exp2: exponentials of the visible pairs.
        compulsory, issued, memory: the three columns of traffic; memory is expected behind the
            last-level cache.
        roofs: seconds of each roof.
        pipes: pipe -> cycles of one inner iteration; empty for unfused attention and decode.
        kernels: launches, memory sets included, copies apart.
        programs, waves: of the main kernel's grid; None for unfused attention.
        occupancy: of the main kernel, 0 to 1; None where it is not known as compiled.
        imbalance: iterations of the longest program over the mean; None as above.
        scratch_bytes: scores or partial results in memory beside input and output.
        notes: assumptions and origins of the efficiencies.
        sentences: the guess in words.
    """

    problem: AttentionProblem
    device: str
    generation: str
    direction: str
    floor_s: float
    expected_s: float
    floor_clock_hz: float
    expected_clock_hz: float
    limiter: str
    expected_limiter: str
    flops: int
    executed_flops: int
    exp2: int
    compulsory: Traffic
    issued: Traffic
    memory: Traffic
    roofs: Roofs
    kernels: int
    scratch_bytes: int
    pipes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    programs: int | None = None
    waves: float | None = None
    occupancy: float | None = None
    imbalance: float | None = None
    notes: tuple[str, ...] = ()
    sentences: tuple[str, ...] = ()

    @property
    def floor_flop_per_s(self) -> float:
        """Rate over the visible pairs at the floor: nobody is faster."""
        return self.flops / self.floor_s if self.floor_s else 0.0

    @property
    def expected_flop_per_s(self) -> float:
        return self.flops / self.expected_s if self.expected_s else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; times in seconds, traffic in bytes."""
        return {
            **dataclasses.asdict(self),
            "floor_flop_per_s": self.floor_flop_per_s,
            "expected_flop_per_s": self.expected_flop_per_s,
        }
