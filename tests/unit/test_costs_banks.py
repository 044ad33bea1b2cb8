"""Bank conflicts: the Triton article's counters, and single accesses against the definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.costs.banks import (
    access,
    bank_of,
    from_counters,
    masked_lane_access,
    strided_access,
)

ITERATIONS = 640 * 32 * 32  # heads x key tiles x query tiles


def test_the_counters_of_the_article():
    counted = from_counters(293_601_280, 1_845_667_948, 1_174_579_308)
    assert counted.conflict_fraction == pytest.approx(0.6364, abs=5e-5)
    assert counted.ideal_wavefronts == 671_088_640
    assert counted.requests / ITERATIONS == 448
    assert counted.ideal_wavefronts / ITERATIONS == 1024
    assert counted.slow_down == pytest.approx(2.75, abs=0.001)
    # its "6.3-way" counts the normal wavefronts of vector loads as conflicts
    assert counted.wavefronts_per_request == pytest.approx(6.29, abs=0.005)
    # and 2.75 times the wavefronts cannot make 4.6 times the time
    assert counted.slow_down < 156.44 / 34


def test_more_conflicts_than_wavefronts_are_refused():
    with pytest.raises(ValueError, match=r"conflicts must be 0 to .*\(5\), got 6"):
        from_counters(1, 5, 6)


def test_the_bank_formula():
    assert [bank_of(address) for address in (0, 4, 124, 128, 130)] == [0, 1, 31, 0, 0]


@pytest.mark.parametrize(
    ("stride", "wavefronts"),
    [(4, 1), (8, 2), (16, 4), (128, 32), (132, 1), (256, 32), (0, 1), (260, 1)],
)
def test_strided_words(stride, wavefronts):
    """A row of 32 words more than a multiple of 32 banks is the classical padding."""
    assert strided_access(stride).wavefronts == wavefronts


def test_a_conflict_free_wide_load_takes_its_normal_wavefronts():
    wide = strided_access(16, bytes_per_lane=16)
    assert (wide.wavefronts, wide.ideal_wavefronts, wide.conflicts) == (4, 4, 0)
    half = strided_access(8, bytes_per_lane=8)
    assert (half.wavefronts, half.conflicts) == (2, 0)


def test_a_broadcast_is_one_wavefront():
    same = access([64] * 32)
    assert (same.wavefronts, same.conflicts, same.slow_down) == (1, 0, 1.0)


def test_sixteen_base_addresses_down_a_column():
    """`tid & 15`: lanes 16 to 31 repeat the addresses, so 16 rows of 256 bytes hit one bank."""
    column = masked_lane_access(256)
    assert (column.wavefronts, column.ideal_wavefronts, column.conflicts) == (16, 1, 15)
    assert masked_lane_access(256 + 4).conflicts == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], 3), "bytes_per_lane must be 1, 2, 4, 8 or 16, got 3"),
        (([0] * 33,), "a warp has 32 lanes, got 33"),
        (([2], 4), "address 2 is not a multiple of 4"),
        (([-4], 4), "address -4"),
    ],
)
def test_impossible_accesses_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        access(*arguments)


@given(words=st.lists(st.integers(0, 4095), min_size=1, max_size=32))
def test_wavefronts_serve_every_word_with_one_word_a_bank(words):
    """Serve greedily, one distinct word from each bank at a time, and count."""
    waiting = set(words)
    passes = 0
    while waiting:
        busy = set()
        for word in sorted(waiting):
            if word % 32 not in busy:
                busy.add(word % 32)
                waiting.remove(word)
        passes += 1
    result = access([4 * word for word in words])
    assert result.wavefronts == passes
    assert result.ideal_wavefronts <= result.wavefronts
    assert 0 <= result.conflict_fraction < 1
