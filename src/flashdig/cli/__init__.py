"""The command `flashdig`: one thin module a sub-command, each with a function `command` for typer.

Exit codes: 0 done, 1 a regression, a failed gate or a finding asked for, 2 usage, 3
unreadable input.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from flashdig._version import __version__
from flashdig.cli.errors import CommandError

# sub-command -> module; imported only when it is asked for, so that `flashdig predict` never waits
# for torch
COMMANDS = {
    "trace": "flashdig.cli.trace",
    "explain": "flashdig.cli.explain",
    "dig": "flashdig.cli.dig",
    "bench": "flashdig.cli.bench",
    "predict": "flashdig.cli.predict",
    "sass": "flashdig.cli.sass",
    "env": "flashdig.cli.env",
}


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process with one of the exit codes above."""
    arguments = sys.argv[1:] if arguments is None else arguments
    wanted = next((word for word in arguments if not word.startswith("-")), None)
    names = [wanted] if wanted in COMMANDS else list(COMMANDS)
    app = typer.Typer(
        name="flashdig",
        help="Exact attention for PyTorch, and the instruments that explain it.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    for name in names:
        app.command(name)(importlib.import_module(COMMANDS[name]).command)
    try:
        app(args=arguments, prog_name="flashdig")
    except CommandError as error:
        typer.echo(f"flashdig: {error}", err=True)
        raise SystemExit(error.exit_code) from error


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flashdig {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Exact attention for PyTorch, and the instruments that explain it."""
