"""flashdig bench host on the CPU: rows, parts, table, command; first calls of stand-in workers."""

import contextlib
import json
import re
from pathlib import Path
from statistics import median

import pytest
from rich.console import Console

from flashdig.bench import first_calls
from flashdig.bench.cell_inputs import make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.environment import Clocks
from flashdig.bench.first_calls import FirstCallError, measure_first_calls
from flashdig.bench.host import CALLS, HostCall, SurroundedMeter, measure_host
from flashdig.bench.host_parts import parts_of
from flashdig.bench.results import read_record
from flashdig.bench.rows import check_row
from flashdig.cli import main
from flashdig.report.host_table import print_host
from tests.short_way import short_way

TINY = Cell(1, 2, 2, 8, 8, 16, 16, dtype="float32", causal=True)
RUN = "20260101T000000Z-0000"


def printed(rows):
    console = Console(width=120)
    with console.capture() as capture:
        print_host(rows, console)
    return capture.get()


@pytest.fixture(scope="module")
def measured():
    return measure_host(
        RUN, peers=("sdpa_flash", "fa3"), cell=TINY, rounds=2, sample=lambda: Clocks(None, None)
    )


def test_every_call_of_everyone_is_a_row(measured) -> None:
    assert measured.failures == []
    whole = [row for row in measured.rows if row["kind"] == "speed"]
    assert {(row["backend"], row["name"]) for row in whole} == {
        (backend, name) for backend in ("flashdig", "sdpa_flash", "fa3") for name, _, _ in CALLS
    }
    for row in measured.rows:
        check_row(row, [RUN], row["name"])
        assert row["pass"] == "host"
        if row.get("backend") == "fa3":
            assert row["gate"] == "not run: needs a CUDA device"
        else:
            assert row["ms"] > 0
            assert row["clock"] == "host"
    assert {row["name"] for row in measured.rows if row["kind"] == "step"} >= {
        "validation",
        "dispatch",
    }


def test_the_table_holds_calls_parts_and_why_someone_is_missing(measured) -> None:
    text = printed(measured.rows)
    for part in ("batch 1, heads 2, seqlen 8", "flashdig", "sdpa_flash", "forward and backward",
                 "validation", "dispatch", "fa3: not run: needs a CUDA device"):  # fmt: skip
        assert part in text
    assert text.count("needs a CUDA device") == 1


def test_parts_of_the_short_way_are_there_where_there_are_plans() -> None:
    cell = Cell(1, 2, 2, 8, 8, 16, 16, dtype="float64", causal=True)  # not for torch's kernel
    inputs = make_inputs(cell, "cpu", 0, backward=True)
    with short_way() as counted:
        parts = parts_of(inputs)
        before = dict(counted.served)
        for name, part in parts.items():
            part()
            assert name
        assert counted.served["forward"] == before["forward"] + 2  # the plan, the operator
        assert counted.served["backward"] == before["backward"] + 1
    assert next(iter(parts)).startswith("key")
    assert list(parts)[-2:] == ["validation", "dispatch"]


def test_surroundings_are_entered_once_around_all_repetitions() -> None:
    entered, called = [], []

    class Around:
        def __enter__(self):
            entered.append(1)

        def __exit__(self, *error):
            return None

    meter = SurroundedMeter(1.0)
    assert meter.milliseconds(HostCall(lambda: called.append(1), Around), 7) > 0
    assert (len(entered), len(called)) == (1, 7)
    assert meter.milliseconds(lambda: called.append(1), 3) > 0
    assert len(called) == 10


