"""The decode suite without a GPU: its lengths, its gate, its rows."""

import contextlib
from pathlib import Path

import pytest
import torch

from flashdig import attention_with_kvcache
from flashdig.bench import decode, decode_goal, decode_loop, decode_mixed
from flashdig.bench.host import HostCall
from flashdig.bench.kvcache_cases import FEATURES, SMALL_FEATURES, may_meet
from flashdig.bench.kvcache_conformance import plan
from flashdig.bench.pairwise import feasible_pairs, pairs_of
from flashdig.bench.results import read_record
from flashdig.bench.rows import check_row
from flashdig.bench.timing import TimingFailure, median_ratio


def inputs(page_size=0):
    torch.manual_seed(0)
    q = torch.randn(2, 1, decode.NUM_HEADS, decode.HEAD_DIM).bfloat16()
    shape = (2, 64, decode.NUM_HEADS_KV, decode.HEAD_DIM)
    k, v = (torch.randn(shape).bfloat16() for _ in range(2))
    table = None
    if page_size:
        k, v = (x.view(-1, page_size, *shape[2:]) for x in (k, v))
        table = torch.randperm(len(k)).to(torch.int32).view(2, -1)
    seqlens = torch.tensor([64, 33], dtype=torch.int32)
    return decode.Inputs(q, k, v, seqlens, table, (64, 33))


def test_cells_are_those_of_the_suite() -> None:
    names = [cell.name for cell in decode.CELLS]
    assert names[:6] == ["1x8k", "1x64k", "1x512k", "16x8k", "64x8k", "128x2k"]
    mixed = decode.CELLS[-1]
    lengths = mixed.lengths()
    assert lengths == mixed.lengths()
    assert len(lengths) == mixed.batch
    assert max(lengths) <= mixed.capacity
    assert max(lengths) > 3 * sorted(lengths)[32]


@pytest.mark.parametrize("page_size", [0, 16])
def test_the_gate_tells_right_from_wrong(page_size) -> None:
    x = inputs(page_size)
    reference = decode.Reference(x)
    out = attention_with_kvcache(
        x.q, x.k, x.v, cache_seqlens=x.seqlens, page_table=x.page_table, causal=True
    )
    assert reference.check(out).reason == "ok"
    out[1, 0, -1] += 0.1  # the last pair is always looked at
    assert not reference.check(out).ok
    assert x.cache_bytes == 2 * 97 * decode.NUM_HEADS_KV * decode.HEAD_DIM * 2


def test_rows_may_stand_in_a_record() -> None:
    for name in ("chosen", "fa3"):
        row = decode._row(decode.CELLS[0], "dense", inputs(), name)
        check_row({**row, "run_id": "a", "gate": "wrong"}, {"a"}, "row")
    assert decode.call_of("sdpa_cudnn", inputs(16)) == "no pages"
    assert decode.call_of("sdpa_flash", inputs()) == "no lengths"


def test_a_table_names_the_fastest() -> None:
    rows = [
        {**decode._row(decode.CELLS[0], "dense", inputs(), name), "ms": ms, "tb_per_s": 1.5}
        for name, ms in (("chosen", 0.0175), ("even parts", 0.01), ("fa3", 0.021))
    ]
    assert decode.table_of(rows).splitlines()[-1] == (
        "| 1x8k, dense | **17.5 (1.50)** |  |  | 21.0 (1.50) |  |"
    )


def test_goals_follow_the_bandwidth_that_was_measured() -> None:
    def rows(keys, **times):
        features = {"cell": f"1x{keys}", "cache": "dense", "keys": keys}
        return [
            {"backend": name, "features": features, "ms": ms, "ms_all": [ms, ms]}
            for name, ms in times.items()
        ]

    small = rows(8192, triton=1.0, fa3=1.2, fa4=1.1, read=0.85)  # fa4 leaves 23 %
    middle = rows(65536, triton=1.0, fa3=1.01, read=0.76)
    large = rows(524288, triton=1.0, fa3=1.1, read=0.89)
    goals = {goal["cell"]: goal for goal in decode_goal.goals_of([*small, *middle, *large])}
    assert goals["1x8192"]["asked"] == [("1.15 of fa4", False)]
    assert goals["1x65536"]["asked"] == [("1.15 of fa3", False), ("75% of the bandwidth", True)]
    assert goals["1x524288"]["asked"] == [("90% of the bandwidth", False)]
    assert goals["1x524288"]["share"] == pytest.approx(0.89)
    assert decode_goal.goal_table(large).splitlines()[-1] == (
        "| 1x524288, dense | 89.0% | fa3 | 80.9% | 1.100 | 90% of the bandwidth: **missed** |"
    )
    ahead = rows(8192, triton=1.0, fa3=1.2, read=0.85)
    assert decode_goal.goals_of(ahead)[0]["asked"] == [("1.15 of fa3", True)]
    assert decode_goal.goal_table(rows(8192, triton=1.0, read=0.9)) == ""


def test_the_eager_clock_waits_for_the_device_within_the_surroundings() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def surroundings():
        events.append("enter")
        yield
        events.append("leave")

    times = iter(range(100))
    meter = decode.EagerMeter(
        1.0, now=lambda: float(next(times)), synchronize=lambda: events.append("wait")
    )
    each = meter.milliseconds(HostCall(lambda: events.append("call"), surroundings), 4)
    assert events == ["enter", "wait", *["call"] * 4, "wait", "leave"]
    assert each == 1e3 / 4


