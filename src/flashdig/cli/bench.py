"""flashdig bench: a suite of attention problems, ours against the peers, each checked first."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError

if TYPE_CHECKING:
    from flashdig.bench.results import Run
    from flashdig.bench.run_suite import Plan
    from flashdig.bench.suite import Suite


def command(
    suite: Annotated[
        str,
        typer.Argument(
            help="A suite's name (of benchmarks/suites) or its TOML file; or host: what a call "
            "costs before the GPU starts; or training-step: whole steps of two GPTs."
        ),
    ],
    ours: Annotated[
        str | None,
        typer.Option(help="Comma-separated backends of flashdig, or auto; default the suite's."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated peers: sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math, flex, "
            "fa3, fa4, in training-step also unfused, or none; default the suite's."
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Peer that geometric means are also taken against, beside the best."),
    ] = None,
    cells: Annotated[
        str | None,
        typer.Option(
            help="Only cells whose title contains this, or for which it holds: "
            "head_dim=128,causal=true,seqlen_q>=4096."
        ),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of each measurement; default the suite's.")
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds after which no further cell is begun."),
    ] = None,
    first_calls: Annotated[
        bool,
        typer.Option(
            "--first-calls",
            help="host only: instead, the first call of a process, with an empty and a warm cache "
            "and in 8 processes at once.",
        ),
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Append the run to this record (JSON).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Measure a suite: ours and the peers on the same inputs, checked before they are timed.

    Exit code 1: a result of ours was wrong, or it failed; 2: usage; 3: an unreadable suite or
    record.
    """
    if suite == "host":
        _refuse_for_host(ours=ours, against=against, cells=cells, time_limit=time_limit)
        from flashdig.cli.bench_host import bench_host

        bench_host(peers, rounds, first_calls, output, as_json)
        return
    if suite == "training-step" and not first_calls:
        if against is not None:
            raise UsageError("--against is not for flashdig bench training-step")
        from flashdig.cli.bench_training import bench_training

        bench_training(ours, peers, cells, rounds, time_limit, output, as_json)
        return
    if first_calls:
        raise UsageError("--first-calls is for flashdig bench host")
    chosen = _suite(suite)
    plan = _plan(chosen, ours, peers, cells, rounds, time_limit)
    _check_against(against, plan)
    _bench(plan, against or chosen.against, output, as_json)


def _refuse_for_host(**options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise UsageError(f"--{name.replace('_', '-')} is not for flashdig bench host")


def _suite(name: str) -> Suite:
    from flashdig.bench.suite import SuiteError, known_suites, load_suite, suite_folders

    path = Path(name)
    if path.suffix != ".toml":
        known = known_suites(suite_folders())
        if name not in known:
            listed = ", ".join(known) or "none found"
            raise UsageError(f"SUITE must be one of {listed}, or a .toml file, got {name!r}")
        path = known[name]
    try:
        return load_suite(path)
    except SuiteError as error:
        raise UnreadableInputError(str(error)) from error


def _plan(
    suite: Suite,
    ours: str | None,
    peers: str | None,
    cells: str | None,
    rounds: int | None,
    time_limit: float | None,
) -> Plan:
    """The suite with what the options change; errors name the option."""
    from flashdig.bench.cells import CellFilterError, cell_filter
    from flashdig.bench.competitors import check_backend
    from flashdig.bench.run_suite import Plan
    from flashdig.bench.suite import PEERS

    our_names = suite.ours if ours is None else _names(ours)
    for name in our_names:
        try:
            check_backend(name)
        except ValueError as error:
            raise UsageError(f"{'the suite' if ours is None else '--ours'}: {error}") from error
    peer_names = None
    if peers is not None:
        peer_names = () if peers.strip() == "none" else _names(peers)
        for name in peer_names:
            if name not in PEERS:
                raise UsageError(f"--peers must be none or of {', '.join(PEERS)}, got {name!r}")
    chosen = suite.cells
    if cells is not None:
        try:
            chosen = tuple(filter(cell_filter(cells), suite.cells))
        except CellFilterError as error:
            raise UsageError(f"--cells: {error}") from error
        if not chosen:
            raise UsageError(f"--cells: no cell of {suite.name} fits {cells!r}")
    return Plan(suite, chosen, our_names, peer_names, rounds, time_limit)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _check_against(against: str | None, plan: Plan) -> None:
    measured = list(dict.fromkeys(name for cell in plan.cells for name in plan.peers_of(cell)))
    if against is not None and against not in measured:
        listed = ", ".join(measured) or "none"
        raise UsageError(f"--against must be a peer that is measured ({listed}), got {against!r}")


def _bench(plan: Plan, against: str | None, output: Path | None, as_json: bool) -> None:
    from rich.console import Console

    from flashdig.bench.environment import collect, revision
    from flashdig.bench.results import new_run
    from flashdig.bench.run_suite import DeviceLostError, run_suite
    from flashdig.cli.record_output import (
        keep,
        progress_bar,
        require_writable,
        terminated_as_interrupted,
    )
    from flashdig.report.bench_table import print_bench

    if output is not None:
        require_writable(output)
    command_line = shlex.join(["flashdig", *sys.argv[1:]])
    run = new_run(command_line, collect(), revision())
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    done, stopped = 0, None
    try:
        with (
            terminated_as_interrupted(),
            warnings.catch_warnings(),
            progress_bar("measuring", len(plan.cells), quiet=as_json) as (say, one_done),
        ):
            # why torch refuses a kernel stands in the rows
            warnings.simplefilter("ignore")
            for result in run_suite(plan, run.run_id, progress=say):
                one_done()
                done += 1
                rows += result.rows
                failures += result.failures
    except KeyboardInterrupt:
        stopped = "interrupted"
    except DeviceLostError as error:
        stopped = str(error)
    finally:  # what was measured before an error or an interruption is kept
        if output is not None and rows:
            keep(output, plan.suite.name, run, rows)
    left = len(plan.cells) - done
    notes = [f"{left} of {len(plan.cells)} cells were not measured."] if left else []
    if as_json:
        _print_json(run, rows, against, notes)
    else:
        console = Console()
        print_bench(rows, console, against)
        for note in notes:
            console.print(note, highlight=False, markup=False)
        if output is not None and rows:
            console.print(f"Recorded in {output}.", highlight=False)
    if stopped is not None:
        failures.insert(0, stopped)
    if failures:
        raise CommandError(_some_of(failures))


def _some_of(failures: list[str], shown: int = 3) -> str:
    """The first failures and how many more there are: each stands in the table and the record."""
    text = "; ".join(failures[:shown])
    more = len(failures) - shown
    return text if more <= 0 else f"{text}; and {more} more"


def _print_json(
    run: Run, rows: list[dict[str, Any]], against: str | None, notes: list[str]
) -> None:
    from flashdig.bench.standings import BEST, means, standings
    from flashdig.report.bench_table import backward_note

    note = backward_note(rows)
    found = standings(rows)
    compared = [BEST] if against is None else [against, BEST]
    ratios = [
        {
            "cell": one.any_row["name"],
            "pass": one.any_row["pass"],
            "ours": one.ours["backend"],
            "best": one.best,
            "ratios": {
                name: {**dataclasses.asdict(ratio), "behind": ratio.behind}
                for name, ratio in one.ratios.items()
            },
        }
        for one in found
        if one.ours is not None
    ]
    content = {
        "run": dataclasses.asdict(run),
        "rows": rows,
        "ratios": ratios,
        "means": [dataclasses.asdict(mean) for mean in means(found, compared)],
        "notes": [*notes, note] if note else notes,
    }
    print(json.dumps(content, indent=1))
