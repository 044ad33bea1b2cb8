"""Who trains: the attention of each competitor as the model calls it, checked against float64.

The check is that of every suite, on views of one projection as the model makes them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from flashdig import dispatch
from flashdig.bench.cell_gate import CellReference, cell_reference
from flashdig.bench.cell_inputs import CellInputs, make_inputs
from flashdig.bench.competitors import Attention, Ours, check_backend, request_for
from flashdig.bench.gate import poison, poisoned_allocator
from flashdig.bench.peers import peer
from flashdig.bench.suite import PEERS as KNOWN_PEERS
from flashdig.bench.timing import Timing
from flashdig.bench.training_cells import UNFUSED, UNFUSED_LIMIT_BYTES, TrainingCell
from flashdig.bench.training_model import SEED
from flashdig.bench.training_trace import AttentionTime

OURS = "flashdig"

Progress = Callable[[str], None]


@dataclass
class Entry:
    """One attention in one cell, and what was found of it.

    Attributes:
        name: "flashdig" for backend="auto", a backend of ours, a peer, or "unfused".
        backend: of flashdig, as asked for; None of a peer. served_by: what "auto" chose.
        error, allowed_error: of the output or gradient that comes closest to the allowance.
        losses: of the first steps.
        peak_bytes: of a whole step, weights and all.
        untimed, untraced: why there is no time, no attention time.
    """

    name: str
    backend: str | None = None
    served_by: str | None = None
    attention: Attention | None = None
    verdict: str = "ok"
    error: float | None = None
    allowed_error: float | None = None
    checked: str = ""
    losses: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    timing: Timing | None = None
    untimed: str | None = None
    attention_time: AttentionTime | None = None
    untraced: str | None = None

    @property
    def ours(self) -> bool:
        return self.backend is not None


def check_names(ours: Sequence[str], peers: Sequence[str]) -> None:
    """Raises ValueError for a name that is no backend, or no peer of this measurement."""
    for name in ours:
        check_backend(name)
    allowed = (*KNOWN_PEERS, UNFUSED)
    for name in peers:
        if name not in allowed:
            raise ValueError(f"peers must be none or of {', '.join(allowed)}, got {name!r}")


def running(entries: Sequence[Entry]) -> list[Entry]:
    return [entry for entry in entries if entry.verdict == "ok"]


def reason_against(entry: Entry, cell: TrainingCell, device: str) -> str | None:
    """Why it is not run; None where it is. Says of "auto" which backend serves."""
    if entry.backend == "auto":
        problem = cell.attention.problem
        entry.served_by = dispatch.choose(problem, request_for(device)).name
        return None
    if entry.backend is not None:
        return Ours(entry.backend).reason_against(cell.attention, device)
    if entry.name != UNFUSED:
        return peer(entry.name).reason_against(cell.attention, device)
    if cell.kept_score_bytes <= UNFUSED_LIMIT_BYTES:
        return None
    gigabytes = cell.kept_score_bytes / 1e9
    return f"the probabilities kept for the backward would take {gigabytes:.0f} GB"


def attention_of(entry: Entry, inputs: CellInputs) -> Attention:
    """An entry's attention on (batch, seqlen, num_heads, head_dim), out alike."""
    if entry.backend is not None:
        return _ours(entry.backend)
    if entry.name == UNFUSED:
        return _unfused
    prepared = peer(entry.name).prepare(inputs)
    # the tensors that it prepared are not held: to_common exchanges two dimensions or none
    function, turned = prepared.attention, prepared.to_common
    return lambda q, k, v: turned(function(turned(q), turned(k), turned(v)))


def _ours(backend: str) -> Attention:
    from flashdig.api import attention

    # its types do not say that without return_lse the output comes alone
    function: Any = attention
    return lambda q, k, v: function(q, k, v, causal=True, backend=backend)


def _unfused(q: Any, k: Any, v: Any) -> Any:
    """The naive exhibit with the mask written in place: the least memory that it can take."""
    from flashdig.generations.v0_eager import inplace

    out, _ = inplace(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), True)
    return out.transpose(1, 2)


def attempt(entry: Entry, device: str, action: Callable[[], None]) -> None:
    """Whatever an implementation raises is its result."""
    try:
        action()
        return
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        entry.verdict = f"error: {type(error).__name__}" + (f": {lines[0]}" if lines else "")
    # outside of the handler, whose traceback holds the failed call's tensors
    free(device)


def check_attention(
    entries: Sequence[Entry], cell: TrainingCell, device: str, say: Progress
) -> None:
    """Judge everyone's output and gradients against float64, and keep each one's attention."""
    if not running(entries):
        return
    say("inputs and their float64 reference")
    inputs = make_inputs(cell.attention, device, SEED, backward=True)
    reference = cell_reference(inputs)
    for entry in running(entries):
        say(f"checking {entry.name}")
        attempt(entry, device, partial(_check, entry, inputs, reference))


def _check(entry: Entry, inputs: CellInputs, reference: CellReference) -> None:
    import torch

    entry.attention = attention_of(entry, inputs)
    if inputs.q.device.type == "cuda":
        _results(entry.attention, inputs)  # compiles
        torch.cuda.empty_cache()
        poison(8 * inputs.q.nbytes, inputs.q.device)
        results = _results(entry.attention, inputs)
    else:
        with poisoned_allocator():
            results = _results(entry.attention, inputs)
    verdict = reference.check(results)
    entry.verdict, entry.checked = verdict.reason, verdict.checked
    entry.error, entry.allowed_error = verdict.error, verdict.budget


def _results(attention: Attention, inputs: CellInputs) -> dict[str, Any]:
    """Output and gradients, from views of one tensor as the model's projection leaves them."""
    import torch

    qkv = torch.stack((inputs.q, inputs.k, inputs.v), dim=2).requires_grad_()
    out = attention(*qkv.unbind(2))
    (gradient,) = torch.autograd.grad(out, qkv, inputs.dout)
    dq, dk, dv = gradient.unbind(2)
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def free(device: str) -> None:
    """Give back device memory that nothing holds any more."""
    if device == "cuda":
        import torch

        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
