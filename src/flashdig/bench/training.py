"""Whole training steps of a GPT in which only the attention differs, ours beside the peers.

Everyone trains the same weights in turns, step by step in one process. Before anything is timed,
each attention is compared with float64 as in every suite, on views of one projection as the model
makes them, and then each trains the same first steps from the same start: their losses must agree.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from flashdig.bench.environment import Clocks, clocks_now
from flashdig.bench.meters import L2, Call, Clock, CudaQueue, HostMeter, Meter, Prepared
from flashdig.bench.results import Row, timing_fields
from flashdig.bench.timing import TimingFailure, rotate
from flashdig.bench.training_cells import PEERS, TrainingCell
from flashdig.bench.training_entries import (
    OURS,
    Entry,
    Progress,
    attempt,
    check_attention,
    free,
    reason_against,
    running,
)
from flashdig.bench.training_model import Training
from flashdig.bench.training_trace import (
    AttentionTime,
    attention_by_step,
    mean_time,
    record_steps,
)
from flashdig.costs.flops import model_flops_utilisation
from flashdig.hardware.detect import device_of_name

# six rounds are the fewest whose ratios have an interval of 95 %
ROUNDS = 6
# trained from the same start; the last one's memory is what is reported
FIRST_STEPS = 3
# of one loss, from the median over everyone: the relative step of bfloat16
LOSS_TOLERANCE = 2**-7
TRACED_ROTATIONS = 2


@dataclass
class TrainingResult:
    """Rows of one cell, and what of ours failed."""

    cell: TrainingCell
    rows: list[Row]
    failures: list[str]


def measure_training(
    cell: TrainingCell,
    run_id: str,
    *,
    ours: Sequence[str] = ("auto",),
    peers: Sequence[str] = PEERS,
    rounds: int = ROUNDS,
    progress: Progress = lambda _: None,
    sample: Callable[[], Clocks] = clocks_now,
) -> TrainingResult:
    """Check, train, time and trace everyone on the current GPU, or on the CPU without one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def say(text: str) -> None:
        progress(f"{cell.title}: {text}")

    entries = [Entry(OURS if name == "auto" else name, backend=name) for name in ours]
    entries += [Entry(name) for name in peers]
    for entry in entries:
        reason = reason_against(entry, cell, device)
        if reason is not None:
            entry.verdict = f"not run: {reason}"
    check_attention(entries, cell, device, say)
    free(device)
    if running(entries):
        say("the model")
        training = Training(cell, device)
        for entry in running(entries):
            say(f"first steps with {entry.name}")
            attempt(entry, device, partial(_first_steps, training, entry, device))
        judge_losses(entries)
        _time(training, entries, rounds, device, say, sample)
        if device == "cuda":
            say("recording")
            _trace(training, entries)
        del training
        free(device)
    rows = [row_of(cell, entry, run_id) for entry in entries]
    failures = [
        f"{entry.name} in {cell.title}: {entry.untimed or entry.verdict}"
        for entry in entries
        if entry.ours and entry.timing is None and not entry.verdict.startswith("not run")
    ]
    return TrainingResult(cell, rows, failures)


def _first_steps(training: Training, entry: Entry, device: str) -> None:
    import torch

    assert entry.attention is not None
    training.restart()
    losses = []
    for number in range(FIRST_STEPS):
        if device == "cuda" and number == FIRST_STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
        losses.append(training.step(entry.attention))
    entry.losses = [float(loss) for loss in losses]
    if device == "cuda":
        entry.peak_bytes = torch.cuda.max_memory_allocated()


def judge_losses(entries: Sequence[Entry]) -> None:
    """Everyone's losses must be finite, and near the median over all who trained."""
    trained = running(entries)
    for number, losses in enumerate(zip(*(e.losses for e in trained), strict=True), start=1):
        # a NaN sorts anywhere
        median = statistics.median([loss for loss in losses if math.isfinite(loss)] or [math.nan])
        for entry, loss in zip(trained, losses, strict=True):
            # written so that a NaN does not pass
            if entry.verdict == "ok" and not abs(loss - median) <= LOSS_TOLERANCE * median:
                entry.verdict = (
                    f"loss {loss:.4f} of step {number} differs from the median {median:.4f} by "
                    f"more than {LOSS_TOLERANCE:.2%}"
                )


class StepMeter:
    """Events around single steps on a GPU; two of them are one measurement pair (A/A).

    A step keeps the GPU busy for hundreds of milliseconds, so that none need be sent ahead to hide
    its first launch.
    """

    clock: Clock = "events"
    l2: L2 = "warm"

    def prepare(self, call: Call) -> Prepared:
        return _TimedSteps(call)

    def recover(self) -> None:
        free("cuda")


class _TimedSteps:
    repetitions = 1
    enqueued = 2

    def __init__(self, call: Call) -> None:
        self._call = call
        self._queue = CudaQueue()
        self._marks: list[Any] = []

    def enqueue(self) -> None:
        self._marks = [self._queue.record()]
        for _ in range(2):
            self._call()
            self._marks.append(self._queue.record())

    def read(self) -> tuple[float, float]:
        self._queue.synchronize()
        start, middle, end = self._marks
        return self._queue.elapsed(start, middle), self._queue.elapsed(middle, end)


