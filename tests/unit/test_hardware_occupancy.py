"""Occupancy against the numbers of public articles, reports and NVIDIA's calculator."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.hardware.arch import ARCHITECTURES, architecture
from flashdig.hardware.occupancy import occupancy

NVIDIA = [key for key in ARCHITECTURES if key[0].isdigit()]


def test_128_threads_of_255_registers_give_12_5_percent_on_an_a100():
    result = occupancy(architecture("8.0"), threads_per_block=128, registers_per_thread=255)
    assert (result.blocks_per_sm, result.active_warps, result.max_warps) == (2, 8, 64)
    assert result.fraction == 0.125
    assert result.limiter == "registers"
    assert not result.matters("tiles")
    assert "2 blocks = 8 of 64 warps = 12.5 %, limited by registers" in result.explain()
    assert "does not matter" in result.explain()


def test_256_threads_of_240_registers_give_12_5_percent_too():
    result = occupancy(architecture("8.0"), threads_per_block=256, registers_per_thread=240)
    assert (result.blocks_per_sm, result.fraction) == (1, 0.125)
    assert result.limiter == "registers"


def test_the_tile_of_the_triton_article_fits_twice_on_turing():
    tile_floats = 2 * 32 + 3 * 32 * 64 + 32 * 32
    assert tile_floats * 4 == 28928  # 28.9 KB
    result = occupancy(
        architecture("7.5"), threads_per_block=128, shared_bytes_per_block=tile_floats * 4
    )
    assert (result.blocks_per_sm, result.fraction) == (2, 0.25)
    assert result.limiter == "shared memory"


def test_a_block_with_200_kb_is_limited_by_shared_memory():
    """K1 of a public report: one block, 4 of 64 warps, 6.25 %; shown by profilers as 6."""
    result = occupancy(
        architecture("9.0"),
        threads_per_block=128,
        shared_bytes_per_block=200 * 1024,
        grid_blocks=132,
        sm_count=132,
    )
    assert (result.blocks_per_sm, result.active_warps) == (1, 4)
    assert result.fraction == 0.0625
    assert result.limiter == "shared memory"
    assert round(100 * result.grid_fraction) == 6


def test_a_grid_of_one_block_is_too_small():
    """K2 of the same report: the profiler's 0 % means 1 of 132 SMs, not idle hardware."""
    result = occupancy(architecture("9.0"), threads_per_block=32, grid_blocks=1, sm_count=132)
    assert result.limiter == "grid"
    assert result.busy_sms == 1
    assert round(100 * result.grid_fraction) == 0
    assert result.matters()
    assert "grid is too small: 1 blocks for 132 SMs" in result.explain()


def test_the_forward_of_flash_attention_2_on_an_h200():
    """The profiler wrote 13 %: 255 registers, 48 KB, 128 threads, as recorded on an H200."""
    result = occupancy(
        architecture("9.0"),
        threads_per_block=128,
        registers_per_thread=255,
        shared_bytes_per_block=49152,
    )
    assert (result.blocks_per_sm, result.fraction) == (2, 0.125)


def test_the_system_takes_a_kilobyte_of_each_block_from_ampere_on():
    sixteenth = 164 * 1024 // 16
    assert occupancy(
        architecture("8.0"), threads_per_block=32, shared_bytes_per_block=sixteenth
    ).limits["shared memory"] == 14  # fmt: skip
    quarter = 16 * 1024
    turing = occupancy(architecture("7.5"), threads_per_block=32, shared_bytes_per_block=quarter)
    assert turing.limits["shared memory"] == 4


def test_a_block_that_does_not_fit():
    result = occupancy(
        architecture("7.5"), threads_per_block=128, shared_bytes_per_block=64 * 1024 + 1
    )
    assert result.blocks_per_sm == 0
    assert result.explain() == "one block does not fit on an SM: shared memory"
    assert result.matters()


def test_small_blocks_are_limited_by_their_number():
    result = occupancy(architecture("8.6"), threads_per_block=32, registers_per_thread=16)
    assert (result.blocks_per_sm, result.limiter) == (16, "blocks")


def test_streaming_kernels_need_bytes_in_flight():
    """An H200 needs 4.8 TB/s x 600 ns / 132 SMs = 21.8 KB an SM: 11 warps of 2 KB."""
    per_sm = 4800e9 / 132
    few = occupancy(architecture("9.0"), threads_per_block=256, registers_per_thread=240)
    many = occupancy(architecture("9.0"), threads_per_block=256, registers_per_thread=64)
    assert few.matters("streaming", per_sm)
    assert not many.matters("streaming", per_sm)
    assert few.matters("streaming")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threads_per_block": 0}, "threads_per_block must be 1 to 1024"),
        ({"threads_per_block": 2048}, "threads_per_block must be 1 to 1024"),
        ({"threads_per_block": 32, "registers_per_thread": 256}, "must be 0 to 255"),
        ({"threads_per_block": 32, "shared_bytes_per_block": -1}, "must be >= 0"),
        ({"threads_per_block": 32, "grid_blocks": 3}, "both grid_blocks and sm_count"),
    ],
)
def test_impossible_blocks_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        occupancy(architecture("9.0"), **arguments)


@given(
    key=st.sampled_from(NVIDIA),
    threads=st.integers(1, 1024),
    registers=st.integers(1, 255),
    shared=st.integers(0, 240 * 1024),
)
def test_resident_blocks_always_fit_and_one_more_never_does(key, threads, registers, shared):
    arch = architecture(key)
    result = occupancy(
        arch,
        threads_per_block=threads,
        registers_per_thread=registers,
        shared_bytes_per_block=shared,
    )

    def fits(blocks: int) -> bool:
        """Count what the blocks take, warp by warp, without the formulas."""
        if shared > arch.shared_bytes_per_block:
            return False
        warps = -(-threads // 32) * blocks
        taken = -(-registers * 32 // 256) * 256
        quarters = [arch.registers // 4] * 4
        for _ in range(warps):
            largest = max(range(4), key=quarters.__getitem__)
            quarters[largest] -= taken
        block_bytes = shared + (0 if key == "7.5" else 1024)
        block_bytes = -(-block_bytes // arch.shared_unit) * arch.shared_unit
        return (
            min(quarters) >= 0
            and warps <= arch.max_warps
            and blocks <= arch.max_blocks
            and block_bytes * blocks <= arch.shared_bytes
        )

    assert result.blocks_per_sm == 0 or fits(result.blocks_per_sm)
    assert not fits(result.blocks_per_sm + 1)
    assert 0 <= result.fraction <= 1
