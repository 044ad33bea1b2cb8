"""Tiles and splits of attention over a cache: pure functions."""

import pytest

from flashdig.kernels.triton.decode_choose import (
    SHARED_BYTES,
    choose_decode_tile,
    choose_splits,
    split_dim,
)

LLAMA = ("sm_90", 2, 2, 128, 128, 4, 4)  # one token of 32/8 heads in bfloat16


def test_the_tiles_that_were_measured() -> None:
    few, many = choose_decode_tile(*LLAMA), choose_decode_tile(*LLAMA, crowded=True)
    assert (few.block_m, few.block_n, few.num_warps, few.num_stages) == (16, 128, 4, 3)
    assert (many.block_m, many.block_n, many.num_warps, many.num_stages) == (16, 64, 4, 2)
    assert (many.resident, many.registers) == (4, 128)
    # the page table's loads take two stages more
    paged = choose_decode_tile(*LLAMA, paged=True)
    assert (paged.block_n, paged.num_stages, paged.resident) == (64, 5, 2)
    many = choose_decode_tile(*LLAMA, paged=True, crowded=True)
    assert (many.num_stages, many.resident, many.registers) == (4, 4, 128)
    long = choose_decode_tile(*LLAMA, paged=True, crowded=True, long=True)
    assert (long.num_stages, long.resident, long.registers) == (5, 3, 168)


@pytest.mark.parametrize("arch", SHARED_BYTES)
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("bytes_", [(2, 2), (2, 1), (4, 4)])
def test_tiles_in_flight_fit_shared_memory(arch, head_dims, bytes_) -> None:
    if bytes_ == (4, 4) and max(head_dims) > 256:
        return
    for rows in (1, 8, 40, 2048):
        for paged in (False, True):
            tile = choose_decode_tile(arch, *bytes_, *head_dims, rows, 8, paged=paged)
            buffers = tile.num_stages - 1 - 2 * paged
            assert buffers >= 1
            held = buffers * tile.block_n * sum(head_dims) * bytes_[1]
            held += tile.block_m * head_dims[0] * bytes_[0]
            assert held <= SHARED_BYTES[arch], tile
            assert tile.block_m >= min(rows, 16)


def test_a_batch_invariant_tile_knows_no_tokens_no_pages_and_no_batch() -> None:
    tiles = {
        (tile.block_m, tile.block_n, tile.num_warps)
        for rows in (4, 40, 4000)
        for paged in (False, True)
        for crowded, long in ((False, False), (True, False), (False, True))
        for tile in [
            choose_decode_tile(
                "sm_90", 2, 2, 128, 128, rows, 4,
                paged=paged, crowded=crowded, long=long, batch_invariant=True,
            )
        ]
    }  # fmt: skip
    assert len(tiles) == 1


@pytest.mark.parametrize("head_dims", [(96, 48), (80, 80), (128, 96), (256, 256), (576, 512)])
def test_odd_and_wide_heads_are_not_multiplied_by_warp_groups(head_dims) -> None:
    for batch_invariant in (False, True):
        tile = choose_decode_tile(
            "sm_90", 2, 1, *head_dims, 4096, 4, batch_invariant=batch_invariant
        )
        assert tile.block_m == 32


def test_64_rows_are_one_warp_groups() -> None:
    for head_dim in (64, 128):
        tile = choose_decode_tile("sm_90", 2, 2, head_dim, head_dim, 4096, 4)
        assert (tile.block_m, tile.block_n, tile.num_warps) == (64, 64, 4)
        # not a cache that is converted on its way
        assert choose_decode_tile("sm_90", 2, 1, head_dim, head_dim, 4096, 4).block_m == 32


@pytest.mark.parametrize(
    ("tiles", "keys", "splits"),
    [
        (8, 8 * 1024, 16),  # 128 programs for 132 multiprocessors
        (8, 512 * 1024, 16),
        (128, 8 * 1024, 1),
        (1024, 2 * 1024, 1),
        (1, 64, 1),
    ],
)
def test_parts_fill_the_chip_once(tiles, keys, splits) -> None:
    assert choose_splits(tiles, keys, 128, 132) == splits


def test_more_sequences_are_never_split_more() -> None:
    found = [choose_splits(8 * batch, 16384, 128, 132) for batch in (1, 2, 4, 8, 16, 64)]
    assert found == sorted(found, reverse=True)


def test_an_unknown_chip_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"arch must be one of sm_80, .* got 'sm_75'"):
        choose_decode_tile("sm_75", *LLAMA[1:])


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [
        (8, (16, 0)),
        (64, (64, 0)),
        (80, (64, 16)),
        (96, (64, 32)),
        (120, (128, 0)),
        (576, (512, 64)),
    ],
)
def test_wide_heads_are_cut_where_a_power_of_two_would_waste(head_dim, parts) -> None:
    assert split_dim(head_dim) == parts
