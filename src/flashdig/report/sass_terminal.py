"""Cards of compiled kernels for the terminal: a table, what it says, what could not be compiled."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from flashdig.evidence.sass import FAMILIES
from flashdig.evidence.sass_card import SassCard

Value = float | str | None
_PIPES = ("tensor cores", "exp2", "FMA units", "shared memory", "issue")


def show_cards(
    cards: Sequence[SassCard], failures: Sequence[tuple[str, str, str]], console: Console
) -> None:
    """A table for each exhibit or file with a column for each chip, and the sentences below it.

    Args:
        failures: (subject, chip, message) of what could not be compiled or read.
    """
    for subject in dict.fromkeys(card.subject for card in cards):
        group = [card for card in cards if card.subject == subject]
        console.print(f"\n[bold]{escape(subject)}[/bold]: {escape(_kernels(group))}")
        console.print(_table(group, [card.arch for card in group]))
        _show_sentences(group, [card.arch for card in group], console)
    _show_failures(failures, console)


def show_against(
    pairs: Sequence[tuple[SassCard, SassCard]],
    failures: Sequence[tuple[str, str, str]],
    console: Console,
) -> None:
    """A table for each chip with two kernels side by side and what the second has more."""
    for first, second in pairs:
        names = [first.subject, second.subject]
        heading = first.arch if first.arch == second.arch else f"{first.arch}, {second.arch}"
        console.print(f"\n[bold]{escape(heading)}[/bold]: {escape(' against '.join(names))}")
        console.print(_table([first, second], names, difference=True))
        _show_sentences([first, second], names, console)
    _show_failures(failures, console)


def _kernels(cards: Sequence[SassCard]) -> str:
    return ", ".join(dict.fromkeys(card.kernel for card in cards))


def _show_sentences(cards: Sequence[SassCard], names: Sequence[str], console: Console) -> None:
    for card, name in zip(cards, names, strict=True):
        said = ". ".join(sentence[:1].upper() + sentence[1:] for sentence in card.sentences)
        console.print(Text(f"{name}: {said}."))


def _show_failures(failures: Sequence[tuple[str, str, str]], console: Console) -> None:
    if not failures:
        return
    table = Table(show_edge=False, pad_edge=False, title="without a card", title_justify="left")
    for column in ("what", "chip", "why"):
        table.add_column(column)
    for failure in failures:
        table.add_row(*(escape(part) for part in failure))
    console.print(Group("", table))


def _table(cards: Sequence[SassCard], columns: Sequence[str], *, difference: bool = False) -> Table:
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for column in columns:
        table.add_column(escape(column), justify="right")
    if difference:
        table.add_column("more", justify="right")
    for name, values in card_figures(cards).items():
        cells = [card_cell(found) for found in values]
        if difference:
            cells.append(card_more(values[0], values[1]))
        table.add_row(name, *cells)
    return table


def card_figures(cards: Sequence[SassCard]) -> dict[str, list[Value]]:
    """Row -> a figure of each card; families and pipes only where a card has them."""
    resident = [card.occupancy for card in cards]
    gemms = [card.gemms for card in cards]
    rows: dict[str, list[Value]] = {
        "registers a thread": [card.registers for card in cards],
        "stack, bytes": [card.stack_bytes for card in cards],
        "spills, bytes": [card.spill_bytes for card in cards],
        "ptxas warnings": [len(card.ptxas.warnings) if card.ptxas else None for card in cards],
        "shared memory, bytes": [card.shared_bytes for card in cards],
        "threads": [card.threads for card in cards],
        "blocks on an SM": [one.blocks_per_sm if one else None for one in resident],
        "limited by": [one.limiter if one else None for one in resident],
        "instructions": [card.instructions for card in cards],
        "  instructions in the loop": [card.loop_instructions for card in cards],
    }
    for family in FAMILIES:
        if any(family in card.whole for card in cards):
            rows[family] = [card.whole.get(family, 0) for card in cards]
            rows[f"  {family} in the loop"] = [card.loop.get(family, 0) for card in cards]
    rows["exp2 expected in the loop"] = [card.exp2_expected for card in cards]
    if any(card.gemms for card in cards):
        rows["  Q K^T in the loop"] = [one.scores if one else None for one in gemms]
        rows["  P V in the loop"] = [one.output if one else None for one in gemms]
        rows["  either of them"] = [one.open if one else None for one in gemms]
        rows["  needed for each"] = [one.needed_scores if one else None for one in gemms]
    if any(card.banks for card in cards):
        rows["bank conflicts in the loop"] = [_conflicts(card) for card in cards]
    for pipe in _PIPES:
        if any(pipe in card.cycles for card in cards):
            rows[f"loop cycles: {pipe}"] = [card.cycles.get(pipe) for card in cards]
    if any(card.measured for card in cards):
        measured = [card.measured for card in cards]
        rows["loop cycles: measured"] = [one.cycles if one else None for one in measured]
    return rows


def _conflicts(card: SassCard) -> Value:
    """Of all warps in an iteration; words where not all addresses are known."""
    if card.banks is None:
        return None
    if not card.banks.known:
        return "not known"
    few = card.banks.known < card.banks.instructions
    conflicts = card.banks.conflicts.conflicts
    return f"{conflicts:,} or more" if few else conflicts


def card_cell(value: Value) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:,.0f}"


def card_more(first: Value, second: Value) -> str:
    if isinstance(first, (int, float)) and isinstance(second, (int, float)):
        return f"{second - first:+,.0f}" if round(second - first) else ""
    return ""
