"""Records: round trips, what a row may hold, and that a file is never lost or quietly changed."""

import json
import math
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdig.bench import results
from flashdig.bench.results import (
    Record,
    Run,
    UnreadableRecordError,
    UnwritableRecordError,
    append_run,
    gpu_folder,
    new_run,
    read_record,
    record_path,
)
from flashdig.bench.rows import FIELDS, REQUIRED, RecordError
from tests.record_rows import EXTRA, PROBLEM, RUNG, SPEED, STARTED, TEST, TIMED, run


def test_rows_of_every_kind_come_back_equal(tmp_path) -> None:
    path = tmp_path / "deep" / "er" / "dig.json"
    rows = [{**SPEED, **EXTRA}, RUNG, {**RUNG, "kind": "step"}, TEST]
    written = append_run(path, "dig", run(), rows)
    assert read_record(path) == written
    assert written.rows_of("first") == [{"run_id": "first", **row} for row in rows]
    assert set(EXTRA) | set(SPEED) | set(TEST) | {"run_id", "name"} == set(FIELDS)


def test_floats_of_rows_keep_six_digits(tmp_path) -> None:
    path = tmp_path / "dig.json"
    row = {**SPEED, "ms": 1.23456789012, "features": {"list": [0.1 + 0.2, 7, 2**70]}}
    written = append_run(path, "dig", run(), [row])
    assert written.rows[0]["ms"] == 1.23457
    assert written.rows[0]["features"] == {"list": [0.3, 7, 2**70]}
    assert read_record(path) == written


TEXT = st.text(min_size=1, max_size=8)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
COUNT = st.integers(0, 2**70)
POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)


@st.composite
def rows(draw):
    row = {
        "kind": draw(st.sampled_from(["speed", "rung", "step"])),
        **{name: draw(COUNT) for name, value in PROBLEM.items() if isinstance(value, int)},
        "pass": draw(st.sampled_from(["forward", "backward", "decode", "host"])),
        "dtype": draw(st.sampled_from(["float64", "float8_e5m2"])),
        "causal": draw(st.sampled_from([True, False, "top-left"])),
        "backend": draw(TEXT),
        "name": draw(TEXT),
        "features": draw(st.none() | OBJECT),
        "predicted": draw(OBJECT),
        "gate": "ok",
        "notes": draw(TEXT),
    }
    if draw(st.booleans()):
        row |= {**TIMED, "ms": draw(POSITIVE), "ms_all": draw(st.lists(POSITIVE, min_size=1))}
    return row


@settings(deadline=None)
@given(
    st.lists(st.tuples(OBJECT, TEXT, st.none() | TEXT, st.lists(rows(), max_size=3)), max_size=3)
)
def test_any_record_survives_its_file(tmp_path_factory, contents) -> None:
    path = tmp_path_factory.mktemp("record") / "dig.json"
    record = Record("dig")
    for number, (environment, command, revision, new_rows) in enumerate(contents):
        added = Run(f"run {number}", environment, command, revision, STARTED)
        record = record.with_run(added, new_rows)
        record.write(path)
        assert read_record(path) == record
        assert read_record(path).to_json() == path.read_text(encoding="utf-8")


def test_appending_adds_lines_and_changes_none_but_the_last_comma(tmp_path) -> None:
    path = tmp_path / "dig.json"
    append_run(path, "dig", run("a"), [SPEED, RUNG])
    before = path.read_text().split("\n")
    append_run(path, "dig", run("b"), [SPEED, TEST])
    after = path.read_text().split("\n")
    texts = [json.loads("\n".join(lines))["names"] for lines in (before, after)]
    assert texts[1][: len(texts[0])] == texts[0]
    assert len(after) - len(texts[1]) == len(before) - len(texts[0]) + 3
    kept = [line.rstrip(",") for line in after]
    assert [line for line in before if line.rstrip(",") not in kept] == []
    assert len({line for line in after if '"kind"' in line}) == 4
    assert json.loads(path.read_text())["schema"] == 1