def _time(
    training: Training,
    entries: Sequence[Entry],
    rounds: int,
    device: str,
    say: Progress,
    sample: Callable[[], Clocks],
) -> None:
    ready = {entry.name: entry for entry in running(entries)}
    if not ready:
        return
    training.restart()
    calls = {name: _step_call(training, entry) for name, entry in ready.items()}
    meter: Meter = StepMeter() if device == "cuda" else HostMeter(1e-3)
    timings = rotate(calls, meter, rounds=rounds, sample=sample, progress=say)
    for name, timing in timings.items():
        if isinstance(timing, TimingFailure):
            ready[name].untimed = timing.reason
        else:
            ready[name].timing = timing


def _step_call(training: Training, entry: Entry) -> Call:
    attention = entry.attention
    assert attention is not None
    return lambda: training.step(attention)


def _trace(training: Training, entries: Sequence[Entry]) -> None:
    """Attention's device time, from steps recorded in turns."""
    timed = [entry for entry in entries if entry.timing is not None]
    if not timed:
        return
    order = timed * TRACED_ROTATIONS
    with tempfile.TemporaryDirectory(prefix="flashdig-training-") as folder:
        steps = [_step_call(training, entry) for entry in order]
        found = attention_by_step(record_steps(steps, Path(folder, "steps.json")))
    attach_times(order, found)


def attach_times(order: Sequence[Entry], found: Sequence[AttentionTime]) -> None:
    """Give each entry the mean over its recorded steps, or why it has none."""
    for entry in dict.fromkeys(map(id, order)):
        places = [number for number, one in enumerate(order) if id(one) == entry]
        owner = order[places[0]]
        if len(found) != len(order):
            owner.untraced = f"{len(found)} of {len(order)} steps are in the recording"
            continue
        try:
            owner.attention_time = mean_time([found[number] for number in places])
        except ValueError as error:
            owner.untraced = str(error)


def row_of(cell: TrainingCell, entry: Entry, run_id: str) -> Row:
    """A finding as a row of a record; unknown values are left out."""
    size = cell.size
    row: Row = {
        "run_id": run_id,
        "kind": "speed",
        "pass": "training",
        **cell.attention.fields(),
        "backend": entry.name,
        "gate": entry.verdict,
        "error": entry.error,
        "allowed_error": entry.allowed_error,
        "peak_bytes": entry.peak_bytes,
        "losses": [round(loss, 4) for loss in entry.losses if math.isfinite(loss)] or None,
        "model": {
            "layers": size.layers,
            "hidden": size.hidden,
            "vocabulary": size.vocabulary,
            "parameters": size.parameters,
            "tokens": cell.tokens,
        },
    }
    notes = [f"backend {entry.served_by}"] if entry.served_by else []
    if entry.checked:
        notes.append(f"compared: {entry.checked}")
    if entry.peak_bytes is not None:
        row["predicted"] = {"peak_bytes": cell.predicted_peak_bytes(entry.name)}
    if entry.verdict == "ok" and entry.timing is not None:
        row |= timing_fields(entry.timing) | rates(cell, entry.timing.ms)
    elif entry.verdict == "ok":
        notes.append(f"no time: {entry.untimed}")
    if entry.attention_time is not None:
        row |= _traced_fields(entry.attention_time)
        found = entry.attention_time.calls
        if found != (size.layers, size.layers):
            forward, backward = found
            notes.append(
                f"recorded: {forward} forward and {backward} backward calls of {size.layers} layers"
            )
    elif entry.untraced is not None:
        notes.append(f"no attention time: {entry.untraced}")
    row["notes"] = "; ".join(notes) or None
    return {name: value for name, value in row.items() if value is not None}


def rates(cell: TrainingCell, ms: float) -> Row:
    """Tokens/s, model TFLOP/s and, on a known GPU, MFU, attention counted in full and in half."""
    counted = cell.flops(halve_causal_attention=False) / ms * 1e3
    visible = cell.flops(halve_causal_attention=True) / ms * 1e3
    found: Row = {"tokens_per_s": cell.tokens / ms * 1e3, "tflops": counted / 1e12}
    peak = _peak_flop_per_s(cell)
    if peak is not None:
        found["mfu"] = model_flops_utilisation(counted, peak)
        found["mfu_causal_half"] = model_flops_utilisation(visible, peak)
    return found


def _peak_flop_per_s(cell: TrainingCell) -> float | None:
    import torch

    if not torch.cuda.is_available():
        return None
    device = device_of_name(torch.cuda.get_device_name())
    return None if device is None else device.peak_flop_per_s.get(cell.attention.dtype)


def _traced_fields(time: AttentionTime) -> Row:
    return {
        "attention_ms": {
            "forward": round(time.forward_ms, 3),
            "backward": round(time.backward_ms, 3),
        },
        "kernels": [
            {"name": name, "count": count, "us": round(us, 1)}
            for name, (count, us) in time.kernels.items()
        ],
    }
