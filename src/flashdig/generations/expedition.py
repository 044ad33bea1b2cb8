"""A whole dig: where q, k, v come from, and the ladder on each of their problems."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from flashdig.bench.timing import Ceilings, measured_ceilings
from flashdig.generations.dig_rows import rows_of
from flashdig.generations.excavation import (
    CellFindings,
    Progress,
    cut_for_cpu,
    dig_on_cpu,
    dig_on_gpu,
)
from flashdig.generations.inputs import QKV, from_safetensors, random_qkv
from flashdig.generations.memory_counters import read_memory_counters
from flashdig.generations.minilm import minilm_qkv
from flashdig.generations.presets import PRESETS, Cell, Preset
from flashdig.generations.step_rows import step_exhibits, step_rows_of
from flashdig.hardware.detect import device_of_name
from flashdig.hardware.devices import Device
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


@dataclass(frozen=True)
class Machine:
    """What a dig runs on.

    Attributes:
        ceilings: rates measured in this run; None without a GPU.
        device: its row of the device table; None where there is none.
        rounds: of each measurement.
    """

    ceilings: Ceilings | None
    device: Device | None
    rounds: int

    @property
    def device_type(self) -> str:
        return "cpu" if self.ceilings is None else "cuda"

    @classmethod
    def here(cls, rounds: int, progress: Progress) -> Machine:
        """This machine; measures the rates of its GPU."""
        if not has_gpu():
            return cls(None, None, rounds)
        progress("measuring the matmul and copy rates of this GPU")
        return cls(measured_ceilings(), device_of_name(torch.cuda.get_device_name()), rounds)

    def dig(
        self,
        cell: Cell,
        inputs: QKV,
        names: Sequence[str],
        *,
        forward_backward: bool,
        progress: Progress,
    ) -> CellFindings:
        """The named exhibits on one problem."""
        if self.ceilings is None:
            return dig_on_cpu(cell, inputs, names, progress=progress)
        return dig_on_gpu(
            cell,
            inputs,
            names,
            device=self.device,
            ceilings=self.ceilings,
            rounds=self.rounds,
            forward_backward=forward_backward,
            progress=progress,
        )


def expedition(
    request: Request,
    names: Sequence[str],
    run_id: str,
    *,
    rounds: int,
    steps: bool,
    counters: bool = False,
    progress: Progress,
) -> Iterator[tuple[list[dict[str, Any]], list[str]]]:
    """Dig at each site; yields its rows and notes as soon as they are there.

    Args:
        steps: also take the steps from v1 to v2, of presets on the cells that ask for them.
        counters: also read the memory counters of the GPU, where Nsight Compute may.
    """
    machine = Machine.here(rounds, progress)
    for site in request.sites:
        preset = site.preset.name if site.preset is not None else None
        cell = site.cell
        if machine.ceilings is None and not site.fixed:
            cell = Cell(cut_for_cpu(cell.problem), steps=cell.steps)
        elif machine.ceilings is None:
            cell = replace(cell, tf32=False)
        inputs = site.make(cell.problem, machine.device_type)
        both = site.preset is not None and site.preset.forward_backward
        findings = machine.dig(cell, inputs, names, forward_backward=both, progress=progress)
        if counters:
            read_memory_counters(findings, inputs, progress)
        rows = rows_of(findings, run_id, preset)
        if steps and (site.preset is None or cell.steps):
            exhibits = step_exhibits(cell.problem, machine.device_type)
            taken = machine.dig(cell, inputs, exhibits, forward_backward=False, progress=progress)
            rows += step_rows_of(taken, run_id, preset)
            findings.notes += taken.notes
        _add_notes(findings, site, inputs)
        del inputs
        if machine.ceilings is not None:
            torch.cuda.empty_cache()
        yield rows, findings.notes


def _add_notes(findings: CellFindings, site: Site, inputs: QKV) -> None:
    """What a reader must know about a site beside its rows."""
    if findings.problem != site.cell.problem:
        findings.notes.append(
            f"Cut for the CPU: {findings.problem.describe()} in place of "
            f"{site.cell.problem.describe()}."
        )
    if site.cell.tf32 and not findings.cell.tf32:
        findings.notes.append("TF32 is a GPU's: without one, float32 products are IEEE.")
    if findings.ceilings is not None and findings.device is None:
        findings.notes.append(
            f"{findings.device_name} is not in the device table: no time was predicted."
        )
    if site.fixed:
        findings.notes.append(f"Input: {inputs.source}.")
    if inputs.tokens:
        findings.notes.append(strongest_pairs(inputs, site.cell.problem.causal))


def strongest_pairs(inputs: QKV, causal: bool, count: int = 3) -> str:
    """The words of a text that attend most to another word, special tokens and self apart."""
    scores = inputs.q[0].float() @ inputs.k[0].float().transpose(-1, -2)
    scores = scores * inputs.q.shape[-1] ** -0.5
    if causal:
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    words = [i for i, token in enumerate(inputs.tokens) if token.removeprefix("##").isalnum()]
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