def test_rows_have_sorted_keys_and_readable_letters() -> None:
    text = Record("dig").with_run(run(), [{**RUNG, "sentence": "QKᵀ"}]).to_json()
    line = next(line for line in text.split("\n") if '"kind"' in line)
    assert list(json.loads(line)) == sorted(json.loads(line))
    assert "QKᵀ" in text


def test_a_run_is_never_replaced(tmp_path) -> None:
    path = tmp_path / "dig.json"
    append_run(path, "dig", run(), [RUNG])
    before = path.read_bytes()
    with pytest.raises(RecordError, match="'first' is already in the record"):
        append_run(path, "dig", run(command="again"), [SPEED])
    assert path.read_bytes() == before


def test_with_run_leaves_the_shorter_record_as_it_was() -> None:
    record = Record("dig").with_run(run("a"), [RUNG])
    longer = record.with_run(run("b"), [RUNG, RUNG])
    assert (len(record.runs), len(record.rows)) == (1, 1)
    assert (len(longer.runs), len(longer.rows)) == (2, 3)


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_a_value_of_the_wrong_type_is_refused_by_name(name) -> None:
    base = TEST if name in TEST and name != "kind" else {**SPEED, "name": "v1"}
    for wrong in (object(), {"a": math.nan}, [math.nan], b"bytes", -1, "", True):
        if (name, wrong) in (("causal", True), ("share_of_gain", -1)):
            continue  # allowed there
        with pytest.raises(RecordError, match=f"new row 1: {name}"):
            Record("dig").with_run(run(), [{**base, name: wrong}])


@pytest.mark.parametrize("name", ["ms", "aa_spread", "error", "tflops", "predicted", "ms_all"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_must_be_finite(name, value) -> None:
    wrong = {"predicted": {"deep": [value]}, "ms_all": [0.5, value]}.get(name, value)
    with pytest.raises(RecordError, match=name):
        Record("dig").with_run(run(), [{**SPEED, name: wrong}])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**SPEED, "speed": 3}, "new row 1: unknown field 'speed'"),
        ({**SPEED, "kind": "fast"}, "kind must be one of speed, rung, step, test"),
        ({**SPEED, "pass": "sideways"}, "pass must be one of forward"),
        ({**SPEED, "dtype": "int8"}, "dtype must be one of float64"),
        ({**SPEED, "clock": "sundial"}, "clock must be one of graph"),
        ({**SPEED, "l2": "tepid"}, "l2 must be one of cold, warm"),
        ({**SPEED, "ms": 0.0}, "ms must be a finite number > 0"),
        ({**SPEED, "batch": 2.0}, "batch must be an integer >= 0"),
        ({**SPEED, "ms_all": []}, "ms_all must be a non-empty list"),
        ({**SPEED, "kernels": [{"name": "a"}]}, "kernels must be a list of {name, count, us}"),
        ({**SPEED, "counted": {"load_bytes": 1}}, "counted must be {load_bytes"),
        ({**SPEED, "run_id": "other"}, "run_id 'other' is not a run of this record"),
        ({**SPEED, "predicted": {1: 2}}, "predicted: keys must be strings"),
        ({**SPEED, "predicted": {"a": (1,)}}, "predicted.a: tuple cannot be stored"),
        ({**SPEED, "notes": "\ud800"}, "notes holds half a surrogate pair"),
        ({**SPEED, "features": {"\udfff": 1}}, "features: a key holds half"),
        ("text", "new row 1 must be an object, got 'text'"),
        (None, "new row 1 must be an object"),
        ({**SPEED, "ms": None}, "clock, l2 without ms"),
        ({**RUNG, "ms": 1.0}, "ms without ms_all, aa_spread, clock, l2"),
        ({**RUNG, "speedup": 1.5}, "speedup without ms"),
        ({**SPEED, "gate": "error 1 above 0.1"}, "no speed without a gate that is 'ok'"),
        ({**RUNG, "gate": "wrong", "tflops": 3.0}, "no speed without a gate"),
        ({k: v for k, v in SPEED.items() if k not in TIMED}, "must say why in notes"),
        ({**TEST, "cases": 4}, "cases .4. must be passed"),
        ({**TEST, "failures": []}, "1 failed, 0 listed"),
        ({**TEST, "failures": [""]}, "failures must be a list"),
    ],
)
def test_each_fault_of_a_row_is_named(row, message) -> None:
    with pytest.raises(RecordError, match=message):
        Record("dig").with_run(run(), [row])


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind, names in REQUIRED.items() for name in names]
)
@pytest.mark.parametrize("absent", ["removed", "null"])
def test_required_fields_of_each_kind(kind, name, absent) -> None:
    row = dict({"test": TEST, "speed": SPEED}.get(kind, {**RUNG, "kind": kind}))
    if absent == "removed":
        del row[name]
    else:
        row[name] = None
    with pytest.raises(RecordError, match=f"new row 2 .{kind}.: {name} missing"):
        Record("dig").with_run(run(), [RUNG, row])


