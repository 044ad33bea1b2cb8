"""What commands that measure share: the record that they append to, and the progress bar."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdig.cli.errors import UnreadableInputError, UsageError

if TYPE_CHECKING:
    from flashdig.bench.results import Run


def require_writable(output: Path) -> None:
    """Find out before the work, not after it, that the run cannot be kept."""
    from flashdig.bench.results import read_record
    from flashdig.bench.rows import RecordError

    if output.is_dir():
        raise UsageError(f"--output: {output} is a folder")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("a"):
            pass
        if output.stat().st_size == 0:
            output.unlink()
            return
        read_record(output)
    except OSError as error:
        raise UsageError(f"--output: cannot write {output}: {error.strerror}") from error
    except RecordError as error:
        raise UnreadableInputError(f"--output: {error}") from error


def keep(output: Path, suite: str, run: Run, rows: list[dict[str, Any]]) -> None:
    """Append the run to the record."""
    from flashdig.bench.results import append_run
    from flashdig.bench.rows import RecordError

    try:
        append_run(output, suite, run, rows)
    except RecordError as error:
        raise UnreadableInputError(f"--output: {error}") from error


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """While it is entered, SIGTERM (a batch system's time limit) raises KeyboardInterrupt, so that
    what was measured is kept as after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bar(
    what: str, steps: int, *, quiet: bool
) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """A bar over steps on standard error: say what is being done, and that one is done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    if quiet:
        yield lambda _: None, lambda: None
        return
    columns = [SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")]
    if steps > 1:
        columns[1:1] = [BarColumn(bar_width=20), MofNCompleteColumn()]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=steps)
        yield (
            lambda text: bar.update(task, description=text),
            lambda: bar.advance(task),
        )