def test_the_command_prints_json_and_keeps_the_run(tmp_path, capsys, monkeypatch) -> None:
    defaults = {**measure_host.__kwdefaults__, "cell": TINY}
    monkeypatch.setattr(measure_host, "__kwdefaults__", defaults)
    output = tmp_path / "host.json"
    command = ["bench", "host", "--peers", "none", "--rounds", "1", "--output", str(output)]
    with contextlib.suppress(SystemExit):
        main([*command, "--json"])
    printed_rows = json.loads(capsys.readouterr().out)["rows"]
    record = read_record(output)
    assert record.suite == "host"
    printed = json.loads(json.dumps(printed_rows), parse_float=lambda x: float(f"{float(x):.6g}"))
    assert list(record.rows) == printed  # a record keeps 6 digits of a float


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["host", "--peers", "sdpa_math"], "--peers must be none or of sdpa_flash"),
        (["host", "--ours", "triton"], "--ours is not for flashdig bench host"),
        (["host", "--time-limit", "5"], "--time-limit is not for flashdig bench host"),
        (["host", "--first-calls"], "--first-calls needs a CUDA device"),
        (["smoke", "--first-calls"], "--first-calls is for flashdig bench host"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, says, capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["bench", *arguments])
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_the_page_holds_the_figures_of_the_record() -> None:
    root = Path(__file__).parents[2]
    rows = read_record(root / "benchmarks" / "results" / "nvidia-h200" / "host.json").rows
    page = (root / "docs" / "benchmarks.md").read_text("utf-8")
    judged = [row["run_id"] for row in rows if row.get("name") == CALLS[0][0]][-1]
    rows = [row for row in rows if row["run_id"] == judged]
    whole = {(row["backend"], row["name"]): row for row in rows if row["kind"] == "speed"}
    for backend in dict.fromkeys(backend for backend, _ in whole):
        found = [whole[backend, name] for name, _, _ in CALLS]
        cells = [f"{row['ms'] * 1e3:.1f}" if "ms" in row else "-" for row in found]
        assert f"| `{backend}` | {' | '.join(cells)} |" in page
    for name, part in {"key": "key", "plan": "plan: ", "operator": "operator"}.items():
        (row,) = [x for x in rows if x["kind"] == "step" and x["name"].startswith(part)]
        assert re.search(rf"{name}\s(took\s)?{row['ms'] * 1e3:.1f}", page)
    ours, theirs = (
        [whole[backend, name]["ms_all"] for name in ("forward", "forward and backward")]
        for backend in ("flashdig", "sdpa_flash")
    )
    more = median(1e3 * (a - b) for a, b in zip(ours[0], theirs[0], strict=True))
    times = median(a / b for a, b in zip(ours[1], theirs[1], strict=True))
    word = "more" if more > 0 else "less"
    assert f"{abs(more):.1f} µs {word} than `sdpa_flash`" in page
    assert f"{times:.2f} times its" in page


WORKER = """
import json, os, sys
print("ready", flush=True)
sys.stdin.readline()
folder = os.environ["TRITON_CACHE_DIR"]
warm = os.path.exists(folder)
os.makedirs(folder, exist_ok=True)
print(json.dumps({"forward": 0.1 if warm else 2.0, "backward": 3.0, "sums": [1.0]}))
"""


def test_first_calls_are_told_apart_by_their_cache(monkeypatch) -> None:
    monkeypatch.setattr(first_calls, "_WORKER", WORKER)
    monkeypatch.setattr(first_calls, "PROCESSES", 3)
    rows = measure_first_calls(RUN)
    for row in rows:
        check_row(row, [RUN], row["name"])
    found = {row["name"]: row for row in rows}
    assert found["forward, empty cache"]["ms_all"] == [2000.0, 2000.0]
    assert found["forward, warm cache"]["ms"] == pytest.approx(100.0)
    assert len(found["backward, 3 processes at once, empty cache"]["ms_all"]) == 3
    assert "3 processes, slowest" in found["forward, 3 processes at once, empty cache"]["notes"]
    assert "first call of a process" in printed(rows)


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ("import sys; sys.exit('no GPU here')", "did not start: no GPU here"),
        ("print('ready', flush=True); raise OSError('disk full')", "failed: .*disk full"),
        (WORKER.replace("[1.0]", "[os.getpid()]"), "disagree"),
    ],
)
def test_a_process_that_fails_or_disagrees_is_an_error(monkeypatch, worker, says) -> None:
    monkeypatch.setattr(first_calls, "_WORKER", worker)
    monkeypatch.setattr(first_calls, "PROCESSES", 2)
    with pytest.raises(FirstCallError, match=rf"(?s){says}"):
        measure_first_calls(RUN)
