"""Bank conflicts of shared memory: how many passes an access needs, and what that costs.

Shared memory has 32 banks of 4 bytes: bank = byte_address / 4 mod 32. One pass ("wavefront") serves
one 4-byte word from each bank; lanes that ask for the same word share it. Accesses of 8 and 16
bytes a lane are split by the hardware into halves and quarters of a warp, so a conflict-free
16-byte load takes four wavefronts: those are work, not conflicts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BANKS = 32
BANK_BYTES = 4
WAVEFRONT_BYTES = BANKS * BANK_BYTES


@dataclass(frozen=True)
class BankConflicts:
    """Wavefronts of shared-memory accesses.

    Attributes:
        requests: instructions (one a warp).
        wavefronts: passes that they took.
        ideal_wavefronts: passes without conflicts.
    """

    requests: int
    wavefronts: int
    ideal_wavefronts: int

    @property
    def conflicts(self) -> int:
        return self.wavefronts - self.ideal_wavefronts

    @property
    def conflict_fraction(self) -> float:
        """Conflicts over wavefronts, 0 to 1: the "conflict rate" of profilers and articles."""
        return self.conflicts / self.wavefronts if self.wavefronts else 0.0

    @property
    def slow_down(self) -> float:
        """Wavefronts over ideal ones: how much longer the shared-memory pipe is busy."""
        return self.wavefronts / self.ideal_wavefronts if self.ideal_wavefronts else 1.0

    @property
    def wavefronts_per_request(self) -> float:
        """The "N-way" of profilers. It counts the normal wavefronts of wide loads as conflicts."""
        return self.wavefronts / self.requests if self.requests else 0.0


def from_counters(requests: int, wavefronts: int, conflicts: int) -> BankConflicts:
    """From a profiler's counters, summed over a kernel.

    Raises ValueError when there are more conflicts than wavefronts.
    """
    if not 0 <= conflicts <= wavefronts:
        raise ValueError(
            f"conflicts must be 0 to the number of wavefronts ({wavefronts}), got {conflicts}"
        )
    return BankConflicts(requests, wavefronts, wavefronts - conflicts)


def bank_of(byte_address: int) -> int:
    return byte_address // BANK_BYTES % BANKS


def access(byte_addresses: Sequence[int], bytes_per_lane: int = 4) -> BankConflicts:
    """Conflicts of one load or store of a warp.

    Args:
        byte_addresses: first byte of each active lane, in lane order; aligned to the access.
        bytes_per_lane: 1, 2, 4, 8 or 16.

    Raises ValueError for other sizes, misaligned addresses or more than 32 lanes.
    """
    if bytes_per_lane not in (1, 2, 4, 8, 16):
        raise ValueError(f"bytes_per_lane must be 1, 2, 4, 8 or 16, got {bytes_per_lane}")
    if len(byte_addresses) > 32:
        raise ValueError(f"a warp has 32 lanes, got {len(byte_addresses)} addresses")
    for address in byte_addresses:
        if address < 0 or address % bytes_per_lane:
            raise ValueError(f"address {address} is not a multiple of {bytes_per_lane} bytes")
    lanes_a_phase = 32 // max(1, bytes_per_lane // BANK_BYTES)
    wavefronts = ideal = 0
    for start in range(0, len(byte_addresses), lanes_a_phase):
        words = {
            (address + step) // BANK_BYTES
            for address in byte_addresses[start : start + lanes_a_phase]
            for step in range(0, bytes_per_lane, BANK_BYTES)
        }
        words_a_bank = [0] * BANKS
        for word in words:
            words_a_bank[word % BANKS] += 1
        wavefronts += max(words_a_bank)
        ideal += math.ceil(len(words) / BANKS)
    return BankConflicts(requests=1, wavefronts=wavefronts, ideal_wavefronts=ideal)


def strided_access(stride_bytes: int, *, lanes: int = 32, bytes_per_lane: int = 4) -> BankConflicts:
    """Lane i reads at i x `stride_bytes`: a column of a row-major tile with that row length."""
    return access([lane * stride_bytes for lane in range(lanes)], bytes_per_lane)


def masked_lane_access(
    stride_bytes: int, mask: int = 15, *, bytes_per_lane: int = 4
) -> BankConflicts:
    """Lane i reads at (i & mask) x `stride_bytes`: lanes above the mask repeat the addresses."""
    return access([(lane & mask) * stride_bytes for lane in range(32)], bytes_per_lane)
