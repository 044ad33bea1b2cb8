"""README and docs quote what the committed record holds, and nothing else."""

import json
from pathlib import Path

import pytest

import flashdig
from flashdig.bench.results import read_record
from flashdig.costs.predict import predict
from flashdig.evidence.sass_card import SassCard
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem
from flashdig.report.markdown import with_tables
from flashdig.report.sass_markdown import with_cards
from tests.grid_tables import geometric_mean, grid_lines, of_run

ROOT = Path(flashdig.__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "nvidia-h200" / "dig.json"


@pytest.mark.parametrize("document", ["README.md", "docs/decisions/portable-kernels.md"])
def test_the_portable_kernels_speed_is_that_of_the_record(document) -> None:
    text = (ROOT / document).read_text()
    rows = read_record(RECORD.with_name("portable.json")).rows
    ms = {
        (r["pass"], r["head_dim"], r["causal"], r["seqlen_q"], r["backend"]): r["ms"] for r in rows
    }
    for direction in ("forward", "backward"):
        means = []
        for head_dim in (64, 128, 256):
            cells = [k[:4] for k in ms if k[:2] == (direction, head_dim) and k[4] == "triton"]
            assert len(cells) == 12
            ratios = [ms[(*cell, "sdpa_flash")] / ms[(*cell, "triton")] for cell in cells]
            means.append(f"{geometric_mean(ratios):.2f}")
        flex = [ms[k] / ms[(*k[:4], "triton")] for k in ms if k[0] == direction and k[4] == "flex"]
        assert f"| {direction} | {' | '.join(means)} |" in text
        if "FlexAttention |" in text:
            assert f"{' | '.join(means)} | {geometric_mean(flex):.2f} |" in text


def test_the_hopper_forwards_speed_is_that_of_the_record() -> None:
    text = (ROOT / "docs" / "decisions" / "hopper-forward.md").read_text()
    every = []
    for line, ratios in grid_lines(of_run("hopper-forward.json", "9ed6094")):
        assert line in text
        every += ratios
    mean = f"{geometric_mean(every):.2f}"
    assert f"Geometric mean of the grid: **{mean}**" in text
    readme = (ROOT / "README.md").read_text()
    assert f"The Hopper forward stands at {mean} of the best of FlashAttention-3" in readme


def test_the_hopper_backwards_speed_is_that_of_the_record() -> None:
    text = (ROOT / "docs" / "decisions" / "hopper-backward.md").read_text()
    means, every = [], []
    for head_dim, revision in ((64, "b5135f1"), (128, "b5135f1"), (256, "6a87d05")):
        ratios: list[float] = []
        found = of_run("hopper-backward.json", revision)
        for line, of_line in grid_lines(found, head_dims=(head_dim,)):
            assert line in text
            ratios += of_line
        means.append(f"{geometric_mean(ratios):.2f}")
        every += ratios
    mean = f"{geometric_mean(every):.2f}"
    first, second, third = means
    assert f"head_dim 64 **{first}**, 128 **{second}**, 256 **{third}**, all **{mean}**" in text
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"The Hopper backward stands at {first}, {second} and {third} of the better" in readme


def test_the_fp8_forwards_speed_is_that_of_the_record() -> None:
    text = (ROOT / "docs" / "decisions" / "fp8.md").read_text()
    every = []
    for line, ratios in grid_lines(of_run("fp8.json", "a22e296"), beside="fa3"):
        assert line in text
        every += ratios
    assert f"**{geometric_mean(every):.3f} times FlashAttention-3's fp8" in text


@pytest.mark.parametrize("document", ["README.md", "docs/decisions/steps-v1-v2.md"])
def test_tables_are_drawn_from_the_record(document) -> None:
    text = (ROOT / document).read_text()
    assert "<!-- table: " in text
    assert with_tables(text, read_record(RECORD).rows) == text


def test_cards_are_drawn_from_their_record() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "compiled" / "sass.json").read_text())
    assert record["failures"] == []
    chips = ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"]
    for exhibit in ("v1", "v2", "v2_transposed"):
        found = [card["arch"] for card in record["cards"] if card["subject"] == exhibit]
        assert found == chips, exhibit
    text = (ROOT / "docs" / "sass.md").read_text()
    assert text.count("<!-- table: ") == 3
    assert with_cards(text, record) == text
    # the sentences follow from the figures of this release
    for values in record["cards"]:
        assert SassCard.from_dict(values).sentences == values["sentences"]


def test_unknown_and_open_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown table 'no'"):
        with_tables("<!-- table: no -->\n<!-- end of table -->", [])
    with pytest.raises(ValueError, match="begins without"):
        with_tables("<!-- table: ladder -->", [])


def test_the_record_is_valid_and_every_rung_that_ran_is_right() -> None:
    record = read_record(RECORD)
    for row in record.rows:
        assert row["gate"] == "ok" or row["gate"].startswith("not run: "), row["name"]
    presets = {row.get("preset") for row in record.rows}
    assert {None, "archaeology", "cutlass-article", "fa2-paper", "profiling-article"} <= presets
    assert all(run.revision for run in record.runs)


def test_no_time_lies_below_its_floor_and_guesses_hold() -> None:
    """At 2k and longer, v2 and the SDPA rungs take what was expected within 15 %."""
    guessed = ("v2", "sdpa_math", "sdpa_efficient", "sdpa_flash", "sdpa_cudnn")
    compared = 0
    for row in read_record(RECORD).rows:
        at_clock = row.get("predicted", {}).get("at_observed_clock", {})
        if "ms" not in row:
            continue
        assert row["ms"] >= at_clock["floor_ms"], row["name"]
        if row["kind"] == "rung" and row["name"] in guessed and row["seqlen_q"] >= 2048:
            assert abs(row["ms"] / at_clock["expected_ms"] - 1) <= 0.15, row["name"]
            compared += 1
    assert compared > 60


def test_the_exhibits_occupancy_is_as_guessed() -> None:
    device, compared = find_device("h200"), 0
    for row in read_record(RECORD).rows:
        if row["kind"] != "rung" or row["name"] not in ("v1", "v2", "v2_transposed"):
            continue
        problem = AttentionProblem.dense(
            *(row[name] for name in ("batch", "num_heads", "seqlen_q", "head_dim", "dtype")),
            causal=row["causal"],
        ).replace(allow_tf32=bool(row["features"].get("tf32")))
        guessed = predict(problem, device, row["name"]).occupancy
        (own,) = (k for k in row["kernels"] if k["name"].startswith("flash_fwd"))
        assert own["occupancy_percent"] / 100 == pytest.approx(guessed, rel=0.15), row["name"]
        compared += 1
    assert compared > 100


def test_v2_beats_v1_everywhere_and_transposing_pays_only_on_cuda_cores() -> None:
    cells: dict[tuple[object, ...], dict[str, float]] = {}
    for row in read_record(RECORD).rows:
        if row["kind"] == "rung" and "ms" in row:
            names = ("run_id", "seqlen_q", "head_dim", "dtype", "causal", "batch", "preset")
            key = (*(row.get(name) for name in names), bool(row["features"].get("tf32")))
            cells.setdefault(key, {})[row["name"]] = row["ms"]
    assert len(cells) > 30
    for key, ms in cells.items():
        assert ms["v2"] < ms["v1"], key
        if "v2_transposed" in ms:
            on_cuda_cores = key[3] == "float32" and not key[-1]
            # 2 %: at 16k the copy is too small to see
            gain = ms["v2"] / ms["v2_transposed"]
            assert gain > 2 if on_cuda_cores else gain < 1.02, key
