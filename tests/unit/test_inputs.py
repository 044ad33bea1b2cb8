"""Inputs of the dig: seeds, files and their faults, and the difficult ones."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from flashdig.generations import inputs
from flashdig.generations.inputs import QKV, InputError, MissingExtraError, from_safetensors
from flashdig.problem import AttentionProblem

PROBLEM = AttentionProblem(
    batch=2,
    num_heads=4,
    num_heads_kv=2,
    seqlen_q=5,
    seqlen_k=7,
    head_dim=8,
    head_dim_v=6,
    dtype="float16",
)


def sized(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def good_tensors() -> dict[str, torch.Tensor]:
    return {"q": sized(2, 4, 5, 8), "k": sized(2, 2, 7, 8), "v": sized(2, 2, 7, 6)}


def saved(folder: Path, **changes: torch.Tensor | None) -> Path:
    tensors = {name: x for name, x in {**good_tensors(), **changes}.items() if x is not None}
    path = folder / "inputs.safetensors"
    save_file(tensors, path)
    return path


def attention(x: QKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and output in float64."""
    group = x.q.shape[1] // x.k.shape[1]
    q, k, v = x.q.double(), *(t.double().repeat_interleave(group, 1) for t in (x.k, x.v))
    probs = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
    return probs, probs @ v


@pytest.mark.parametrize(
    "make", [inputs.random_qkv, *inputs.PATHOLOGICAL.values()], ids=["random", *inputs.PATHOLOGICAL]
)
def test_every_source_makes_the_problem_asked_for(make: Any) -> None:
    x = make(PROBLEM, "cpu")
    assert x.problem() == PROBLEM
    assert all(t.is_contiguous() and t.isfinite().all() for t in (x.q, x.k, x.v))
    assert x.source
    empty = make(PROBLEM.replace(seqlen_k=0), "cpu")
    assert empty.k.shape == (2, 2, 0, 8)


def test_random_follows_the_seed_and_looks_normal() -> None:
    problem = AttentionProblem.dense(2, 4, 64, 32, "float32")
    first, again, other = (inputs.random_qkv(problem, "cpu", seed) for seed in (1, 1, 2))
    assert torch.equal(first.q, again.q)
    assert not torch.equal(first.q, other.q)
    assert not torch.equal(first.k, first.v)
    assert float(first.q.mean()) == pytest.approx(0, abs=0.05)
    assert float(first.q.std()) == pytest.approx(1, abs=0.05)


def test_causal_reaches_the_problem() -> None:
    x = inputs.random_qkv(PROBLEM, "cpu")
    assert x.problem(causal=True).causal
    assert x.problem(causal="top-left").mask.alignment == "top-left"


def test_constant_gives_its_constant() -> None:
    probs, out = attention(inputs.constant(PROBLEM))
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / 7))
    torch.testing.assert_close(out, torch.full_like(out, 0.5))


def test_rising_scores_rise_from_key_to_key_to_20() -> None:
    problem = PROBLEM.replace(dtype="float32", seqlen_k=100)
    x = inputs.rising(problem)
    scores = x.q[:, :2] @ x.k.mT * problem.softmax_scale
    assert bool((scores.diff(dim=-1) > 0).all())
    assert float(scores.min()) == 0
    assert float(scores.max()) == pytest.approx(20, rel=1e-5)
    assert (float(x.v.min()), float(x.v.max())) == (-1, 1)


def test_one_huge_key_takes_a_row_whole_or_not_at_all() -> None:
    problem = AttentionProblem.dense(1, 2, 64, 32, "float32")
    probs, _ = attention(inputs.one_huge_key(problem, "cpu", 3))
    share = probs[..., 32]
    decided = (share > 0.999) | (share < 0.001)
    # its scores have a standard deviation of 50: about one row in eight lies within reach of others
    assert float(decided.double().mean()) > 0.75
    assert bool((share > 0.999).any())
    assert bool((share < 0.001).any())


def test_file_round_trip(tmp_path: Path) -> None:
    x = from_safetensors(saved(tmp_path))
    for name, expected in good_tensors().items():
        assert torch.equal(getattr(x, name), expected)
    assert x.problem() == PROBLEM.replace(dtype="float32")
    assert "inputs.safetensors" in x.source


