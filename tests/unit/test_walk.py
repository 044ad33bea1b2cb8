"""The walk: every step holds, the loop equals naive attention on any input, and it prints."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from flashdig.generations import walk_loop
from flashdig.generations.walk import two_blocks_step, walk
from flashdig.generations.walk_data import Check, Shown, Step, Walk
from flashdig.report.walk import print_walk


@pytest.fixture(scope="module")
def whole_walk() -> Walk:
    return walk()


def shown(step: Step, name: str) -> Shown:
    return next(part for part in step.shown if part.name == name)


def step_titled(whole: Walk, start: str) -> Step:
    return next(step for step in whole.steps if step.title.startswith(start))


def printed(whole: Walk, width: int = 100) -> str:
    stream = io.StringIO()
    print_walk(whole, Console(file=stream, width=width))
    return stream.getvalue()


def test_every_step_holds(whole_walk: Walk) -> None:
    assert [step.title for step in whole_walk.steps if not step.ok] == []
    assert len(whole_walk.steps) == 11
    assert all(step.checks for step in whole_walk.steps)


def test_naive_step_is_the_row_worked_out_by_hand(whole_walk: Walk) -> None:
    # query 0 = (1, 0, 1, 0): products with the keys 0, 0, 3, 0, 3, 1, times the scale 1/2
    step = step_titled(whole_walk, "Naive")
    assert shown(step, "S").values[0] == (0, 0, 1.5, 0, 1.5, 0.5)
    total = 3 + 2 * math.exp(1.5) + math.exp(0.5)
    first_column = (1 + 2 * math.exp(1.5) - 1 + 4 * math.exp(1.5)) / total
    assert shown(step, "O").values[0][0] == pytest.approx(first_column, abs=1e-14)


@pytest.mark.parametrize("row", range(4))
def test_two_blocks_merge_for_every_query(row: int) -> None:
    assert two_blocks_step(row).ok


def test_running_maximum_takes_all_three_courses(whole_walk: Walk) -> None:
    step = step_titled(whole_walk, "The tiled loop")
    tables = [part for part in step.shown if part.name.startswith("queries")]
    maxima = [[table.values[i][0] for table in group] for group, i in _rows_of(tables)]
    assert maxima[1][0] == max(maxima[1])  # first tile decides
    assert maxima[2][1] > max(maxima[2][0], maxima[2][2])  # the middle one does
    assert maxima[3] == sorted(set(maxima[3]))  # each raises it


def _rows_of(tables: list[Shown]) -> list[tuple[list[Shown], int]]:
    return [(tables[:3], 0), (tables[:3], 1), (tables[3:], 0), (tables[3:], 1)]


def test_memory_numbers_of_the_article(whole_walk: Walk) -> None:
    step = step_titled(whole_walk, "Why S and P")
    assert shown(step, "S of one head, MiB").values == 64
    assert shown(step, "S of all heads, GiB").values == 8
    assert shown(step, "S and P, GiB").values == 16
    assert shown(step, "traffic of S and P, GB").values == pytest.approx(34.36, abs=0.005)


def test_shared_memory_and_mma_counts(whole_walk: Walk) -> None:
    buffers = shown(step_titled(whole_walk, "A tile in shared"), "KiB a buffer")
    assert buffers.values == (8,) * 5
    assert shown(step_titled(whole_walk, "A tile in shared"), "KiB a block").values == (40, 56, 40)
    mma = step_titled(whole_walk, "Tensor-core")
    assert shown(mma, "m16n8k16 for Q Kᵀ").values == 128
    assert shown(mma, "m16n8k16 for P V").values == 128


def test_butterfly_reaches_every_lane_only_in_its_last_step(whole_walk: Walk) -> None:
    sums = shown(step_titled(whole_walk, "Butterfly"), "sum").values
    assert len(sums) == 6
    total = sum(range(32))
    assert set(sums[-1]) == {total}
    assert all(total not in row for row in sums[:-1])


def test_performance_claim(whole_walk: Walk) -> None:
    step = step_titled(whole_walk, "The article's measurement")
    flops = 4 * 8 * 16 * 4096**2 * 64
    assert shown(step, "fused, TFLOP/s").values == pytest.approx(flops / 0.035 / 1e12)
    assert {check.what for check in step.checks} >= {"speed-up", "memory saved, %"}


@settings(max_examples=60, deadline=None)
@given(
    seqlen_q=st.integers(1, 9),
    seqlen_k=st.integers(1, 13),
    head_dim=st.integers(1, 5),
    tile_m=st.integers(1, 6),
    tile_n=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_loop_equals_torch_for_any_lengths_and_tiles(
    seqlen_q: int, seqlen_k: int, head_dim: int, tile_m: int, tile_n: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(rows, head_dim, dtype=torch.float64, generator=generator) * 4
        for rows in (seqlen_q, seqlen_k, seqlen_k)
    )
    result = walk_loop.tiled_attention(q, k, v, tile_m, tile_n)
    expected = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0]
    torch.testing.assert_close(result.out, expected, rtol=1e-10, atol=1e-12)
    scores = q @ k.T / math.sqrt(head_dim)
    torch.testing.assert_close(result.lse, torch.logsumexp(scores, 1), rtol=1e-12, atol=1e-12)


def test_json_holds_every_number_and_verdict(whole_walk: Walk) -> None:
    text = json.dumps(whole_walk.to_dict(), allow_nan=False)
    record = json.loads(text)
    assert record["ok"] is True
    assert [len(record[part]) for part in ("steps", "slips", "symptoms")] == [11, 5, 5]
    assert record["steps"][0]["shown"][0]["values"] == [list(row) for row in walk_loop.QUERIES]
    assert record["steps"][0]["checks"][0]["ok"] is True
    assert "nan" in record["steps"][2]["shown"][5]["values"]


def test_print_shows_all_parts_and_the_summary(whole_walk: Walk) -> None:
    text = printed(whole_walk)
    titles = [step.title for step in whole_walk.steps] + [slip.title for slip in whole_walk.slips]
    titles += [symptom.symptom for symptom in whole_walk.symptoms]
    assert [title for title in titles if title not in text] == []
    assert "36 of 36 checks hold; 5 of 5 slips shown wrong; 5 of 5 symptoms seen and cured." in text
    assert "FAILED" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_print_fits_a_narrow_terminal_without_losing_numbers(whole_walk: Walk) -> None:
    text = printed(whole_walk, width=80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_step_that_does_not_hold_is_said_to_fail(whole_walk: Walk) -> None:
    broken = dataclasses.replace(whole_walk.steps[0], checks=(Check("planted", 1.0, 2.0, 0.5),))
    whole = dataclasses.replace(whole_walk, steps=(broken, *whole_walk.steps[1:]))
    assert not whole.ok
    assert whole.to_dict()["steps"][0]["ok"] is False
    text = printed(whole)
    assert "FAILED  planted: 1 (expected 2 ± 0.5)" in text
    assert "34 of 35 checks hold" in text


def test_a_check_of_a_number_that_is_none_fails() -> None:
    assert not Check("nan", math.nan, 0.0, 1.0).ok


def test_printing_needs_no_torch() -> None:
    code = (
        "import sys; import flashdig.report.walk, flashdig.generations.walk_data; "
        "sys.exit('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