@pytest.mark.parametrize(("device", "features"), [("cuda", FEATURES), ("cpu", SMALL_FEATURES)])
def test_the_conformance_grid_covers_every_pair_of_features(device, features) -> None:
    covered = set().union(*(pairs_of(one, list(features)) for one in plan(device)))
    assert covered >= set(feasible_pairs(features, may_meet))


def test_a_mixed_step_is_checked_and_summed_up(monkeypatch) -> None:
    monkeypatch.setattr(decode_mixed, "CAPACITY", 64)
    cell = decode_mixed.MixedCell(2, 8)
    assert cell.queries == [1, 1, 8]
    assert cell.lengths(3) == cell.lengths(3) != cell.lengths(4)
    step, lengths = decode_mixed.Step(cell, "cpu"), [64, 3, 24]
    step.set_lengths(lengths)
    out = decode_mixed.call_of("flashdig", step)()
    assert step.check(out, lengths) == "ok"
    out[-1, 0] += 0.1
    assert step.check(out, lengths).startswith("sequence 2: ")
    times = [[n / 100, n / 100, n / 50] for n in range(1, 101)]
    row = decode_mixed._row(cell, "flashdig") | decode_mixed.figures(times)
    check_row({**row, "run_id": "a", "gate": "ok"}, {"a"}, "row")
    assert row["features"]["p50_us"] == pytest.approx(505.0)
    assert row["features"]["p99_us"] == pytest.approx(990.0)
    assert row["aa_spread"] == 0.5


@pytest.mark.parametrize("failures", [[], ["InPlaceCache: token 3 differs"]])
def test_a_loop_is_kept_as_soon_as_it_was_measured(failures, monkeypatch, tmp_path, capsys) -> None:
    cells = []

    def time_rotated(calls, **settings):
        return {name: TimingFailure("no GPU") for name in calls}

    def prompt(cell, size, device):
        cells.append((cell.name, len(read_record(output).runs)))

    output = tmp_path / "loop.json"
    monkeypatch.setattr(decode_loop, "check", lambda *arguments: failures)
    monkeypatch.setattr(decode_loop, "make_model", lambda *arguments: None)
    monkeypatch.setattr(decode_loop, "make_prompt", prompt)
    monkeypatch.setattr(decode_loop, "time_rotated", time_rotated)
    assert decode_loop.main(["--output", str(output)]) == bool(failures)
    assert cells == [("1x128", 1), ("8x4096", 2), ("64x4096", 3)]
    tested, *timed = read_record(output).rows
    assert (tested["passed"], tested["failed"]) == (2 - len(failures), len(failures))
    gates = {row["gate"] for row in timed if row["backend"] == "flashdig"}
    assert gates == set(failures or ["ok"])
    assert "1x128: flashdig, InPlaceCache -;" in capsys.readouterr().out


def latest_by_clock(path):
    """The rows of the last run of each clock."""
    record, latest = read_record(path), {}
    for run in record.runs:
        rows = record.rows_of(run.run_id)
        (clock,) = {row["clock"] for row in rows}
        latest[clock] = rows
    return latest


def test_the_documented_figures_are_the_records() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "inference.md").read_text("utf-8")
    results = root / "benchmarks" / "results" / "nvidia-h200"
    latest = latest_by_clock(results / "decode.json")
    graph, eager = latest["graph"], latest["host"]
    assert decode.table_of(graph) in text
    (own,) = [r for r in eager if r["backend"] == "triton" and r["features"]["cache"] == "dense"]
    peers = [r["ms"] for r in eager if r["features"]["cache"] == "dense" and r is not own]
    said = f"{1e3 * own['ms']:.1f} us beside {1e3 * min(peers):.1f} us of the fastest peer"
    assert said in text
    mixed = read_record(results / "decode-mixed.json")
    assert decode_mixed.table_of(mixed.rows_of(mixed.latest_run().run_id)) in text
    conformance = read_record(results / "kvcache-conformance.json")
    (case,) = conformance.rows_of(conformance.latest_run().run_id)
    assert f"{case['passed']:,} of {case['cases']:,} cases" in text


def test_the_readme_says_how_decoding_stands() -> None:
    root = Path(__file__).parents[2]
    text = " ".join((root / "README.md").read_text("utf-8").split())
    results = root / "benchmarks" / "results" / "nvidia-h200"
    graph = latest_by_clock(results / "decode.json")["graph"]
    cells: dict = {}
    for row in graph:
        key = (row["features"]["cell"], row["features"]["cache"])
        if row["backend"] != decode_goal.READ:
            cells.setdefault(key, {})[row["backend"]] = row
    behind = []
    for found in cells.values():
        own = found.pop("triton")
        best = min(found.values(), key=lambda row: row["ms"])
        ratio = median_ratio(best["ms_all"], own["ms_all"])
        if ratio.high < 1:
            behind.append(ratio.median)
    assert not behind
    assert f"in all {len(cells)} cells" in text
    mixed = read_record(results / "decode-mixed.json")
    rows = mixed.rows_of(mixed.latest_run().run_id)
    p50 = {(row["name"], row["backend"]): row["features"]["p50_us"] for row in rows}
    ratios = [
        p50[name, "fa3"] / ours for (name, backend), ours in p50.items() if backend == "flashdig"
    ]
    assert f"run at {min(ratios):.2f} to {max(ratios):.2f} of FlashAttention-3" in text
