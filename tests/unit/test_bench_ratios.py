"""How rows of a record compare, and what a timing leaves in one."""

import copy
import json

import pytest

from flashdig.bench.results import Record, ratio, timing_fields
from flashdig.bench.rows import RecordError
from flashdig.bench.timing import Timing
from tests.record_rows import SPEED, TIMED, run


def two_rows(**changes) -> tuple[dict, dict]:
    slow = {**SPEED, "run_id": "first", "ms_all": [1.0] * 12}
    fast = {**copy.deepcopy(SPEED), "run_id": "first", "ms_all": [0.5] * 12, **changes}
    return slow, fast


def test_ratio_says_how_many_times_as_fast_the_first_is() -> None:
    slow, fast = two_rows()
    assert ratio(fast, slow).median == 2.0
    assert not ratio(fast, slow).behind
    assert ratio(slow, fast).median == 0.5
    assert ratio(slow, fast).behind


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run_id": "second"}, "different run_id: 'first' and 'second'"),
        ({"run_id": None}, "run"),
        ({"clock": "events"}, "different clock"),
        ({"l2": "cold"}, "different l2"),
        ({"ms_all": [0.5] * 11}, "12 and 11 rounds"),
        ({"ms_all": None}, "not timed"),
    ],
)
def test_rows_that_cannot_be_compared_have_no_ratio(changes, message) -> None:
    slow, fast = two_rows(**changes)
    for pair in ((slow, fast), (fast, slow)):
        with pytest.raises(RecordError, match=message if pair[0] is slow else "no ratio"):
            ratio(*pair)


def test_a_timing_becomes_fields_of_a_row() -> None:
    timing = Timing(0.5, (0.5, 0.5), 0.01, 1980.0, None, "graph", "warm", 4, 0)
    row = {key: value for key, value in SPEED.items() if key not in TIMED}
    record = Record("dig").with_run(run(), [{**row, **timing_fields(timing)}])
    assert record.rows[0]["ms_all"] == [0.5, 0.5]
    assert json.loads(record.to_json())["rows"][0]["sm_clock_mhz"] == 1980.0
