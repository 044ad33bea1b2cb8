"""Pages of digs for the tests: from committed records, and from a small hostile one."""

from __future__ import annotations

import copy
import html.parser
import json
from collections import Counter
from pathlib import Path
from typing import Any

import flashdig
from flashdig.bench.results import Record, Run, read_record
from flashdig.evidence.card_file import Cards
from flashdig.generations.walk import walk
from flashdig.report.dig_page import render_dig_page
from flashdig.report.dig_page_record import Dig, dig_of
from tests.figure_cases import with_counters

ROOT = Path(flashdig.__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
REPORTS = ROOT / "docs" / "reports"
MACHINES = ("nvidia-h200", "cpu")
HOSTILE = "<script>alert('dug')</script><img src=x onerror=alert(2)>\"' onfocus=alert(3) x='"


def record_path(machine: str) -> Path:
    return RESULTS / machine / "dig.json"


def small_record(rungs: tuple[str, ...] = ("v1", "v2"), preset: str | None = None) -> Record:
    """Some rungs of one problem of the H200's record."""
    whole = read_record(record_path("nvidia-h200"))
    rows = [
        copy.deepcopy(row)
        for row in whole.rows
        if row["name"] in rungs and row["kind"] == "rung" and row.get("preset") == preset
    ][: len(rungs)]
    (run_id,) = {row["run_id"] for row in rows}
    runs = tuple(run for run in whole.runs if run.run_id == run_id)
    return Record("dig", runs, tuple(rows))


def hostile_record() -> Record:
    """Markup wherever a record holds text that somebody else chose."""
    plain = small_record()
    rows = []
    for number, row in enumerate(with_counters(list(plain.rows))):
        row |= {"sentence": HOSTILE, "notes": HOSTILE, "preset": HOSTILE, "gate": "ok"}
        row["name"] = f"{HOSTILE}{number}" if number else row["name"]
        row["surprises"] = [
            {"what": HOSTILE, "predicted": 1.0, "found": 2.0, "tolerance": 0.1, "cause": HOSTILE}
        ]
        for kernel in row["kernels"]:
            kernel |= {"name": HOSTILE, "occupancy_limit": HOSTILE}
        row["counted"]["source"] = HOSTILE
        row["counters"]["source"] = HOSTILE
        row["counters"]["kernels"][0]["name"] = HOSTILE
        rows.append(row)
    (run,) = plain.runs
    environment: dict[str, Any] = dict.fromkeys(run.environment, HOSTILE)
    environment |= {"power_limit_w": 700.0}
    return Record(
        "dig", (Run(run.run_id, environment, HOSTILE, HOSTILE, run.started),), tuple(rows)
    )


def write(record: Record, path: Path) -> Path:
    path.write_text(record.to_json(), encoding="utf-8")
    return path


def page_of(dig: Dig, cards: Cards | str = "none were compiled") -> str:
    return render_dig_page(dig, cards, walk())


def hostile_page() -> str:
    return page_of(dig_of(hostile_record(), HOSTILE, notes=[HOSTILE]), HOSTILE)


class Parsed(html.parser.HTMLParser):
    """What a page holds and what it would fetch; checks that its tags close."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})
    INLINE = frozenset({"a", "b", "code", "span"})

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.handlers: list[str] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(content)
        assert self._open == []
        self.text = " ".join("".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            if name == "id":
                self.ids[value or ""] += 1
            elif name == "href" and (value or "").startswith("#"):
                self.links.append((value or "")[1:])
            elif name in {"src", "href", "srcset", "action", "data", "poster"}:
                self.fetched.append(f"{tag} {name}={value}")
            elif name.startswith("on"):
                self.handlers.append(f"{tag} {name}={value}")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag not in self.INLINE:
            self.texts.append(" ")

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] != "style":
            self.texts.append(data)


def as_dict(record: Record) -> dict[str, Any]:
    """The file's content, to be damaged."""
    content: dict[str, Any] = json.loads(record.to_json())
    return content
