"""Counters of the programs of a launch that have written their part: 0 between launches.

A kernel leaves its counters as it found them, so launches that follow each other on a stream share
theirs and none has to be cleared. A captured launch has its own: its graph may be replayed on any
stream, beside other launches.
"""

from __future__ import annotations

import threading

import torch

from flashdig.kernels.launch import current_stream

_AT_LEAST = 4096
_SPARE = 2**19
_lock = threading.Lock()
# (device, stream) -> counters of the launches there
_of_stream: dict[tuple[int, int], torch.Tensor] = {}
# device -> counters that no launch has yet, for captured ones; they are never given back
_spare: dict[int, torch.Tensor] = {}
_given: list[torch.Tensor] = []
# devices that need more of them
_low: set[int] = set()


def arrival_counters(count: int, device: torch.device) -> torch.Tensor:
    """`count` zeros, int32, for one launch on the current stream of `device`, the current one."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device()
    if torch.cuda.is_current_stream_capturing():
        return _captured(count, index, device)
    key = (index, current_stream(index))
    counters = _of_stream.get(key)
    if counters is None or counters.shape[0] < count or index in _low:
        with _lock:
            counters = torch.zeros(max(count, _AT_LEAST), dtype=torch.int32, device=device)
            _of_stream[key] = counters
            if index not in _spare or index in _low:
                _spare[index] = torch.zeros(_SPARE, dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()  # other streams will use them
                _low.discard(index)
    return counters


def _captured(count: int, index: int, device: torch.device) -> torch.Tensor:
    with _lock:
        spare = _spare.get(index)
        if spare is None or spare.shape[0] < count:
            _low.add(index)
            # a part of the graph clears these
            return torch.zeros(count, dtype=torch.int32, device=device)
        own, _spare[index] = spare[:count], spare[count:]
        _given.append(own)
        if 2 * _spare[index].shape[0] < _SPARE:
            _low.add(index)
        return own
