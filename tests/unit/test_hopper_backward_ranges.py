"""Rows and keys that the Hopper backward cuts off: against a mask written out."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flashdig.kernels.hopper.backward_operator import live_ranges


def test_live_rows_and_keys_are_those_of_the_written_out_mask() -> None:
    sides = (-1, 0, 1, 3, 9)
    lengths = (1, 2, 5, 8)
    for seqlen_q, seqlen_k, left, right in itertools.product(lengths, lengths, sides, sides):
        for offset in (0, seqlen_k - seqlen_q):
            i = torch.arange(seqlen_q)[:, None] + offset
            j = torch.arange(seqlen_k)[None, :]
            seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
            if left >= 0:
                seen &= j >= i - left
            if right >= 0:
                seen &= j <= i + right
            row, row_end, key, key_end = live_ranges(seqlen_q, seqlen_k, offset, left, right)
            where = (seqlen_q, seqlen_k, offset, left, right)
            assert list(range(row, row_end)) == seen.any(1).nonzero().flatten().tolist(), where
            assert list(range(key, key_end)) == seen.any(0).nonzero().flatten().tolist(), where
