"""A plan's launches again, for tensors at addresses that came together before.

What a launch hands to its kernel depends, for one plan, on addresses and on the stream alone. In a
loop the allocator gives the same addresses again: the arguments of every launch are then there as
whole tuples, and nothing is read from tensors but where they are.

A plan that can be replayed has, beside being callable,

    makes: functions of no argument; each allocates one tensor of what the plan writes
    launches(tensors, made) -> [(Launch, its tensors)], everything that the plan runs, in order
    counts: whether a launch takes the counter of its stream, see `flashdig.kernels.hopper.counters`
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, cast

import torch

from flashdig.kernels.launch import Bound, Launch, current_stream, hooked
from flashdig.kernels.plans import kept_arguments

Tensors = tuple[torch.Tensor | None, ...]
Steps = list[tuple[Launch, Tensors]]

_numbers = itertools.count()
_capturing = cast(
    "Callable[[], bool]", getattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False)
)
_unread: dict[int, torch.Tensor] = {}
_lock = threading.Lock()
UNREAD_BYTES = 2**20


class Replayable(Protocol):
    """A plan that tells what it allocates and what it launches."""

    makes: tuple[Callable[[], torch.Tensor], ...]
    counts: bool

    def launches(self, tensors: Tensors, made: Sequence[torch.Tensor]) -> Steps: ...


class ForwardPlan:
    """A plan that writes out and lse, and nothing but what its launches write."""

    __slots__ = ("makes",)

    makes: tuple[Callable[[], torch.Tensor], ...]

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = (make() for make in self.makes)
        for launch, arguments in self.launches(tensors, (out, lse)):
            launch(*arguments)
        return out, lse

    def launches(self, tensors: Tensors, made: Sequence[torch.Tensor]) -> Steps:
        raise NotImplementedError(f"{type(self).__name__} must say what it launches")


class Replay:
    """The launches of one plan on one device, for its tensors without those that are never there.

    Args:
        plan: of these tensors.
        device: index of their GPU, which must be the current one when the replay is called; -1 for
            tensors elsewhere.
        places: where they stand among the `count` arguments of the plan; the others are None.
    """

    __slots__ = ("_count", "_device", "_makes", "_number", "_places", "_plan", "_small")

    def __init__(self, plan: Replayable, device: int, places: Sequence[int], count: int) -> None:
        self._plan = plan
        self._makes = plan.makes
        self._device = device
        self._places = tuple(places)
        self._count = count
        self._number = next(_numbers)
        self._small: bool | None = None if device >= 0 else False

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """What the plan's `makes` allocated, written."""
        made = [make() for make in self._makes]
        self._run(tensors, made)
        return made

    def first(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The first of what the plan, which writes two tensors, makes; nobody reads the second. It
        is then written where every such call on this GPU writes it, if it is small."""
        if not self._small or _capturing():  # a graph owns all the memory that it writes
            out, unread = self(q, k, v)
            if self._small is None and not _capturing():
                self._small = self._fits(unread)
            return out
        out = self._makes[0]()
        self._run((q, k, v), (out, _unread[self._device]))
        return out

    def _run(self, tensors: tuple[torch.Tensor, ...], made: Sequence[torch.Tensor]) -> None:
        key: Hashable = None
        if self._device >= 0 and not hooked() and not (self._plan.counts and _capturing()):
            key = (
                self._number,
                current_stream(self._device),
                *[x.data_ptr() for x in tensors],
                *[x.data_ptr() for x in made],
            )
            known: list[Bound] | None = kept_arguments.get(key)
            if known is not None:
                for run, arguments in known:
                    run(*arguments)
                return
        spread: list[torch.Tensor | None] = [None] * self._count
        for place, x in zip(self._places, tensors, strict=True):
            spread[place] = x
        steps = self._plan.launches(tuple(spread), made)
        bound = [None if key is None else launch.bound(arguments) for launch, arguments in steps]
        kept = [one for one in bound if one is not None]
        if len(kept) < len(steps):
            for launch, arguments in steps:
                launch(*arguments)
            return
        for run, arguments in kept:
            run(*arguments)
        kept_arguments.keep(key, kept)

    def _fits(self, unread: torch.Tensor) -> bool:
        """Whether `unread` may be written elsewhere; makes that place."""
        if unread.nbytes > UNREAD_BYTES:
            return False
        with _lock:
            if self._device not in _unread:
                place = torch.empty(UNREAD_BYTES // 4, dtype=torch.float32, device=unread.device)
                # whoever had this memory before may still use it on this stream
                torch.cuda.current_stream(unread.device).synchronize()
                _unread[self._device] = place
        return True
