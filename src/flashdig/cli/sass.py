"""`flashdig sass`: what kernels compile to on any chip, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashdig.cli.errors import CommandError, UnreadableInputError, UsageError
from flashdig.hardware.arch import UnknownArchitectureError, architecture
from flashdig.hardware.names import nearest
from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    from flashdig.evidence.sass_card import SassCard

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_SEQLEN = 1024
Failure = tuple[str, str, str]


def command(
    subjects: Annotated[
        list[str], typer.Argument(metavar="EXHIBIT|FILE.cubin...", help="As v1 v2, or a cubin.")
    ],
    arch: Annotated[
        str, typer.Option(help="Chips, with commas.")
    ] = "sm_75,sm_80,sm_90,sm_100,sm_120",
    head_dim: Annotated[int, typer.Option(min=1)] = 64,
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32 or torch's name.")] = "float16",
    causal: Annotated[bool, typer.Option("--causal/--full", help="Aligned bottom-right.")] = False,
    against: Annotated[
        str | None, typer.Option(help="A second exhibit or cubin, side by side with the one given.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Compile exhibits for chips that need not be here, and show what became of them.

    Registers, spills, occupancy, instructions of the whole kernel and of its inner loop, and the
    cycles that these keep each pipe busy. A cubin's chip is its own: --arch does not apply.
    """
    if against is not None and len(subjects) != 1:
        raise UsageError(f"--against compares with one exhibit, got {', '.join(subjects)}")
    archs = _archs(arch)
    wanted = list(dict.fromkeys([*subjects, *([against] if against is not None else [])]))
    files = [name for name in wanted if name.endswith(".cubin")]
    exhibits = [name for name in wanted if name not in files]
    problem = _problem(head_dim, dtype, causal)
    _check_exhibits(exhibits, problem)
    cards = [_read(name) for name in files]
    failures: list[Failure] = []
    for chip in archs if exhibits else []:
        compiled, failed = _compile(exhibits, problem, chip)
        cards += compiled
        failures += failed
    if as_json:
        shown = [card.to_dict() for card in cards]
        failed_rows = [
            dict(zip(("subject", "arch", "error"), row, strict=True)) for row in failures
        ]
        typer.echo(json.dumps({"cards": shown, "failures": failed_rows}, indent=2))
    else:
        _show(cards, failures, subjects[0], against)
    if not cards:
        raise CommandError("nothing could be compiled; see above")


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
        try:
            reasons = generation(name).unsupported(problem, "cuda")
        except ValueError as error:
            raise UsageError(str(error)) from error
        if reasons:
            raise UsageError(f"{name} cannot run {problem.describe()}: {'; '.join(reasons)}")


def _read(name: str) -> SassCard:
    from flashdig.evidence.sass_card import card_of_cubin

    try:
        return card_of_cubin(Path(name))
    except UnknownArchitectureError as error:
        raise UnreadableInputError(f"{name}: {error}") from error
    except ValueError as error:
        raise UnreadableInputError(str(error)) from error


def _compile(
    exhibits: list[str], problem: AttentionProblem, arch: str
) -> tuple[list[SassCard], list[Failure]]:
    """All in one process; each in one of its own when that fails, to keep what does compile."""
    from flashdig.evidence.offline import OfflineError, Request, compile_exhibits
    from flashdig.evidence.sass_card import card_of

    requests = [Request(name, problem, arch) for name in exhibits]
    cards: list[SassCard] = []
    failures: list[Failure] = []
    try:
        found = list(zip(exhibits, compile_exhibits(requests), strict=True))
    except OfflineError as error:
        if len(exhibits) == 1:
            return [], [(exhibits[0], arch, str(error))]
        for name in exhibits:
            compiled, failed = _compile([name], problem, arch)
            cards += compiled
            failures += failed
        return cards, failures
    for name, kernels in found:
        cards += [card_of(name, arch, kernel) for kernel in kernels]
        if not kernels:
            failures.append((name, arch, "launches no Triton kernel: there is nothing to compile"))
    return cards, failures


def _show(
    cards: list[SassCard], failures: list[Failure], subject: str, against: str | None
) -> None:
    from rich.console import Console

    from flashdig.report.sass_terminal import show_against, show_cards

    console = Console()
    first, second = (
        [card for card in cards if card.subject == name] for name in (subject, against)
    )
    pairs = [(a, b) for a in first for b in second]
    # a cubin's chip may be none of those that the exhibit was compiled for
    pairs = [(a, b) for a, b in pairs if a.arch == b.arch] or pairs
    if pairs and against != subject:
        show_against(pairs, failures, console)
    else:
        show_cards(cards, failures, console)
