"""flashdig trace on Nsight Compute's files."""

import json
from pathlib import Path

import pytest

from flashdig.cli import main

DATA = Path(__file__).parents[1] / "data" / "ncu"
RAW, DETAILS = (str(DATA / f"ncu_{page}_h200.csv.gz") for page in ("raw", "details"))


def run(arguments: list[str], capsys) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        main(["trace", *arguments])
    said = capsys.readouterr()
    return int(stopped.value.code or 0), said.out, said.err


@pytest.mark.parametrize("page", [RAW, DETAILS])
def test_counters_of_every_kernel_are_shown(page, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    code, out, _ = run([page], capsys)
    assert code == 0
    assert "13 kernels" in out
    for part in ("FlashAttention-2 inside PyTorch", "cuDNN's generated flash", "masked_fill"):
        assert part in out
    # the details page has no cycles of stalls, the raw page no remarks
    assert ("long scoreboard 68.0 cycles (92 %)" in out) == (page == RAW)
    assert ("estimated gain" in out) == (page == DETAILS)


def test_json_has_base_units_and_null_for_what_was_not_measured(capsys) -> None:
    code, out, _ = run([RAW, "--json"], capsys)
    assert code == 0
    (file,) = json.loads(out)
    product = file["kernels"][5]
    assert product["role"] == "matmul"
    assert product["duration_ns"] == pytest.approx(160_700, rel=1e-3)
    assert product["registers_per_thread"] == 168
    assert product["occupancy_limiters"] == ["registers", "shared_memory"]
    code, out, _ = run([DETAILS, "--json"], capsys)
    assert json.loads(out)[0]["kernels"][5]["dram_read_bytes"] is None


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ([RAW, "--html", "page.html"], 2, "no time line"),
        ([RAW, "--against", RAW], 2, "no time line"),
        ([RAW, "trace.json"], 2, "alone"),
        (["no-such.csv"], 3, "no-such.csv"),
        (["no-such.ncu-rep"], 3, "no-such.ncu-rep"),
    ],
)
def test_what_counters_cannot_do_is_one_line(arguments, code, says, capsys) -> None:
    found, _, error = run(arguments, capsys)
    assert found == code
    assert says in error
    assert "Traceback" not in error


def test_a_foreign_csv_is_refused_with_its_line(tmp_path, capsys) -> None:
    path = tmp_path / "table.csv"
    path.write_text("a,b\n1,2\n")
    code, _, error = run([str(path)], capsys)
    assert code == 3
    assert "table.csv" in error
