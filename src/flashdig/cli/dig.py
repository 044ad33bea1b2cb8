"""flashdig dig: run the ladder of attention generations and say why each rung is faster."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashdig.cli.dig_page import PageRequest, show_record, write_live_page
from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError
from flashdig.cli.sizes import parse_size

if TYPE_CHECKING:
    from flashdig.generations.expedition import Request

GPU_DEFAULTS = {"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 128, "dtype": "bfloat16"}
CPU_DEFAULTS = {"batch": 1, "heads": 2, "seqlen": 512, "head_dim": 64, "dtype": "float32"}


def command(
    preset: Annotated[
        str | None,
        typer.Option(
            help="An article's problems: archaeology, cutlass-article, fa2-paper, "
            "profiling-article, or all."
        ),
    ] = None,
    input_file: Annotated[
        Path | None, typer.Option("--input", help="A safetensors file with tensors q, k and v.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Dig at a real transformer's (MiniLM's) q, k, v of this text."),
    ] = None,
    layer: Annotated[int, typer.Option(help="Layer of MiniLM whose q, k, v --text takes.")] = 3,
    batch: Annotated[str | None, typer.Option(help="Random input: batch size.")] = None,
    heads: Annotated[str | None, typer.Option(help="Random input: query heads.")] = None,
    heads_kv: Annotated[
        str | None, typer.Option(help="Random input: key and value heads; default --heads.")
    ] = None,
    seqlen: Annotated[str | None, typer.Option(help="Random input: tokens; 4k is 4096.")] = None,
    head_dim: Annotated[str | None, typer.Option(help="Random input: head dimension.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="float32, tf32, float16 or bfloat16; with --text and --input "
            "the values are converted."
        ),
    ] = None,
    causal: Annotated[bool, typer.Option(help="Causal attention.")] = False,
    rungs: Annotated[
        str | None, typer.Option(help="Comma-separated rungs, bottom first; default all.")
    ] = None,
    steps: Annotated[
        bool,
        typer.Option("--steps", help="Also take v1 to v2 step by step (presets: on some cells)."),
    ] = False,
    counters: Annotated[
        bool,
        typer.Option(
            "--counters", help="Also measure each rung's memory traffic, with Nsight Compute (ncu)."
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each measurement.")] = 12,
    seed: Annotated[int, typer.Option(help="Seed of random input.")] = 0,
    output: Annotated[
        Path | None, typer.Option(help="Append the run to this record (JSON).")
    ] = None,
    walk: Annotated[
        bool, typer.Option("--walk", help="Walk through the algorithm on small numbers instead.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one offline page of what was found.")
    ] = None,
    problem: Annotated[
        str | None,
        typer.Option(help="With --html or --from: the main problem, by a part of its title."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option("--from", metavar="RECORD", help="Show this record; nothing is run."),
    ] = None,
    run_id: Annotated[
        str | None, typer.Option("--run", metavar="ID", help="With --from: only this run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, nothing else.")] = False,
) -> None:
    """Run the ladder of attention generations and say why each rung is faster."""
    if walk:
        if html is not None or record is not None:
            raise UsageError("--walk prints the walk alone; the page of a dig holds it as well")
        _walk(as_json)
        return
    if record is not None:
        asked: dict[str, object | None] = {
            "--preset": preset,
            "--input": input_file,
            "--text": text,
            "--output": output,
        }
        asked |= {"--rungs": rungs, "--batch": batch, "--heads": heads, "--heads-kv": heads_kv}
        asked |= {"--seqlen": seqlen, "--head-dim": head_dim, "--dtype": dtype}
        asked |= {"--causal": causal or None, "--steps": steps or None}
        asked |= {"--counters": counters or None}
        given = [name for name, value in asked.items() if value is not None]
        if given:
            raise UsageError(f"--from runs nothing: {', '.join(given)} cannot be given")
        show_record(record, run_id, problem, html, as_json)
        return
    if run_id is not None:
        raise UsageError("--run goes with --from")
    if problem is not None and html is None:
        raise UsageError("--problem goes with --html or --from")
    sizes = {
        "batch": batch,
        "heads": heads,
        "heads_kv": heads_kv,
        "seqlen": seqlen,
        "head_dim": head_dim,
    }
    _check_one_source(preset, input_file, text, sizes)
    from flashdig.generations.expedition import has_gpu

    request = _request(preset, input_file, text, layer, sizes, dtype, causal, seed, has_gpu())
    from flashdig.generations.ladder import RUNGS, generation

    names = list(RUNGS) if rungs is None else [name.strip() for name in rungs.split(",")]
    try:
        for name in names:
            generation(name)
    except ValueError as error:
        raise UsageError(f"--rungs: {error}") from error
    page = None if html is None else PageRequest(html, problem)
    _dig(request, names, rounds, steps, counters, output, page, as_json)


def _dig(
    request: Request,
    names: list[str],
    rounds: int,
    steps: bool,
    counters: bool,
    output: Path | None,
    page: PageRequest | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    from flashdig.bench.environment import collect, revision
    from flashdig.bench.results import new_run
    from flashdig.cli.record_output import keep, progress_bar, require_writable
    from flashdig.generations.expedition import expedition
    from flashdig.report.dig_table import legend, print_ladder

    if output is not None:
        require_writable(output)
    if page is not None:
        page.check()
    console = Console()
    command_line = shlex.join(["flashdig", *sys.argv[1:]])
    run = new_run(command_line, collect(), revision())
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    try:
        with progress_bar("digging", len(request.sites), quiet=as_json) as (say, one_done):
            for cell_rows, cell_notes in expedition(
                request,
                names,
                run.run_id,
                rounds=rounds,
                steps=steps,
                counters=counters,
                progress=say,
            ):
                one_done()
                rows += cell_rows
                notes += [note for note in cell_notes if note not in notes]
                if not as_json:
                    print_ladder(cell_rows, console)
    finally:  # what was measured before an error or an interruption is kept
        if output is not None and rows:
            keep(output, "dig", run, rows)
    if as_json:
        fields = dataclasses.asdict(run)
        print(json.dumps({"run": fields, "rows": rows, "notes": notes}, indent=1))
    else:
        for note in [*notes, legend(rows)]:
            console.print(note, style="dim", highlight=False)
        if output is not None:
            console.print(f"Recorded in {output}.")
    if page is not None:
        with progress_bar("the page", 1, quiet=as_json) as (say, _):
            write_live_page(page, run, rows, notes, say)
        if not as_json:
            console.print(f"page written: {page.path}", markup=False, highlight=False)
    failed = [row for row in rows if row["gate"] != "ok" and not row["gate"].startswith("not run")]
    if failed:
        names_of = ", ".join(dict.fromkeys(row["name"] for row in failed))
        raise CommandError(f"wrong results: {names_of}")


def _request(
    preset: str | None,
    input_file: Path | None,
    text: str | None,
    layer: int,
    sizes: dict[str, str | None],
    dtype: str | None,
    causal: bool,
    seed: int,
    on_gpu: bool,
) -> Request:
    """What to dig at, checked; errors name the option."""
    from flashdig.generations import expedition
    from flashdig.generations.inputs import InputError, MissingExtraError
    from flashdig.generations.minilm import TextError

    if dtype not in (None, "float32", "tf32", "float16", "bfloat16"):
        raise UsageError(f"--dtype must be float32, tf32, float16 or bfloat16, got {dtype!r}")
    try:
        if preset is not None:
            return expedition.from_presets(preset, seed)
        if input_file is not None:
            return expedition.from_file(input_file, dtype, causal)
        if text is not None:
            return expedition.from_text(text, layer, dtype, causal)
        defaults = GPU_DEFAULTS if on_gpu else CPU_DEFAULTS
        chosen: dict[str, Any] = {**defaults, "dtype": dtype or defaults["dtype"]}
        for name, given in sizes.items():
            if given is not None:
                chosen[name] = parse_size(given, f"--{name.replace('_', '-')}")
        return expedition.from_random(**chosen, causal=causal, seed=seed)
    except InputError as error:
        raise UnreadableInputError(f"--input: {error}") from error
    except TextError as error:
        raise UsageError(f"--text: {error}") from error
    except (MissingExtraError, ValueError) as error:
        raise UsageError(str(error)) from error


def _check_one_source(
    preset: str | None, input_file: Path | None, text: str | None, sizes: dict[str, str | None]
) -> None:
    sources: dict[str, object | None] = {"--preset": preset, "--input": input_file, "--text": text}
    given = [name for name, value in sources.items() if value is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other")
    given_sizes = [f"--{n.replace('_', '-')}" for n, value in sizes.items() if value is not None]
    if given and given_sizes:
        raise UsageError(f"{given[0]} decides the sizes; {', '.join(given_sizes)} cannot be given")


def _walk(as_json: bool) -> None:
    from flashdig.generations.walk import walk
    from flashdig.report.walk import print_walk

    result = walk()
    if as_json:
        print(json.dumps(result.to_dict(), indent=1))
    else:
        from rich.console import Console

        print_walk(result, Console())
    if not result.ok:
        raise CommandError("a step of the walk does not hold")
