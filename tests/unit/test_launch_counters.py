"""Counters by which blocks share out their work: who has which, without a GPU."""

import torch

from flashdig.kernels.hopper import counters
from flashdig.kernels.hopper.counters import _Slab, counter_for


class Stream:
    def synchronize(self) -> None:
        pass


def test_a_slab_hands_out_each_counter_once(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    for spacing, together in ((4, 4096), (1024, 1024), (2**21, 1)):
        slab = _Slab(spacing)
        taken = [slab.take(torch.device("cpu")) for _ in range(min(together, 50) + 1)]
        assert all(x.shape == (spacing,) and not x.any() for x in taken)
        addresses = [x.data_ptr() for x in taken]
        assert len(set(addresses)) == len(addresses)
        assert slab._numbers.numel() == spacing * together  # 4 MiB, or one counter
        assert all(address % 16 == 0 for address in addresses)


def test_streams_and_captures_have_counters_of_their_own(monkeypatch) -> None:
    stream, capturing = [1], [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(counters, "current_stream", lambda index: stream[0])
    monkeypatch.setattr(counters, "_of_stream", {})
    monkeypatch.setattr(counters, "_slabs", {})
    zeros = torch.zeros

    def on_the_cpu(*size, dtype, device):
        return zeros(*size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    device = torch.device("cuda", 0)

    def address(numbers: int = 8) -> int:
        return counter_for(device, numbers).data_ptr()

    first = address()
    assert address() == first
    assert address(16) != first
    stream[0] = 2
    assert address() != first
    capturing[0] = True
    captured = {address() for _ in range(5)}
    assert len(captured) == 5
    assert first not in captured
