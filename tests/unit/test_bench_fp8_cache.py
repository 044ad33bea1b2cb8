"""Accuracy of a cache in 8 bits: errors of each format's size, factors where they help."""

from pathlib import Path

import pytest
import torch

from flashdig.bench import fp8_cache
from flashdig.bench.results import read_record


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(fp8_cache, "SIZES", (1, 3, 200, 4, 2, 16))


def relative(row) -> float:
    return row["rms_error"] / row["features"]["rms_of_out"]


def test_errors_are_those_of_the_formats(small) -> None:
    found = {one.name: one for one in fp8_cache.synthetic("cpu")}
    rows = {
        (name, cache): fp8_cache.measure(one, cache)
        for name, one in found.items()
        for cache in fp8_cache.CACHES
    }
    assert all(row["gate"] == "ok" for row in rows.values())
    # 8, 4 and 3 bits of mantissa, the hidden one counted
    of_normal = {cache: relative(rows["normal", cache]) for cache in fp8_cache.CACHES}
    assert of_normal["bfloat16"] < 0.01 < of_normal["e4m3"] < 0.08 < 3 * of_normal["e5m2"]
    assert of_normal["e4m3"] < of_normal["e5m2"] < 4 * of_normal["e4m3"]
    for name in ("values times 1000", "values over 1000"):
        assert relative(rows[name, "e4m3"]) < 0.08
        assert relative(rows[name, "e4m3, no factors"]) > 0.3


def test_the_key_for_all_gets_most_of_every_row() -> None:
    (one,) = [x for x in fp8_cache.synthetic("cpu") if x.name == "one key for all"]
    q, k = (x[0].transpose(0, 1).repeat_interleave(8 // x.shape[2], 0) for x in (one.q, one.k))
    probs = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
    assert 0.2 < float(probs[..., 0].min()) <= float(probs[..., 0].max()) < 0.9


def test_a_run_becomes_a_table_and_a_record(small, tmp_path, capsys) -> None:
    path = tmp_path / "fp8-cache.json"
    assert fp8_cache.main(["--output", str(path)]) == 0
    rows = read_record(path).rows
    assert len(rows) == 6 * len(fp8_cache.CACHES)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| activations | bfloat16 | e4m3 | e4m3, no factors | e5m2 |"
    assert [line.count("%") for line in lines[2:]] == [4] * 6


def test_values_that_are_not_finite_are_no_result(small) -> None:
    one = next(iter(fp8_cache.synthetic("cpu")))
    one.v[:, 3] = torch.nan
    row = fp8_cache.measure(one, "bfloat16")
    assert "NaN" in row["gate"]
    assert "rms_error" not in row
    assert row["gate"] in fp8_cache.table_of(
        [{**row, "features": {**row["features"], "cache": cache}} for cache in fp8_cache.CACHES]
    )


def test_the_documented_table_is_the_records() -> None:
    root = Path(__file__).parents[2]
    record = read_record(root / "benchmarks" / "results" / "cpu" / "fp8-cache.json")
    rows = record.rows_of(record.latest_run().run_id)
    assert fp8_cache.table_of(rows) in (root / "docs" / "inference.md").read_text("utf-8")
