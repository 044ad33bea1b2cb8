"""`flashdig explain`: guess first, then look; what differs, why, and what to try."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError
from flashdig.cli.page_file import require_place, write_page
from flashdig.cli.problem_text import HELP, parse_problem

if TYPE_CHECKING:
    from flashdig.findings.guess import Guess
    from flashdig.findings.presets import ArticlePreset
    from flashdig.findings.study import Study
    from flashdig.hardware.devices import Device


class FindingError(CommandError):
    """--fail-on-finding, and there is one."""


def command(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Traces (Chrome/Kineto, Nsight Systems) or Nsight Compute's counters (CSV, "
            ".ncu-rep).",
            show_default=False,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="An article, recorded on this machine's GPU: profiling-article or archaeology.",
        ),
    ] = None,
    recordings: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --preset: where its recordings are written, or with --read are already.",
        ),
    ] = None,
    read: Annotated[
        bool, typer.Option("--read", help="With --preset: record nothing, read the folder.")
    ] = False,
    problem: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Guess this before the files are opened. " + HELP),
    ] = None,
    asked: Annotated[
        str, typer.Option(help="With --problem: what the code calls, as sdpa, eager, fa3, v2.")
    ] = "sdpa",
    direction: Annotated[
        str, typer.Option("--pass", help="With --problem: forward, backward or decode.")
    ] = "forward",
    gpu: Annotated[
        str | None,
        typer.Option(help="Chip of the guess with --problem, and of counters, as h200."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="PAGE", help="Write one offline page.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="With --preset: append a run to this record."),
    ] = None,
    fail_on_finding: Annotated[
        bool, typer.Option("--fail-on-finding", help="Exit with 1 if a finding costs time.")
    ] = False,
) -> None:
    """Guess what attention should show, then compare with what a recording shows.

    Surprises come first, each with its cause where a rule knows it.
    """
    if html is not None:
        require_place(html)
    if preset is not None:
        if files or problem is not None:
            raise UsageError("--preset has files and a problem of its own: give it alone")
        study, guesses = _of_preset(preset, recordings, read, gpu, record, quiet=as_json)
    else:
        if recordings is not None or read or record is not None:
            raise UsageError("--recordings, --read and --record go with --preset")
        if not files:
            raise UsageError("give a recording, or --preset NAME (flashdig explain --help)")
        study, guesses = _of_files(files, problem, asked, direction, gpu, quiet=as_json)
    if html is not None:
        from flashdig.report.explain_page import render_explain_page

        write_page(html, render_explain_page(study, guesses))
    if as_json:
        typer.echo(json.dumps(study.to_dict(), indent=1))
    else:
        from rich.console import Console

        from flashdig.report.explain_terminal import print_study

        console = Console()
        print_study(study, console)
        if html is not None:
            console.print(f"page written: {html}", markup=False, highlight=False)
    slow = [finding.rule for finding in study.findings if finding.verdict == "slow"]
    if fail_on_finding and slow:
        raise FindingError(f"findings that cost time: {', '.join(dict.fromkeys(slow))}")


def _show_guesses(guesses: dict[str, Guess], quiet: bool) -> None:
    if quiet:
        return
    from rich.console import Console

    from flashdig.report.explain_terminal import print_guesses

    print_guesses(guesses, Console())
    sys.stdout.flush()


def _of_files(
    files: list[str],
    problem: str | None,
    asked: str,
    direction: str,
    gpu: str | None,
    *,
    quiet: bool,
) -> tuple[Study, dict[str, Guess]]:
    from dataclasses import replace

    from flashdig.cli.trace import holds_counters
    from flashdig.findings import study
    from flashdig.readers.files import read_traces
    from flashdig.readers.ncu import read_ncu
    from flashdig.readers.open_file import UnreadableFileError

    device = _device(gpu)
    guesses: dict[str, Guess] = {}
    guessed_at = None
    if problem is not None:
        guesses = {"the call": _guess(problem, asked, direction, device)}
        guessed_at = study.now()
        _show_guesses(guesses, quiet)
    given = next(iter(guesses.values()), None)
    counters = [name for name in files if holds_counters(name)]
    if counters and len(counters) < len(files):
        raise UsageError("give counters and traces apart: they are read differently")
    try:
        if len(counters) > 1:
            raise UsageError("give one file of counters at a time")
        if counters:
            found = study.study_counters(counters[0], read_ncu(counters[0]), device, given)
        else:
            found = study.study_traces(read_traces(files), given)
    except UnreadableFileError as error:
        raise UnreadableInputError(str(error)) from error
    return replace(found, guessed_at=guessed_at), guesses


def _guess(problem: str, asked: str, direction: str, device: Device | None) -> Guess:
    from flashdig.findings.guess import guess

    if direction not in ("forward", "backward", "decode"):
        raise UsageError(f"--pass must be forward, backward or decode, got {direction!r}")
    if device is None:
        raise UsageError("--problem needs --gpu: the guess is for a chip")
    typed = parse_problem(problem).problem
    try:
        return guess(asked, typed, device, direction)  # type: ignore[arg-type]
    except ValueError as error:
        raise UsageError(f"--asked: {error}") from error


def _device(gpu: str | None) -> Device | None:
    from flashdig.hardware.detect import this_device
    from flashdig.hardware.devices import find_device

    if gpu is None:
        return None
    try:
        return this_device() if gpu == "here" else find_device(gpu)
    except ValueError as error:
        raise UsageError(f"--gpu: {error}") from error


def _of_preset(
    name: str,
    folder: Path | None,
    read: bool,
    gpu: str | None,
    record: Path | None,
    *,
    quiet: bool,
) -> tuple[Study, dict[str, Guess]]:
    from flashdig.findings.presets import ARTICLE_PRESETS, RecordingsError
    from flashdig.findings.study import guesses_of, study_preset, write_guesses
    from flashdig.readers.open_file import UnreadableFileError

    preset = ARTICLE_PRESETS.get(name)
    if preset is None:
        raise UsageError(f"--preset must be {' or '.join(ARTICLE_PRESETS)}, got {name!r}")
    if read and folder is None:
        raise UsageError("--read needs --recordings FOLDER")
    if record is not None:
        from flashdig.cli.record_output import require_writable

        require_writable(record)
    folder = folder or Path(f"flashdig-{name}")
    device = _device(gpu) or (_device_of_folder(folder) if read else _recording_device(name))
    guesses = guesses_of(preset, device)
    _show_guesses(guesses, quiet)
    guessed_at = _kept_time(folder) if read else write_guesses(folder, guesses)
    if not read:
        _record(preset, folder)
    try:
        study = study_preset(preset, folder, guesses, guessed_at, device)
    except RecordingsError as error:
        raise UnreadableInputError(str(error)) from error
    except UnreadableFileError as error:
        raise UnreadableInputError(str(error)) from error
    if record is not None:
        from flashdig.bench.results import new_run
        from flashdig.cli.record_output import keep
        from flashdig.findings.presets import recorded_on
        from flashdig.findings.record_rows import record_rows

        try:
            environment, revision = recorded_on(folder)
        except RecordingsError as error:
            raise UnreadableInputError(str(error)) from error
        command = " ".join(["flashdig", *sys.argv[1:]])
        run = new_run(command, environment, revision)
        keep(record, preset.name, run, record_rows(preset, study))
    return study, guesses


def _recording_device(preset: str) -> Device:
    """The chip that a preset is to be recorded on: this machine's."""
    from flashdig.hardware.detect import this_device
    from flashdig.hardware.devices import UnknownDeviceError

    try:
        return this_device()
    except UnknownDeviceError as error:
        raise UsageError(
            f"--preset {preset} records on this machine's GPU: {error} (--read --recordings FOLDER "
            "explains recordings that exist)"
        ) from error


