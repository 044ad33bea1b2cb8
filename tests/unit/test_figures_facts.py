"""What the figures say: alt texts and marks against the rows and the cost models themselves."""

import re
from xml.etree import ElementTree

import pytest

from flashdig.costs.predict import predict
from flashdig.costs.units import seconds, with_unit
from flashdig.generations.walk import walk
from flashdig.generations.walk_data import Walk
from flashdig.hardware.devices import find_device
from flashdig.report.figures.errors import errors
from flashdig.report.figures.ladder import ladder
from flashdig.report.figures.memory_ledger import memory_ledger
from flashdig.report.figures.picture import Missing
from flashdig.report.figures.pipes import pipes
from flashdig.report.figures.roofline import roofline
from flashdig.report.figures.rung_rows import problem_of
from flashdig.report.figures.steps import steps
from flashdig.report.figures.walk_picture import walk_picture
from flashdig.report.figures.waves import _ends, waves
from tests.figure_cases import (
    archaeology_rows,
    default_rows,
    step_rows,
    with_counters,
    without_a_gpu,
)

H200 = find_device("h200")


def named(rows, name):
    return next(row for row in rows if row["name"] == name)


def words_of(picture) -> list[str]:
    root = ElementTree.fromstring(picture.svg)
    return ["".join(text.itertext()) for text in root.iter("{http://www.w3.org/2000/svg}text")]


def test_the_ladder_names_the_fastest_rung_and_every_time() -> None:
    rows = default_rows()
    picture = ladder(rows, H200)
    fastest, slowest = min(rows, key=lambda r: r["ms"]), max(rows, key=lambda r: r["ms"])
    assert f"Fastest is {fastest['name']}: it takes {seconds(fastest['ms'] / 1e3)}" in picture.alt
    assert f"{slowest['ms'] / fastest['ms']:.3g} times as fast as {slowest['name']}" in picture.alt
    words = words_of(picture)
    for row in rows:
        assert row["name"] in words
        label = f"{seconds(row['ms'] / 1e3)}, {row['tflops']:.3g} TFLOP/s"
        assert any(text.startswith(label) for text in words), label
    v2 = named(rows, "v2")
    assert any(text.endswith(f", {v2['speedup']:.2f}x") for text in words)


def test_a_ladder_without_a_gpu_shows_guesses_and_says_so() -> None:
    rows = without_a_gpu(archaeology_rows())
    picture = ladder(rows, H200)
    assert "is expected to take" in picture.alt
    assert picture.caption.startswith("No time was measured")
    expected = predict(problem_of(rows[0]), H200, "v1").expected_s
    assert f"v1 {seconds(expected)}" in picture.alt
    assert ladder(rows, None) == Missing(
        "ladder",
        "Time of each rung",
        "No rung passed the gate with a time, measured or expected.",
    )


def test_rungs_that_failed_have_no_bar() -> None:
    rows = [
        {**row, "gate": "error 1 above 0.1", "ms": None} if row["name"] == "v2" else row
        for row in default_rows()
    ]
    assert "v2" not in words_of(ladder(rows, H200))
    assert "v2_transposed" in words_of(ladder(rows, H200))


def test_the_waterfall_ends_at_v2_and_its_shares_are_the_records() -> None:
    rows = step_rows(causal=True)
    path = [row for row in rows if row["name"].startswith("step:")]
    first, last = path[0], named(rows, "step:causal_skipping")
    picture = steps(rows)
    assert f"from v1, {seconds(first['ms'] / 1e3)}, to v2, {seconds(last['ms'] / 1e3)}" in (
        picture.alt
    )
    gain = max(path[1:], key=lambda row: row["speedup"])
    assert f"The largest gain is {gain['name'].removeprefix('step:')}" in picture.alt
    words = words_of(picture)
    order = [w for w in words if w in {"v1", "v2"} | {r["name"][5:] for r in path}]
    assert order == ["v1", *(row["name"][5:] for row in path[1:-1]), "v2", "k_layout"]
    for row in path[1:-1]:
        without = named(rows, f"without:{row['name'][5:]}")
        assert any(
            f"({100 * row['share_of_gain']:.0f} %)" in text
            and text.endswith(f"without it {1 / without['speedup']:.2f}x")
            for text in words
        ), row["name"]
    assert steps(default_rows()).reason.startswith("The run did not take the steps apart")


