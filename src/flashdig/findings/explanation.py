"""Guess against found, row by row: what surprises, and which finding explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashdig.costs.units import seconds
from flashdig.findings.finding import Finding, Unit
from flashdig.findings.guess import Guess, guess
from flashdig.findings.recording import Recording, causal
from flashdig.hardware.devices import Device
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import DeviceEvent, Kernel
from flashdig.readers.summary import AttentionGroup

UNEXPLAINED = "unexplained"
_DEVICE_TOLERANCE = 0.30
# host times under a profiler vary as much between two runs
_HOST_FACTOR = 2.0
# row -> rules that can say why it differs
_EXPLAINS: dict[str, tuple[str, ...]] = {
    "backend": ("math-fallback", "slower-backend", "float32-attention"),
    "kernels": ("math-fallback", "mask-converted"),
    "copies and fills": ("hidden-mask-copy",),
    "device time": (
        *("math-fallback", "slower-backend", "products-on-cuda-cores", "hidden-mask-copy"),
        *("repeated-heads", "float32-attention", "decode-without-split", "small-grid"),
        *("tail-wave", "causal-imbalance", "padded-head-dim", "mask-converted"),
        "register-spills",
    ),
    "host time": ("cudnn-planning", "wrapper-cost", "math-fallback", "hidden-mask-copy"),
    "occupancy as recorded": (
        *("occupancy-not-measured", "occupancy-of-small-grid", "occupancy-by-design"),
    ),
}
# a finding explains a time when it accounts for this part of the difference
_LEAST_PART = 0.3
# of an attention made of operators; its backward has two products for each of them
_EXPECTED_PARTS = ("scores", "scale", "mask", "softmax", "values")
_ASKED_OF_BACKEND = {
    "eager": "eager",
    "flash_attention_2": "fa2",
    "flash_attention_3": "fa3",
    "flash_attention_4": "fa4",
    "flex_attention": "flex",
    "flashdig": "flashdig",
}
_SDPA = ("math", "flash", "efficient", "cudnn")


@dataclass(frozen=True)
class Row:
    """One quantity of one call: the guess, what was found, and why they differ.

    Attributes:
        guessed, found: numbers in `unit`, or names.
        surprise: they differ by more than the row's tolerance.
        cause: why, for a surprise: a rule's finding, or "unexplained".
        rule: the rule; None without one.
    """

    what: str
    guessed: float | str | None
    found: float | str | None
    unit: Unit | None
    surprise: bool
    cause: str = ""
    rule: str | None = None

    @property
    def ratio(self) -> float | None:
        if isinstance(self.guessed, str) or isinstance(self.found, str):
            return None
        if not self.guessed or self.found is None:
            return None
        return self.found / self.guessed

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Explanation:
    """One kind of call: its guess and the rows, surprises first."""

    subject: str
    calls: int
    guess: Guess | None
    rows: tuple[Row, ...]

    @property
    def surprises(self) -> list[Row]:
        return [row for row in self.rows if row.surprise]

    def to_dict(self) -> dict[str, Any]:
        return {
            "subject": self.subject,
            "calls": self.calls,
            "guess": None if self.guess is None else self.guess.to_dict(),
            "rows": [row.to_dict() for row in self.rows],
        }


def asked(call: AttentionCall) -> str | None:
    """What a call asked for, by its operators; None for a backend without a guess."""
    return "sdpa" if call.backend in _SDPA else _ASKED_OF_BACKEND.get(call.backend)


def guess_for_call(call: AttentionCall, device: Device | None) -> Guess | None:
    """The guess from a call's host side alone; None where its sizes are not recorded."""
    problem, what = call.problem(), asked(call)
    if problem is None or what is None:
        return None
    if what == "eager" and call.mask.kind == "tensor":
        problem = causal(problem)  # so that the mask's kernel is among those expected
    direction = "decode" if call.is_decoding and call.pass_ == "forward" else call.pass_
    try:
        return guess(what, problem, device, direction)
    except ValueError:
        return None


