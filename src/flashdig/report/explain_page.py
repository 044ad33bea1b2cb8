"""`flashdig explain` as one offline HTML page: no network, no script, light and dark."""

from __future__ import annotations

from collections.abc import Mapping

from flashdig._version import __version__
from flashdig.findings.guess import Guess
from flashdig.findings.study import Study
from flashdig.report.finding_words import (
    CONFIDENCE_WORDS,
    VERDICT_WORDS,
    gain_words,
    guess_cells,
    quantity,
    ratio_words,
)
from flashdig.report.page_environment import page_environment


def render_explain_page(study: Study, guesses: Mapping[str, Guess] | None = None) -> str:
    """The page as text.

    Args:
        guesses: that were written down beforehand, by name; None where each is beside its rows.
    """
    environment = page_environment()
    environment.filters.update(quantity=quantity, ratio=ratio_words, gain=gain_words)
    known, surprises = study.explained
    return environment.get_template("explain.html").render(
        study=study,
        guesses={name: guess_cells(guess) for name, guess in (guesses or {}).items()},
        verdict=_verdict(study, known, surprises),
        verdict_words=VERDICT_WORDS,
        confidence_words=CONFIDENCE_WORDS,
        version=__version__,
    )


def _verdict(study: Study, known: int, surprises: int) -> str:
    slow = [f for f in study.findings if f.verdict == "slow" and f.part_of is None]
    recorded = sum(bool(section.explanations) for section in study.sections)
    words = f"{recorded} recording{'s' if recorded != 1 else ''}, {surprises} surprises"
    if surprises:
        words += f", {known} of them explained by a rule"
    if not slow:
        return f"{words}. No finding costs time."
    names = ", ".join(dict.fromkeys(finding.rule for finding in slow))
    return f"{words}. What costs time: {names}."
