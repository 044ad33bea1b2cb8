"""Masks and problems against brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.problem import AttentionProblem, Mask

LENGTHS = st.integers(0, 14)
SIDES = st.one_of(st.none(), st.integers(-1, 16))
MASKS = st.builds(
    Mask.from_arguments,
    st.sampled_from([False, True, "bottom-right", "top-left"]),
    st.one_of(st.none(), st.tuples(SIDES, SIDES)),
)


def sees(mask: Mask, i: int, j: int, seqlen_q: int, seqlen_k: int) -> bool:
    diagonal = i + (0 if mask.alignment == "top-left" else seqlen_k - seqlen_q)
    left = mask.window_left is None or j >= diagonal - mask.window_left
    right = mask.window_right is None or j <= diagonal + mask.window_right
    return left and right


@given(MASKS, LENGTHS, LENGTHS)
def test_ranges_and_pairs_equal_brute_force(mask: Mask, seqlen_q: int, seqlen_k: int) -> None:
    total = 0
    for i in range(seqlen_q):
        visible = [j for j in range(seqlen_k) if sees(mask, i, j, seqlen_q, seqlen_k)]
        begin, end = mask.key_range(i, seqlen_q, seqlen_k)
        assert list(range(begin, end)) == visible
        total += len(visible)
    assert mask.visible_pairs(seqlen_q, seqlen_k) == total


@given(MASKS, LENGTHS, LENGTHS, st.integers(0, 14), st.integers(1, 14))
def test_tile_range_is_the_union_of_its_rows(
    mask: Mask, seqlen_q: int, seqlen_k: int, first: int, rows: int
) -> None:
    end_row = min(first + rows, seqlen_q)
    if first >= end_row:
        return
    seen = {
        j
        for i in range(first, end_row)
        for j in range(seqlen_k)
        if sees(mask, i, j, seqlen_q, seqlen_k)
    }
    begin, end = mask.tile_key_range(first, end_row, seqlen_q, seqlen_k)
    assert seen <= set(range(begin, end))
    if seen:
        assert (begin, end) == (min(seen), max(seen) + 1)


def test_article_problem_counts() -> None:
    problem = AttentionProblem.dense(2, 16, 4096, 128, causal=True, num_heads_kv=4)
    assert 4 * 128 * problem.visible_pairs == 137_472_507_904
    chunk = AttentionProblem.dense(2, 16, 1024, 128, causal=True, seqlen_k=4096)
    assert 4 * 128 * chunk.visible_pairs == 60_137_930_752


@pytest.mark.parametrize(
    ("causal", "window", "error", "names"),
    [
        ("left", None, ValueError, "causal"),
        (False, (-2, 0), ValueError, "window"),
        (False, (1.5, 0), TypeError, "window"),
        (False, 3, TypeError, "window"),
        (False, (1, 2, 3), TypeError, "window"),
    ],
)
def test_bad_masks_are_refused_by_name(causal, window, error, names) -> None:
    with pytest.raises(error, match=names):
        Mask.from_arguments(causal, window)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_heads": 33, "num_heads_kv": 2}, "num_heads"),
        ({"num_heads": 4, "num_heads_kv": 8}, "num_heads"),
        ({"num_heads_kv": 0}, "num_heads_kv"),
        ({"head_dim": 0}, "head_dim"),
        ({"seqlen_q": -1}, "seqlen_q"),
        ({"dtype": "int8"}, "dtype"),
        ({"alibi": True}, "alibi must be one of none, heads, batch_heads, got True"),
        ({"bias": "bh"}, "bias must be one of none, float, bool"),
    ],
)
def test_impossible_problems_are_refused_by_name(change, names) -> None:
    with pytest.raises(ValueError, match=names):
        AttentionProblem.dense(1, 8, 16, 64).replace(**change)


def test_sides_are_numbers_and_minus_one_is_unlimited() -> None:
    assert Mask().sides == (-1, -1)
    assert Mask.from_arguments(True).sides == (-1, 0)
    assert Mask.from_arguments(False, (3, None)).sides == (3, -1)
