"""Who is measured: what a competitor is, and the backends of flashdig as competitors.

A competitor says whether it serves a cell, and prepares the calls. All calls of one cell share its
inputs; what only one competitor needs (another layout, a mask tensor) is made while it prepares and
is neither timed nor counted as its memory.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashdig.bench.cell_inputs import CellInputs
from flashdig.bench.cells import Cell
from flashdig.bench.meters import Call

if TYPE_CHECKING:
    import torch

    from flashdig import dispatch

# q, k, v -> out
Attention = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor"], "torch.Tensor"]


class Competitor(Protocol):
    """Attention by one implementation."""

    @property
    def name(self) -> str: ...

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        """Why it cannot serve the cell, as far as that is known without trying; None: it may."""

    def prepare(self, inputs: CellInputs) -> Prepared:
        """Its calls on these inputs. May compile; raises what the implementation raises."""


@dataclass(frozen=True)
class Prepared:
    """One competitor's attention on one cell's inputs.

    Attributes:
        attention: (q, k, v) -> out, all in its own layout.
        tensors: q, k, v in its layout.
        dout: gradient of its output; None where no backward is measured.
        to_common: from its layout to that of the inputs.
    """

    attention: Attention
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    dout: torch.Tensor | None
    to_common: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self) -> Call:
        """A call that computes the output, without gradients."""
        import torch

        q, k, v = self.tensors

        def call() -> torch.Tensor:
            with torch.no_grad():
                return self.attention(q, k, v)

        return call

    def backward(self) -> Call:
        """A call that computes the gradients of q, k and v alone.

        Its first run does the forward and keeps the graph: then both run on one stream, as a
        capture of the backward needs it (autograd runs each backward on its forward's stream).
        """
        import torch

        leaves = self._leaves()
        kept: list[torch.Tensor] = []

        def call() -> tuple[torch.Tensor, ...]:
            if not kept:
                kept.append(self.attention(*leaves))
            return torch.autograd.grad(kept[0], leaves, self.dout, retain_graph=True)

        return call

    def forward_backward(self) -> Call:
        """A call that computes the output and then the gradients of q, k and v."""
        import torch

        leaves = self._leaves()

        def call() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(self.attention(*leaves), leaves, self.dout)

        return call

    def _leaves(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in self.tensors)
        return q, k, v


@dataclass(frozen=True)
class Ours:
    """A backend of flashdig, through the public functions."""

    name: str

    def reason_against(self, cell: Cell, device_type: str) -> str | None:
        from flashdig import dispatch

        for backend, reasons in dispatch.support(cell.problem, request_of(cell, device_type)):
            if backend.name == self.name:
                return "; ".join(reasons) or None
        return f"no backend is called {self.name}"

    def prepare(self, inputs: CellInputs) -> Prepared:
        return Prepared(
            attention=ours_call(inputs, self.name),
            tensors=(inputs.q, inputs.k, inputs.v),
            dout=inputs.dout,
        )


def ours_call(inputs: CellInputs, backend: str) -> Attention:
    """flashdig's attention with a cell's features, by one backend."""
    # its types do not say that without return_lse the output comes alone
    package: Any = importlib.import_module("flashdig")
    cell = inputs.cell
    options: dict[str, Any] = {
        "causal": cell.causal,
        "window": cell.window,
        "softcap": cell.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "sinks": inputs.sinks,
        "dropout_p": cell.dropout_p,
        "backend": backend,
        **inputs.descales,
    }
    if not cell.packed:
        return lambda q, k, v: package.attention(q, k, v, bias=inputs.bias, **options)
    cu_seqlens = inputs.cu_seqlens
    return lambda q, k, v: package.attention_varlen(
        q, k, v, cu_seqlens, cu_seqlens, cell.seqlen_q, cell.seqlen_k, **options
    )


def request_for(device_type: str) -> dispatch.Request:
    """What a plain call asks of `dispatch` besides its problem."""
    from flashdig import dispatch

    if device_type != "cuda":
        return dispatch.Request(device_type=device_type)
    import torch

    capability = torch.cuda.get_device_capability()
    return dispatch.Request(device_type=device_type, compute_capability=capability)


def request_of(cell: Cell, device_type: str) -> dispatch.Request:
    """What a cell's call asks of `dispatch` besides its problem."""
    return dataclasses.replace(request_for(device_type), descale=cell.fp8)


def ours_for(names: Sequence[str], cell: Cell, device_type: str) -> list[Ours]:
    """The backends of flashdig by name; "auto" is the one that dispatch chooses for the cell.

    Raises ValueError for an unknown name.
    """
    from flashdig import dispatch

    chosen: dict[str, Ours] = {}
    for asked in names:
        check_backend(asked)
        name = asked
        if asked == "auto":
            name = dispatch.choose(cell.problem, request_of(cell, device_type)).name
        chosen.setdefault(name, Ours(name))
    return list(chosen.values())


def check_backend(name: str) -> None:
    """Raises ValueError unless flashdig has this backend, or it is "auto"."""
    from flashdig import dispatch

    names = [backend.name for backend in dispatch.BACKENDS]
    if name not in ("auto", *names):
        raise ValueError(f"backend must be auto or one of {', '.join(names)}, got {name!r}")
