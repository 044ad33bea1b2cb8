"""Rows and keys that the Hopper backward cuts off, against a mask written out; its grids."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flashdig.kernels.hopper.backward_launch import Call, Launches, _main
from flashdig.kernels.hopper.backward_operator import live_ranges
from flashdig.kernels.hopper.backward_tiles import TILES


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
    constants = constants_of(made._main)
    assert (constants["BLOCK_M"], constants["KEY_TILES"]) == expected


def constants_of(launch):
    names = launch._kernel.arg_names[-len(launch._rest) :]
    return dict(zip(names, launch._rest, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "seqlen_k", "left", "right", "apart"),
    [
        (128, 512, -1, -1, True),
        (128, 513, -1, -1, False),
        (128, 1024, -1, 0, True),
        (128, 1025, -1, 0, False),
        (96, 512, -1, -1, True),  # padded to 128
        (256, 2048, -1, -1, True),
        (256, 2049, -1, -1, False),
        (256, 4096, -1, 0, True),
        (256, 4097, -1, 0, False),
        (64, 64, -1, 0, False),
        (128, 512, 100, 0, False),  # a window: not measured
    ],
)
def test_dq_is_made_apart_where_keys_are_few(head_dim, seqlen_k, left, right, apart):
    q = torch.empty(2, 700, 8, head_dim, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, seqlen_k, 4, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 8, 700, device="meta")
    numbers = {"softmax_scale": 1.0, "softcap": 0.0, "window_left": left, "window_right": right}
    call = Call(q, None, q, k, k, None, q, lse, **numbers)
    made = Launches(call, q, k, k)
    assert (made._dq is not None) == apart
    assert (made._postprocess is None) == apart
    assert constants_of(made._main)["WITH_DQ"] != apart
    # what is asked for comes first
    assert Launches(call, q, k, k, dq_apart=True)._dq is not None
    assert Launches(call, q, k, k, dq_apart=False)._dq is None


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("right", [-1, 0])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_walk_of_long_tiles_makes_dq(head_dim, right, softcap):
    """It cannot leave dQ to another kernel, whatever makes scores of products."""
    q = torch.empty(2, 4096, 8, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(2, 8, 4096, device="meta")
    numbers = {"softmax_scale": 1.0, "softcap": softcap, "window_left": -1, "window_right": right}
    call = Call(q, None, q, q, q, None, q, lse, **numbers)
    fused, apart = (Launches(call, q, q, q, dq_apart=choice)._main for choice in (False, True))
    if head_dim == 256:  # a kernel of its own
        assert "LONG" not in constants_of(fused)
    else:
        assert constants_of(fused)["LONG"] == (head_dim == 128 and right < 0)
        assert not constants_of(apart)["LONG"]