@pytest.mark.parametrize("name", list(inputs.DTYPES))
def test_file_dtype_kept_or_converted(tmp_path: Path, name: str) -> None:
    dtype = inputs.torch_dtype(name)
    path = saved(tmp_path, **{key: x.to(dtype) for key, x in good_tensors().items()})
    assert from_safetensors(path).problem().dtype == name
    assert from_safetensors(saved(tmp_path), dtype=name).problem().dtype == name


def test_three_dimensions_are_one_batch(tmp_path: Path) -> None:
    path = saved(tmp_path, q=sized(4, 5, 8), k=sized(2, 7, 8), v=sized(2, 7, 6))
    assert from_safetensors(path).problem() == PROBLEM.replace(batch=1, dtype="float32")


def non_finite(value: float) -> torch.Tensor:
    tensor = sized(2, 2, 7, 8)
    tensor[0, 0, :3, 0] = value
    return tensor


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": None}, "no tensor named q; it must hold q, k and v, and holds k, v"),
        ({"k": None, "v": None, "key": sized(1)}, "no tensor named k, v; .* holds key, q"),
        ({"q": sized(5, 8)}, r"q must be \(batch, heads, seqlen, head_dim\) or .* got shape"),
        ({"q": sized(4, 5, 8)}, "same number of dimensions, got q"),
        ({"q": sized(3, 4, 5, 8)}, r"same batch, got q \(3, 4, 5, 8\), k \(2, 2, 7, 8\)"),
        ({"v": sized(2, 2, 6, 6)}, "k and v must have the same heads and seqlen"),
        ({"v": sized(2, 4, 7, 6)}, "k and v must have the same heads and seqlen"),
        ({"q": sized(2, 4, 5, 16)}, "q and k must have the same head_dim"),
        ({"q": sized(2, 3, 5, 8)}, "heads of q must be a multiple"),
        ({"k": torch.zeros(2, 2, 0, 8), "v": torch.zeros(2, 2, 0, 6)}, "k has a dimension of size"),
        ({"q": sized(2, 4, 5, 8).int()}, "q is int32; allowed are float16, bfloat16"),
        ({"v": sized(2, 2, 7, 6).half()}, "one dtype, got q float32, k float32, v float16"),
        ({"k": non_finite(float("nan"))}, "k holds 3 values of 224 that are NaN or infinite"),
        ({"k": non_finite(float("-inf"))}, "k holds 3 values of 224"),
    ],
)
def test_faults_of_a_file_are_named(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    path = saved(tmp_path, **changes)
    with pytest.raises(InputError, match=message) as caught:
        from_safetensors(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_mixed_dtypes_are_fine_when_one_is_asked_for(tmp_path: Path) -> None:
    path = saved(tmp_path, v=sized(2, 2, 7, 6, dtype=torch.float16))
    assert from_safetensors(path, dtype="bfloat16").problem().dtype == "bfloat16"


def test_values_beyond_the_asked_dtype_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, k=non_finite(1e5))
    with pytest.raises(InputError, match=r"k holds 3 values .* beyond the range of float16"):
        from_safetensors(path, dtype="float16")
    assert from_safetensors(path, dtype="bfloat16").problem().dtype == "bfloat16"


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"absent\.safetensors: no such file"):
        from_safetensors(tmp_path / "absent.safetensors")
    with pytest.raises(InputError, match="not a file"):
        from_safetensors(tmp_path)
    for content in (b"", b"not a header", b"\xff" * 64):
        path = tmp_path / "bad.safetensors"
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.safetensors: cannot be read as safetensors"):
            from_safetensors(path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        from_safetensors(path)


def test_unknown_dtype_is_refused_before_the_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'float8'"):
        from_safetensors(tmp_path / "absent", dtype="float8")


def test_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    path = saved(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"safetensors .*pip install flashdig\[real\]"):
        from_safetensors(path)


def test_qkv_refuses_what_does_not_fit_and_copies_strided_tensors() -> None:
    q, k, v = good_tensors().values()
    with pytest.raises(ValueError, match=r"must be \(batch, heads, seqlen, head_dim\)"):
        QKV(q[0], k, v, "test")
    with pytest.raises(ValueError, match="one dtype"):
        QKV(q, k.half(), v, "test")
    strided = QKV(sized(2, 5, 4, 8).transpose(1, 2), k, v, "test")
    assert strided.q.is_contiguous()
    assert strided.to(dtype="float64").problem().dtype == "float64"
