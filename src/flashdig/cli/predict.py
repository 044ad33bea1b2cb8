"""`flashdig predict`: what one attention call takes on a chip, guessed from shapes alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from flashdig.cli.errors import UsageError
from flashdig.cli.problem_text import SHORT_DTYPES
from flashdig.cli.sizes import parse_size
from flashdig.costs.predict import predict
from flashdig.costs.prediction import Prediction
from flashdig.costs.units import percent, seconds, with_unit
from flashdig.hardware.detect import this_device
from flashdig.hardware.devices import Device, find_device
from flashdig.problem import DTYPE_BYTES, AttentionProblem, Mask

if TYPE_CHECKING:
    from rich.table import Table


def command(
    gpu: Annotated[str, typer.Option(help="Chip, as h200, a100 or l4; 'here' asks the driver.")],
    seqlen: Annotated[
        str, typer.Option(help="Keys, and queries unless --seqlen-q says otherwise; 8k is 8192.")
    ],
    batch: Annotated[int, typer.Option(min=1)] = 1,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 16,
    heads_kv: Annotated[int | None, typer.Option(min=1, help="KV heads; all by default.")] = None,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    head_dim_v: Annotated[int | None, typer.Option(min=1, help="Same as head-dim.")] = None,
    seqlen_q: Annotated[str | None, typer.Option(help="Queries; 1 for decode.")] = None,
    causal: Annotated[bool, typer.Option("--causal/--full", help="Aligned bottom-right.")] = False,
    window_left: Annotated[int | None, typer.Option(min=0, help="Keys seen before it.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp8 or torch's name.")] = "bf16",
    direction: Annotated[
        str, typer.Option("--pass", help="forward, backward or decode.")
    ] = "forward",
    generation: Annotated[str, typer.Option(help="Rung of the ladder, as v1 or naive.")] = "v2",
    against: Annotated[str | None, typer.Option(help="A second chip to compare with.")] = None,
    clock_mhz: Annotated[
        float | None, typer.Option(min=1, help="SM clock that was observed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON.")] = False,
) -> None:
    """Guess time, bytes and limiter of one attention call on any chip of the table. No GPU needed.

    The floor comes from specified peaks: no run is faster.

    The expected time counts with what the chip reaches, measured or (and then it says so) assumed.
    """
    problem = _problem(
        batch=batch,
        heads=heads,
        heads_kv=heads_kv,
        seqlen=seqlen,
        seqlen_q=seqlen_q,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window_left=window_left,
        dtype=dtype,
        decode=direction == "decode",
    )
    try:
        devices = [this_device() if name == "here" else find_device(name) for name in [gpu]]
        devices += [find_device(against)] if against else []
        guesses = [
            predict(
                problem,
                device,
                generation,
                direction,
                clock_hz=clock_mhz * 1e6 if clock_mhz else None,
            )
            for device in devices
        ]
    except ValueError as error:
        raise UsageError(str(error)) from error
    if as_json:
        typer.echo(json.dumps([guess.to_dict() for guess in guesses], indent=2))
    else:
        _show(guesses, devices)


def _problem(
    *,
    batch: int,
    heads: int,
    heads_kv: int | None,
    seqlen: str,
    seqlen_q: str | None,
    head_dim: int,
    head_dim_v: int | None,
    causal: bool,
    window_left: int | None,
    dtype: str,
    decode: bool,
) -> AttentionProblem:
    dtype = SHORT_DTYPES.get(dtype, dtype)
    if dtype not in DTYPE_BYTES:
        raise UsageError(
            f"--dtype must be {', '.join([*SHORT_DTYPES, *DTYPE_BYTES])}, got {dtype!r}"
        )
    keys = parse_size(seqlen, "--seqlen")
    queries = parse_size(seqlen_q, "--seqlen-q") if seqlen_q else (1 if decode else keys)
    try:
        return AttentionProblem(
            batch=batch,
            num_heads=heads,
            num_heads_kv=heads if heads_kv is None else heads_kv,
            seqlen_q=queries,
            seqlen_k=keys,
            head_dim=head_dim,
            head_dim_v=head_dim if head_dim_v is None else head_dim_v,
            dtype=dtype,
            mask=Mask.from_arguments(causal, (window_left, None)),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _show(guesses: list[Prediction], devices: list[Device]) -> None:
    from rich.console import Console

    console = Console()
    first = guesses[0]
    console.print(f"{first.generation}, {first.direction}: {first.problem.describe()}")
    console.print(_table(guesses, devices))
    for guess, device in zip(guesses, devices, strict=True):
        if len(guesses) > 1:
            console.print(f"\n[bold]{device.name}[/bold]")
        for sentence in guess.sentences:
            console.print(sentence, highlight=False)
    if len(guesses) > 1:
        console.print(f"\n{_compare(guesses, devices)}", highlight=False)
    notes = dict.fromkeys(note for guess in guesses for note in guess.notes)
    for note in notes:
        console.print(f"[dim]{note}[/dim]", highlight=False)


def _table(guesses: list[Prediction], devices: list[Device]) -> Table:
    from rich.table import Table

    table = Table(show_edge=False, pad_edge=False)
    table.add_column("")
    for device in devices:
        table.add_column(device.name, justify="right")
    rows = {
        "floor": [seconds(guess.floor_s) for guess in guesses],
        "expected": [seconds(guess.expected_s) for guess in guesses],
        "rate expected": [with_unit(guess.expected_flop_per_s, "FLOP/s") for guess in guesses],
        "limiter of the floor": [guess.limiter for guess in guesses],
        "limiter expected": [guess.expected_limiter for guess in guesses],
        "FLOP, visible pairs": [with_unit(guess.flops, "FLOP") for guess in guesses],
        "FLOP, executed": [with_unit(guess.executed_flops, "FLOP") for guess in guesses],
        "bytes, compulsory": [with_unit(guess.compulsory.total_bytes, "B") for guess in guesses],
        "bytes, issued": [with_unit(guess.issued.total_bytes, "B") for guess in guesses],
        "bytes, at memory": [with_unit(guess.memory.total_bytes, "B") for guess in guesses],
        "scratch": [with_unit(guess.scratch_bytes, "B") for guess in guesses],
        "kernels": [str(guess.kernels) for guess in guesses],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    pipes = dict.fromkeys(pipe for guess in guesses for pipe in guess.pipes)
    for pipe in pipes:
        cells = [
            f"{guess.pipes[pipe]:.0f} cycles" if pipe in guess.pipes else "" for guess in guesses
        ]
        table.add_row(f"one tile: {pipe}", *cells)
    return table


def _compare(guesses: list[Prediction], devices: list[Device]) -> str:
    """How the second chip stands to the first, and what the chips themselves would suggest."""
    slower = guesses[1].expected_s / guesses[0].expected_s
    first, second = devices
    bandwidth = second.memory_bytes_per_s / first.memory_bytes_per_s
    text = (
        f"{second.name} takes {slower:.3g} times as long as {first.name}. "
        f"It has {percent(bandwidth)} of the memory bandwidth"
    )
    dtype = guesses[0].problem.dtype
    peaks = [device.flop_per_s(dtype) for device in devices]
    if peaks[0] and peaks[1]:
        text += f" and {percent(peaks[1] / peaks[0])} of the {dtype} peak"
    return f"{text}."
