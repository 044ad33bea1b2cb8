"""`flashdig env`: what this machine has, and which backend serves a problem and why not others."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashdig.bench.environment import collect
from flashdig.cli.errors import UsageError
from flashdig.cli.problem_text import HELP, TypedProblem, parse_problem
from flashdig.costs.units import with_unit
from flashdig.dispatch import BACKENDS, Request, support
from flashdig.hardware.arch import UnknownArchitectureError, architecture
from flashdig.hardware.devices import UnknownDeviceError, find_device

if TYPE_CHECKING:
    from rich.console import Console


def command(
    problem: Annotated[str | None, typer.Option(help=HELP)] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda (the GPU here), cpu, or any chip, as sm_80 or h200; by default cuda where "
            "there is one, else cpu."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Versions, GPU and driver of this machine; with --problem the backends that serve it."""
    environment = collect()
    wanted = device or ("cuda" if environment["gpu"] else "cpu")
    request = _request(wanted, environment)
    typed = None if problem is None else parse_problem(problem)
    answer: dict[str, Any] = {"environment": environment}
    if typed is None:
        answer["backends"] = [{"name": b.name, "summary": b.summary} for b in BACKENDS]
    else:
        answer |= _served(typed, request)
    if as_json:
        typer.echo(json.dumps(answer, indent=2))
    else:
        _show(answer, typed, wanted)


def _request(device: str, environment: dict[str, Any]) -> Request:
    """The request of a plain call on that device."""
    triton = environment["triton"] is not None
    if device == "cpu":
        return Request("cpu", triton=triton)
    if device == "cuda":
        if environment["compute_capability"] is None:
            raise UsageError(
                "--device cuda: torch sees no GPU here; name a chip instead, as sm_80 or h200"
            )
        return Request("cuda", _capability(environment["compute_capability"]), triton)
    return Request("cuda", _capability(_key_of(device)), triton)


def _key_of(device: str) -> str:
    """Compute capability of an architecture or chip by name."""
    try:
        key = architecture(device).key
    except UnknownArchitectureError:
        try:
            key = find_device(device).arch.key
        except UnknownDeviceError as error:
            raise UsageError(
                f"--device must be cuda, cpu, a compute capability as sm_80, or a chip: {error}"
            ) from error
    if key.startswith("gfx"):
        raise UsageError(f"--device must name an NVIDIA chip or cpu, got {device!r}")
    return key


def _capability(key: str) -> tuple[int, int]:
    major, _, minor = key.partition(".")
    return int(major), int(minor)


def _served(typed: TypedProblem, request: Request) -> dict[str, Any]:
    """The JSON of a problem: itself, the request, the backends with reasons, and auto's choice."""
    request = dataclasses.replace(
        request,
        return_lse=typed.return_lse,
        descale=typed.descale,
        paged=typed.paged,
        out_dtype=typed.out_dtype,
    )
    answers = support(typed.problem, request)
    auto = [backend.name for backend, reasons in answers if backend.in_auto and not reasons]
    return {
        "problem": dataclasses.asdict(typed.problem),
        "request": dataclasses.asdict(request),
        "auto": auto[0] if auto else None,
        "backends": [
            {
                "name": backend.name,
                "summary": backend.summary,
                "in_auto": backend.in_auto,
                "serves": not reasons,
                "reasons": reasons,
            }
            for backend, reasons in answers
        ],
    }


def _show(answer: dict[str, Any], typed: TypedProblem | None, device: str) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    for name, text in _facts(answer["environment"]):
        table.add_row(name, text)
    console.print(table)
    console.print()
    if typed is None:
        backends = Table("backend", "what it is", show_edge=False, pad_edge=False)
        for backend in answer["backends"]:
            backends.add_row(backend["name"], backend["summary"])
        console.print(backends)
        console.print(
            "\nWhich of them serves a problem: flashdig env --problem seqlen=4096,causal",
            highlight=False,
        )
        return
    _show_served(answer, typed, device, console)


def _show_served(
    answer: dict[str, Any], typed: TypedProblem, device: str, console: Console
) -> None:
    from rich.table import Table

    capability = answer["request"]["compute_capability"]
    where = device if capability is None else f"{device} (compute capability {_dotted(capability)})"
    console.print(f"{typed.describe()}, on {where}:\n", highlight=False)
    table = Table("backend", "serves it", "why not, or what it is", show_edge=False, pad_edge=False)
    for backend in answer["backends"]:
        serves = "yes" if backend["serves"] else "no"
        if backend["serves"] and not backend["in_auto"]:
            serves = "by name"
        words = "; ".join(backend["reasons"]) or backend["summary"]
        table.add_row(backend["name"], serves, words)
    console.print(table)
    auto = answer["auto"]
    console.print(f'\nbackend="auto" takes {auto}.' if auto else "\nNo backend serves it.")


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for people, in a fixed order; what is not there is said."""
    gpu = environment["gpu"]
    if gpu is None:
        gpu_text = "none that torch sees" if environment["torch"] else "unknown without torch"
    else:
        gpu_text = (
            f"{gpu}, compute capability {environment['compute_capability']}, "
            f"{environment['sm_count']} SMs, {with_unit(environment['memory_bytes'], 'B')}"
        )
    rows = {
        "flashdig": environment["flashdig"],
        "GPU": gpu_text,
        "driver": environment["driver"] or f"unknown ({environment['nvml']})",
    }
    if environment["power_limit_w"] is not None:
        rows["power limit"] = f"{environment['power_limit_w']:g} W"
    torch = environment["torch"]
    for name in ("torch", "triton", "numpy"):
        rows[name] = environment[name] or "not installed"
    if torch is not None:
        rows["CUDA of torch"] = environment["cuda"] or "none (a CPU build)"
        rows["cuDNN of torch"] = environment["cudnn"] or "none"
    rows["python"] = environment["python"]
    rows["platform"] = environment["platform"]
    rows["CPU"] = f"{environment['cpu'] or 'unknown'}, {environment['cpu_count']} cores"
    for name, version in environment["peers"].items():
        rows[name] = version or "not installed"
    return list(rows.items())
