"""Autograd of kept calls: past the dispatcher, forward and backward.

A kept call (`flashdig.kept_calls.KeptCall`) has `plan`, `replay`, `tail` (the operator's inputs
behind its tensors), `return_lse` and `backward`, what its gradients were made with last. A backward
that somebody watches or differentiates goes through its operator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashdig.kernels.plans import ALIGNMENT, Plan, replay_of
from flashdig.ops import eager
from flashdig.ops.attention import (
    TENSORS,
    backward_op,
    nothing_below,
    planned_backward,
    run_backward,
)

if TYPE_CHECKING:
    from flashdig.kernels.replay import Replay

Tensors = tuple[torch.Tensor | None, ...]

_ALONE: Tensors = (None,) * (TENSORS - 3)  # what q, k and v come without
# among the inputs of the backward: grad_out, q, k, v, out, lse
_PRESENT = (0, 2, 3, 4, TENSORS + 2, TENSORS + 3)
_deterministic = torch._C._get_deterministic_algorithms
_compiling = torch.compiler.is_compiling


class _PlannedAttentionFunction(torch.autograd.Function):
    """Of whatever tensors a call has."""

    @staticmethod
    def forward(
        ctx: Any,
        kept: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        sinks: torch.Tensor | None,
        slopes: torch.Tensor | None,
        rest: Tensors,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = (q, k, v, bias, slopes, sinks, *rest)
        output: tuple[torch.Tensor, torch.Tensor] = kept.plan(*tensors)
        ctx.save_for_backward(*tensors, *output)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return output

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        wanted = ctx.needs_input_grad[1:6]
        tensors = (grad_out, grad_lse, *ctx.saved_tensors)
        found = iter(_gradients(ctx.kept, tensors, wanted))
        return (None, *(next(found) if want else None for want in wanted), None, None)


class _PlannedDenseFunction(torch.autograd.Function):
    """Of q, k and v alone. The lse is a result only where it was asked for."""

    @staticmethod
    def forward(ctx: Any, kept: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        out, lse = kept.both(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        return (out, lse) if kept.return_lse else out

    @staticmethod
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        kept = ctx.kept
        q, k, v, out, lse = ctx.saved_tensors
        if grad_lse is None:
            if grad_out is None:
                return (None,) * 4
            last: _KeptBackward | None = kept.backward
            if last is not None and last.replay is not None:
                found = last.replayed(grad_out, q, k, v, out, lse, ctx.needs_input_grad)
                if found is not None:
                    return found
        wanted = (*ctx.needs_input_grad[1:], False, False)
        tensors = (grad_out, grad_lse, q, k, v, *_ALONE, out, lse)
        made = iter(_gradients(kept, tensors, wanted))
        return (None, *(next(made) if want else None for want in wanted[:3]))


# (kept call, q, k, v, bias, sinks, alibi_slopes, the other tensors) -> out and lse. Autograd's own
# `apply` would first look for wrappers of torch.func: there are none
differentiable: Any = super(torch.autograd.Function, _PlannedAttentionFunction).apply
# (kept call, q, k, v) -> out, or out and lse where the call returns both
differentiable_dense: Any = super(torch.autograd.Function, _PlannedDenseFunction).apply


class _KeptBackward:
    """The plan of the gradients that a kept call's backward made last, and for which tensors.

    Args:
        tensors: inputs of the backward; those that are there: `present`.
    """

    __slots__ = ("deterministic", "device", "plan", "replay", "same", "wanted")

    def __init__(
        self,
        plan: Plan,
        tensors: Tensors,
        present: list[torch.Tensor],
        wanted: tuple[bool, ...],
    ) -> None:
        self.plan = plan
        self.wanted = wanted
        self.same = eager.same_as(*present)
        self.device = present[0].get_device()
        self.deterministic = _deterministic()
        self.replay: Replay | None = None
        places = tuple(place for place, x in enumerate(tensors) if x is not None)
        if self.same is not None and places == _PRESENT and all(wanted[:3]):
            self.replay = replay_of(plan, self.device, places, TENSORS + 4)

    def serves(self, present: list[torch.Tensor], wanted: tuple[bool, ...]) -> bool:
        return (
            wanted == self.wanted
            and self.same is not None
            and self.same(*present)
            and _are_aligned(present)
            and self._is_as_it_was()
        )

    def replayed(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        needs: tuple[bool, ...],
    ) -> tuple[torch.Tensor | None, ...] | None:
        """What the backward of q, k and v alone returns, None where it has to ask further."""
        if not (
            self.same is not None
            and self.replay is not None
            and self.same(grad_out, q, k, v, out, lse)
            and needs == (False, True, True, True)
            and (
                grad_out.data_ptr()
                | q.data_ptr()
                | k.data_ptr()
                | v.data_ptr()
                | out.data_ptr()
                | lse.data_ptr()
            )
            % ALIGNMENT
            == 0
            and not torch.is_grad_enabled()
            and not _compiling()
            and self._is_as_it_was()
        ):
            return None
        made = self.replay(grad_out, q, k, v, out, lse)
        return None, made[0], made[1], made[2]

    def _is_as_it_was(self) -> bool:
        return (
            (self.device < 0 or self.device == eager.current_device())
            and self.deterministic == _deterministic()
            and eager.unwatched()
        )


def _are_aligned(tensors: list[torch.Tensor]) -> bool:
    addresses = 0
    for x in tensors:
        addresses |= x.data_ptr()
    return addresses % ALIGNMENT == 0


def _gradients(kept: Any, tensors: Tensors, wanted: tuple[bool, ...]) -> list[torch.Tensor]:
    """The wanted gradients of a kept call, from the upstream gradients and what was saved."""
    settings, backend = kept.tail[:-2], kept.tail[-1]
    inputs = (*tensors, *settings, wanted, backend)
    if torch.is_grad_enabled() or _compiling():
        return list(backward_op(*inputs))
    # which of them are there is the same at every call, but for the gradient of the lse
    present = [x for x in tensors if x is not None]
    plain = tensors[0] is not None and tensors[1] is None
    last: _KeptBackward | None = kept.backward
    if plain and last is not None and last.serves(present, wanted):
        return [gradient for gradient in last.plan(*tensors) if gradient is not None]
    if not nothing_below(tensors):
        return list(backward_op(*inputs))
    gradients = run_backward(*inputs)
    plan = planned_backward(inputs)
    if plain and plan is not None and _are_aligned(present):
        kept.backward = _KeptBackward(plan, tensors, present, wanted)
    return gradients
