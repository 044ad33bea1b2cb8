"""Texts in a record's file: each once, in an order that appending does not change."""

import json

import pytest

from flashdig.bench.results import append_run, read_record
from flashdig.bench.rows import RecordError
from tests.unit.test_bench_results import RUNG, SPEED, run


def with_kernels(*names):
    return {**RUNG, "kernels": [{"name": name, "count": 1, "us": 2.5} for name in names]}


def test_a_text_of_many_rows_is_written_once(tmp_path) -> None:
    path = tmp_path / "speed.json"
    for name in ("a", "b"):
        record = append_run(path, "speed", run(name), [{**SPEED, "notes": "said twice"}])
    text = path.read_text()
    assert text.count("said twice") == 1
    assert read_record(path) == record
    assert [row["notes"] for row in read_record(path).rows] == ["said twice"] * 2
    runs = [one.run_id for one in record.runs]
    assert [row["run_id"] for row in read_record(path).rows] == runs
    path.write_text(text.replace('"notes":', '"notes":9'))
    with pytest.raises(RecordError, match=r"row 1: notes 9\d is not in names"):
        read_record(path)


def test_a_kernels_name_is_written_once(tmp_path) -> None:
    path = tmp_path / "dig.json"
    rows = [with_kernels("long<name>", "b"), SPEED, with_kernels("b", "long<name>", "b")]
    append_run(path, "dig", run("a"), rows)
    before = path.read_text().split("\n")
    assert path.read_text().count("long<name>") == 1
    record = append_run(path, "dig", run("b"), [with_kernels("c", "b")])
    assert read_record(path) == record
    kept = [line.rstrip(",") for line in path.read_text().split("\n")]
    assert [line for line in before if line.rstrip(",") not in kept] == []
    names = [[k["name"] for k in row["kernels"]] for row in record.rows if "kernels" in row]
    assert names == [["long<name>", "b"], ["b", "long<name>", "b"], ["c", "b"]]
    # a file of before, with the names in the rows, is read as well
    content = json.loads(path.read_text())
    del content["names"]
    content["rows"] = list(record.rows)
    path.write_text(json.dumps(content))
    assert read_record(path).rows == record.rows


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "row 1: run_id 1 is not in names"),
        (["a", "b"], "row 1: kernel name 2 is not in names"),
        ({"0": "a"}, "a list of strings"),
        ([1], "a list"),
    ],
)
def test_a_number_without_a_name_is_refused(tmp_path, names, message) -> None:
    path = tmp_path / "dig.json"
    append_run(path, "dig", run("a"), [with_kernels("x", "y")])
    path.write_text(json.dumps({**json.loads(path.read_text()), "names": names}))
    with pytest.raises(RecordError, match=message):
        read_record(path)
