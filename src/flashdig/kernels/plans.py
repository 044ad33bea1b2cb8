"""Plans: what is worked out once for a call's shapes, strides, dtypes and options, and kept.

`flashdig.kernels.launch` says what a plan is and how a backend makes one. Needs neither Triton nor
a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from flashdig.kernels.replay import Replay

Plan = Callable[..., Any]

# entries of a table; the oldest goes when one more comes
LIMIT = 2048
ALIGNMENT = 16  # bytes; Triton compiles other loads for other addresses


class Kept:
    """A bounded table that several threads may use; the oldest entry goes first."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._entries: dict[Hashable, Any] = {}
        self._limit = limit
        self._lock = threading.Lock()
        self.get = self._entries.get

    def keep(self, key: Hashable, entry: Any) -> None:
        with self._lock:
            while len(self._entries) >= self._limit:
                del self._entries[next(iter(self._entries))]
            self._entries[key] = entry

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


_plans = Kept()
_ABSENT = object()
# of replays: (which, stream, addresses) -> what is run
kept_arguments = Kept(2 * LIMIT)


def forget() -> None:
    """Drop every kept plan and the arguments of their launches."""
    _plans.clear()
    kept_arguments.clear()


def replay_of(plan: Any, device: int, places: Sequence[int], count: int) -> Replay | None:
    """The launches of a plan as `flashdig.kernels.replay.Replay` runs them, None where the plan
    cannot be replayed."""
    if getattr(plan, "launches", None) is None or not plan.makes:
        return None
    from flashdig.kernels.replay import Replay  # needs Triton, as does a plan with launches

    return Replay(plan, device, places, count)


def is_aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % ALIGNMENT == 0


def plan_key(tensors: Iterable[torch.Tensor | None]) -> tuple[Hashable, ...]:
    """What a plan depends on of its tensors, one flat entry each."""
    return tuple(
        [
            None
            if x is None
            else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % ALIGNMENT == 0)
            for x in tensors
        ]
    )


def plan_of(
    make: Callable[[], Plan | None],
    name: Hashable,
    tensors: Sequence[torch.Tensor | None],
    settings: tuple[Hashable, ...],
) -> Plan | None:
    """The kept plan of a call, made by `make` where there is none; None where there can be none.

    Args:
        name: which plans these are (backend and direction).
        tensors: of the call; settings: everything else that it depends on.
    """
    key = (name, settings, plan_key(tensors))
    plan = _plans.get(key, _ABSENT)
    if plan is _ABSENT:
        plan = make()
        _plans.keep(key, plan)
    return cast("Plan | None", plan)
