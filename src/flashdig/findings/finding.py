"""Finding: what a rule concludes from a recording, as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flashdig.readers.attribution import AttentionCall

Verdict = Literal["slow", "fine", "not measured", "elsewhere", "check"]
Confidence = Literal["certain", "likely", "possible"]
Unit = Literal["ns", "bytes", "count", "percent", "ratio", "FLOP", "Hz"]


@dataclass(frozen=True)
class Number:
    """A number that a claim rests on.

    Attributes:
        place: where it stands in the file (an event and its time stamp, a kernel and a metric);
            None for what is worked out or guessed.
    """

    name: str
    value: float
    unit: Unit
    place: str | None = None


@dataclass(frozen=True)
class Gain:
    """What the advice is expected to save.

    Attributes:
        seconds: of the whole recording.
        share: of the busy time ("device") or of the elapsed time ("host"), 0 to 1; None where that
            is not known.
        clock: whose time it is.
        basis: how it was worked out, in words.
    """

    seconds: float
    share: float | None
    clock: Literal["device", "host"]
    basis: str


@dataclass(frozen=True)
class Advice:
    """What to try.

    Attributes:
        text: one sentence.
        code: Python that runs where the names of `given` exist; "" where there is no code.
        given: names that the code takes from its surroundings. q, k, v are (batch, heads, seqlen,
            head_dim) unless the code says otherwise.
    """

    text: str
    code: str = ""
    given: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One conclusion.

    Attributes:
        rule: short and stable, such as "hidden-mask-copy".
        verdict: "slow" (it costs time and can be changed), "fine" (it looks wrong and is not),
            "not measured" (a number of the file that is no measurement), "elsewhere" (the time is
            not in attention), "check" (the file cannot tell, a line of code can).
        claim: one or two sentences.
        where: which calls or kernels, in words.
        confidence: "certain" (the file shows it), "likely" (it follows from documented behaviour),
            "possible" (other causes would look the same).
        backend: of the calls concerned; None where it is not about calls of one backend.
        device_ns, host_ns: time of one call that it accounts for; None where it is not about that.
        calls: the attention calls concerned; () where it is not about calls.
        part_of: the rule whose advice removes this as well; its gain is counted there.
    """

    rule: str
    verdict: Verdict
    claim: str
    where: str = ""
    numbers: tuple[Number, ...] = ()
    gain: Gain | None = None
    advice: Advice | None = None
    confidence: Confidence = "certain"
    backend: str | None = None
    part_of: str | None = None
    device_ns: float | None = None
    host_ns: float | None = None
    calls: tuple[AttentionCall, ...] = field(default=(), repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "claim": self.claim,
            "where": self.where,
            "numbers": [vars(number) for number in self.numbers],
            "gain": None if self.gain is None else vars(self.gain),
            "advice": (
                None
                if self.advice is None
                else {**vars(self.advice), "given": list(self.advice.given)}
            ),
            "confidence": self.confidence,
            "backend": self.backend,
            "part_of": self.part_of,
        }


_ORDER: dict[Verdict, int] = {"slow": 0, "check": 1, "elsewhere": 2, "not measured": 3, "fine": 4}


def in_order(findings: list[Finding]) -> list[Finding]:
    """What costs most first; what is part of another behind it; what is fine last."""

    def key(finding: Finding) -> tuple[int, float, int]:
        gain = 0.0 if finding.gain is None else finding.gain.seconds
        return (_ORDER[finding.verdict], -gain, finding.part_of is not None)

    return sorted(findings, key=key)
