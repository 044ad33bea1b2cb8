"""Attention's device time within recorded training steps, as `flashdig trace` attributes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flashdig.readers.attribution import attention_calls
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Trace
from flashdig.readers.steps import find_steps, step_index
from flashdig.readers.trace import read_kineto


@dataclass(frozen=True)
class AttentionTime:
    """Attention of one step, or a mean over steps.

    Attributes:
        forward_ms, backward_ms: kernels, copies and fills of all attention calls.
        calls: (forward, backward) calls that were found, one each a layer where all were.
        kernels: name -> (launches, microseconds in all) of fused attention's own kernels.
    """

    forward_ms: float
    backward_ms: float
    calls: tuple[int, int]
    kernels: dict[str, tuple[int, float]]

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


def record_steps(steps: Sequence[Callable[[], object]], path: Path) -> Trace:
    """Run the steps under torch.profiler, one marked step each, and read what was recorded."""
    from flashdig.evidence.capture import record

    with record(path, memory=False, flops=False, steps=True) as profiler:
        for step in steps:
            step()
            profiler.step()
    return read_kineto(str(path))


def attention_by_step(trace: Trace) -> list[AttentionTime]:
    """Attention's time of each marked step, in order."""
    steps = find_steps(trace)
    starts = [step.start_ns for step in steps]
    times = [{"forward": 0, "backward": 0} for _ in steps]
    calls = [{"forward": 0, "backward": 0} for _ in steps]
    kernels: list[dict[str, tuple[int, float]]] = [defaultdict(lambda: (0, 0.0)) for _ in steps]
    for call in attention_calls(trace):
        for number, event in enumerate(call.events):
            index = step_index(event, starts, steps[-1].end_ns) if steps else None
            if index is None:
                continue
            calls[index][call.pass_] += number == 0
            times[index][call.pass_] += event.duration_ns
            if decode(event.name).is_attention:
                count, us = kernels[index][event.name]
                kernels[index][event.name] = (count + 1, us + event.duration_ns / 1e3)
    return [
        AttentionTime(
            time["forward"] / 1e6,
            time["backward"] / 1e6,
            (count["forward"], count["backward"]),
            dict(found),
        )
        for time, count, found in zip(times, calls, kernels, strict=True)
    ]


def mean_time(times: Sequence[AttentionTime]) -> AttentionTime:
    """The mean of several steps with the same attention.

    Raises ValueError where they did not run the same calls: then a recording lost some of them.
    """
    if len({one.calls for one in times}) != 1:
        found = ", ".join(str(one.calls) for one in times) or "none"
        raise ValueError(f"times must be of steps with equally many attention calls, got {found}")
    count = len(times)
    names = dict.fromkeys(name for one in times for name in one.kernels)
    of_name = {name: [one.kernels.get(name, (0, 0.0)) for one in times] for name in names}
    return AttentionTime(
        sum(one.forward_ms for one in times) / count,
        sum(one.backward_ms for one in times) / count,
        times[0].calls,
        {
            name: (round(sum(n for n, _ in found) / count), sum(us for _, us in found) / count)
            for name, found in of_name.items()
        },
    )
