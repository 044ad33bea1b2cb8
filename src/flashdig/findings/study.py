"""Study: guesses, rows and findings of some files or of a preset's folder, in one value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashdig.findings.articles import ArticleRow, against_article, of_variant
from flashdig.findings.counted import counted_kernels
from flashdig.findings.counted_rows import counted_rows
from flashdig.findings.counters import COUNTER_RULES
from flashdig.findings.elsewhere import low_clock
from flashdig.findings.explanation import UNEXPLAINED, Explanation, Row, explain
from flashdig.findings.finding import Finding, in_order
from flashdig.findings.guess import Guess, guess
from flashdig.findings.presets import (
    COUNTERS,
    ArticlePreset,
    RecordingsError,
    environment_of,
    read_manifest,
)
from flashdig.findings.recording import Recording
from flashdig.findings.rules import find_in_trace
from flashdig.hardware.detect import device_of_name
from flashdig.hardware.devices import Device
from flashdig.readers.files import read_traces
from flashdig.readers.model import Trace
from flashdig.readers.ncu import read_ncu
from flashdig.readers.ncu_model import NcuKernel

GUESSES = "guesses.json"


@dataclass(frozen=True)
class Section:
    """One recording: what was asked, what was found.

    Attributes:
        notes: what a reader must know, such as why there is no recording.
        facts: from the manifest of a preset: gate, times without the profiler.
    """

    name: str
    explanations: tuple[Explanation, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def surprises(self) -> list[Row]:
        return [row for one in self.explanations for row in one.surprises]

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "explanations": [one.to_dict() for one in self.explanations],
            "findings": [finding.to_dict() for finding in self.findings],
            "notes": list(self.notes),
            "facts": dict(self.facts),
        }


@dataclass(frozen=True)
class Study:
    """Everything that `flashdig explain` shows.

    Attributes:
        guessed_at: when the guesses were written down, ISO 8601; None where they are made from the
            files' own operators and shapes.
    """

    title: str
    sections: tuple[Section, ...]
    article: tuple[ArticleRow, ...] = ()
    guessed_at: str | None = None

    @property
    def findings(self) -> list[Finding]:
        return [finding for section in self.sections for finding in section.findings]

    @property
    def explained(self) -> tuple[int, int]:
        """(surprises with a cause, all surprises)."""
        rows = [row for section in self.sections for row in section.surprises]
        return sum(row.cause != UNEXPLAINED for row in rows), len(rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "title": self.title,
            "guessed_at": self.guessed_at,
            "sections": [section.to_dict() for section in self.sections],
            "article": [row.to_dict() for row in self.article],
        }


def now() -> str:
    return datetime.now(timezone.utc).replace(microsecond=0).isoformat()


def guesses_of(preset: ArticlePreset, device: Device | None) -> dict[str, Guess]:
    """The guess for each variant of a preset, before anything is recorded or read."""
    return {name: guess(asked, preset.problem, device) for name, asked in preset.variants.items()}


def write_guesses(folder: Path, guesses: Mapping[str, Guess]) -> str:
    """Write the guesses down beside where the recordings will be; returns the time."""
    written = now()
    content = {"written": written, "guesses": {n: g.to_dict() for n, g in guesses.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / GUESSES).write_text(json.dumps(content) + "\n", encoding="utf-8")
    return written


def study_traces(traces: Sequence[Trace], given: Guess | None = None) -> Study:
    """Explain traces.

    Args:
        given: what was guessed before the files were opened, for the kind of call with most device
            time; the others are guessed from the host side of the file.
    """
    sections = []
    for trace in traces:
        recording = Recording.of(trace)
        findings = find_in_trace(trace, recording.summary)
        guesses = None if given is None else [given]
        sections.append(
            Section(
                name=trace.source,
                explanations=tuple(explain(recording, findings, guesses)),
                findings=tuple(findings),
                notes=() if recording.calls else ("No attention was found in this recording.",),
            )
        )
    return Study("What the recordings say", tuple(sections))


def study_counters(
    source: str, kernels: Sequence[NcuKernel], device: Device | None, given: Guess | None
) -> Study:
    """Explain counters; a guess is for the longest attention kernel of its own backend, if any."""
    counted = counted_kernels(kernels, device)
    explanations: list[Explanation] = []
    findings: list[Finding] = []
    attention = [one for one in counted if one.kernel.decoded.is_attention]
    if given is not None and given.schedule is not None:
        backend = given.schedule.removeprefix("sdpa_")
        attention = [one for one in attention if one.kernel.decoded.backend == backend] or attention
    main = max(attention, key=lambda one: one.kernel.duration_ns or 0, default=None)
    for one in counted:
        own = [found for rule in COUNTER_RULES.values() for found in rule(one)]
        findings += own
        if one is main and given is not None:
            rows = counted_rows(one.kernel, given, own)
            explanations.append(Explanation(one.subject, 1, given, rows))
    section = Section(source, tuple(explanations), tuple(in_order(findings)))
    return Study("What the counters say", (section,))


def study_preset(
    preset: ArticlePreset,
    folder: Path,
    guesses: Mapping[str, Guess],
    guessed_at: str | None,
    device: Device | None,
) -> Study:
    """Explain the recordings of a preset.

    Raises RecordingsError for a folder without them, and UnreadableFileError.
    """
    manifest = {one["name"]: one for one in read_manifest(folder, preset.name)}
    counters = folder / COUNTERS
    kernels = read_ncu(str(counters)) if preset.counters and counters.is_file() else []
    if preset.counters and not kernels:
        raise RecordingsError(f"{counters} does not exist: this preset is about counters")
    limit = environment_of(folder).get("power_limit_w")
    recordings: dict[str, Recording] = {}
    mains: dict[str, NcuKernel] = {}
    sections = []
    for name in preset.variants:
        facts = manifest.get(name)
        if facts is None:
            sections.append(Section(name, notes=("It is not in the manifest.",)))
            continue
        trace_name = facts.get("trace")
        if not isinstance(trace_name, str):
            sections.append(Section(name, notes=(str(facts.get("gate")),), facts=facts))
            continue
        (trace,) = read_traces([str(folder / trace_name)])
        recordings[name] = Recording.of(trace)
        counted = of_variant(kernels, name)
        if counted:
            mains[name] = counted[0]
        section = _preset_section(name, facts, recordings[name], counted, guesses, device)
        sections.append(_with_clock(section, device, limit))
    article = against_article(preset, recordings, mains, device)
    return Study(preset.title, tuple(sections), tuple(article), guessed_at)


def _preset_section(
    name: str,
    facts: Mapping[str, Any],
    recording: Recording,
    counted: Sequence[NcuKernel],
    guesses: Mapping[str, Guess],
    device: Device | None,
) -> Section:
    findings = find_in_trace(recording.trace, recording.summary)
    if not counted:
        explanations = explain(recording, findings, [guesses.get(name)])[:1]
    else:
        main, *beside = counted
        (one,) = counted_kernels([main], device or _device(recording), subjects=[name])
        own = [
            replace(found, calls=tuple(recording.calls))
            for rule in COUNTER_RULES.values()
            for found in rule(one)
        ]
        explanations = explain(recording, [*findings, *own], [guesses.get(name)])[:1]
        given = guesses.get(name)
        if given is not None:
            rows = counted_rows(main, given, own, beside)
            explanations.append(Explanation(f"{name}: counters", 1, given, rows))
        findings += own
    return Section(name, tuple(explanations), tuple(in_order(findings)), facts=facts)


def _with_clock(section: Section, device: Device | None, limit: object) -> Section:
    """The section with what the sensors say of the clock at which it was timed."""
    if device is None:
        return section
    clock, power = section.facts.get("sm_clock_mhz"), section.facts.get("power_w")
    found = low_clock(device, clock, power, limit if isinstance(limit, int | float) else None)
    return replace(section, findings=tuple(in_order([*section.findings, *found])))


def _device(recording: Recording) -> Device | None:
    names = [device.name for device in recording.trace.devices if device.name]
    return device_of_name(names[0]) if names else None
