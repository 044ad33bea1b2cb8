"""`flashdig trace`: read profiler files (or record one) and say where device time went."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError
from flashdig.cli.page_file import write_page

if TYPE_CHECKING:
    from flashdig.findings import Finding
    from flashdig.readers.compare import Comparison
    from flashdig.readers.model import Trace
    from flashdig.readers.summary import TraceSummary

# below this nobody waits long enough to want a progress bar
_PROGRESS_BYTES = 50_000_000


def command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Traces of one run: Chrome/Kineto JSON (plain, gzip, xz), Nsight Systems SQLite "
            "exports, directories of them, or - for standard input; or Nsight Compute's counters: "
            "CSV (raw or details page) or .ncu-rep. With --run or --ncu: the "
            "script's own arguments (after -- if they start with a dash).",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="FILE", help="Compare with this trace (the later one).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        str | None, typer.Option(metavar="PAGE", help="Write one offline page with time lines.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(metavar="SCRIPT", help="Record this Python script first, then read it."),
    ] = None,
    ncu: Annotated[
        str | None,
        typer.Option(
            metavar="SCRIPT",
            help="Measure this script's attention kernels with Nsight Compute, or print the "
            "command where it is missing or not permitted.",
        ),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Where --run and --ncu write their recording."),
    ] = None,
    stacks: Annotated[
        bool, typer.Option(help="With --run: record Python stacks and module paths too.")
    ] = False,
    allow_large: Annotated[
        bool,
        typer.Option(
            "--allow-large", help="Read compressed data that expands over 1000:1 or over 8 GiB too."
        ),
    ] = False,
) -> None:
    """Which attention ran, and where device time went, from anyone's profiler file."""
    files = files or []
    if run is not None and ncu is not None:
        raise UsageError("--run and --ncu exclude each other")
    if output is not None and run is None and ncu is None:
        raise UsageError("--output goes with --run or --ncu; --html and --json write results")
    if ncu is not None:
        if against is not None or html is not None or stacks:
            raise UsageError("--ncu only records: it takes --output and --json")
        _measure_with_ncu(ncu, files, output, as_json)
        return
    failure = None
    if run is not None:
        files, failure = _record(run, files, output, stacks)
    elif stacks:
        raise UsageError("--stacks goes with --run")
    if not files:
        raise UsageError("give at least one trace file, or --run SCRIPT (flashdig trace --help)")
    counters = [name for name in files if holds_counters(name)]
    if counters:
        if len(counters) < len(files) or against is not None or html is not None:
            raise UsageError(
                "Nsight Compute files hold no time line: give them alone, without --against and "
                "--html"
            )
        _show_counters(counters, as_json)
        return
    traces = _read(files, allow_large)
    others = _read([against], allow_large) if against is not None else []
    _show(traces, others, as_json, html)
    if failure is not None:
        raise CommandError(failure)


def holds_counters(name: str) -> bool:
    """By its name: the CSV pages and reports of Nsight Compute."""
    plain = name.lower().removesuffix(".gz").removesuffix(".xz")
    return plain.endswith((".csv", ".ncu-rep", ".ncu-repz"))


def _show_counters(files: list[str], as_json: bool) -> None:
    from flashdig.readers.ncu import read_ncu
    from flashdig.readers.open_file import UnreadableFileError

    try:
        read = {name: read_ncu(name) for name in files}
    except UnreadableFileError as error:
        raise UnreadableInputError(str(error)) from error
    from flashdig.findings import find_in_counters
    from flashdig.report.ncu_terminal import ncu_to_json, print_ncu

    findings = {name: find_in_counters(kernels) for name, kernels in read.items()}
    if as_json:
        answer = [
            {
                "source": name,
                "kernels": ncu_to_json(kernels),
                "findings": [finding.to_dict() for finding in findings[name]],
            }
            for name, kernels in read.items()
        ]
        typer.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console

    from flashdig.report.trace_terminal import print_short_findings

    console = Console()
    for name, kernels in read.items():
        print_ncu(kernels, name, console)
        print_short_findings(findings[name], console, places=True)


