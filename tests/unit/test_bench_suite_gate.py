"""The gate for cells: float64 with any feature, forward and backward, in any chunking; and that it
refuses what is wrong."""

import dataclasses

import pytest
import torch

from flashdig.bench import exact
from flashdig.bench.cell_gate import cell_reference, compared_pairs
from flashdig.bench.cell_inputs import make_inputs
from flashdig.bench.cells import Cell
from flashdig.kernels.reference import reference_attention, reference_attention_varlen

BASE = {
    "batch": 2, "num_heads": 4, "num_heads_kv": 2, "seqlen_q": 35, "seqlen_k": 47, "head_dim": 16,
    "head_dim_v": 8, "dtype": "float64",
}  # fmt: skip
FEATURES = {
    "plain": {},
    "causal": {"causal": True},
    "more queries than keys": {"causal": True, "seqlen_q": 47, "seqlen_k": 35},
    "top-left": {"causal": "top-left"},
    "window": {"window": (10, 5)},
    "causal window": {"causal": True, "window": (10, 0)},
    "softcap and ALiBi": {"softcap": 3.0, "alibi": True},
    "float bias": {"bias": "float"},
    "bool bias": {"bias": "bool", "causal": True},
    "sinks": {"sinks": True},
    "packed": {"batch": 4, "seqlen_q": 30, "seqlen_k": 30, "lengths": (11, 1, 30, 19),
               "causal": True},
}  # fmt: skip


def oracle(inputs, **options):
    """(out, dq, dk, dv) of the eager reference in the inputs' layout, by name."""
    cell = inputs.cell
    options |= {"causal": cell.causal, "window": cell.window, "softcap": cell.softcap,
                "alibi_slopes": inputs.alibi_slopes, "sinks": inputs.sinks}  # fmt: skip
    leaves = [x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    if cell.packed:
        cu_seqlens = inputs.cu_seqlens
        out, _ = reference_attention_varlen(*leaves, cu_seqlens, cu_seqlens, **options)
    else:
        out, _ = reference_attention(*leaves, bias=inputs.bias, **options)
    out = out.to(inputs.q.dtype)
    gradients = torch.autograd.grad(out, leaves, inputs.dout)
    return {"out": out.detach(), **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}


@pytest.mark.parametrize("rows_at_once", ["all", "few"])
@pytest.mark.parametrize("name", FEATURES)
def test_float64_agrees_with_the_oracle(name, rows_at_once, monkeypatch) -> None:
    if rows_at_once == "few":
        monkeypatch.setattr(exact, "CHUNK_SCORES_CPU", 600)
    inputs = make_inputs(Cell(**{**BASE, **FEATURES[name]}), "cpu", 0, backward=True)
    verdict = cell_reference(inputs).check(oracle(inputs))
    assert verdict.ok, verdict.reason
    assert verdict.error < 1e-13


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_right_results_in_the_cells_dtype_pass(dtype) -> None:
    cell = Cell(**{**BASE, "dtype": dtype, "causal": True, "softcap": 5.0})
    inputs = make_inputs(cell, "cpu", 0, backward=True)
    reference = cell_reference(inputs)
    right = oracle(inputs, precision=torch.float32)
    assert reference.check({"out": right.pop("out")}).reason == "ok"
    assert reference.check(right).reason == "ok"
    # the allowance is of the dtype's size, not of another's
    unit = torch.finfo(getattr(torch, dtype)).eps
    assert all(0.05 * unit < error < 8 * unit for error in reference.eager_errors.values())


def spoiled(name: str, x: torch.Tensor) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    if name == "NaN":
        x.flatten()[5] = float("nan")
    elif name == "scaled":
        x *= 1.05
    elif name == "last row":
        x[:, -1] = 0
    elif name == "heads exchanged":
        x = x.flip(2)
    return x


@pytest.mark.parametrize("how", ["NaN", "scaled", "last row", "heads exchanged"])
@pytest.mark.parametrize("of", ["out", "dq", "dk", "dv"])
def test_wrong_results_fail_and_the_tensor_is_named(how, of) -> None:
    inputs = make_inputs(Cell(**{**BASE, "dtype": "bfloat16"}), "cpu", 0, backward=True)
    right = oracle(inputs, precision=torch.float32)
    verdict = cell_reference(inputs).check({of: spoiled(how, right[of])})
    assert not verdict.ok
    assert of in verdict.reason


def test_shape_and_dtype_are_checked_first() -> None:
    inputs = make_inputs(Cell(**BASE), "cpu", 0, backward=True)
    reference = cell_reference(inputs)
    right = oracle(inputs)
    assert "shape" in reference.check({"out": right["out"].transpose(1, 2)}).reason
    assert "torch.float32" in reference.check({"dk": right["dk"].float()}).reason


def test_without_a_backward_only_the_output_is_computed() -> None:
    inputs = make_inputs(Cell(**BASE), "cpu", 0, backward=False)
    assert inputs.dout is None
    assert set(cell_reference(inputs).pairs[0].values) == {"out"}


def test_same_seed_same_inputs() -> None:
    cell = Cell(**BASE)
    a, b, c = (make_inputs(cell, "cpu", seed, backward=True) for seed in (1, 1, 2))
    assert torch.equal(a.q, b.q)
    assert not torch.equal(a.q, c.q)


DROPOUT = {**BASE, "dtype": "float32", "seqlen_q": 96, "seqlen_k": 96, "head_dim_v": 16}


@pytest.mark.parametrize("features", [{}, {"causal": True}, {"softcap": 2.0}])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5])
def test_dropout_passes_whatever_mask_was_drawn(features, dropout_p) -> None:
    inputs = make_inputs(Cell(**DROPOUT, **features, dropout_p=dropout_p), "cpu", 0, backward=True)
    reference = cell_reference(inputs)
    for seed in range(3):
        found = oracle(inputs, dropout_p=dropout_p, dropout_seed=seed, precision=torch.float32)
        verdict = reference.check(found)
        assert verdict.ok, verdict.reason


