"""Grids, waves, causal imbalance and the time of the last program."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.costs.grid import Grid, causal_imbalance, makespan, v1_programs, v2_programs
from flashdig.problem import AttentionProblem

ARTICLE = AttentionProblem.dense(10, 64, 1024, 64, "float32")


def test_the_grids_of_the_triton_article():
    assert v1_programs(ARTICLE) == 640
    assert v2_programs(ARTICLE, 32) == 20_480


def test_small_batches_leave_sms_without_work():
    """FlashAttention-2's observation: fewer than 108 programs at small batch on an A100."""
    long = AttentionProblem.dense(1, 16, 16384, 128)
    first = Grid(v1_programs(long), 108, 1)
    assert (first.busy_sms, first.busy_fraction) == (16, 16 / 108)
    second = Grid(v2_programs(long, 128), 108, 2)
    assert second.busy_fraction == 1
    assert second.waves == pytest.approx(2048 / 216)


def test_the_tail_of_a_wave():
    assert Grid(330, 132, 1).tail_efficiency == pytest.approx(2.5 / 3)
    assert Grid(264, 132, 1).tail_efficiency == 1
    assert Grid(0, 132, 1).tail_efficiency == 1


def test_causal_programs_are_uneven():
    full = AttentionProblem.dense(1, 1, 4096, 64)
    causal = AttentionProblem.dense(1, 1, 4096, 64, causal=True)
    assert causal_imbalance(full, 64, 64) == 1
    assert causal_imbalance(causal, 64, 64) == pytest.approx(64 / 32.5)


def test_the_last_program_decides():
    assert makespan([], 4) == 0
    assert makespan([3, 1], 4) == 3
    assert makespan([2] * 5, 2) == 6
    # long programs first fill the gaps that long programs last leave
    assert makespan([4, 3, 2, 1], 2) < makespan([1, 2, 3, 4], 2)
    with pytest.raises(ValueError, match="workers must be >= 1"):
        makespan([1], 0)


def test_huge_grids_take_the_bound():
    count = 70_000
    assert makespan([2.0] * count, 100) == 2 * count / 100 + 2
    assert makespan([1.0, 3.0], 100, repeats=count // 2) == 2 * count / 100 + 3


@given(
    one=st.lists(st.integers(0, 20), max_size=12),
    repeats=st.integers(1, 4),
    workers=st.integers(1, 6),
)
def test_the_time_lies_between_the_bounds_of_list_scheduling(one, repeats, workers):
    durations = one * repeats
    free = [0] * workers
    for duration in durations:
        next_free = min(range(workers), key=free.__getitem__)
        free[next_free] += duration
    result = makespan(one, workers, repeats)
    assert result == max(free)
    longest = max(durations, default=0)
    assert max(longest, sum(durations) / workers) <= result
    assert result <= sum(durations) / workers + longest
