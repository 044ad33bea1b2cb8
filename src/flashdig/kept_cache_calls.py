"""Calls of `flashdig.attention_with_kvcache` that were served before; `flashdig.kept_calls` keeps
those of `flashdig.attention`.

A decoding loop makes the same call for every layer and token: only addresses and values differ.
What was checked and chosen once holds for every call whose tensors are of the same kinds, sizes
and strides and whose other arguments are equal. Everything out of the ordinary takes the long way.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any

import torch

from flashdig.kept_keys import any_autocast, is_here
from flashdig.kernels.plans import ALIGNMENT, replay_of
from flashdig.ops.eager import Check, current_device, is_plain, same_as, unwatched
from flashdig.ops.kvcache import TENSORS, planned
from flashdig.packing import values_are_checked
from flashdig.validate import tf32_allowed

Tensors = tuple[Any, ...]
RECENT = 4
_NONE = itertools.repeat(None)


class _Recent:
    """A call as it was made last.

    Attributes:
        options: the arguments that are no tensors; return_lse: one of them.
        absent: which of the tensors were not there; same: whether others are as these.
        order: where the operator's tensors stand among those that are there.
        replay: of these.
        caches: places of the caches that keys are appended to.
        tf32: torch's setting; None where products do not follow it.
    """

    __slots__ = (
        "absent",
        "caches",
        "device",
        "options",
        "order",
        "replay",
        "return_lse",
        "same",
        "tf32",
    )

    def __init__(self, tensors: Tensors, options: tuple[Any, ...], return_lse: bool) -> None:
        self.options = options
        self.return_lse = return_lse
        self.absent = [x is None for x in tensors]
        q = tensors[0]
        self.device: int = q.get_device()
        self.tf32 = tf32_allowed() if q.dtype is torch.float32 else None
        self.same: Check
        self.replay: Any
        self.order: Sequence[int]
        self.caches: Sequence[int] = ()

    def fits(self, tensors: Tensors, given: list[Any], options: tuple[Any, ...]) -> bool:
        return (
            (all(map(operator.is_, options, self.options)) or _equal(options, self.options))
            and list(map(operator.is_, tensors, _NONE)) == self.absent
            and self.same(*given)
        )


class _Latest:
    """What was called last, the newest first: a tuple, which other threads may be reading."""

    calls: tuple[_Recent, ...] = ()


_latest = _Latest()


def again(tensors: Tensors, options: tuple[Any, ...]) -> Any:
    """What a call returns that is one of those made last; None if that is not known fast.

    Args:
        tensors: arguments that may be tensors, in the order of the public function.
        options: the others, the backend last.
    """
    # first of all: torch.compile must not look into what is kept
    if torch.compiler.is_compiling() or not _latest.calls or values_are_checked("cuda"):
        return None
    given = [x for x in tensors if x is not None]
    for recent in _latest.calls:
        if recent.fits(tensors, given, options):
            break
    else:
        return None
    here = (
        recent.device == current_device()
        if recent.device >= 0
        else is_here(given[0].device, options)
    )
    if (
        not here
        or not _aligned(given)
        or (recent.tf32 is not None and tf32_allowed() != recent.tf32)
        or not unwatched()
        or any_autocast()
    ):
        return None
    for place in recent.caches:
        torch.autograd.graph.increment_version(given[place])
    made = recent.replay(*[given[place] for place in recent.order])
    return (made[0], made[1]) if recent.return_lse else made[0]


def remember(tensors: Tensors, options: tuple[Any, ...], return_lse: bool, inputs: Any) -> None:
    """Let `again` know a call that was served; from the second of its kind on.

    Args:
        inputs: of the operator.
    """
    if torch.compiler.is_compiling() or inputs[-1] != "triton":
        return
    given = [x for x in tensors if x is not None]
    if (
        not all(isinstance(x, torch.Tensor) and is_plain(x) for x in given)
        or any(x.requires_grad for x in given)
        or not is_here(given[0].device, options)
        or not unwatched()
        or any_autocast()
        or not _aligned(given)
    ):
        return
    places = [place for place, x in enumerate(inputs[:TENSORS]) if x is not None]
    addresses = {id(x): place for place, x in enumerate(given)}
    order = [addresses.get(id(inputs[place]), -1) for place in places]
    if min(order) < 0:  # the operator was given a tensor that was made for it
        return
    plan: Any = planned(inputs)
    if plan is None:
        return
    if not plan.met:  # lengths that grow are no loop to keep anything for
        plan.met = True
        return
    same = same_as(*given)
    if same is None:
        return
    recent = _Recent(tensors, options, return_lse)
    recent.same = same
    recent.order = order
    recent.replay = replay_of(plan, recent.device, places, TENSORS)
    if inputs[3] is not None:
        recent.caches = [addresses[id(cache)] for cache in inputs[1:3]]
    _latest.calls = (recent, *_latest.calls[: RECENT - 1])


def forget() -> None:
    """Drop every kept call."""
    _latest.calls = ()


def _aligned(given: list[Any]) -> bool:
    places = 0
    for x in given:
        at = x.data_ptr()
        if not at:
            return False
        places |= at
    return places % ALIGNMENT == 0


def _equal(options: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether options have the types and values that they had: True equals 1, and not each may be
    either of them."""
    if list(map(type, options)) != list(map(type, before)):
        return False
    try:
        return bool(options == before)
    except (RuntimeError, ValueError):  # a tensor among them, which no comparison decides
        return False
