"""Cells in fp8: quantised inputs, what the gate allows and refuses, what a suite may say."""

import pytest
import torch

import flashdig
from flashdig.bench.cell_gate import cell_reference
from flashdig.bench.cell_inputs import make_inputs
from flashdig.bench.cells import Cell
from flashdig.bench.fp8 import quantised
from flashdig.bench.peers import peer
from flashdig.bench.run_suite import Plan, run_suite
from flashdig.bench.suite import PEERS, Suite, SuiteError, suite_from

E4M3 = torch.float8_e4m3fn
DENSE = Cell(2, 4, 2, 150, 150, 32, 16, dtype="float8_e4m3fn", causal=True)
PACKED = Cell(3, 4, 2, 90, 90, 32, 16, dtype="float8_e4m3fn", lengths=(30, 1, 90))


def test_a_factor_for_each_sequence_and_kv_head_uses_the_whole_range() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 50, 6, 8) * torch.tensor([1.0, 30.0])[:, None, None, None]
    x[1, :, 4:] = 0.0
    values, descale = quantised(x, 3, E4M3)
    assert values.dtype == E4M3
    assert descale.shape == (2, 3)
    assert float(descale[1, 2]) == 1.0
    largest = values.float().abs().unflatten(2, (3, 2)).amax(dim=(1, 3, 4))
    assert largest.flatten()[:5].tolist() == [448.0] * 5
    back = values.float().unflatten(2, (3, 2)) * descale[:, None, :, None, None]
    # 3 bits of mantissa; subnormals end at 2^-9, of 448
    torch.testing.assert_close(back.flatten(2, 3), x, rtol=2**-4, atol=30 * 4 * 2**-10 / 448)


@pytest.mark.parametrize("cell", [DENSE, PACKED])
def test_each_sequence_of_a_cell_has_factors_of_its_own(cell) -> None:
    inputs = make_inputs(cell, "cpu", 0, backward=False)
    assert (inputs.q.dtype, inputs.out_dtype) == (E4M3, torch.bfloat16)
    assert set(inputs.descales) == {"q_descale", "k_descale", "v_descale"}
    assert all(x.shape == (cell.batch, 2) for x in inputs.descales.values())
    for name in ("q", "k", "v"):
        for number in range(cell.batch):
            rows = inputs.sequence(name, getattr(inputs, name), number).float()
            assert float(rows.abs().max()) == 448.0


@pytest.mark.parametrize("cell", [DENSE, PACKED])
def test_the_gate_takes_what_p_in_8_bits_costs_and_no_more(cell) -> None:
    inputs = make_inputs(cell, "cpu", 0, backward=False)
    reference = cell_reference(inputs)

    def out(**changes):
        options = {"causal": cell.causal, **inputs.descales, **changes}
        if cell.packed:
            return flashdig.attention_varlen(
                inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.cu_seqlens, **options
            )
        return flashdig.attention(inputs.q, inputs.k, inputs.v, **options)

    right = reference.check({"out": out()})
    assert right.ok, right.reason
    # rounding P to 3 bits of mantissa is most of what is allowed
    assert right.rms_error < 0.5 * right.budget
    assert 2**-7 < right.budget < 2**-2
    swapped = inputs.descales["v_descale"].flip(1)
    assert not reference.check({"out": out(v_descale=1.3 * swapped)}).ok
    assert not reference.check({"out": out(q_descale=None)}).ok
    assert "expected torch.bfloat16" in reference.check({"out": out().float()}).reason


def test_a_suite_in_fp8_runs_and_peers_without_factors_say_so() -> None:
    suite = Suite("fp8", "", (DENSE,), passes=("forward",), peers=PEERS, ours=("auto",), rounds=2,
                  target_ms=0.01)  # fmt: skip
    (result,) = run_suite(Plan(suite, suite.cells, suite.ours), "run", progress=lambda _: None)
    ours, *others = result.rows
    assert (ours["backend"], ours["gate"]) == ("tiled", "ok")
    assert 0 < ours["rms_error"] < ours["error"] < ours["allowed_error"]
    assert all(row["gate"].startswith("not run: ") for row in others)


def test_only_flash_attention_3_takes_e4m3(monkeypatch) -> None:
    monkeypatch.setattr("flashdig.bench.peers._import_problem", lambda module: None)
    taken = [name for name in PEERS if peer(name).reason_against(DENSE, "cuda") is None]
    assert taken == ["fa3"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"passes": ["backward"]}, "fp8 has no backward"),
        ({"passes": ["forward"], "bias": "float"}, "bias is not measured in fp8"),
        ({"passes": ["forward"], "dropout_p": 0.1}, "dropout_p is not measured in fp8"),
        ({"passes": ["forward"], "dtype": "float8_e5m2"}, "dtype must be one of"),
    ],
)
def test_what_a_suite_may_not_ask_of_fp8(changes, says) -> None:
    cell = {"batch": 1, "seqlen": 64, "num_heads": 2, "head_dim": 32, "dtype": "float8_e4m3fn"}
    with pytest.raises(SuiteError, match=says):
        suite_from("s", {"cell": [{**cell, **changes}]})
