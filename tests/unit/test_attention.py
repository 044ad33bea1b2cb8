"""flashdig.attention: arguments, backends, dtypes and autograd behaviour on CPU tensors."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdig
from flashdig import AttentionProblem, attention, run
from flashdig.dispatch import Request, choose, support
from flashdig.kernels.reference import reference_attention
from tests.attention_cases import CASES, build, gradients, taking_gradients


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_oracle(name, backend) -> None:
    q, k, v, options = build(name, torch.float32)
    options.pop("dropout_p", None)
    out, lse = attention(q, k, v, **options, return_lse=True, backend=backend)
    only_out = attention(q, k, v, **options, backend=backend)
    expected, expected_lse = reference_attention(q, k, v, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(only_out.double(), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=1e-5)
    inputs = taking_gradients(q, k, v, options)
    ours = gradients(out, lse, inputs)
    for a, b in zip(ours, gradients(expected, expected_lse, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_fused_cpu_attention_serves_plain_problems(dtype, causal) -> None:
    q, k, v = (torch.randn(2, 50, 3, 32).to(dtype).requires_grad_() for _ in range(3))
    assert names_without_reasons(q, causal)[0] == "fused_cpu"
    out = attention(q, k, v, causal=causal)
    assert out.dtype == dtype
    expected, _ = reference_attention(q, k, v, causal=causal)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    ours = torch.autograd.grad(out.float().pow(2).sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.pow(2).sum(), (q, k, v))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=10 * tolerance, rtol=10 * tolerance)


def names_without_reasons(q, causal):
    batch, seqlen, num_heads, head_dim = q.shape
    dtype = str(q.dtype).removeprefix("torch.")
    problem = AttentionProblem.dense(batch, num_heads, seqlen, head_dim, dtype, causal=causal)
    return [b.name for b, reasons in support(problem, Request("cpu")) if not reasons]


def test_an_explicit_backend_is_obeyed_or_refused_with_reasons() -> None:
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ValueError, match="no softcap") as error:
        attention(q, q, q, softcap=1.0, sinks=torch.zeros(2), backend="fused_cpu")
    assert "no sinks" in str(error.value)
    with pytest.raises(ValueError, match="backend must be 'auto' or one of 'fused_cpu'"):
        attention(q, q, q, backend="cudnn")
    problem = AttentionProblem.dense(1, 2, 8, 8, "float32")
    assert choose(problem, Request("cuda", (8, 0))).name == "triton"
    assert choose(problem, Request("cuda", (7, 5))).name == "tiled"
    assert choose(problem, Request("cpu", return_lse=True)).name == "tiled"


def tensor(*shape, dtype=torch.float32, **options):
    return torch.zeros(*shape, dtype=dtype, **options)


Q = (2, 5, 4, 8)
BAD = {
    "q": [({"q": tensor(5, 4, 8)}, ValueError), ({"q": [1]}, TypeError)],
    "k": [
        ({"k": tensor(2, 5, 3, 8)}, ValueError),
        ({"k": tensor(2, 5, 4, 7)}, ValueError),
        ({"k": tensor(1, 5, 4, 8)}, ValueError),
        ({"k": tensor(2, 5, 4, 8, device="meta")}, ValueError),
    ],
    "v": [
        ({"v": tensor(2, 6, 4, 8)}, ValueError),
        ({"v": tensor(2, 5, 2, 8)}, ValueError),
        ({"v": tensor(2, 5, 4, 8, dtype=torch.bfloat16)}, TypeError),
    ],
    "causal": [({"causal": "right"}, ValueError), ({"causal": 2}, ValueError)],
    "window": [({"window": (-5, 0)}, ValueError), ({"window": 4}, TypeError)],
    "softmax_scale": [
        ({"softmax_scale": float("nan")}, ValueError),
        ({"softmax_scale": tensor(1)}, TypeError),
    ],
    "softcap": [
        ({"softcap": -1.0}, ValueError),
        ({"softcap": float("inf")}, ValueError),
        ({"softcap": "5"}, TypeError),
    ],
    "dropout_p": [
        ({"dropout_p": -0.1}, ValueError),
        ({"dropout_p": 1.5}, ValueError),
        ({"dropout_p": float("nan")}, ValueError),
        ({"dropout_p": True}, TypeError),
        ({"dropout_p": None}, TypeError),
    ],
    "deterministic": [({"deterministic": "yes"}, TypeError)],
    "return_lse": [({"return_lse": None}, TypeError)],
    "backend": [({"backend": None}, ValueError)],
    "bias": [
        ({"bias": tensor(2, 4, 5)}, ValueError),
        ({"bias": tensor(2, 4, 5, 6)}, ValueError),
        ({"bias": tensor(2, 4, 5, 5, dtype=torch.int32)}, TypeError),
    ],
    "alibi_slopes": [
        ({"alibi_slopes": tensor(3)}, ValueError),
        ({"alibi_slopes": tensor(4, dtype=torch.float16)}, TypeError),
        ({"alibi_slopes": tensor(4, requires_grad=True)}, ValueError),
    ],
    "sinks": [({"sinks": tensor(2)}, ValueError), ({"sinks": tensor(4).int()}, TypeError)],
    "k_descale": [
        ({"k_descale": tensor(2, 3)}, ValueError),
        ({"k_descale": 2.0}, TypeError),
    ],
    "out_dtype": [
        ({"out_dtype": torch.int8}, ValueError),
        ({"out_dtype": torch.float8_e5m2}, ValueError),
    ],
}


@pytest.mark.parametrize(
    ("argument", "change", "error"),
    [(name, change, error) for name, cases in BAD.items() for change, error in cases],
)
def test_bad_arguments_are_named(argument, change, error) -> None:
    arguments = {"q": tensor(*Q), "k": tensor(*Q), "v": tensor(*Q), **change}
    with pytest.raises(error, match=rf"\b{argument}\b"):
        attention(**arguments)


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (4, 8), (4, 0)])
def test_indivisible_head_counts(heads) -> None:
    num_heads, num_heads_kv = heads
    kv = tensor(1, 5, num_heads_kv, 8)
    with pytest.raises(ValueError, match="heads"):
        attention(tensor(1, 5, num_heads, 8), kv, kv)


@pytest.mark.parametrize(
    "shape",
    [(0, 5, 5, 4, 4), (2, 0, 5, 4, 2), (2, 5, 0, 4, 2), (2, 5, 5, 0, 0), (2, 0, 0, 4, 4)],
)
def test_zero_size_dimensions(shape) -> None:
    batch, seqlen_q, seqlen_k, num_heads, num_heads_kv = shape
    q = torch.randn(batch, seqlen_q, num_heads, 8, requires_grad=True)
    k = torch.randn(batch, seqlen_k, num_heads_kv, 8, requires_grad=True)
    v = torch.randn(batch, seqlen_k, num_heads_kv, 16, requires_grad=True)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert out.shape == (batch, seqlen_q, num_heads, 16)
    assert lse.shape == (batch, num_heads, seqlen_q)
    assert not out.any()
    assert (lse == -torch.inf).all()
    for gradient in torch.autograd.grad(out.sum(), (q, k, v)):
        assert not gradient.any()


def test_gradients_of_every_subset_of_inputs() -> None:
    for wanted in itertools.product([False, True], repeat=3):
        q, k, v, _ = build("causal", grad=False)
        inputs = [x.clone().requires_grad_(w) for x, w in zip((q, k, v), wanted, strict=True)]
        out, lse = attention(*inputs, causal=True, return_lse=True)
        assert lse.shape == (1, 2, 130)
        if not any(wanted):
            assert not out.requires_grad
            continue
        out.sum().backward()
        for x, w in zip(inputs, wanted, strict=True):
            assert (x.grad is not None) == w


def test_lse_without_gradients_equals_the_training_value() -> None:
    q, k, v, _ = build("causal")
    _, lse = attention(q, k, v, causal=True, return_lse=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(attention(q, k, v, causal=True, return_lse=True)[1], lse)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: g.sum().expand_as(g) * 0 + 1,
        lambda g: torch.ones(()).expand_as(g),
        lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
        lambda g: torch.stack((g, g), -1)[..., 0],
        lambda g: g[:, :, :1].expand_as(g),
    ],
)
def test_any_strides_of_inputs_and_upstream_gradient(make) -> None:
    q, k, v, _ = build("plain", torch.float32)
    upstream = torch.randn(2, 33, 4, 16)
    out = attention(q, k, v)
    expected = torch.autograd.grad(out, (q, k, v), make(upstream).contiguous(), retain_graph=True)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), make(upstream)), expected, strict=True):
        assert torch.equal(a, b)
    strided = attention(make(q), k.transpose(1, 3).contiguous().transpose(1, 3), v)
    assert torch.equal(strided, attention(make(q).contiguous(), k, v))


def test_autocast_computes_in_its_dtype_and_gradients_keep_theirs() -> None:
    q, k = torch.randn(2, 1, 9, 2, 8, requires_grad=True).unbind()
    v = torch.randn(1, 9, 2, 8, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(TypeError, match=r"float32.*float32.*bfloat16"):
        attention(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v)
        with torch.autocast("cpu", enabled=False), pytest.raises(TypeError, match="dtype"):
            attention(q, k, v)
        doubles = (x.double() for x in (q, k, v))
        assert attention(*doubles).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    dq, dv = torch.autograd.grad(out.float().sum(), (q, v))
    assert (dq.dtype, dv.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("where", [torch.backends, torch.backends.cuda.matmul])
def test_tf32_follows_torchs_setting(where, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(run, "choose", lambda *given: seen.append(given[0]) or choose(*given))
    q = torch.zeros(1, 3, 1, 8)
    attention(q, q, q)
    before = where.fp32_precision
    where.fp32_precision = "tf32"
    try:
        attention(q, q, q)
        attention(q.half(), q.half(), q.half())
    finally:
        where.fp32_precision = before
    attention(q, q, q)
    assert [problem.allow_tf32 for problem in seen] == [False, True, False, False]


def test_dropout_follows_the_generator() -> None:
    q, k, v, _ = build("plain", torch.float32)
    torch.manual_seed(0)
    first, second = (attention(q, k, v, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(attention(q, k, v, dropout_p=0.5), first)
    assert not torch.equal(first, second)
    assert not attention(q, k, v, dropout_p=1.0).any()
    assert torch.equal(attention(q, k, v, dropout_p=0.0), attention(q, k, v))


def test_fp8_is_forward_only() -> None:
    q, k, v, _ = build("plain", torch.float32, grad=False)
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
    factor = torch.full((2, 2), 2.0)
    out = attention(q8, k8, v8, v_descale=factor)
    assert out.dtype == torch.bfloat16
    expected, _ = reference_attention(q8, k8, v8, v_descale=factor)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)
    assert attention(q8, k8, v8, out_dtype=torch.float32).dtype == torch.float32
    with pytest.raises(ValueError, match="q requires a gradient"):
        attention(q8.requires_grad_(), k8, v8)


def test_importing_needs_neither_triton_nor_torch() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; sys.modules['torch'] = None;"
        "import flashdig, flashdig.problem; print(flashdig.__version__)"
    )
    source = str(Path(flashdig.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.stderr == ""
    assert done.stdout.strip() == flashdig.__version__


def test_public_names_exist() -> None:
    for name in flashdig.__all__:
        assert getattr(flashdig, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = flashdig.no_such_name