def test_dropout_with_the_wrong_probability_or_scale_fails() -> None:
    inputs = make_inputs(Cell(**DROPOUT, dropout_p=0.2), "cpu", 0, backward=True)
    reference = cell_reference(inputs)
    right = oracle(inputs, dropout_p=0.2, precision=torch.float32)
    for name, x in right.items():
        # kept values not scaled by 1 / (1 - p)
        assert "times its mean" in reference.check({name: 0.8 * x}).reason
    none = oracle(inputs, precision=torch.float32)
    twice = oracle(inputs, dropout_p=0.4, precision=torch.float32)
    for name in right:
        assert "varies" in reference.check({name: none[name]}).reason
        assert "varies" in reference.check({name: twice[name]}).reason


def test_variances_are_those_of_many_masks() -> None:
    cell = Cell(1, 2, 1, 12, 12, 4, 4, dtype="float64", causal=True, softcap=1.5, dropout_p=0.3)
    inputs = make_inputs(cell, "cpu", 0, backward=True)
    (pair,) = cell_reference(inputs).pairs
    draws: dict[str, list[torch.Tensor]] = {name: [] for name in pair.values}
    for seed in range(600):
        found = oracle(inputs, dropout_p=0.3, dropout_seed=seed)
        for name, x in found.items():
            of_keys = name in ("dk", "dv")
            draws[name].append(x[0][:, 0] if of_keys else x[0].transpose(0, 1))
    for name, values in draws.items():
        stacked = torch.stack(values)
        mean, variance = pair.values[name][0], pair.variances[name][0]
        deviation = (stacked.mean(0) - mean) / (variance / 600).sqrt().clamp(min=1e-9)
        assert deviation.abs().max() < 6, name
        assert stacked.var(0).sum() == pytest.approx(float(variance.sum()), rel=0.1), name


def test_which_pairs_are_compared() -> None:
    small = Cell(**BASE)
    assert compared_pairs(small) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    large = dataclasses.replace(small, batch=64, num_heads=8, num_heads_kv=8, seqlen_q=4096,
                                seqlen_k=4096)  # fmt: skip
    chosen = compared_pairs(large)
    assert len(chosen) == 4
    assert chosen[0] == (0, 0)
    assert chosen[-1] == (63, 7)
    lengths = (5,) * 40 + (900,) + (5,) * 40
    packed = dataclasses.replace(small, batch=81, seqlen_q=900, seqlen_k=900, lengths=lengths)
    assert 40 in {sequence for sequence, _ in compared_pairs(packed)}
