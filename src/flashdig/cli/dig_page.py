"""`flashdig dig --html` and `--from`: the page of a dig, fresh or from a record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdig.cli.errors import UnreadableInputError, UsageError
from flashdig.cli.page_file import require_place, write_page

if TYPE_CHECKING:
    from flashdig.bench.results import Record, Run
    from flashdig.evidence.card_file import Cards
    from flashdig.report.dig_page_record import Dig

CARDS = "cards.json"


@dataclass(frozen=True)
class PageRequest:
    """Where a page goes, and the part of its main problem's title that was asked for."""

    path: Path
    problem: str | None = None

    def check(self) -> None:
        """Raises UsageError where no page can be written."""
        require_place(self.path)


def show_record(
    path: Path, run_id: str | None, problem: str | None, html: Path | None, as_json: bool
) -> None:
    """The ladders of a record, on the terminal or as JSON, and as a page; nothing is run.

    Raises UnreadableInputError for what is no record of a dig or of a schema that is not known,
    and UsageError for a run or a problem that is not in it.
    """
    from flashdig.bench.results import read_record
    from flashdig.bench.rows import RecordError

    if html is not None:
        require_place(html)
    try:
        record = read_record(path)
        if run_id is not None and all(run.run_id != run_id for run in record.runs):
            names = ", ".join(run.run_id for run in record.runs) or "none"
            raise UsageError(f"--run: {path} has no run {run_id!r}; it has: {names}")
        dig = _dig(record, path.name, run_id, problem)
    except RecordError as error:
        named = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise UnreadableInputError(f"--from: {named}") from error
    if html is not None:
        _write(html, dig, _kept_cards(dig, path.with_name(CARDS)))
    _print(dig, problem is not None, html, as_json)


def _print(dig: Dig, only_main: bool, html: Path | None, as_json: bool) -> None:
    import json

    from rich.console import Console

    from flashdig.report.dig_table import legend, print_ladder

    shown = [dig.main] if only_main else dig.problems
    rows = [row for problem in shown for row in problem.rows]
    if as_json:
        runs = {run_id: asdict(run) for run_id, run in dig.runs.items()}
        print(json.dumps({"runs": runs, "rows": rows}, indent=1))
        return
    console = Console()
    if html is None:
        print_ladder(rows, console)
        console.print(legend(rows), style="dim", highlight=False)
    else:
        console.print(f"page written: {html}", markup=False, highlight=False)


def write_live_page(
    request: PageRequest,
    run: Run,
    rows: Sequence[dict[str, Any]],
    notes: Sequence[str],
    progress: Callable[[str], None],
) -> None:
    """The page of what was just found; v1 and v2 are compiled for it, here."""
    from importlib.metadata import PackageNotFoundError, version

    from flashdig.bench.results import Record
    from flashdig.evidence.card_file import compile_cards

    dig = _dig(Record("dig").with_run(run, rows), "this run", None, request.problem, notes)
    key = dig.card_key
    cards: Cards | str = "The record names no chip that v1 and v2 could be compiled for."
    if key is not None:
        progress(f"compiling v1 and v2 for {key.words}")
        try:
            cards = compile_cards(key, version("triton"))
        except PackageNotFoundError:
            cards = "Triton is not installed here, so that nothing could be compiled."
    _write(request.path, dig, cards)


def _dig(
    record: Record,
    source: str,
    run_id: str | None,
    problem: str | None,
    notes: Sequence[str] = (),
) -> Dig:
    from flashdig.report.dig_page_record import UnknownProblemError, dig_of

    try:
        return dig_of(record, source, run_id=run_id, wanted=problem, notes=notes)
    except UnknownProblemError as error:
        raise UsageError(f"--problem: {error}") from error


def _kept_cards(dig: Dig, path: Path) -> Cards | str:
    """The cards beside a record, or why there are none."""
    from flashdig.evidence.card_file import UnreadableCardsError, read_cards

    key = dig.card_key
    if key is None:
        return "The record names no chip that v1 and v2 could be compiled for."
    if not path.exists():
        return f"There is no {path.name} beside the record; benchmarks/record_cards.py writes it."
    try:
        kept = read_cards(path)
    except UnreadableCardsError as error:
        raise UnreadableInputError(str(error)) from error
    return kept.get(key) or f"{path.name} has no cards for {key.words}."


def _write(path: Path, dig: Dig, cards: Cards | str) -> None:
    from flashdig.generations.walk import walk
    from flashdig.report.dig_page import render_dig_page

    write_page(path, render_dig_page(dig, cards, walk()))
