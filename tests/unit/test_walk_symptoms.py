"""Each symptom of the troubleshooting table appears with its cause and goes with its fix."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flashdig.generations import walk_shared_memory as memory
from flashdig.generations import walk_symptoms
from flashdig.generations.walk_loop import literal_inputs, tiled_attention


def test_every_symptom_is_seen_and_cured() -> None:
    table = walk_symptoms.symptoms()
    assert len(table) == 5
    assert [row.symptom for row in table if not row.appears] == []
    assert [row.symptom for row in table if not row.is_cured] == []


def test_loss_stalls_without_the_rescale_and_converges_with_it() -> None:
    row = walk_symptoms.loss_does_not_converge()
    forgotten, rescaled = row.shown[0].values
    assert forgotten[0] == pytest.approx(rescaled[0])  # zero queries: no maximum moves yet
    assert forgotten[-1] > 0.2
    assert forgotten[-2] == pytest.approx(forgotten[-1], rel=1e-3)  # and no longer falls
    assert rescaled[-1] < 1e-12


def test_query_gradient_is_that_of_autograd_when_the_forward_is_right() -> None:
    q, k, v = literal_inputs()
    q.requires_grad_()
    result = tiled_attention(q, k, v)
    grad_out = torch.arange(8, dtype=torch.float64).reshape(4, 2) - 3
    (expected,) = torch.autograd.grad(result.out, q, grad_out)
    computed = walk_symptoms._query_gradient(
        q.detach(), k, v, result.out.detach(), result.lse.detach(), grad_out
    )
    torch.testing.assert_close(computed, expected)


def test_output_is_zero_or_not_a_number_without_the_maximum() -> None:
    row = walk_symptoms.output_zero_or_not_a_number()
    plain, cured, truth = zip(*row.shown[0].values, strict=True)
    assert plain[0] == 0
    assert math.isnan(plain[1])
    assert math.isnan(plain[2])
    assert cured == pytest.approx(truth, rel=1e-3)
    assert (row.seen, row.after) == (3, 0)


@pytest.mark.parametrize(
    ("pattern", "padding", "expected"),
    [
        (memory.COLUMN_FLOAT32, 0, 32),
        (memory.COLUMN_FLOAT32, 1, 1),
        (memory.COLUMN_FLOAT32, 8, 8),
        (memory.COLUMN_FLOAT32, 16, 16),
        (memory.COLUMN_FLOAT16, 1, 2),
        (memory.COLUMN_FLOAT16, 2, 1),
        (memory.COLUMN_FLOAT16, 8, 4),
        (memory.LDMATRIX_FLOAT16, 0, 8),
        (memory.LDMATRIX_FLOAT16, 8, 1),
        (memory.LDMATRIX_FLOAT16, 16, 2),
    ],
)
def test_wavefronts(pattern: memory.AccessPattern, padding: int, expected: int) -> None:
    assert memory.wavefronts(pattern, 64, padding) == expected


def test_a_row_read_and_a_broadcast_are_free_of_conflicts() -> None:
    row = memory.AccessPattern("row", tuple((0, lane) for lane in range(32)), 4, 4)
    assert memory.wavefronts(row, 64, 0) == 1
    broadcast = memory.AccessPattern("broadcast", ((3, 5),) * 32, 4, 4)
    assert memory.wavefronts(broadcast, 64, 0) == 1


def test_float16_sums_lose_more_with_more_tiles_and_float32_sums_do_not() -> None:
    short = walk_symptoms.small_errors(seqlen_k=64)
    long = walk_symptoms.small_errors(seqlen_k=1024)
    assert long.seen > 4 * long.after
    assert long.seen - long.after > short.seen - short.after
    errors = dict(zip(long.shown[0].columns, long.shown[0].values, strict=True))
    assert errors["float32 sums"] < 1.1 * errors["rounding of O alone"]


def test_tile_bytes_and_limits() -> None:
    assert memory.TileChoice(64, 64, 64, 1, keeps_scores=True).shared_kib == 40
    assert memory.TileChoice(64, 64, 64, 2, keeps_scores=True).shared_kib == 56
    assert memory.LARGE_TILE.shared_kib == 224
    row = walk_symptoms.launch_failure()
    fits = dict(zip(row.shown[0].rows, row.shown[0].values, strict=True))
    assert fits[memory.LARGE_TILE.label] == (224, 0, 0, 0, 1)
    assert fits[memory.FITTING_TILE.label] == (160, 0, 0, 1, 1)
    assert list(memory.BLOCK_LIMITS_KIB.values()) == [48, 99, 163, 227]


def test_a_symptom_that_does_not_appear_or_is_not_cured_is_not_ok() -> None:
    row = walk_symptoms.launch_failure()
    assert not dataclasses.replace(row, seen=row.limit).ok
    assert not dataclasses.replace(row, after=row.limit + 1).ok
    assert dataclasses.replace(row, seen=math.nan).ok
    assert not dataclasses.replace(row, after=math.nan).ok
