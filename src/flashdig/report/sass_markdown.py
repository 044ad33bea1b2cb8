"""Tables of compiled kernels for the docs, drawn from what `flashdig sass --json` wrote.

    python -m flashdig.report.sass_markdown benchmarks/results/compiled/sass.json docs/sass.md

rewrites what stands between "<!-- table: NAME -->" and "<!-- end of table -->"; NAME is an exhibit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flashdig.evidence.sass_card import SassCard
from flashdig.report.markdown import with_drawn
from flashdig.report.sass_terminal import card_cell, card_figures


def card_markdown(cards: Sequence[SassCard]) -> str:
    """A column for each chip, a row for each figure, and below what the figures say."""
    lines = [
        f"| `{cards[0].subject}` | {' | '.join(card.arch for card in cards)} |",
        f"| --- |{' ---: |' * len(cards)}",
    ]
    for name, values in card_figures(cards).items():
        # a row of the loop is indented under that of the whole kernel
        title = name.strip() if name == name.lstrip() else f"&nbsp;&nbsp;{name.strip()}"
        lines.append(f"| {title} | {' | '.join(card_cell(value) for value in values)} |")
    lines.append("")
    lines += [f"- {card.arch}: {'; '.join(card.sentences)}." for card in cards]
    return "\n".join(lines)


def with_cards(text: str, record: Mapping[str, Any]) -> str:
    """A document with its tables drawn anew. Raises ValueError for an unknown or open table."""
    cards = [SassCard.from_dict(values) for values in record["cards"]]
    groups: dict[str, list[SassCard]] = {}
    for card in cards:
        groups.setdefault(card.subject, []).append(card)
    return with_drawn(text, {name: partial(card_markdown, own) for name, own in groups.items()})


if __name__ == "__main__":
    recorded, *documents = (Path(argument) for argument in sys.argv[1:])
    for document in documents:
        document.write_text(with_cards(document.read_text(), json.loads(recorded.read_text())))
