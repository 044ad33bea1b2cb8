"""A dig as one offline HTML page: no network, no script, light and dark, for screen and print.

It says what the terminal says, from the same rows, with pictures, a glossary and the reasons to
trust it. A page from a committed record is the same whenever it is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import pass_context

from flashdig._version import __version__
from flashdig.evidence.card_file import Cards
from flashdig.hardware.devices import Device
from flashdig.report.dig_page_findings import comparisons
from flashdig.report.dig_page_glossary import Glossary
from flashdig.report.dig_page_record import Dig, Problem
from flashdig.report.dig_page_tables import (
    Table,
    card_table,
    counters_table,
    error_table,
    ladder_table,
    rung_words,
)
from flashdig.report.dig_page_trust import machines, trust
from flashdig.report.dig_page_words import SECTIONS, is_timed, machine, tiles, verdict
from flashdig.report.dig_table import PATHS, legend
from flashdig.report.figures import Missing, Picture
from flashdig.report.figures.errors import errors
from flashdig.report.figures.ladder import ladder
from flashdig.report.figures.memory_ledger import memory_ledger
from flashdig.report.figures.pipes import pipes
from flashdig.report.figures.roofline import roofline
from flashdig.report.figures.steps import steps
from flashdig.report.figures.style import FIGURES_CSS
from flashdig.report.figures.walk_picture import walk_picture
from flashdig.report.figures.waves import waves
from flashdig.report.page_environment import page_environment

if TYPE_CHECKING:
    from flashdig.generations.walk_data import Walk

Figure = Picture | Missing


@dataclass(frozen=True)
class Section:
    """A heading, what it shows, pictures, and perhaps a table."""

    anchor: str
    title: str
    lead: str
    figures: Sequence[Figure]
    table: Table | None = None


def render_dig_page(dig: Dig, cards: Cards | str, walk: Walk) -> str:
    """The page as text.

    Args:
        cards: v1 and v2 compiled for the main problem, or why there are none.
        walk: through the loop on small numbers, which no record holds.
    """
    glossary = Glossary()
    environment = page_environment()
    # with the context: a filter of constants alone would be evaluated out of order
    environment.filters["terms"] = pass_context(lambda _, text: glossary.link(text))
    main = dig.main
    compared = comparisons(main.ladder)
    device = dig.shown_device
    notes = list(dig.notes)
    if dig.gpu is None and device is not None:
        notes.append(
            f"Pictures that need a chip show what the cost models expect of an {device.name}; "
            "nothing was measured on one for this page."
        )
    sections = _sections(main, device)
    others = _others(dig)
    return environment.get_template("dig.html").render(
        dig=dig,
        main=main,
        machine=machine(dig),
        timed=is_timed(main.ladder),
        generator=generator(),
        figures_css=FIGURES_CSS,
        verdict=verdict(dig, main, compared),
        notes=notes,
        tiles=tiles(dig, compared),
        contents=_contents(sections, others),
        words=SECTIONS,
        figures={"ladder": ladder(main.ladder, device)},
        ladder=ladder_table(main.ladder),
        legend=legend(main.ladder),
        rungs=rung_words(main.ladder, kernels=True),
        comparisons=compared,
        sections=sections,
        cards=_cards(cards),
        steps=_steps(dig),
        walk=_walk(walk),
        others=others,
        trust=trust(dig),
        machines=machines(dig.runs),
        glossary=glossary,
        version=__version__,
        source=dig.source,
    )


def generator() -> str:
    """What drew a page: the same versions draw the same page from the same record."""
    import matplotlib

    return f"flashdig {__version__}, matplotlib {matplotlib.__version__}"


def _sections(problem: Problem, device: Device | None) -> list[Section]:
    rows = problem.ladder
    drawn: list[tuple[str, str, Sequence[Figure], Table | None]] = [
        ("roofs", "Roofs", [roofline(rows, device)], None),
        ("memory", "Memory ledger", [memory_ledger(rows, device)], counters_table(rows)),
        ("grid", "Grids and waves", [waves(rows, device)], None),
        ("pipes", "One tile loop", [pipes(rows, device)], None),
        ("errors", "Errors", [errors(rows)], error_table(rows)),
    ]
    return [
        Section(anchor, title, SECTIONS[anchor], figures, table)
        for anchor, title, figures, table in drawn
    ]


def _contents(
    sections: Sequence[Section], others: Sequence[Mapping[str, Any]]
) -> list[tuple[str, str]]:
    found = [("ladder", "The ladder"), ("guesses", "Guess against found")]
    found += [(section.anchor, section.title) for section in sections]
    found += [("sass", "As compiled"), ("steps", "Step by step"), ("walk", "Online softmax")]
    found += [("problems", "Other problems")] if others else []
    found += [(group["anchor"], group["title"]) for group in others]
    return [*found, ("trust", "Why to trust it"), ("glossary", "Words")]


def _cards(cards: Cards | str) -> dict[str, Any]:
    if isinstance(cards, str):
        return {"reason": cards, "table": None, "sentences": []}
    failed = "; ".join(f"{name} could not be compiled: {said}" for name, said in cards.failures)
    return {
        "reason": failed,
        "table": card_table(cards),
        "sentences": [
            (card.subject, f"{'; '.join(card.sentences)}. Kernel {card.kernel}.")
            for card in cards.cards
        ],
    }


def _steps(dig: Dig) -> list[dict[str, Any]]:
    """Each problem that was taken apart; the main one first, as everywhere."""
    found = []
    for number, problem in enumerate(dig.problems):
        if not problem.steps:
            continue
        rows = [row for path in problem.steps.values() for row in path]
        found.append(
            {
                "title": problem.title,
                "figure": steps(rows, name=f"steps-{number}"),
                "tables": [
                    (PATHS[path], ladder_table(own, "step")) for path, own in problem.steps.items()
                ],
                "rungs": rung_words(
                    [*problem.steps.get("cumulative", ()), *problem.steps.get("pair", ())],
                    kernels=False,
                ),
            }
        )
    return found


def _walk(walk: Walk) -> dict[str, Any]:
    checks = [check.ok for step in walk.steps for check in step.checks]
    return {
        "figures": [walk_picture(walk)],
        "slips": walk.slips,
        "checks": f"{sum(checks)} of {len(checks)} numbers of the walk are as they must be.",
    }


def _others(dig: Dig) -> list[dict[str, Any]]:
    """The ladders of all problems but the main one, by preset."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, problem in enumerate(dig.problems):
        if problem is dig.main or not problem.ladder:
            continue
        compared = comparisons(problem.ladder)
        group = groups.setdefault(problem.preset or "chosen sizes", [])
        drawn: list[Figure] = []
        if not group:  # of the first one; a page of a whole record would grow to megabytes
            drawn = [
                memory_ledger(problem.ladder, dig.shown_device, f"memory-{number}"),
                waves(problem.ladder, dig.shown_device, f"waves-{number}"),
            ]
        group.append(
            {
                "figures": drawn,
                "anchor": f"problem-{number}",
                "title": problem.title,
                "verdict": verdict(dig, problem, compared),
                "table": ladder_table(problem.ladder),
                "rungs": rung_words(problem.ladder, kernels=False),
                "surprises": [one for one in compared if one.is_surprise],
            }
        )
    return [
        {"anchor": f"preset-{number}", "title": title, "problems": problems}
        for number, (title, problems) in enumerate(groups.items())
    ]
