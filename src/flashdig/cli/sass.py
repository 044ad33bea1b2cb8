"""`flashdig sass`: what kernels compile to on any chip, without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError
from flashdig.hardware.arch import UnknownArchitectureError, architecture
from flashdig.hardware.names import nearest
from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    from flashdig.evidence.kernel_source import KernelRequest
    from flashdig.evidence.sass_card import SassCard
    from flashdig.evidence.sass_subjects import Found

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SEQLEN = 1024
_ARCHS = "sm_75,sm_80,sm_90,sm_100,sm_120"


def command(
    subjects: Annotated[
        list[str],
        typer.Argument(
            metavar="EXHIBIT|MODULE:KERNEL|FILE.cubin|FOLDER...",
            help="As v1 v2; package.module:kernel or file.py:kernel; a cubin; a Triton cache.",
        ),
    ],
    arch: Annotated[
        str | None, typer.Option(help=f"Chips, with commas; {_ARCHS} for what is compiled.")
    ] = None,
    head_dim: Annotated[int, typer.Option(min=1, help="Of exhibits.")] = 64,
    dtype: Annotated[
        str, typer.Option(help="Of exhibits: fp16, bf16, fp32 or torch's name.")
    ] = "float16",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Aligned bottom-right.")] = False,
    signature: Annotated[
        str, typer.Option(help='Types of a MODULE:KERNEL\'s arguments: "*fp16,i32:16,n=i64".')
    ] = "",
    constant: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE of a MODULE:KERNEL; can be repeated.")
    ] = None,
    num_warps: Annotated[int | None, typer.Option(min=1, help="Of a MODULE:KERNEL.")] = None,
    num_stages: Annotated[int | None, typer.Option(min=1, help="Of a MODULE:KERNEL.")] = None,
    match: Annotated[
        str | None, typer.Option(help="Only kernels of a FOLDER with this in their names.")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="A second subject, side by side with the one given.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(help="A dig's record: cycles measured on the same chip.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for a MODULE:KERNEL.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Compile kernels for chips that need not be here, and show what became of them.

    Registers, spills, what ptxas warns of, occupancy, instructions of the whole kernel and of its
    inner loop, which of them are Q K^T and which P V, bank conflicts, and the cycles that these
    keep each pipe busy. A cubin's chip is its own: --arch chooses among those of a folder.
    """
    if against is not None and len(subjects) != 1:
        raise UsageError(f"--against compares with one subject, got {', '.join(subjects)}")
    archs = _archs(arch or _ARCHS)
    wanted = list(dict.fromkeys([*subjects, *([against] if against is not None else [])]))
    files = [name for name in wanted if name.endswith(".cubin")]
    folders = [name for name in wanted if Path(name).is_dir()]
    kernels = [name for name in wanted if ":" in name and name not in (*files, *folders)]
    exhibits = [name for name in wanted if name not in (*files, *folders, *kernels)]
    _check_options(kernels, folders, signature, constant, num_warps, num_stages, match)
    problem = _problem(head_dim, dtype, causal)
    _check_exhibits(exhibits, problem)

    from flashdig.evidence.sass_subjects import Found, exhibit_cards, kernel_cards

    requests = [
        _kernel(name, chip, signature, constant or [], num_warps, num_stages)
        for name in kernels
        for chip in archs
    ]
    found = Found(tuple(_read(name) for name in files))
    for name in folders:
        found += _folder(name, match, archs if arch is not None else None)
    if exhibits:
        found += exhibit_cards(exhibits, problem, archs)
    found += kernel_cards(requests, timeout_s=timeout)
    if record is not None:
        found = _with_record(found, record)
    if as_json:
        import triton

        shown = {
            "triton": triton.__version__,
            "cards": [card.to_dict() for card in found.cards],
            "failures": [asdict(failure) for failure in found.failures],
        }
        typer.echo(json.dumps(shown, indent=2))
    else:
        _show(found, subjects[0], against)
    if not found.cards:
        raise CommandError("nothing could be compiled or read; see above")


def _archs(text: str) -> list[str]:
    archs = []
    for part in text.split(","):
        try:
            key = architecture(part.strip()).key
        except UnknownArchitectureError as error:
            raise UsageError(f"--arch: {error}") from error
        if key.startswith("gfx"):
            raise UsageError(f"--arch must name NVIDIA chips, as sm_80 or sm_90, got {part!r}")
        archs.append(f"sm_{key.replace('.', '')}")
    return list(dict.fromkeys(archs))


