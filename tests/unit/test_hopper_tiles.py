"""Tiles of the Hopper forward: they fit every pair of widths, and groups are chosen rightly."""

import itertools

import pytest
import torch

from flashdig.hardware.arch import architecture
from flashdig.kernels.hopper.descriptors import BLOCKS, fits_into, padded, taken_by_tma, tiles_of
from flashdig.kernels.hopper.forward_launch import ROWS, plan_forward, worth_grouping
from flashdig.kernels.hopper.tiles import TILES, tile_of
from flashdig.kernels.triton.arguments import prepared

# barriers and what the producer sends to the consumers
BARRIERS = 1024
REGISTERS = 65536


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_of(q, k, v, alibi_slopes=None, cu_seqlens=None):
    numbers = dict.fromkeys(("dropout_p", "softcap"), 0.0) | {"softmax_scale": 1.0}
    numbers |= {"window_left": -1, "window_right": -1, "top_left": False, "allow_tf32": False}
    tensors = (None, alibi_slopes, None, None, cu_seqlens, cu_seqlens, None, None)
    return prepared(q, k, v, *tensors, **numbers)


# from which numbers of rows on some pair of widths takes another tile
STEPS = {rows for by_mask in TILES.values() for steps in by_mask.values() for rows, _ in steps}


@pytest.mark.parametrize("rows", sorted(STEPS))
@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_of_widths_fits_shared_memory_and_registers(rows, causal) -> None:
    allowed = architecture("9.0").shared_bytes_per_block
    for head_dim, head_dim_v in itertools.product(BLOCKS, BLOCKS):
        tile = tile_of(head_dim, head_dim_v, rows, causal)
        queries = ROWS * tile.consumers
        held = queries * tile.q_buffers * head_dim
        held += tile.stages * tile.block_n * head_dim
        held += (tile.value_stages or tile.stages) * tile.block_n * head_dim_v
        if tile.own_output or not fits_into(head_dim_v, head_dim):
            held += queries * head_dim_v
        assert 2 * held + BARRIERS <= allowed, (head_dim, head_dim_v, tile)
        assert 128 * (tile.consumers * tile.registers + 24) <= REGISTERS, tile
        # the accumulators of a row's thread: scores, output, and P in 16 bits
        assert (tile.block_n + head_dim_v) // 2 + tile.block_n // 4 < tile.registers


def test_widths_are_padded_to_what_kernels_are_compiled_for() -> None:
    assert [padded(n) for n in (8, 64, 72, 96, 104, 128, 136, 192, 200, 256)] == [
        *(64, 64, 96, 96, 128, 128, 192, 192, 256, 256)
    ]
    with pytest.raises(ValueError, match="head_dim must be at most 256, got 264"):
        padded(264)
    assert fits_into(128, 192)
    assert fits_into(64, 96)
    assert not fits_into(96, 64)
    assert not fits_into(64, 128)


def test_descriptors_say_where_rows_end() -> None:
    x = meta(2, 100, 6, 72)
    both = tiles_of("k_desc", x, 64, seqlen=33)
    assert list(both) == ["k_desc", "k_desc_rest"]
    assert both["k_desc"].shape == (2, 6, 33, 72)
    assert both["k_desc"].strides == (43200, 72, 432, 1)
    assert (both["k_desc"].block, both["k_desc_rest"].block) == ((1, 1, 64, 64), (1, 1, 64, 32))
    (grouped,) = tiles_of("q_desc", meta(2, 100, 6, 128), 64, group=3).values()
    assert grouped.shape == (2, 2, 100, 3, 128)
    assert grouped.block == (1, 1, 16, 4, 128)
    (packed,) = tiles_of("q_desc", meta(100, 6, 128), 64).values()
    turn, end, head, row, column = packed.strides
    # 2**30 turns and rows cancel in 64 bits, of 2 bytes an element
    assert (2**30 * (turn + row) * 2) % 2**64 == 0
    assert (end, head, row, column) == (768, 128, 768, 1)
    (groups,) = tiles_of("q_desc", meta(100, 6, 128), 64, group=2).values()
    assert groups.shape[2:] == (2**30, 6, 128)
    assert groups.block == (1, 1, 32, 2, 128)
    with pytest.raises(ValueError, match=r"at most 2\*\*30 rows on this backend, got 1073741825"):
        tiles_of("q_desc", meta(2**30 + 1, 1, 8), 64)


def test_plans_are_made_where_nothing_is_copied_and_a_kernel_runs() -> None:
    numbers = {"softmax_scale": 0.1, "softcap": 0.0, "dropout_p": 0.0, "window_left": -1}
    numbers |= {"window_right": 0, "top_left": False, "allow_tf32": False, "out_dtype": None}

    def plan(q, k, v, alibi_slopes=None, cu_seqlens=None, **changes):
        behind = (None, None, cu_seqlens, cu_seqlens, None, None)
        return plan_forward(q, k, v, None, alibi_slopes, *behind, **{**numbers, **changes})

    q, k = meta(2, 10, 4, 72), meta(2, 20, 2, 72)
    assert plan(q, k, k) is not None
    assert plan(q, k, k[..., :64]) is not None
    assert plan(meta(30, 4, 72), meta(30, 2, 72), meta(30, 2, 72), cu_seqlens=meta(3).int())
    assert plan(q, k, k[..., 4:68]) is None
    assert plan(q[..., ::2], k[..., ::2], k) is None
    assert plan(q, k, meta(2, 20, 2, 77)[..., :72]) is None
    assert plan(q, k[:, :0], k[:, :0]) is None
    assert plan(q, k, k, softmax_scale=0.0) is None
    assert plan(q, k, k, softmax_scale=-1.0) is None
    assert plan(q, k, k, softmax_scale=-1.0, softcap=5.0) is not None
    assert plan(q, k, k, meta(4, dtype=torch.float32), softmax_scale=-1.0) is not None


def test_only_what_tma_does_not_take_is_copied() -> None:
    x = torch.zeros(2, 10, 3, 72, dtype=torch.float16)
    for taken in (x, x[:, 2:5], x[..., :64], x.transpose(1, 2), x[:, :, :1].expand(2, 10, 3, 72)):
        assert taken_by_tma(taken) is taken
    for odd in (x[..., 1:65], x[..., ::2], x.flatten()[4:3844].view(2, 10, 3, 64)):
        copied = taken_by_tma(odd)
        assert copied is not odd
        assert copied.is_contiguous()


def test_groups_share_a_tile_where_rows_are_few() -> None:
    def chosen(seqlen_q, heads=8, **changes):
        call = call_of(meta(1, seqlen_q, heads, 128), meta(1, 256, 2, 128), meta(1, 256, 2, 128))
        call = call if not changes else call_of(call.q, call.k, call.v, **changes)
        return worth_grouping(call, tile_of(128, 128))

    assert chosen(1)
    assert chosen(32)
    assert not chosen(128)
    assert not chosen(4096)
    assert not chosen(1, heads=2)
    assert chosen(1, heads=12)
    assert not chosen(1, alibi_slopes=meta(8, dtype=torch.float32))

    def packed(total, heads):
        q, k = meta(total, heads, 128), meta(4096, 2, 128)
        return worth_grouping(
            call_of(q, k, k, cu_seqlens=meta(9, dtype=torch.int32)), tile_of(8, 8)
        )

    assert packed(8, 8)
    assert not packed(8, 12)  # a tile of four would reach into the next group of three
    assert not packed(4096, 8)
