"""flashdig bench host: what a call costs the host, whole and in parts, beside the peers."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import warnings
from pathlib import Path

from flashdig.cli.errors import CommandError, UsageError


def bench_host(
    peers: str | None,
    rounds: int | None,
    first_calls: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """What `flashdig bench host` does; the arguments are its options."""
    import torch
    from rich.console import Console

    from flashdig.bench.environment import collect, revision
    from flashdig.bench.first_calls import FirstCallError, measure_first_calls
    from flashdig.bench.host import PEERS, check_peers, measure_host
    from flashdig.bench.results import Row, new_run
    from flashdig.bench.timing import DEFAULT_ROUNDS
    from flashdig.cli.record_output import keep, progress_bar, require_writable
    from flashdig.report.host_table import print_host

    names: tuple[str, ...] = PEERS
    if peers is not None:
        chosen = () if peers.strip() == "none" else tuple(x.strip() for x in peers.split(","))
        names = tuple(dict.fromkeys(chosen))
        try:
            check_peers(names)
        except ValueError as error:
            raise UsageError(f"--peers {error}") from error
    if first_calls and not torch.cuda.is_available():
        raise UsageError("--first-calls needs a CUDA device: elsewhere no kernel is compiled")
    if output is not None:
        require_writable(output)
    run = new_run(shlex.join(["flashdig", *sys.argv[1:]]), collect(), revision())
    with (
        warnings.catch_warnings(),
        progress_bar("measuring", 1, quiet=as_json) as (say, _),
    ):
        warnings.simplefilter("ignore")  # why torch refuses a kernel stands in the rows
        rows: list[Row] = []
        failures: list[str] = []
        if first_calls:
            try:
                rows = measure_first_calls(run.run_id, progress=say)
            except FirstCallError as error:
                failures.append(str(error))
        else:
            chosen_rounds = rounds or DEFAULT_ROUNDS
            result = measure_host(run.run_id, peers=names, rounds=chosen_rounds, progress=say)
            rows, failures = result.rows, result.failures
    if output is not None and rows:
        keep(output, "host", run, rows)
    if as_json:
        print(json.dumps({"run": dataclasses.asdict(run), "rows": rows}, indent=1))
    else:
        console = Console()
        print_host(rows, console)
        if output is not None and rows:
            console.print(f"Recorded in {output}.", highlight=False)
    if failures:
        raise CommandError("; ".join(failures))
