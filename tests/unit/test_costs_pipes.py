"""Cycles of an inner iteration against hand analysis, compiled loops and published figures."""

from __future__ import annotations

import pytest

from flashdig.costs.pipes import inner_iteration
from flashdig.hardware.arch import architecture

HOPPER = architecture("9.0")


def test_hopper_at_head_dim_128_is_bound_by_products():
    """MMA 2048, MUFU 1024 (and 32 for rescale factors), issue about 980 clocks."""
    cycles = inner_iteration(HOPPER, tile_m=128, tile_n=128, head_dim=128)
    assert cycles.matmul == 2048
    assert cycles.exp2 - cycles.exp2_rescale == 1024
    assert cycles.issue == pytest.approx(980, rel=0.01)
    assert cycles.limiter == "tensor cores"
    assert cycles.overlapped == 2048


def test_hopper_at_head_dim_64_has_softmax_as_critical_as_products():
    """MMA 1024, MUFU 1056, issue about 900 clocks."""
    cycles = inner_iteration(HOPPER, tile_m=128, tile_n=128, head_dim=64)
    assert (cycles.matmul, cycles.exp2) == (1024, 1056)
    assert cycles.issue == pytest.approx(900, rel=0.015)
    assert cycles.limiter == "exp2"


def test_blackwell_matches_the_analysis_of_flash_attention_4():
    """128 x 128 x 128 on a B200: products 1024, exponentials 1024, shared memory 768 clocks."""
    cycles = inner_iteration(architecture("10.0"), tile_m=128, tile_n=128, head_dim=128)
    assert cycles.matmul == 1024
    assert cycles.exp2 - cycles.exp2_rescale == 1024
    assert cycles.shared == 768


def test_blackwell_ultra_doubles_the_exponentials():
    sizes = {"tile_m": 128, "tile_n": 128, "head_dim": 128}
    plain = inner_iteration(architecture("10.0"), **sizes)
    ultra = inner_iteration(architecture("10.3"), **sizes)
    assert ultra.exp2 == plain.exp2 / 2


def test_the_compiled_backward_has_419_instructions_a_warp():
    cycles = inner_iteration(HOPPER, tile_m=64, tile_n=128, head_dim=128, backward=True)
    assert cycles.issue == pytest.approx(8 * 419 / 4, rel=0.01)
    assert cycles.matmul == 5 * 2 * 64 * 128 * 128 / 4096


def test_ampere_and_float8_rates():
    ampere = inner_iteration(architecture("8.0"), tile_m=128, tile_n=128, head_dim=128)
    assert ampere.matmul == 4096
    eight = inner_iteration(HOPPER, tile_m=128, tile_n=128, head_dim=128, dtype="float8_e4m3fn")
    assert eight.matmul == 1024


def test_the_iteration_of_the_triton_article():
    """32 x 32 x 64 in float32 on CUDA cores: 131,072 multiply-adds at 64 a clock, 1,024 wavefronts.

    With 2.75 times the wavefronts shared memory becomes the slower pipe, but only by 1.4 times:
    bank conflicts alone cannot explain that article's 4.6 times.
    """
    cycles = inner_iteration(
        architecture("7.5"), tile_m=32, tile_n=32, head_dim=64, dtype="float32", path="fma", warps=4
    )
    assert cycles.matmul == 131_072 / 64 == 2048
    assert cycles.shared == 1024
    assert cycles.limiter == "FMA units (products)"
    assert 2.75 * cycles.shared / cycles.matmul == pytest.approx(1.375)


def test_one_warp_for_all_rows_reads_keys_once():
    """mma.sync: each warp with rows of its own reads all keys and values from shared memory."""
    sizes = {"tile_m": 64, "tile_n": 64, "head_dim": 64, "path": "mma.sync"}
    one, four, eight = (
        inner_iteration(architecture("8.0"), warps=warps, **sizes) for warps in (1, 4, 8)
    )
    keys_and_values, queries = 2 * 64 * 64 * 2 / 128, 64 * 64 * 2 / 128
    assert one.shared == queries + keys_and_values
    assert four.shared == queries + 4 * keys_and_values
    # 16 rows are the least a warp multiplies: eight stand in two columns, read Q twice and exchange
    # P, which is written once and read by both columns
    scores = 64 * 64 * 2 / 128
    assert eight.shared == 2 * queries + 4 * keys_and_values + 3 * scores


def test_copied_tiles_take_the_bandwidth_of_shared_memory():
    sizes = {"tile_m": 64, "tile_n": 64, "head_dim": 64}
    plain = inner_iteration(HOPPER, **sizes)
    copied = inner_iteration(HOPPER, copies_tiles=True, **sizes)
    assert copied.shared == plain.shared == 3 * 64 * 64 * 2 / 128
    assert copied.copies == 2 * 64 * 64 * 2 / 128
    assert copied.pipes["shared memory"] == copied.shared + copied.copies == 320
    # 64 x 64 tiles keep it busier than the tensor cores
    assert copied.pipes["shared memory"] > copied.pipes["tensor cores"] == 256


def test_three_products_of_lower_precision_for_one():
    sizes = {"tile_m": 64, "tile_n": 64, "head_dim": 64, "dtype": "tfloat32"}
    one, three = (inner_iteration(HOPPER, matmul_passes=passes, **sizes) for passes in (1, 3))
    assert three.matmul == 3 * one.matmul


def test_operands_of_mma_sync_are_waited_for_only_beside_a_newer_instruction():
    sizes = {"tile_m": 64, "tile_n": 64, "head_dim": 64, "path": "mma.sync"}
    assert inner_iteration(HOPPER, **sizes).waits_for_operands
    assert not inner_iteration(architecture("8.0"), **sizes).waits_for_operands


def test_a_chips_own_rate_goes_before_its_architectures():
    cycles = inner_iteration(
        architecture("8.6"), tile_m=64, tile_n=64, head_dim=64, matmul_flop_per_clock=512
    )
    assert cycles.matmul == 4 * 64**3 / 512


def test_exponentials_of_unknown_rate_are_left_out():
    cycles = inner_iteration(architecture("gfx942"), tile_m=64, tile_n=64, head_dim=64)
    assert cycles.exp2 is None
    assert "exp2" not in cycles.pipes


def test_products_that_a_chip_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"capability 7\.5 do not multiply bfloat16; they do f"):
        inner_iteration(architecture("7.5"), tile_m=64, tile_n=64, head_dim=64)