def test_untimed_rows_are_allowed_where_they_say_enough() -> None:
    untimed = {key: value for key, value in SPEED.items() if key not in TIMED}
    record = Record("dig").with_run(
        run(),
        [
            RUNG,
            {**untimed, "notes": "out of memory"},
            {**untimed, "gate": "error 0.5 above 0.1", "error": 0.5},
        ],
    )
    assert len(record.rows) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run_id": ""}, "run_id"),
        ({"run_id": 3}, "run_id"),
        ({"environment": []}, "environment must be an object"),
        ({"environment": {"power": math.nan}}, "environment.power must be finite"),
        ({"environment": {"torch": Path("x")}}, "PosixPath cannot be stored"),
        ({"command": ""}, "command"),
        ({"revision": 5}, "revision"),
        ({"started": "yesterday"}, "started must be an ISO 8601 time in UTC"),
        ({"started": "2026-11-29T18:14:05"}, "started"),
        ({"started": "2026-11-29T18:14:05+02:00"}, "started"),
        ({"started": None}, "started"),
    ],
)
def test_each_fault_of_a_run_is_named(change, message) -> None:
    with pytest.raises(RecordError, match=message):
        run(**change)


def test_new_run_takes_the_time_and_is_unique() -> None:
    now = datetime(2026, 11, 29, 20, 14, 5, 999, tzinfo=timezone(timedelta(hours=2)))
    runs = [new_run("flashdig dig", {"gpu": None}, None, now=now) for _ in range(20)]
    assert {r.started for r in runs} == {STARTED}
    assert all(r.run_id.startswith("20261129T181405Z-") for r in runs)
    assert len({r.run_id for r in runs}) > 1
    assert new_run("c", {}, None).when() <= datetime.now(timezone.utc)


def test_latest_run_is_the_one_that_started_last() -> None:
    day = "2026-11-{:02}T00:00:00+00:00"
    record = Record("dig", (run("b", day.format(9)), run("a", day.format(10)), run("c")))
    assert record.latest_run().run_id == "c"
    tied = Record("dig", (run("a"), run("b"), run("old", day.format(1))))
    assert tied.latest_run().run_id == "b"
    with pytest.raises(RecordError, match="'dig' holds no run"):
        Record("dig").latest_run()


def test_rows_of_an_unknown_run_is_an_error_that_lists_the_runs() -> None:
    record = Record("dig").with_run(run("a"), []).with_run(run("b"), [RUNG])
    assert record.rows_of("a") == []
    with pytest.raises(RecordError, match=r"no run 'c'.*runs: a, b"):
        record.rows_of("c")


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia-a100-sxm4-80gb"),
        ("  Tesla T4 (x) ", "tesla-t4-x"),
    ],
)
def test_gpu_folders(name, folder) -> None:
    assert gpu_folder(name) == folder
    assert record_path(Path("r"), name, "dig") == Path("r") / folder / "dig.json"


def test_names_that_make_no_path_are_refused() -> None:
    with pytest.raises(RecordError, match="GPU name"):
        gpu_folder(" / ")
    for suite in ("", "../dig", "A", 3):
        with pytest.raises(RecordError, match="suite"):
            Record(suite)


def valid() -> dict:
    return json.loads(Record("dig").with_run(run(), [SPEED]).to_json())


