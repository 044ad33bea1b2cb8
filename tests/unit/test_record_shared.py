"""Fields that a run's rows have in common, in the file and back."""

import json

import pytest

from flashdig.bench.record_shared import completed, shortened
from flashdig.bench.results import RecordError, append_run, read_record
from tests.unit.test_record_names import SPEED, run

ROWS = [
    {"run_id": "a", "kind": "speed", "batch": 1, "ms": 2.0, "causal": True},
    {"run_id": "a", "kind": "speed", "batch": 1, "causal": 1},
    {"run_id": "a", "kind": "speed", "batch": 8, "ms": 2.0, "causal": True, "notes": None},
    {"run_id": "b", "kind": "speed", "batch": 1, "ms": 2.0},
]


def test_what_most_rows_of_a_run_have_is_written_once() -> None:
    shared, short = shortened(ROWS)
    assert shared == {"a": {"kind": "speed", "batch": 1, "causal": True}}
    assert short == [
        {"run_id": "a", "ms": 2.0},
        {"run_id": "a", "causal": 1},  # equal to True, and another value all the same
        {"run_id": "a", "batch": 8, "ms": 2.0, "notes": None},
        ROWS[3],  # alone in its run
    ]
    back = completed(short, shared)
    assert back == ROWS
    assert [type(row.get("causal")) for row in back[:3]] == [bool, int, bool]


def test_an_appended_run_changes_no_line_that_is_there(tmp_path) -> None:
    path = tmp_path / "speed.json"
    rows = [{**SPEED, "batch": n} for n in (1, 1, 2)]
    append_run(path, "speed", run("a"), rows)
    before = path.read_text().splitlines()
    record = append_run(path, "speed", run("b"), [{**SPEED, "batch": 3}, *rows])
    after = path.read_text().splitlines()
    kept = [line.rstrip(",") for line in after]
    # names are numbered as they come first, on one line each
    assert [line for line in before if line.rstrip(",") not in kept] == []
    assert read_record(path) == record
    assert [row["batch"] for row in record.rows] == [1, 1, 2, 3, 1, 1, 2]


@pytest.mark.parametrize(
    ("shared", "message"),
    [
        ([], "shared must be an object of objects"),
        ({"a": 1}, "shared must be an object of objects"),
        ({"b": {"batch": 1}}, "shared names the run 'b', which has no rows"),
    ],
)
def test_a_wrong_share_is_refused(shared, message, tmp_path) -> None:
    path = tmp_path / "speed.json"
    append_run(path, "speed", run("a"), [SPEED, SPEED])
    path.write_text(json.dumps({**json.loads(path.read_text()), "shared": shared}))
    with pytest.raises(RecordError, match=message):
        read_record(path)


def test_a_shared_field_must_be_one_that_rows_have(tmp_path) -> None:
    path = tmp_path / "speed.json"
    record = append_run(path, "speed", run("a"), [SPEED, SPEED])
    content = json.loads(path.read_text())
    content["shared"][record.runs[0].run_id]["colour"] = "red"
    path.write_text(json.dumps(content))
    with pytest.raises(RecordError, match=r"row 1: .*'colour'"):
        read_record(path)


def test_rows_that_are_none_are_left_for_the_check_of_rows() -> None:
    assert completed([3, {"run_id": 4}, {}], {}) == [3, {"run_id": 4}, {}]
