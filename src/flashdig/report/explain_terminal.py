"""`flashdig explain` on the terminal: the guess, guess against found, findings with advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashdig.findings.articles import ArticleRow
from flashdig.findings.explanation import Explanation
from flashdig.findings.finding import Finding
from flashdig.findings.guess import Guess
from flashdig.findings.study import Section, Study
from flashdig.report.finding_words import (
    CONFIDENCE_WORDS,
    gain_words,
    guess_cells,
    headline,
    quantity,
    ratio_words,
)

_STYLES = {"slow": "bold red", "check": "yellow", "elsewhere": "cyan"}
_MOST_KINDS = 6
_SHOWN = ("kernels", "operations", "bytes at memory", "floor", "expected", "host")


def print_guesses(guesses: Mapping[str, Guess], console: Console) -> None:
    """The guesses, before any file is opened."""
    console.print("[bold]The guess, before anything is recorded or opened[/bold]")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for name in _SHOWN:
        table.add_column(name, no_wrap=True, justify="right")
    for name, guess in guesses.items():
        cells = guess_cells(guess)
        table.add_row(escape(name), *(escape(cells[shown]) for shown in _SHOWN))
    console.print(table)
    console.print()


def print_study(study: Study, console: Console) -> None:
    """All sections, then the article's figures where there are any."""
    for section in study.sections:
        _print_section(section, console)
    if study.article:
        _print_article(study.article, console)
    known, surprises = study.explained
    if surprises:
        console.print(f"{surprises} surprises, {known} of them explained by a rule.")


def print_findings(findings: Sequence[Finding], console: Console) -> None:
    """Findings, one paragraph each, with advice and code."""
    for finding in findings:
        style = _STYLES.get(finding.verdict, "dim")
        console.print(f"[{style}]{escape(headline(finding))}[/{style}]")
        console.print(f"  {escape(finding.claim)}", highlight=False)
        gain = gain_words(finding.gain)
        if gain:
            console.print(f"  [dim]to gain:[/dim] {escape(gain)}", highlight=False)
        if finding.advice is not None:
            console.print(f"  [dim]try:[/dim] {escape(finding.advice.text)}", highlight=False)
            for line in finding.advice.code.splitlines():
                console.print(f"      {escape(line)}", style="green", highlight=False)
        about = f"{finding.where}; {CONFIDENCE_WORDS[finding.confidence]}"
        if finding.part_of is not None:
            about += f"; part of {finding.part_of}"
        console.print(f"  {escape(about)}", style="dim", highlight=False)


def _print_section(section: Section, console: Console) -> None:
    console.rule(f"[bold]{escape(section.name)}[/bold]", align="left")
    for note in section.notes:
        console.print(escape(note), style="yellow")
    for explanation in section.explanations[:_MOST_KINDS]:
        _print_explanation(explanation, {f.rule for f in section.findings}, console)
    if len(section.explanations) > _MOST_KINDS:
        hidden = len(section.explanations) - _MOST_KINDS
        console.print(f"… and {hidden} kinds of call more (--json has all)", style="dim")
    if section.findings:
        console.print("[bold]Findings[/bold]")
        print_findings(section.findings, console)
    elif section.explanations:
        console.print("No rule found anything here.")
    console.print()


def _print_explanation(explanation: Explanation, below: set[str], console: Console) -> None:
    """Rows of one kind of call; causes that are findings below are named, not repeated."""
    guess = explanation.guess
    console.print(
        f"{escape(explanation.subject)}"
        + (f" [dim](asked: {escape(guess.asked)})[/dim]" if guess is not None else "")
    )
    if guess is None:
        console.print("  No guess: sizes are not recorded, or no model knows this.", style="dim")
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("", no_wrap=True)
    for name in ("guessed", "found", ""):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for row in explanation.rows:
        cause = row.rule if row.rule in below and row.rule is not None else row.cause
        table.add_row(
            "!" if row.surprise else " ",
            row.what,
            escape(quantity(row.guessed, row.unit)),
            escape(quantity(row.found, row.unit)),
            ratio_words(row),
            escape(cause),
            style="" if row.surprise else "dim",
        )
    console.print(table)


def _print_article(rows: Sequence[ArticleRow], console: Console) -> None:
    console.rule("[bold]The article's figures[/bold]", align="left")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("", "", "published", "here", "why"):
        right = name in ("published", "here")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(
            escape(row.variant),
            row.what,
            escape(quantity(row.published, row.unit)),
            escape(quantity(row.found, row.unit)),
            escape(row.why),
        )
    console.print(table)
    console.print()