def changed(**changes) -> str:
    return json.dumps({**valid(), **changes})


def without(key: str) -> str:
    return json.dumps({name: value for name, value in valid().items() if name != key})


def with_run_fields(**changes) -> str:
    content = valid()
    content["runs"]["first"].update(changes)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ('{"schema": 1,\n"suite"', "is not JSON.*line 2"),
        ("[]", "not a record"),
        ("{}", "not a record.*'schema'"),
        (changed(schema=2), r"schema 2 is not the one that this version reads \(1\)"),
        (changed(schema="1"), "schema '1'"),
        (changed(schema=True), "schema True"),
        (changed(schema=2, more=1), "schema 2"),
        (without("rows"), "the record: rows missing"),
        (without("suite"), "the record: suite missing"),
        (changed(more=1), "unknown key 'more'"),
        (changed(runs=[]), "runs must be an object"),
        (changed(rows={}), "rows must be a list"),
        (changed(rows=[3]), "row 1 must be an object"),
        (changed(rows=[{**SPEED, "run_id": "ghost"}]), "row 1: run_id 'ghost'"),
        (changed(rows=[{**SPEED, "run_id": "first", "ms": math.nan}]), "row 1: ms must be"),
        (changed(suite="A B"), "suite must be"),
        (changed(runs={"first": 3}), "run 'first' must be an object"),
        (with_run_fields(host="me"), "run 'first': unknown key 'host'"),
        (with_run_fields(started="now"), "run 'first': started"),
        ('{"schema": 1, "schema": 1}', "'schema' stands twice"),
    ],
)
def test_files_that_are_no_record_are_refused_with_file_and_place(tmp_path, text, message) -> None:
    path = tmp_path / "dig.json"
    path.write_text(text)
    with pytest.raises(UnreadableRecordError, match=message) as caught:
        read_record(path)
    assert str(path) in str(caught.value)
    with pytest.raises(UnreadableRecordError):
        append_run(path, "dig", run("second"), [])
    assert path.read_text() == text


def test_a_valid_file_is_read(tmp_path) -> None:
    (tmp_path / "dig.json").write_text(changed())
    assert len(read_record(tmp_path / "dig.json").rows) == 1


def test_files_that_cannot_be_read_at_all(tmp_path) -> None:
    with pytest.raises(UnreadableRecordError, match=r"missing.json does not exist"):
        read_record(tmp_path / "missing.json")
    with pytest.raises(UnreadableRecordError, match=r"cannot read .*: Is a directory"):
        read_record(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(UnreadableRecordError, match=r"bytes.json is not UTF-8"):
        read_record(tmp_path / "bytes.json")


def test_another_suites_record_is_not_appended_to(tmp_path) -> None:
    append_run(tmp_path / "dig.json", "dig", run(), [RUNG])
    with pytest.raises(UnreadableRecordError, match="of suite 'dig', not of 'bench'"):
        append_run(tmp_path / "dig.json", "bench", run("b"), [RUNG])


def test_folders_that_cannot_be_written_are_named(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "nvidia-h200" / "dig.json"
    with pytest.raises(UnwritableRecordError, match=f"cannot write {path}"):
        append_run(path, "dig", run(), [RUNG])
    (tmp_path / "dig.json").mkdir()
    with pytest.raises(UnwritableRecordError, match=f"cannot write {tmp_path / 'dig.json'}"):
        Record("dig").write(tmp_path / "dig.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dig.json", "file"]


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch) -> None:
    path = tmp_path / "dig.json"
    append_run(path, "dig", run("a"), [RUNG])
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "fsync", full)
    with pytest.raises(UnwritableRecordError, match=r"dig.json: No space left on device"):
        append_run(path, "dig", run("b"), [SPEED])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_new_files_have_ordinary_permissions(tmp_path) -> None:
    mask = os.umask(0o022)
    try:
        append_run(tmp_path / "dig.json", "dig", run(), [])
    finally:
        os.umask(mask)
    assert (tmp_path / "dig.json").stat().st_mode & 0o777 == 0o644
