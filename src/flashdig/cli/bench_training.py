"""flashdig bench training-step: whole training steps, ours beside the peers."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from flashdig.cli.errors import CommandError, UsageError

if TYPE_CHECKING:
    from flashdig.bench.training_cells import TrainingCell

# parameters of which a step on a CPU takes seconds, not minutes
LARGEST_ON_CPU = 10_000_000


def bench_training(
    ours: str | None,
    peers: str | None,
    cells: str | None,
    rounds: int | None,
    time_limit: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """What `flashdig bench training-step` does; the arguments are its options."""
    from rich.console import Console

    from flashdig.bench.environment import collect, revision
    from flashdig.bench.results import Record, Row, new_run, read_record
    from flashdig.bench.training import ROUNDS, measure_training
    from flashdig.bench.training_cells import PEERS, SUITE
    from flashdig.bench.training_entries import check_names
    from flashdig.cli.record_output import (
        progress_bar,
        require_writable,
        terminated_as_interrupted,
    )
    from flashdig.report.training_table import print_training

    our_names = _names(ours, ("auto",))
    peer_names = _names(peers, PEERS)
    try:
        check_names(our_names, peer_names)
    except ValueError as error:
        raise UsageError(f"--ours or --peers: {error}") from error
    chosen = _cells(cells)
    before = Record(SUITE)
    if output is not None:
        require_writable(output)
        before = read_record(output) if output.exists() else before
        if before.suite != SUITE:
            raise UsageError(f"--output: {output} is the record of suite {before.suite!r}")
    run = new_run(shlex.join(["flashdig", *sys.argv[1:]]), collect(), revision())
    rows: list[Row] = []
    failures: list[str] = []
    done = 0
    start = began = time.monotonic()
    try:
        with (
            terminated_as_interrupted(),
            warnings.catch_warnings(),
            progress_bar("measuring", len(chosen), quiet=as_json) as (say, one_done),
        ):
            warnings.simplefilter("ignore")  # why torch refuses a kernel stands in the rows
            for cell in chosen:
                last, began = time.monotonic() - began, time.monotonic()
                if time_limit is not None and began - start + last > time_limit:
                    break
                result = measure_training(
                    cell,
                    run.run_id,
                    ours=our_names,
                    peers=peer_names,
                    rounds=rounds or ROUNDS,
                    progress=say,
                )
                rows += result.rows
                failures += result.failures
                done += 1
                one_done()
                if output is not None:  # after each cell: a batch system may end the run
                    before.with_run(run, rows).write(output)
    except KeyboardInterrupt:
        failures.insert(0, "interrupted")
    left = len(chosen) - done
    notes = [f"{left} of {len(chosen)} cells were not measured."] if left else []
    if as_json:
        content = {"run": dataclasses.asdict(run), "rows": rows, "notes": notes}
        print(json.dumps(content, indent=1))
    else:
        console = Console()
        print_training(rows, console)
        for note in notes:
            console.print(note, highlight=False, markup=False)
        if output is not None and rows:
            console.print(f"Recorded in {output}.", highlight=False)
    if failures:
        raise CommandError("; ".join(failures))


def _names(text: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    if text is None:
        return default
    if text.strip() == "none":
        return ()
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _cells(text: str | None) -> list[TrainingCell]:
    """The cells that --cells takes, refused where a CPU would train for hours."""
    import torch

    from flashdig.bench.cells import CellFilterError, cell_filter
    from flashdig.bench.training_cells import CELLS

    chosen = list(CELLS)
    if text is not None:
        try:
            takes = cell_filter(text)
        except CellFilterError as error:
            raise UsageError(f"--cells: {error}") from error
        chosen = [cell for cell in chosen if takes(cell.attention)]
        if not chosen:
            raise UsageError(f"--cells: no cell of training-step fits {text!r}")
    largest = max(cell.size.parameters for cell in chosen)
    if not torch.cuda.is_available() and largest > LARGEST_ON_CPU:
        raise UsageError("training-step needs a CUDA device: elsewhere one step takes minutes")
    return chosen
