"""Rows and keys that the Hopper backward cuts off, against a mask written out; its grids."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flashdig.kernels.hopper.backward_launch import TILES, Call, Launches, _main
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


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "right", "programs"),
    [
        (128, 8192, -1, 132),  # as many blocks as an H200 has multiprocessors
        (128, 512, 0, 132),
        (128, 8192, 0, 132),  # tiles are counted out
        (64, 8192, 0, 132),
        (256, 8192, -1, 128 * 64),
        (128, 130, -1, 2 * 64),
    ],
)
def test_blocks_walk_several_tiles_of_keys(head_dim, seqlen, right, programs):
    q = torch.empty(1, seqlen, 64, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(1, 64, seqlen, device="meta")
    numbers = {"softmax_scale": 1.0, "softcap": 0.0, "window_left": -1, "window_right": right}
    call = Call(q, None, q, q, q, None, q, lse, **numbers)
    assert _main(call, True, q, q, TILES[head_dim])._programs == programs


@pytest.mark.parametrize(
    ("head_dim", "seqlen", "heads_kv", "right", "expected"),
    [
        (64, 512, 8, 0, (64, 2)),  # a tile of keys meets few rows
        (64, 1024, 8, 0, (128, 2)),
        (64, 512, 4, 0, (128, 2)),  # twice as many, of two heads
        (64, 512, 8, -1, (128, 2)),
        (128, 2048, 8, 0, (64, 2)),
        (128, 2048, 4, 0, (64, 1)),
        (128, 2048, 8, -1, (64, 1)),
    ],
)
def test_rows_of_a_tile_and_buffers_of_keys(head_dim, seqlen, heads_kv, right, expected):
    q = torch.empty(2, seqlen, 8, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, seqlen, heads_kv, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 8, seqlen, device="meta")
    numbers = {"softmax_scale": 1.0, "softcap": 0.0, "window_left": -1, "window_right": right}
    made = Launches(Call(q, None, q, k, k, None, q, lse, **numbers), q, k, k)
    names = made._main._kernel.arg_names[-len(made._main._rest) :]
    constants = dict(zip(names, made._main._rest, strict=True))
    assert (constants["BLOCK_M"], constants["KEY_TILES"]) == expected