def _show(traces: list[Trace], others: list[Trace], as_json: bool, html: str | None) -> None:
    from flashdig.findings import find_in_trace
    from flashdig.readers.compare import compare
    from flashdig.readers.summary import summarize

    summaries = [summarize(trace) for trace in traces]
    comparison = None
    if others:
        summaries.append(summarize(others[0]))
        if len(traces) != 1 or len(others) != 1:
            raise UsageError("--against compares one trace with one other")
        comparison = compare(summaries[0], summaries[1])
    findings = [
        find_in_trace(trace, summary)
        for trace, summary in zip([*traces, *others], summaries, strict=True)
    ]
    for summary in summaries:
        for warning in summary.warnings:
            typer.echo(f"flashdig: warning: {summary.source}: {warning.message}", err=True)
    if html is not None:
        _write_page(html, [*traces, *others], summaries, comparison, findings)
    if as_json:
        from flashdig.readers.summary_json import summaries_to_json

        answer = summaries_to_json(summaries, comparison)
        for entry, found in zip(cast(list[Any], answer["traces"]), findings, strict=True):
            entry["findings"] = [finding.to_dict() for finding in found]
        typer.echo(json.dumps(answer, indent=1))
        return
    from rich.console import Console

    from flashdig.report.trace_terminal import print_comparison, print_ranks, print_summary

    console = Console()
    if len(traces) > 1:
        print_ranks(summaries, console)
    for summary, found in zip(summaries, findings, strict=True):
        print_summary(summary, console, found)
    if comparison is not None:
        print_comparison(comparison, console)
    if html is not None:
        console.print(f"page written: {html}", markup=False, highlight=False)


def _write_page(
    path: str,
    traces: list[Trace],
    summaries: list[TraceSummary],
    comparison: Comparison | None,
    findings: list[list[Finding]],
) -> None:
    from flashdig.report.trace_page import render_trace_page

    write_page(Path(path), render_trace_page(traces, summaries, comparison, findings))


def _read(files: list[str], allow_large: bool) -> list[Trace]:
    from flashdig.readers.files import read_traces
    from flashdig.readers.open_file import UnreadableFileError

    with _progress(files) as progress:
        try:
            return read_traces(files, allow_large=allow_large, progress=progress)
        except UnreadableFileError as error:
            raise UnreadableInputError(str(error)) from error


@contextmanager
def _progress(files: list[str]) -> Iterator[Callable[[str, int], None] | None]:
    """A bar on standard error while large files are read, where somebody looks."""
    sizes = {name: Path(name).stat().st_size for name in files if Path(name).is_file()}
    if sum(sizes.values()) < _PROGRESS_BYTES or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID

    with Progress(console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(name: str, done: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(Path(name).name, total=sizes.get(name))
            bar.update(tasks[name], completed=done)

        yield advance


def _record(
    script: str, arguments: list[str], output: str | None, stacks: bool
) -> tuple[list[str], str | None]:
    """Record the script; the trace's name, and what went wrong in the script."""
    from flashdig.evidence.capture import CaptureError, ScriptFailedError, record_script

    path = output or f"{Path(script).stem}.trace.json.gz"
    try:
        record_script(script, arguments, path, stacks=stacks)
    except ScriptFailedError as error:
        return [error.path], str(error)
    except CaptureError as error:
        raise UsageError(str(error)) from error
    typer.echo(f"flashdig: trace written: {path}", err=True)
    return [path], None


def _measure_with_ncu(script: str, arguments: list[str], output: str | None, as_json: bool) -> None:
    from flashdig.evidence.capture import CaptureError, run_ncu

    path = output or f"{Path(script).stem}.ncu.csv"
    try:
        outcome = run_ncu(script, arguments, path)
    except CaptureError as error:
        raise UsageError(str(error)) from error
    if as_json:
        answer = {"command": outcome.command, "path": outcome.path, "reason": outcome.reason}
        typer.echo(json.dumps(answer, indent=1))
    elif outcome.path is None:
        typer.echo(f"Not measured: {outcome.reason}. Run it where it is allowed:")
        typer.echo(outcome.command)
    else:
        typer.echo(f"counters written: {outcome.path}")
        _show_counters([outcome.path], as_json=False)
