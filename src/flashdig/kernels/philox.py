"""Philox4x32-10, the counter-based generator behind dropout, in plain torch.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The key is the
64-bit seed; the counter is (j // 4, i, head, sequence), and word j % 4 of its four outputs decides
about the pair (i, j). Positions are relative to the sequence, so packed input draws what dense
input draws and no tile size shows.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_ROUNDS = 10


def philox4x32(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Four 32-bit words for each counter.

    Args:
        counter: four int64 tensors of one broadcastable shape, values in [0, 2**32).
        seed: 64-bit key; its low half is key word 0.

    Returns: four int64 tensors with values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK32, (seed >> 32) & _MASK32
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + _KEY_STEPS[0]) & _MASK32
        k1 = (k1 + _KEY_STEPS[1]) & _MASK32
    return c0, c1, c2, c3


def keep_mask(
    seed: int,
    dropout_p: float,
    sequences: torch.Tensor,
    heads: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Which probabilities dropout keeps.

    A pair is kept when its word is at least dropout_p * 2**32 (rounded), so the kept share is
    1 - dropout_p; dropout_p = 1 keeps nothing.

    Args: int64 index vectors of the sequences (batch entries), query heads, query rows and keys.
    Returns: bool (sequences, heads, rows, columns).
    """
    words = philox4x32(
        (
            columns[None, None, None, :] // 4,
            rows[None, None, :, None],
            heads[None, :, None, None],
            sequences[:, None, None, None],
        ),
        seed,
    )
    lane = (columns % 4)[None, None, None, :]
    word = torch.where(
        lane < 2,
        torch.where(lane == 0, words[0], words[1]),
        torch.where(lane == 2, words[2], words[3]),
    )
    return word >= round(dropout_p * 2**32)


def _multiply(a: torch.Tensor, multiplier: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, in int64 without overflow."""
    low = (a & 0xFFFF) * multiplier
    high = (a >> 16) * multiplier + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