def explain(
    recording: Recording,
    findings: Sequence[Finding],
    guesses: Sequence[Guess | None] | None = None,
) -> list[Explanation]:
    """Each kind of call of a recording, in order of device time.

    Args:
        guesses: one a kind of call, in the order of `recording.groups`; without it they are made
            from each call's host side.
    """
    made: list[Explanation] = []
    for at, group in enumerate(recording.groups):
        if guesses is not None and at < len(guesses):
            guessed = guesses[at]
        else:
            guessed = guess_for_call(group.first, recording.device)
        rows = () if guessed is None else _rows(recording, group, guessed, findings)
        made.append(Explanation(group.describe(), group.count, guessed, rows))
    return made


def _rows(
    recording: Recording, group: AttentionGroup, guessed: Guess, findings: Sequence[Finding]
) -> tuple[Row, ...]:
    members = {id(call) for call in group.calls}
    own = [f for f in findings if any(id(call) in members for call in f.calls)]
    kernels, copies = round(group.kernels_per_call), round(group.copies_per_call)
    call = group.calls[len(group.calls) // 2]
    launches = len({id(e.launch) for e in call.events if e.launch is not None})
    device_ns = group.median_device_ns
    if guessed.whole:
        kernels, copies, device_ns = _of_a_step(recording) or (kernels, copies, device_ns)
        launches = kernels + copies
    rows = [
        *_backend_rows(group, guessed, own),
        _exact("kernels", guessed.kernels, kernels, group, own),
        _exact("copies and fills", guessed.copies, copies, group, own),
    ]
    if launches:
        extra = _exact("launches", guessed.launches, launches - copies, group, own)
        rows.append(Row(**{**vars(extra), "surprise": False, "cause": ""}))
    if device_ns is not None:
        rows += [_with_side_jobs(row, group) for row in _device_rows(device_ns, guessed, own)]
    host = [call.host_ns for call in group.calls if call.host_ns is not None]
    if host and not guessed.whole:
        # the first calls of a recording are slower on the host
        rows.append(_host_row(float(min(host)), guessed, own))
    rows += _occupancy_rows(group, own)
    rows.sort(key=lambda row: not row.surprise)
    return tuple(rows)


def _backend_rows(group: AttentionGroup, guessed: Guess, own: Sequence[Finding]) -> list[Row]:
    """Of calls for which torch chooses the backend."""
    expected = (guessed.schedule or "").removeprefix("sdpa_")
    found = group.first.backend
    if found not in _SDPA or not (guessed.schedule or "").startswith("sdpa_"):
        return []
    if expected == found:
        return [Row("backend", expected, found, None, False)]
    return [_surprise("backend", expected, found, None, own)]


def _exact(
    what: str, guessed: int, found: int, group: AttentionGroup, own: Sequence[Finding]
) -> Row:
    if guessed == found:
        return Row(what, guessed, found, "count", False)
    row = _surprise(what, guessed, found, "count", own)
    if row.rule is None and found > guessed:
        parts = _side_jobs(group, copies=what == "copies and fills")
        if len(parts) >= found - guessed:
            return Row(what, guessed, found, "count", True, _named(parts), "side-jobs")
    return row


def _side_jobs(group: AttentionGroup, *, copies: bool) -> list[DeviceEvent]:
    """Device events of a call besides its main kernels, or besides one of each expected part."""
    call = group.calls[len(group.calls) // 2]
    expected = list(_EXPECTED_PARTS) * (2 if call.pass_ == "backward" else 1)
    jobs = []
    for part in call.parts:
        if isinstance(part.event, Kernel) == copies or part.label == "attention":
            continue
        if call.backend == "eager" and part.label in expected:
            expected.remove(part.label)
            continue
        jobs.append(part.event)
    return jobs


def _named(events: Sequence[DeviceEvent]) -> str:
    named = [f"{decode(e.name).words} ({seconds(e.duration_ns / 1e9)})" for e in events]
    return "besides what was expected: " + " ".join(dict.fromkeys(named))


def _with_side_jobs(row: Row, group: AttentionGroup) -> Row:
    """A device time that no rule explains, where unexpected parts account for the difference."""
    if row.what != "device time" or row.cause != UNEXPLAINED or group.first.pass_ == "backward":
        return row  # the model of a backward has its first and last step in it
    if not isinstance(row.guessed, float) or not isinstance(row.found, int | float):
        return row
    jobs = [*_side_jobs(group, copies=False), *_side_jobs(group, copies=True)]
    total = sum(job.duration_ns for job in jobs)
    if not jobs or total < _LEAST_PART * (row.found - row.guessed) or row.found < row.guessed:
        return row
    cause = f"{seconds(total / 1e9)} {_named(jobs)}"
    return Row(row.what, row.guessed, row.found, row.unit, True, cause, "side-jobs")


def _of_a_step(recording: Recording) -> tuple[int, int, float | None] | None:
    """Kernels, copies and busy time of the typical step; None without steps."""
    steps = [step for breakdown in recording.summary.breakdowns for step in breakdown.steps]
    if not steps:
        return None
    step = sorted(steps, key=lambda one: one.shares.busy_ns)[len(steps) // 2]
    window = step.window
    return window.kernels, window.events - window.kernels, float(step.shares.busy_ns)


def _device_rows(found: float, guessed: Guess, own: Sequence[Finding]) -> list[Row]:
    rows = []
    if guessed.expected_s is not None:
        expected = guessed.expected_s * 1e9
        off = abs(found / expected - 1) > _DEVICE_TOLERANCE if expected else False
        rows.append(
            _surprise("device time", expected, found, "ns", own)
            if off
            else Row("device time", expected, found, "ns", False)
        )
    if guessed.floor_s is not None:
        floor = guessed.floor_s * 1e9
        below = found < 0.97 * floor
        cause = "below the floor: the model or the recording is wrong" if below else ""
        rows.append(Row("device time, at least", floor, found, "ns", below, cause))
    if guessed.flops and found:
        rows.append(Row("operations a second", None, guessed.flops / found * 1e9, "FLOP", False))
    return rows


def _host_row(found: float, guessed: Guess, own: Sequence[Finding]) -> Row:
    expected = guessed.host_s * 1e9
    if expected / _HOST_FACTOR <= found <= _HOST_FACTOR * expected:
        return Row("host time", expected, found, "ns", False)
    if found < expected:
        return Row("host time", expected, found, "ns", False)
    return _surprise("host time", expected, found, "ns", own)


def _occupancy_rows(group: AttentionGroup, own: Sequence[Finding]) -> list[Row]:
    """The recorded occupancy against the article's rule of thumb, 50 %."""
    fused = [
        part.event
        for part in group.first.parts
        if part.label == "attention" and isinstance(part.event, Kernel)
    ]
    kernel = max(fused, key=lambda one: one.duration_ns, default=None)
    if kernel is None or kernel.occupancy_percent is None:
        return []
    recorded = kernel.occupancy_percent
    if recorded >= 50:
        return [Row("occupancy as recorded", 50.0, recorded, "percent", False)]
    return [_surprise("occupancy as recorded", 50.0, recorded, "percent", own)]


def _surprise(
    what: str,
    guessed: float | str,
    found: float | str,
    unit: Unit | None,
    own: Sequence[Finding],
) -> Row:
    causes = [f for rule in _EXPLAINS.get(what, ()) for f in own if f.rule == rule]
    if unit == "ns" and isinstance(guessed, float) and not isinstance(found, str):
        least = _LEAST_PART * (found - guessed)
        side = "device_ns" if what == "device time" else "host_ns"
        sized = [(getattr(f, side) or 0.0, f) for f in causes]
        causes = [f for time, f in sorted(sized, key=lambda one: -one[0]) if time >= least > 0]
    if not causes:
        return Row(what, guessed, found, unit, True, UNEXPLAINED)
    return Row(what, guessed, found, unit, True, causes[0].claim, causes[0].rule)


def explained(explanations: Sequence[Explanation]) -> tuple[int, int]:
    """(surprises with a cause, all surprises)."""
    rows = [row for one in explanations for row in one.surprises]
    return sum(row.cause != UNEXPLAINED for row in rows), len(rows)