def _device_of_folder(folder: Path) -> Device | None:
    """The chip of a preset's recordings, from the first trace among them."""
    from flashdig.hardware.detect import device_of_name
    from flashdig.readers.files import read_traces
    from flashdig.readers.open_file import UnreadableFileError

    traces = sorted(folder.glob("*.json.gz"))
    if not traces:
        return None
    try:
        (trace,) = read_traces([str(traces[0])])
    except UnreadableFileError as error:
        raise UnreadableInputError(str(error)) from error
    names = [device.name for device in trace.devices if device.name]
    return device_of_name(names[0]) if names else None


def _kept_time(folder: Path) -> str | None:
    """When the guesses beside a folder's recordings were written."""
    from flashdig.findings.study import GUESSES

    try:
        kept = json.loads((folder / GUESSES).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    written = kept.get("written") if isinstance(kept, dict) else None
    return written if isinstance(written, str) else None


def _record(preset: ArticlePreset, folder: Path) -> None:
    from flashdig.evidence import preset_recordings

    def say(what: str) -> None:
        typer.echo(f"flashdig: recording: {what}", err=True)

    recorders = {
        "profiling-article": preset_recordings.record_profiling_article,
        "archaeology": preset_recordings.record_archaeology,
    }
    try:
        recorders[preset.name](folder, say=say)
    except preset_recordings.RecordingError as error:
        raise UsageError(f"--preset {preset.name}: {error}") from error