def _check_options(
    kernels: list[str],
    folders: list[str],
    signature: str,
    constant: list[str] | None,
    num_warps: int | None,
    num_stages: int | None,
    match: str | None,
) -> None:
    """An option without what it is for would be ignored in silence."""
    of_kernels = {
        "--signature": signature or None,
        "--constant": constant,
        "--num-warps": num_warps,
        "--num-stages": num_stages,
    }
    unused = [name for name, value in of_kernels.items() if value is not None]
    if unused and not kernels:
        raise UsageError(f"{', '.join(unused)}: only a MODULE:KERNEL takes that, and none is given")
    if match is not None and not folders:
        raise UsageError("--match: only a cache folder takes that, and none is given")


def _problem(head_dim: int, dtype: str, causal: bool) -> AttentionProblem:
    name = _DTYPES.get(dtype, dtype)
    if name not in _DTYPES.values():
        allowed = [*_DTYPES, *_DTYPES.values()]
        raise UsageError(
            f"--dtype must be one of {', '.join(allowed)}, got {dtype!r}; "
            f"nearest: {', '.join(nearest(dtype, allowed))}"
        )
    return AttentionProblem.dense(1, 4, _SEQLEN, head_dim, name, causal=causal)


def _check_exhibits(exhibits: list[str], problem: AttentionProblem) -> None:
    if not exhibits:
        return
    from flashdig.generations.ladder import generation

    for name in exhibits:
        if name.endswith(".py"):
            raise UsageError(f"{name}: which kernel? Name it as {name}:KERNEL")
        if "/" in name:
            raise UsageError(f"{name}: no such folder")
        try:
            reasons = generation(name).unsupported(problem, "cuda")
        except ValueError as error:
            raise UsageError(str(error)) from error
        if reasons:
            raise UsageError(f"{name} cannot run {problem.describe()}: {'; '.join(reasons)}")


def _kernel(
    name: str,
    arch: str,
    signature: str,
    constant: list[str],
    num_warps: int | None,
    num_stages: int | None,
) -> KernelRequest:
    from flashdig.evidence.kernel_source import (
        KernelRequest,
        parse_constants,
        parse_signature,
        split_subject,
    )

    try:
        module, kernel = split_subject(name)
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        arguments = parse_signature(signature)
    except ValueError as error:
        raise UsageError(f"--signature: {error}") from error
    try:
        constants = parse_constants(constant)
    except ValueError as error:
        raise UsageError(f"--constant: {error}") from error
    return KernelRequest(module, kernel, arguments, constants, num_warps, num_stages, arch)


def _read(name: str) -> SassCard:
    from flashdig.evidence.sass_card import card_of_cubin

    try:
        return card_of_cubin(Path(name))
    except UnknownArchitectureError as error:
        raise UnreadableInputError(f"{name}: {error}") from error
    except ValueError as error:
        raise UnreadableInputError(str(error)) from error


def _folder(name: str, match: str | None, archs: list[str] | None) -> Found:
    from flashdig.evidence.sass_subjects import cache_cards
    from flashdig.evidence.triton_cache import read_cache

    try:
        contents = read_cache(Path(name), name_contains=match, archs=archs)
    except ValueError as error:
        raise UnreadableInputError(str(error)) from error
    if not contents.entries and not contents.unreadable:
        of = f" with {match!r} in its name" if match is not None else ""
        raise UsageError(f"{name}: no kernel{of} for {', '.join(archs) if archs else 'any chip'}")
    return cache_cards(contents)


def _with_record(found: Found, path: Path) -> Found:
    from flashdig.bench.results import read_record
    from flashdig.bench.rows import RecordError
    from flashdig.evidence.sass_card import with_measured

    try:
        content = read_record(path)
    except RecordError as error:
        raise UnreadableInputError(str(error)) from error
    return replace(found, cards=tuple(with_measured(card, content) for card in found.cards))


def _show(found: Found, subject: str, against: str | None) -> None:
    from rich.console import Console

    from flashdig.report.sass_terminal import show_against, show_cards

    console = Console()
    first, second = (
        [card for card in found.cards if card.subject == name] for name in (subject, against)
    )
    pairs = [(a, b) for a in first for b in second]
    # a cubin's chip may be none of those that the exhibit was compiled for
    pairs = [(a, b) for a, b in pairs if a.arch == b.arch] or pairs
    failures = [(one.subject, one.arch, one.error) for one in found.failures]
    if pairs and against != subject:
        show_against(pairs, failures, console)
    else:
        show_cards(found.cards, failures, console)
