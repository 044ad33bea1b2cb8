"""A whole dig: where q, k, v come from, and the ladder on each of their problems."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashdig.bench.timing import measured_ceilings
from flashdig.generations.dig_rows import rows_of
from flashdig.generations.excavation import Progress, cut_for_cpu, dig_on_cpu, dig_on_gpu
from flashdig.generations.inputs import QKV, from_safetensors, random_qkv
from flashdig.generations.minilm import minilm_qkv
from flashdig.generations.presets import PRESETS, Cell, Preset
from flashdig.hardware.detect import device_of_name
from flashdig.problem import AttentionProblem


@dataclass(frozen=True)
class Site:
    """One problem to dig at and how to make its inputs on a device."""

    cell: Cell
    make: Callable[[AttentionProblem, str], QKV]
    preset: Preset | None = None
    fixed: bool = False  # the inputs are given: they cannot be cut for the CPU


@dataclass(frozen=True)
class Request:
    """The sites of one dig, in order."""

    sites: tuple[Site, ...]


def has_gpu() -> bool:
    return torch.cuda.is_available()


def from_presets(name: str, seed: int) -> Request:
    """The problems of a preset by name, or of "all". Raises ValueError with the nearest names."""
    if name != "all" and name not in PRESETS:
        near = difflib.get_close_matches(name, PRESETS, n=2, cutoff=0.3) or list(PRESETS)
        raise ValueError(f"unknown preset {name!r}; did you mean {' or '.join(near)}?")
    presets = list(PRESETS.values()) if name == "all" else [PRESETS[name]]
    return Request(
        tuple(Site(cell, _random(seed), preset) for preset in presets for cell in preset.cells)
    )


def from_random(
    *,
    batch: int,
    heads: int,
    seqlen: int,
    head_dim: int,
    dtype: str,
    causal: bool,
    seed: int,
    heads_kv: int | None = None,
) -> Request:
    """One problem of random normal inputs. Raises ValueError naming the size that is wrong."""
    sizes = {"batch": batch, "heads": heads, "seqlen": seqlen, "head-dim": head_dim}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"--{name} must be at least 1, got {size}")
    tf32 = dtype == "tf32"
    problem = AttentionProblem.dense(
        batch,
        heads,
        seqlen,
        head_dim,
        "float32" if tf32 else dtype,
        causal=causal,
        num_heads_kv=heads_kv,
    )
    return Request((Site(Cell(problem, tf32=tf32), _random(seed)),))


def from_file(path: Path, dtype: str | None, causal: bool) -> Request:
    """q, k, v of a safetensors file. Raises InputError naming file and tensor."""
    tf32 = dtype == "tf32"
    return _given(from_safetensors(path, dtype="float32" if tf32 else dtype), causal, tf32)


def from_text(text: str, layer: int, dtype: str | None, causal: bool) -> Request:
    """MiniLM's q, k, v of a text. Raises TextError, MissingExtraError."""
    tf32 = dtype == "tf32"
    wanted = "float32" if tf32 or dtype is None else dtype
    return _given(minilm_qkv(text, layer, dtype=wanted), causal, tf32)


def expedition(
    request: Request,
    names: Sequence[str],
    run_id: str,
    *,
    rounds: int,
    progress: Progress,
) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Dig at each site; yields its rows and notes as soon as they are there."""
    ceilings = device = None
    if has_gpu():
        device = device_of_name(torch.cuda.get_device_name())
        progress("measuring the matmul and copy rates of this GPU")
        ceilings = measured_ceilings()
    for number, site in enumerate(request.sites, 1):
        prefix = f"{number}/{len(request.sites)} " if len(request.sites) > 1 else ""

        def step(text: str, prefix: str = prefix) -> None:
            progress(prefix + text)

        preset = None if site.preset is None else site.preset.name
        if ceilings is not None:
            inputs = site.make(site.cell.problem, "cuda")
            findings = dig_on_gpu(
                site.cell,
                inputs,
                names,
                device=device,
                ceilings=ceilings,
                rounds=rounds,
                forward_backward=site.preset is not None and site.preset.forward_backward,
                progress=step,
            )
        else:
            cell = site.cell if site.fixed else Cell(cut_for_cpu(site.cell.problem))
            inputs = site.make(cell.problem, "cpu")
            findings = dig_on_cpu(cell, inputs, names, progress=step)
            if cell.problem != site.cell.problem:
                findings.notes.append(
                    f"Cut for the CPU: {cell.problem.describe()} in place of "
                    f"{site.cell.problem.describe()}."
                )
        if ceilings is not None and device is None:
            findings.notes.append(
                f"{findings.device_name} is not in the device table: no time was predicted."
            )
        if site.fixed:
            findings.notes.append(f"Input: {inputs.source}.")
        if inputs.tokens:
            findings.notes.append(strongest_pairs(inputs, site.cell.problem.causal))
        del inputs
        if ceilings is not None:
            torch.cuda.empty_cache()
        yield rows_of(findings, run_id, preset), findings.notes


def strongest_pairs(inputs: QKV, causal: bool, count: int = 3) -> str:
    """The words of a text that attend most to another word, special tokens and self apart."""
    scores = inputs.q[0].float() @ inputs.k[0].float().transpose(-1, -2)
    scores = scores * inputs.q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    words = [i for i, token in enumerate(inputs.tokens) if not token.startswith("[")]
    ranked = sorted(
        ((float(probs[:, i, j].max()), i, j) for i in words for j in words if i != j), reverse=True
    )
    if not ranked:
        return "The text has a single word: nothing attends to another one."
    pairs = (
        f"{inputs.tokens[i]!r} to {inputs.tokens[j]!r} {share:.2f} "
        f"(head {int(probs[:, i, j].argmax())})"
        for share, i, j in ranked[:count]
    )
    return f"Strongest attention between words: {', '.join(pairs)}."


def _random(seed: int) -> Callable[[AttentionProblem, str], QKV]:
    def make(problem: AttentionProblem, device: str) -> QKV:
        return random_qkv(problem, device=device, seed=seed)

    return make


def _given(inputs: QKV, causal: bool, tf32: bool) -> Request:
    def make(problem: AttentionProblem, device: str) -> QKV:
        return inputs.to(device=device)

    cell = Cell(inputs.problem(causal), tf32=tf32)
    return Request((Site(cell, make, fixed=True),))
