"""What the migration page says of FlashAttention's own tests is what the records hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashdig
from flashdig.bench.results import read_record

ROOT = Path(flashdig.__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = (ROOT / "docs" / "migration-from-flash-attn.md").read_text(encoding="utf-8")
CHAPTER = PAGE.split("\n## FlashAttention's own tests\n")[1].split("\n## ")[0]
COUNTS = ("cases", "passed", "failed", "skipped")
RECORDS = {
    str(path.relative_to(RESULTS)): read_record(path)
    for path in sorted(RESULTS.glob("*/flash-attn-*tests.json"))
}
ROWS = [row for record in RECORDS.values() for row in record.rows]


def table() -> dict[str, tuple[int, ...]]:
    """Test function -> (parametrisations, cases, passed, failed, skipped), as printed."""
    rows = re.findall(r"^\| `(test_\w+)` \| ([\d, |]+) \|$", CHAPTER, re.MULTILINE)
    return {
        name: tuple(int(cell.replace(",", "")) for cell in cells.split("|")) for name, cells in rows
    }


def test_the_table_holds_the_sums_of_all_runs() -> None:
    expected = {}
    for name in dict.fromkeys(row["name"] for row in ROWS):
        mine = [row for row in ROWS if row["name"] == name]
        (every,) = {row["features"]["parametrisations"] for row in mine}
        expected[name] = (every, *(sum(row[count] for row in mine) for count in COUNTS))
    assert table() == expected


def test_the_sample_is_as_large_and_as_spread_as_promised() -> None:
    cases = {name: counts[1] for name, counts in table().items() if "kvcache" not in name}
    assert sum(cases.values()) >= 2000
    for part in ("output", "varlen", "causal", "bwd", "race_condition", "deterministic"):
        assert sum(number for name, number in cases.items() if part in name) >= 60, part


def test_cases_with_dropout_are_counted() -> None:
    dropped = sum(row["features"].get("with_dropout", 0) for row in ROWS)
    assert f"\n{dropped:,} of the cases have dropout" in CHAPTER


@pytest.mark.parametrize("name", RECORDS)
def test_where_it_ran_and_what_is_named(name) -> None:
    record = RECORDS[name]
    machine, _, file = name.rpartition("/")
    assert file in CHAPTER
    assert f"benchmarks/results/{machine}" in CHAPTER
    for run in record.runs:
        assert re.fullmatch(r"[0-9a-f]{40}", run.revision)
        assert run.environment["gpu"] == {"nvidia-h200": "NVIDIA H200", "cpu": None}[machine]
    for row in record.rows:
        # flash-attention's revision, as the page abbreviates it
        assert f"`{row['features']['tests'].split()[1][:7]}`" in CHAPTER
        assert row["skipped"] == 0 or row["notes"].startswith("unsupported: ")
        assert not row["failures"] or f"`{row['name']}` failed" in CHAPTER


def test_every_unsupported_test_is_told_with_its_reason() -> None:
    unsupported = {row["name"] for row in ROWS if row["skipped"]}
    assert unsupported == set(re.findall(r"^- `(test_\w+)`: ", CHAPTER, re.MULTILINE))
