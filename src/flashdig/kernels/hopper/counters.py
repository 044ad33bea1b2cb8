"""Counters by which the blocks of a launch share out their tiles.

A counter is two numbers in the GPU's memory, zero before a launch; the launch leaves them zero.
Launches that may run at the same time must not share one: each stream has its own, and so has each
launch that is captured into a CUDA graph, which may be replayed on any stream.
"""

from __future__ import annotations

import threading

import torch

from flashdig.kernels.launch import current_stream

COUNTERS = 4096  # of a slab
_SPACING = 4  # numbers from one counter to the next: 16 bytes, so that all are aligned alike

_of_stream: dict[tuple[int, int], torch.Tensor] = {}
_lock = threading.Lock()


class _Slab:
    """Counters of one device that nobody uses yet."""

    def __init__(self) -> None:
        self._numbers: torch.Tensor | None = None
        self._used = 0

    def take(self, device: torch.device) -> torch.Tensor:
        numbers = self._numbers
        if numbers is None or self._used == COUNTERS:
            if torch.cuda.is_current_stream_capturing():
                # memory of the graph's own, which it clears at every replay
                return torch.zeros(_SPACING, dtype=torch.int32, device=device)
            numbers = torch.zeros(COUNTERS * _SPACING, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # before another stream uses one
            self._numbers, self._used = numbers, 0
        begin = self._used * _SPACING
        self._used += 1
        return numbers[begin : begin + _SPACING]


_slabs: dict[int, _Slab] = {}


def counter_for(device: torch.device) -> torch.Tensor:
    """A counter for one launch on `device`, which must be the current one, and its current stream.

    Returns: int32, zeros when the launch begins. On a device without memory, a tensor without.
    """
    if device.type != "cuda":
        return torch.empty(_SPACING, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            return _slabs.setdefault(index, _Slab()).take(device)
    key = index, current_stream(index)
    counter = _of_stream.get(key)
    if counter is None:
        with _lock:
            counter = _of_stream.get(key)
            if counter is None:
                counter = _of_stream[key] = _slabs.setdefault(index, _Slab()).take(device)
    return counter
