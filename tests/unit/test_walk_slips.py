"""Each slip of the article gives a wrong answer, of the size that the formula predicts."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flashdig.generations import walk_slips
from flashdig.generations.walk_data import Slip
from flashdig.generations.walk_loop import literal_inputs, naive_attention


def slip_titled(start: str) -> Slip:
    return next(slip for slip in walk_slips.slips() if slip.title.startswith(start))


def test_every_slip_is_wrong_and_every_correction_right() -> None:
    slips = walk_slips.slips()
    assert len(slips) == 5
    assert [slip.title for slip in slips if not slip.ok] == []


def test_intensity() -> None:
    slip = slip_titled("Arithmetic intensity")
    assert (slip.wrong.values, slip.right.values) == (32, 16)
    # in float16 both faults cancel: FLOP per byte of both products is 32
    assert walk_slips.intensity_slip(element_bytes=2).right.values == 32


@pytest.mark.parametrize("start", ["V is cut", "The sum", "P, already", "The un-normalised"])
def test_right_answer_is_naive_attention(start: str) -> None:
    slip = slip_titled(start)
    expected = naive_attention(*literal_inputs())
    torch.testing.assert_close(torch.tensor(slip.right.values, dtype=torch.float64), expected)
    wrong = torch.tensor(slip.wrong.values, dtype=torch.float64)
    assert slip.error == pytest.approx(float((wrong - expected).abs().max()))
    assert slip.error > 0.1


def test_forgotten_rescale_of_the_sum_makes_row_zero_too_small_by_the_ratio_of_the_sums() -> None:
    # row 0: tiles (0, 0), (1.5, 0), (1.5, 0.5)
    later = 2 * 1 + math.exp(-1.5) + math.exp(-1)
    right_sum, wrong_sum = 2 * math.exp(-1.5) + later, 2 + later
    slip = slip_titled("The sum")
    for wrong, right in zip(slip.wrong.values[0], slip.right.values[0], strict=True):
        assert wrong == pytest.approx(right * right_sum / wrong_sum)


def test_slips_that_need_a_moving_maximum_leave_other_rows_right() -> None:
    forgotten = slip_titled("The sum")
    assert forgotten.wrong.values[1] == pytest.approx(forgotten.right.values[1])
    twice = slip_titled("P, already")
    for row in (0, 1, 3):
        assert twice.wrong.values[row] == pytest.approx(twice.right.values[row])
    assert twice.wrong.values[2] != pytest.approx(twice.right.values[2], abs=0.1)


def test_first_column_by_columns_sees_only_the_first_half_of_the_keys() -> None:
    q, k, v = literal_inputs()
    probs = torch.softmax(q @ k.T / 2, 1)
    slip = slip_titled("V is cut")
    first_column = torch.tensor([row[0] for row in slip.wrong.values], dtype=torch.float64)
    torch.testing.assert_close(first_column, probs[:, :3] @ v[:3, 0])


def test_a_wrong_formula_that_gives_the_truth_is_no_slip() -> None:
    slip = slip_titled("The sum")
    assert not dataclasses.replace(slip, error=slip.right_error).ok
    assert not dataclasses.replace(slip, right_error=slip.error).ok
