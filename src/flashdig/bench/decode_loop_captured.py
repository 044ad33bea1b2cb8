"""The decoding loop with its step captured as a CUDA graph: the host's work is gone, what is left
is kernels. `flashdig.bench.decode_loop --captured` runs it.

Ours and torch's attention with transformers' `StaticCache` are driven by the same
`DecodingGraph`. torch's attention with a `DynamicCache` cannot be captured, since its tensors grow:
its steps are eager. Nothing is compiled by torch.compile.

What is timed is a step, the mean over every token but the first, which comes with the prompt:
prompts run eagerly, apart. Eager steps are timed over fewer tokens.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from flashdig.bench.decode_loop_entries import (
    COMPETITORS,
    Competitor,
    EagerLoop,
    Loop,
    backend_of,
    choose,
    loop_of,
)
from flashdig.bench.environment import clocks_now
from flashdig.bench.meters import L2, Call, Clock, Prepared
from flashdig.bench.results import timing_fields
from flashdig.bench.timing import Timing, TimingFailure, median_ratio, rotate

STEP = "decode loop, a step"


def failures_of(
    model: Any, prompt: Any, expected: Any, tokens: int, competitors: Sequence[Competitor]
) -> dict[str, str]:
    """Which competitor's tokens are not the expected ones, and the first that differs: of a
    generation in which the step is captured, and of the next, which is replays alone."""
    import torch

    found = {}
    for competitor in competitors:
        choose(model, competitor)
        loop = loop_of(model, competitor, prompt.shape[1] + tokens)
        for which in ("first", "second"):
            given = [loop.prefill(prompt)]
            with backend_of(competitor):
                given.append(loop.decode(tokens - 1))
            different = torch.cat(given, -1) != expected[:, prompt.shape[1] :]
            if different.any():
                place = int(different.any(0).int().argmax())
                found[competitor.name] = (
                    f"{competitor.name}, {which} generation: token {place} differs from that "
                    "of eager attention"
                )
                break
    return found


def gate_of(model: Any, prompt: Any, tokens: int) -> str:
    """ "ok" where a captured step of ours gives the tokens of an eager one, else which is the first
    that differs. Both run the same kernels, so this holds in any dtype."""
    from flashdig.integrations.transformers import InPlaceCache

    ours = COMPETITORS[0]
    choose(model, ours)
    room = prompt.shape[1] + tokens
    eager = EagerLoop(model, lambda: InPlaceCache(model.config, room))
    expected, loop = (eager.prefill(prompt), eager.decode(tokens - 1)), loop_of(model, ours, room)
    if (loop.prefill(prompt) != expected[0]).any():
        return "token 0 of a captured generation differs from that of an eager one"
    different = (loop.decode(tokens - 1) != expected[1]).any(0)
    if different.any():
        place = 1 + int(different.int().argmax())
        return f"token {place} of a captured generation differs from that of an eager one"
    return "ok"


@dataclass
class Generation:
    """What `StepsMeter` times: `steps` steps behind a prompt."""

    model: Any
    competitor: Competitor
    loop: Loop
    prompt: Any
    steps: int

    def prefill(self) -> None:
        choose(self.model, self.competitor)
        self.loop.prefill(self.prompt)

    def decode(self, count: int) -> None:
        with backend_of(self.competitor):
            self.loop.decode(count)

    def __call__(self) -> None:
        self.prefill()
        self.decode(self.steps)


class StepsMeter:
    """Milliseconds of a step, the GPU waited for at both ends: in the first half of a generation
    and in the second, with a prompt before them that is timed apart.

    Attributes:
        prompts: milliseconds of each prompt, by the competitor's name.
    """

    clock: Clock = "host"
    l2: L2 = "warm"

    def __init__(self, wait: Callable[[], None], now: Callable[[], float]) -> None:
        self.wait, self.now = wait, now
        self.prompts: dict[str, list[float]] = {}

    def prepare(self, call: Call) -> Prepared:
        call()
        return _TimedSteps(self, cast(Generation, call))

    def milliseconds(self, call: Callable[[], None]) -> float:
        self.wait()
        start = self.now()
        call()
        self.wait()
        return (self.now() - start) * 1e3

    def recover(self) -> None:
        self.wait()
        gc.collect()


class _TimedSteps:
    def __init__(self, meter: StepsMeter, generation: Generation) -> None:
        self._meter, self._generation = meter, generation
        self.repetitions = self.enqueued = generation.steps
        self._measured = (0.0, 0.0)

    def enqueue(self) -> None:
        meter, generation = self._meter, self._generation
        prompt = meter.milliseconds(generation.prefill)
        meter.prompts.setdefault(generation.competitor.name, []).append(prompt)
        first = generation.steps // 2
        a, b = (
            meter.milliseconds(partial(generation.decode, count)) / count
            for count in (first, generation.steps - first)
        )
        self._measured = (a, b)

    def read(self) -> tuple[float, float]:
        return self._measured


def measure_steps(
    model: Any,
    prompt: Any,
    tokens: int,
    rounds: int,
    competitors: Sequence[Competitor],
) -> list[tuple[Timing | TimingFailure, float | None]]:
    """Of each competitor: the time of a step, and milliseconds of a prompt.

    Args:
        tokens: at least 3.
    """
    import torch

    room = prompt.shape[1] + tokens
    generations = {
        one.name: Generation(model, one, loop_of(model, one, room), prompt, one.steps(tokens))
        for one in competitors
    }
    wait: Callable[[], None] = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    meter = StepsMeter(wait, time.perf_counter)
    timings = rotate(generations, meter, rounds=rounds, sample=clocks_now, progress=lambda _: None)
    prompts = {name: statistics.median(times) for name, times in meter.prompts.items()}
    return [(timing, prompts.get(name)) for name, timing in timings.items()]


def rows_of(
    common: dict[str, Any],
    tokens: int,
    competitors: Sequence[Competitor],
    measured: Sequence[tuple[Timing | TimingFailure, float | None]],
    failures: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for each competitor.

    Args:
        common: fields of all of them.
        failures: as `failures_of` gives them.
    """
    rows = []
    for competitor, (timing, prefill) in zip(competitors, measured, strict=True):
        features = common["features"] | {
            "cache": competitor.cache,
            "competitor": competitor.name,
            "step": "captured" if competitor.captured else "eager",
            "timed_steps": competitor.steps(tokens),
        }
        if competitor.backend is not None:
            features["sdpa_backend"] = competitor.backend
        row = common | {
            "name": STEP,
            "features": features,
            "backend": competitor.name.split("-")[0],
            "gate": failures.get(competitor.name, "ok"),
        }
        if isinstance(timing, TimingFailure):
            row["notes"] = f"no time: {timing.reason}"
        elif row["gate"] == "ok":
            row |= {n: x for n, x in timing_fields(timing).items() if x is not None}
            row["tokens_per_s"] = 1e3 * common["batch"] / timing.ms
            features["prompt_ms"] = prefill
        rows.append(row)
    return rows


