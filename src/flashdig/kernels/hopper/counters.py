"""Counters by which the blocks of a launch share out their tiles.

A counter is a few numbers in the GPU's memory, zero before a launch; the launch leaves them zero.
Launches that may run at the same time must not share one: each stream has its own, and so has each
launch that is captured into a CUDA graph, which may be replayed on any stream.
"""

from __future__ import annotations

import threading

import torch

from flashdig.kernels.launch import current_stream

COUNTERS = 4096  # of a slab, unless they are large
_SLAB_NUMBERS = 2**20
_SPACING = 4  # numbers from one counter to the next: 16 bytes, so that all are aligned alike

_of_stream: dict[tuple[int, int, int], torch.Tensor] = {}
_lock = threading.Lock()


class _Slab:
    """Counters of one device and size that nobody uses yet."""

    def __init__(self, spacing: int) -> None:
        self._spacing = spacing
        self._count = max(1, min(COUNTERS, _SLAB_NUMBERS // spacing))
        self._numbers: torch.Tensor | None = None
        self._used = 0

    def take(self, device: torch.device) -> torch.Tensor:
        numbers = self._numbers
        if numbers is None or self._used == self._count:
            if torch.cuda.is_current_stream_capturing():
                # memory of the graph's own, which it clears at every replay
                return torch.zeros(self._spacing, dtype=torch.int32, device=device)
            numbers = torch.zeros(self._count * self._spacing, dtype=torch.int32, device=device)
            torch.cuda.current_stream(device).synchronize()  # before another stream uses one
            self._numbers, self._used = numbers, 0
        begin = self._used * self._spacing
        self._used += 1
        return numbers[begin : begin + self._spacing]


_slabs: dict[tuple[int, int], _Slab] = {}


def counter_for(device: torch.device, numbers: int = _SPACING) -> torch.Tensor:
    """A counter for one launch on `device`, which must be the current one, and its current stream.

    Args:
        numbers: how many the launch needs, a multiple of 4.

    Returns: int32, zeros when the launch begins. On a device without memory, a tensor without.
    """
    if device.type != "cuda":
        return torch.empty(numbers, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_current_stream_capturing():
        with _lock:
            return _slabs.setdefault((index, numbers), _Slab(numbers)).take(device)
    key = index, current_stream(index), numbers
    counter = _of_stream.get(key)
    if counter is None:
        with _lock:
            counter = _of_stream.get(key)
            if counter is None:
                slab = _slabs.setdefault((index, numbers), _Slab(numbers))
                counter = _of_stream[key] = slab.take(device)
    return counter