def test_the_roofline_stands_on_the_devices_peaks() -> None:
    rows = default_rows()
    picture = roofline(rows, H200)
    assert f"memory {with_unit(H200.memory_bytes_per_s, 'B/s')}" in picture.alt
    fastest = max(rows, key=lambda row: row["tflops"])
    assert f"Fastest is {fastest['name']}, measured" in picture.alt
    v2 = named(rows, "v2")
    problem = problem_of(v2)
    guess = predict(problem, H200, "v2", clock_hz=v2["sm_clock_mhz"] * 1e6)
    intensity = with_unit(guess.flops / guess.memory.total_bytes, "FLOP")
    measured = with_unit(guess.flops / v2["ms"] * 1e3, "FLOP/s")
    expected = with_unit(guess.expected_flop_per_s, "FLOP/s")
    assert f"v2: {intensity} a byte, measured {measured}, expected {expected}." in picture.alt
    # no rung is above the roofs of its problem
    clock = max(row["sm_clock_mhz"] for row in rows) * 1e6
    assert fastest["tflops"] * 1e12 < H200.flop_per_s("bfloat16", clock)
    unmeasured = roofline(without_a_gpu(rows), H200)
    assert "measured" not in unmeasured.alt
    assert "No time was measured" in unmeasured.caption


def test_a_float32_roofline_has_no_tensor_roof_and_a_tf32_one_has() -> None:
    rows = archaeology_rows()
    assert "tensor cores" not in roofline(rows, H200).alt
    tf32 = [{**row, "features": {"tf32": True}} for row in rows]
    assert "tensor cores, tfloat32" in roofline(tf32, H200).alt


def test_the_ledger_counts_what_the_interpreter_counted() -> None:
    rows = archaeology_rows()
    picture = memory_ledger(rows, H200)
    v1, v2 = named(rows, "v1"), named(rows, "v2")
    said = dict(re.findall(r"(\w+): (issued [^.]*(?:\.\d[^.]*)*)\.", picture.alt))
    issued = v1["predicted"]["load_bytes"] + v1["predicted"]["store_bytes"]
    assert f"issued {with_unit(issued, 'B')}" in said["v1"]
    around = issued - v1["predicted"]["triton_load_bytes"] - v1["predicted"]["triton_store_bytes"]
    counted = around + v1["counted"]["load_bytes"] + v1["counted"]["store_bytes"]
    assert f"counted {with_unit(counted, 'B')}" in said["v1"]
    assert "most is O" in said["v1"]
    assert "most is K" in said["v2"]
    memory = v2["predicted"]["memory_load_bytes"] + v2["predicted"]["memory_store_bytes"]
    assert f"Least at memory: v2 with {with_unit(memory, 'B')}" in picture.alt
    words = words_of(picture)
    # two rungs that move the same bytes share a panel; library kernels are not ours to count
    assert "naive, inplace" in words
    assert "sdpa_efficient" not in " ".join(words)
    uncounted = [{n: v for n, v in row.items() if n != "counted"} for row in rows]
    picture = memory_ledger(uncounted, H200)
    assert "counted" not in words_of(picture)
    assert "Counted" not in picture.caption


def test_the_ledger_shows_what_memory_moved_where_it_was_measured() -> None:
    rows = default_rows()
    plain = memory_ledger(rows, H200)
    assert "no memory counters were read in this run" in plain.caption
    assert "measured" not in words_of(plain)
    assert "measured" not in plain.alt
    measured = with_counters(rows)
    picture = memory_ledger(measured, H200)
    assert "no memory counters" not in picture.caption
    assert "each kernel from a cold L2 cache" in picture.caption
    assert "measured" in words_of(picture)
    counters = named(measured, "v2")["counters"]
    total = counters["dram_read_bytes"] + counters["dram_write_bytes"]
    assert re.search(rf"v2: issued [^;]+;[^;]+; (counted [^;]+; )?measured {with_unit(total, 'B')}",
                     picture.alt)  # fmt: skip
    # rungs that ask for the same bytes and were measured differently have panels of their own
    assert "naive, inplace" in words_of(plain)
    assert "naive, inplace" not in words_of(picture)


def test_the_articles_grids_over_an_h200() -> None:
    picture = waves(archaeology_rows(), H200)
    # batch 10, heads 64, seqlen 1024, tiles of 32
    assert "v1: 640 blocks, 2.42 waves of 264" in picture.alt
    assert "v2: 20,480 blocks, 77.6 waves of 264" in picture.alt
    assert "640 blocks were launched in the recording" in picture.alt
    assert "20,480 blocks were launched in the recording" in picture.alt
    # 5 rounds of 1,024 visits on 132 SMs against 156 of 32
    assert "5,120 tile visits long" in picture.alt
    assert "4,992 tile visits long" in picture.alt
    assert f"v2 ends {5120 / 4992:.3g} times as early" in picture.alt
    assert "launched in the recording" not in waves(without_a_gpu(archaeology_rows()), H200).alt


