"""The ledger by tensor: its columns add up to the prediction's, and say what each rung re-reads."""

import dataclasses

import pytest

from flashdig.costs.ledger import TENSORS, ledger
from flashdig.costs.predict import predict
from flashdig.costs.schedules import SCHEDULES
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem

PROBLEMS = {
    "archaeology": AttentionProblem.dense(10, 64, 1024, 64, "float32"),
    "causal": AttentionProblem.dense(4, 16, 2048, 128, "bfloat16", causal=True),
    "grouped, uneven": AttentionProblem.dense(
        2, 8, 300, 64, "float16", num_heads_kv=2, seqlen_k=700, causal=True
    ),
    "values wider": dataclasses.replace(
        AttentionProblem.dense(2, 4, 512, 64, "float16"), head_dim_v=128
    ),
}
CASES = [
    (generation, name, device)
    for generation, schedule in SCHEDULES.items()
    for name, problem in PROBLEMS.items()
    for device in ("h200", "a100")
    if "forward" in schedule.directions
    and problem.dtype in schedule.dtypes
    and (not schedule.only or find_device(device).architecture in schedule.only)
]


@pytest.mark.parametrize(("generation", "name", "device"), CASES)
def test_the_columns_add_up_to_the_predictions(generation, name, device) -> None:
    chip = find_device(device)
    guess = predict(PROBLEMS[name], chip, generation)
    entries = ledger(guess, chip)
    assert list(entries) == [tensor for tensor in TENSORS if tensor in entries]
    for column, rounding in (("compulsory", 0), ("issued", 0), ("memory", len(entries))):
        whole = getattr(guess, column)
        for part in ("load_bytes", "store_bytes"):
            found = sum(getattr(getattr(entry, column), part) for entry in entries.values())
            assert abs(found - getattr(whole, part)) <= rounding, (column, part)


def test_v1_reads_q_and_o_again_for_each_of_32_tiles_of_keys() -> None:
    device = find_device("h200")
    entries = ledger(predict(PROBLEMS["archaeology"], device, "v1"), device)
    # the Triton article's 10.7 GB: Q and O, 167.8 MB each, 32 times
    assert entries["Q"].issued.load_bytes + entries["O"].issued.load_bytes == 10_737_418_240
    assert entries["K"].issued == entries["K"].compulsory
    assert entries["m"].issued.load_bytes == entries["l"].issued.load_bytes == 83_886_080
    assert "S" not in entries
    assert "P" not in entries


def test_v2_reads_k_and_v_again_and_the_cache_serves_them() -> None:
    device = find_device("h200")
    entries = ledger(predict(PROBLEMS["archaeology"], device, "v2"), device)
    for tensor in ("K", "V"):
        assert entries[tensor].issued.load_bytes == 32 * entries[tensor].compulsory.load_bytes
        assert entries[tensor].memory == entries[tensor].compulsory
    assert entries["Q"].issued == entries["Q"].compulsory
    assert entries["O"].issued == entries["O"].compulsory


def test_only_the_unfused_move_scores_and_weights() -> None:
    device = find_device("h200")
    size = 4 * 16 * 2048 * 2048 * 2
    entries = ledger(predict(PROBLEMS["causal"], device, "naive"), device)
    # scores: stored by the product, the scale, the copy, the mask; read by all but the first
    assert entries["S"].issued.store_bytes == 4 * size
    assert entries["S"].issued.load_bytes == 4 * size
    assert entries["P"].issued.store_bytes == entries["P"].issued.load_bytes == size
    assert entries["S"].compulsory.total_bytes == entries["P"].compulsory.total_bytes == 0
    inplace = ledger(predict(PROBLEMS["causal"], device, "inplace"), device)
    assert inplace["S"].issued.store_bytes == 3 * size
    online = ledger(predict(PROBLEMS["archaeology"], device, "online_softmax"), device)
    assert online["S"].issued.load_bytes == 2 * online["S"].issued.store_bytes


def test_a_backward_is_refused() -> None:
    device = find_device("h200")
    guess = predict(PROBLEMS["causal"], device, "v2", "backward")
    with pytest.raises(ValueError, match="guess must be of a forward, got 'backward'"):
        ledger(guess, device)