def line_of(rows: Sequence[dict[str, Any]], competitors: Sequence[Competitor]) -> str:
    """A cell's times, and ours in times as fast as each of the others."""
    ours, words = rows[0], []
    for row, competitor in zip(rows, competitors, strict=True):
        word = f"{competitor.name} -"
        if "ms" in row:
            word = (
                f"{competitor.name} {row['ms']:.3f} ms, {row['tokens_per_s']:.0f} tokens/s "
                f"(prompt {row['features']['prompt_ms']:.0f} ms)"
            )
            if row is not ours and "ms" in ours:
                word += f": {_times_as_fast(ours, row)}"
        elif "notes" in row:
            word += f" ({row['notes']})"
        words.append(word)
    return f"{ours['features']['cell']}, a step: {'; '.join(words)}"


def _times_as_fast(ours: dict[str, Any], other: dict[str, Any]) -> str:
    ratio = median_ratio(other["ms_all"], ours["ms_all"])
    return f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: a line for each cell, with the time of a step and, beside the others', how many
    times as fast ours is.

    Args:
        rows: `rows_of` cells; others are passed over.
    """
    cells: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.get("name") == STEP:
            cells.setdefault(row["features"]["cell"], {})[row["features"]["competitor"]] = row
    names = [one.name for one in COMPETITORS if any(one.name in cell for cell in cells.values())]
    lines = [f"| cell | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for cell, by_name in cells.items():
        ours = by_name[COMPETITORS[0].name]
        words = []
        for name in names:
            row = by_name.get(name, {})
            word = f"{row['ms']:.3f} ms" if "ms" in row else "-"
            if "ms" in row and row is ours:
                word += f", {row['tokens_per_s']:.0f} tokens/s"
            elif "ms" in row and "ms" in ours:
                word += f", {_times_as_fast(ours, row)}"
            words.append(word)
        lines.append(f"| {cell} | {' | '.join(words)} |")
    return "\n".join(lines)