def test_causal_blocks_differ() -> None:
    rows = step_rows(causal=True)
    picture = waves(rows, H200)
    # 64 query tiles see 1 to 64 key tiles: 32.5 on average
    assert f"v2's longest block has {64 / 32.5:.3g} times the mean work" in picture.alt
    assert any("32.5 on average, at most 64" in text for text in words_of(picture))
    assert "the tiles that it skips" in picture.alt


def test_sms_run_dry_as_a_list_scheduler_says() -> None:
    # 7 equal programs of 3 on 3 SMs: 3, 3, then 1
    assert _ends([3], 7, 3) == (6.0, 6.0, 9.0)
    assert _ends([2], 2, 4) == (0.0, 0.0, 2.0, 2.0)
    # 4, 1, 2 twice on two SMs: one does 4, 1, 2, the other 1, 2, 4
    assert _ends([4, 1, 2], 2, 2) == (7.0, 7.0)
    # work is conserved, however large the grid
    large = _ends([1, 2, 3, 4] * 1000, 5000, 132)
    assert sum(large) == pytest.approx(5000 * 1000 * 10)
    assert large[-1] - large[0] <= 4


def test_pipes_are_the_predictions_scaled_to_one_tile() -> None:
    rows = default_rows()
    picture = pipes(rows, H200)
    v2 = named(rows, "v2")
    guess = predict(problem_of(v2), H200, "v2", clock_hz=v2["sm_clock_mhz"] * 1e6)
    busiest = max(guess.pipes, key=guess.pipes.__getitem__)
    # the exhibit's tile is 64 x 64 itself
    assert f"v2: busiest is {busiest}; tensor cores {guess.pipes['tensor cores']:,.0f}" in (
        picture.alt
    )
    tiles = 4 * 16 * 64 * 64
    cycles = v2["ms"] / 1e3 * v2["sm_clock_mhz"] * 1e6 * 132 / tiles
    assert f"measured {cycles:,.0f}" in picture.alt
    assert f"{cycles:,.0f}" in words_of(picture)
    # unfused rungs have no tile loop
    assert "naive" not in picture.alt
    assert "measured" not in pipes(without_a_gpu(rows), H200).alt


def test_pipes_of_float32_are_products_on_fma_units() -> None:
    assert "FMA units (products)" in words_of(pipes(archaeology_rows(), H200))


def test_errors_show_the_bound_of_the_record_or_of_the_rule() -> None:
    rows = default_rows()
    bound = 2 * named(rows, "naive")["error"] + 1e-5
    picture = errors(rows)
    assert f"allowed is {bound:.2g}" in picture.alt
    assert "with the rung naive for eager attention" in picture.caption
    best = min(rows, key=lambda row: row["error"])
    assert f"Closest is {best['name']} with {best['error']:.2g}" in picture.alt
    kept = errors([{**row, "allowed_error": 0.02} for row in rows])
    assert "allowed is 0.02" in kept.alt
    assert "allowed 0.02" in words_of(kept)
    without_naive = errors([row for row in rows if row["name"] != "naive"])
    assert "allowed is" not in without_naive.alt
    assert "not in the record" in without_naive.caption


def test_errors_that_failed_or_vanish() -> None:
    rows = [dict(row) for row in default_rows()]
    named(rows, "v1").update(gate="error 0.5 above 0.1", error=0.5)
    named(rows, "v2").update(error=0.0)
    picture = errors(rows)
    assert "These failed the gate: v1." in picture.alt
    assert "0.5, failed" in words_of(picture)
    assert "v2 0," in picture.alt
    assert isinstance(errors([{**row, "error": None} for row in rows]), Missing)


def test_the_walk_shows_what_it_computed() -> None:
    taken = walk()
    picture = walk_picture(taken)
    assert "query 3: m 1, 2, 2.5; rescaled by 0, 0.368, 0.607" in picture.alt
    assert "The maximum of query 3 rises most often: 2 times." in picture.alt
    words = words_of(picture)
    assert {"query 0", "query 1", "query 2", "query 3"} <= set(words)
    assert words.count("×0.37") == 1
    # the last sum of each query is the walk's own
    table = next(s for step in taken.steps for s in step.shown if s.columns == ("m", "l", "LSE"))
    for _, row_sum, _ in table.values:
        assert f"{row_sum:.3g}" in words


def test_a_walk_without_a_loop_is_missing() -> None:
    assert isinstance(walk_picture(Walk("", "", (), (), ())), Missing)
