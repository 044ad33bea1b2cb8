"""What Triton exhibits compute and ask of memory, run in Triton's interpreter without a GPU.

The interpreter is chosen when a kernel is decorated, so it runs in a process of its own: this
module writes the request, starts `interpreter_worker`, and reads the outputs and the counts.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashdig.evidence.worker import last_line, run_worker


@dataclass(frozen=True)
class Counts:
    """Bytes that loads and stores asked for (masked-off lanes apart) and FLOP of dots."""

    load_bytes: int
    store_bytes: int
    matmul_flops: int

    def times(self, factor: int) -> Counts:
        """The counts of `factor` such problems: (batch, head) pairs do the same work."""
        return Counts(
            self.load_bytes * factor, self.store_bytes * factor, self.matmul_flops * factor
        )


@dataclass(frozen=True, eq=False)
class Interpreted:
    """One exhibit's run: out and lse as `Generation.run` returns them, what it counted, seconds."""

    out: torch.Tensor
    lse: torch.Tensor | None
    counts: Counts
    seconds: float


class InterpreterError(RuntimeError):
    """The worker failed; the message holds the last line that it printed."""


def interpreter_fault() -> str | None:
    """Why Triton's interpreter cannot be used here; None when it can."""
    try:
        triton = _release("triton")
        numpy = _release("numpy")
    except importlib.metadata.PackageNotFoundError as missing:
        return f"{missing.name} is not installed"
    if triton < (3, 7) and numpy >= (2, 4):
        return (
            f"Triton {'.'.join(map(str, triton))}'s interpreter needs numpy below 2.4, "
            f"here is {'.'.join(map(str, numpy))}"
        )
    return None


@dataclass(frozen=True, eq=False)
class Job:
    """Exhibits to run, by name, on CPU tensors (batch, heads, seqlen, head_dim)."""

    names: tuple[str, ...]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool


def run_in_interpreter(
    jobs: Sequence[Job], *, timeout_s: float = 600.0
) -> list[dict[str, Interpreted]]:
    """Run the jobs one after the other in one process; a result by exhibit name for each.

    Raises InterpreterError when the worker fails or takes longer than `timeout_s` in all.
    """
    with tempfile.TemporaryDirectory(prefix="flashdig-interpreter-") as folder:
        tensors = [{"q": job.q.cpu(), "k": job.k.cpu(), "v": job.v.cpu()} for job in jobs]
        torch.save(tensors, Path(folder, "inputs.pt"))
        request = [{"names": job.names, "causal": job.causal} for job in jobs]
        Path(folder, "request.json").write_text(json.dumps(request))
        _run_worker(folder, timeout_s)
        counted = json.loads(Path(folder, "counts.json").read_text())
        outputs = torch.load(Path(folder, "outputs.pt"), weights_only=True)
    return [
        {
            name: Interpreted(
                out=output[name]["out"],
                lse=output[name]["lse"],
                counts=Counts(**counts[name]["counts"]),
                seconds=counts[name]["seconds"],
            )
            for name in job.names
        }
        for job, output, counts in zip(jobs, outputs, counted, strict=True)
    ]


def _run_worker(folder: str, timeout_s: float) -> None:
    environment = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    try:
        code = run_worker(
            "flashdig.evidence.interpreter_worker",
            folder,
            timeout_s=timeout_s,
            environment=environment,
        )
    except subprocess.TimeoutExpired as error:
        raise InterpreterError(f"the interpreter took more than {timeout_s:g} s") from error
    if code:
        raise InterpreterError(
            f"the interpreter failed: {last_line(folder) or f'exit code {code}'}"
        )


def _release(package: str) -> tuple[int, ...]:
    """(major, minor) of an installed package."""
    version = importlib.metadata.version(package)
    return tuple(int(part) for part in version.split(".")[:2])
