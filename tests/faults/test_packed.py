"""Packed sequences: empty ones, slack rows, rows without keys, NaN between and behind them."""

import math

import pytest
import torch

from flashdig.kernels.reference import reference_attention_varlen
from tests.faults.budget import assert_error, eager_rounded
from tests.faults.targets import offsets, only_cuda, packed, poisoned, randn, spread

BF16 = torch.bfloat16


def eager_packed(q, k, v, cu_q, cu_k, **options):
    """`eager_rounded` sequence by sequence; rows outside every sequence are 0, their lse -inf."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float32)
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        out_b, lse_b = eager_rounded(q[None, rows], k[None, keys], v[None, keys], **options)
        index = torch.arange(rows.start, rows.stop, device=q.device)
        out = out.index_copy(0, index, out_b[0])
        lse = lse.index_copy(1, index, lse_b[0])
    return out, lse


def assert_packed_within_budget(attend_packed, inputs, cu_q, cu_k, *, lengths=(), **options):
    """out, lse and gradients of a random function of both against float64; returns them."""
    out, lse = attend_packed(*inputs, cu_q, cu_k, *lengths, **options, return_lse=True)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact, exact_lse = reference_attention_varlen(*exact_inputs, cu_q, cu_k, **options)
    eager, _ = eager_packed(*inputs, cu_q, cu_k, **options)
    assert out.shape == exact.shape
    assert lse.shape == exact_lse.shape
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    assert not out[lse.isneginf().T].any()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
    assert_error(out, exact, eager, 2.0, "out")
    upstream = randn(out.device, out.dtype, *out.shape, seed=11)
    row_upstream = randn(out.device, lse.dtype, *lse.shape, seed=12)
    found = torch.autograd.grad((out, lse), inputs, (upstream, row_upstream))
    wanted = torch.autograd.grad(
        (exact, exact_lse), exact_inputs, (upstream.double(), row_upstream.double())
    )
    # eager attention's loss has no gradient through the lse: it only sets the allowance
    naive = torch.autograd.grad(eager, inputs, upstream)
    without_lse = torch.autograd.grad(
        reference_attention_varlen(*exact_inputs, cu_q, cu_k, **options)[0],
        exact_inputs,
        upstream.double(),
    )
    for name, got, want, rounded, base in zip(
        "qkv", found, wanted, naive, without_lse, strict=True
    ):
        assert_error(got, want, want + (rounded - base), 3.0, f"gradient of {name}")
    return out, lse, found


@pytest.mark.parametrize(
    ("head_dim", "causal"), [(64, False), (64, True), (128, True), (256, True)]
)
def test_empty_sequences_in_a_batch(attend_packed, device, head_dim, causal) -> None:
    cu_q, cu_k = offsets(device, 0, 0, 5, 9, 9), offsets(device, 0, 7, 12, 16, 25)
    inputs = packed(device, BF16, 9, 25, 4, 1, head_dim)
    with poisoned(device):
        _, _, (_, dk, dv) = assert_packed_within_budget(
            attend_packed, inputs, cu_q, cu_k, causal=causal
        )
    for gradient in (dk, dv):
        assert not gradient[:7].any()
        assert not gradient[16:].any()
        assert gradient.isfinite().all()


def test_one_query_a_sequence_and_empty_ones(attend_packed, device) -> None:
    cu_q, cu_k = offsets(device, 0, 0, 1, 1, 2), offsets(device, 0, 0, 3, 3, 8)
    inputs = packed(device, BF16, 2, 8, 9, 3, 64)
    assert_packed_within_budget(attend_packed, inputs, cu_q, cu_k, lengths=(1, 5))


def test_a_batch_of_empty_sequences(attend_packed, device) -> None:
    inputs = packed(device, BF16, 0, 0, 2, 2, 64)
    cu = offsets(device, 0, 0, 0)
    out, lse = attend_packed(*inputs, cu, cu, return_lse=True)
    assert out.shape == (0, 2, 64)
    assert lse.shape == (2, 0)
    for gradient in torch.autograd.grad(out.sum(), inputs):
        assert gradient.shape == (0, 2, 64)


def test_rows_behind_the_last_sequence(attend_packed, device) -> None:
    """Two slack rows: zero in every result, and a projection's weight gradient stays finite."""
    lengths = (0, 144, 432, 944) if device == "cuda" else (0, 14, 43, 94)
    total = lengths[-1] + 2
    num_heads = 16 if device == "cuda" else 2
    cu = offsets(device, *lengths)
    x = randn(device, BF16, total, 32, seed=1)
    weight = randn(device, BF16, 3 * num_heads * 64, 32, seed=2, scale=0.2).requires_grad_()

    def step(rows):
        with poisoned(device):
            q, k, v = (x[:rows] @ weight.T).view(rows, 3, num_heads, 64).unbind(1)
            for y in (q, k, v):
                y.retain_grad()
            out = attend_packed(q, k, v, cu, cu, causal=True, deterministic=True)
            (dw,) = torch.autograd.grad(out.float().square().sum(), weight, retain_graph=True)
            grads = torch.autograd.grad(out.float().square().sum(), (q, k, v))
        return dw, out, *grads

    dw, *slack = step(total)
    exact_dw, *exact = step(lengths[-1])
    assert dw.isfinite().all()
    torch.testing.assert_close(dw, exact_dw, atol=2e-2, rtol=2e-2)
    for a, b in zip(slack, exact, strict=True):
        assert torch.equal(a[:-2], b)
        assert not a[-2:].any()


def test_rows_that_see_no_key(attend_packed, device) -> None:
    cu_q, cu_k = offsets(device, 0, 4, 304), offsets(device, 0, 2, 19)
    inputs = packed(device, BF16, 304, 19, 1, 1, 64)
    with torch.no_grad():
        for x in inputs[:2]:
            x[: 4 if x is inputs[0] else 2] = 0
        inputs[2][0], inputs[2][1] = 1, 3
    out, lse, (dq, _, _) = assert_packed_within_budget(
        attend_packed, inputs, cu_q, cu_k, causal=True
    )
    first = out.detach()[:4, 0, 0].float().tolist()
    assert first == [0.0, 0.0, 1.0, 2.0]
    assert torch.isneginf(lse[0, :2]).all()
    torch.testing.assert_close(
        lse.detach()[0, 2:4], torch.tensor([0.0, math.log(2)], device=device), atol=1e-6, rtol=0
    )
    assert not dq[:2].any()
    assert torch.isneginf(lse[0, 4 : 304 - 17]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_between_and_behind_the_used_keys(attend_packed, device, value) -> None:
    """seqused ends sequences early; what lies behind never shows."""
    cu_q, cu_k = offsets(device, 0, 33, 70), offsets(device, 0, 60, 130)
    used_q, used_k = offsets(device, 30, 37), offsets(device, 41, 70)
    rows_unused = torch.zeros(75, dtype=torch.bool, device=device)
    rows_unused[30:33] = rows_unused[70:] = True
    keys_unused = torch.zeros(140, dtype=torch.bool, device=device)
    keys_unused[41:60] = keys_unused[130:] = True
    results = []
    for fill in (0.0, value):
        q, k, v = (x.detach() for x in packed(device, BF16, 75, 140, 4, 2, 64))
        inputs = [
            x.masked_fill(unused[:, None, None], fill).requires_grad_()
            for x, unused in ((q, rows_unused), (k, keys_unused), (v, keys_unused))
        ]
        with poisoned(device):
            out, lse = attend_packed(
                *inputs,
                cu_q,
                cu_k,
                seqused_q=used_q,
                seqused_k=used_k,
                causal=True,
                deterministic=True,
                return_lse=True,
            )
            upstream = (torch.ones_like(out), torch.ones_like(lse))
            grads = torch.autograd.grad((out, lse), inputs, upstream)
        results.append((out, lse, *grads))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(dirty, clean)
    out, lse, dq, dk, dv = results[1]
    assert torch.equal(lse.isneginf().all(0), rows_unused)
    for x in (out, dq):
        assert not x[rows_unused].any()
    for x in (dk, dv):
        assert not x[keys_unused].any()
    assert all(x.isfinite().all() for x in (out, dq, dk, dv))


def test_a_key_behind_the_used_length_never_beats_a_low_score(attend_packed, device) -> None:
    q, k, v = (torch.zeros(n, 1, 64, device=device, dtype=BF16) for n in (1, 2, 2))
    q[..., 0] = -200
    k[0, :, 0] = 100
    v[0], v[1] = 1, 100
    cu = offsets(device, 0, 1)
    out, lse = attend_packed(
        q,
        k,
        v,
        cu,
        offsets(device, 0, 2),
        seqused_k=offsets(device, 1),
        softmax_scale=1.0,
        return_lse=True,
    )
    assert torch.equal(out, torch.ones_like(out))
    assert abs(float(lse) + 20000) <= 0.004


def test_the_lse_is_heads_by_rows(attend_packed, attend, device) -> None:
    cu = offsets(device, 0, 3, 3, 10)
    q, k, v = (x.detach() for x in packed(device, BF16, 10, 10, 2, 2, 64))
    _, lse = attend_packed(q, k, v, cu, cu, return_lse=True)
    assert lse.shape == (2, 10)
    assert lse.dtype == torch.float32
    for rows in (slice(0, 3), slice(3, 10)):
        _, dense = attend(q[None, rows], k[None, rows], v[None, rows], return_lse=True)
        torch.testing.assert_close(lse[:, rows], dense[0], atol=1e-5, rtol=0)
    zero = torch.zeros_like(q)
    _, lse = attend_packed(zero, zero, v, cu, cu, return_lse=True)
    expected = torch.tensor([3.0] * 3 + [7.0] * 7, device=device).log().expand(2, 10)
    torch.testing.assert_close(lse, expected, atol=1e-6, rtol=0)


def test_softcap_window_and_shared_heads(attend_packed, device) -> None:
    cu = offsets(device, 0, 17, 147, 260)
    inputs = packed(device, BF16, 260, 260, 6, 2, 64)
    with torch.no_grad():
        inputs[0].mul_(40)
    assert_packed_within_budget(
        attend_packed, inputs, cu, cu, causal=True, window=(70, 0), softcap=15.0
    )


def test_alibi_measures_within_each_sequence(attend_packed, device) -> None:
    cu_q, cu_k = offsets(device, 0, 1, 3), offsets(device, 0, 4, 8)
    q, k, v = (torch.zeros(n, 1, 64, device=device) for n in (3, 8, 8))
    v += torch.arange(4, device=device).repeat(2)[:, None, None]
    slopes = torch.tensor([0.5], device=device)
    out = attend_packed(q, k, v, cu_q, cu_k, alibi_slopes=slopes)
    expected = torch.tensor([2.084576, 1.714926, 2.084576], device=device)
    torch.testing.assert_close(out[:, 0, 0], expected, atol=2e-6, rtol=0)


def test_packed_dropout_draws_what_dense_dropout_draws(attend_packed, attend, device) -> None:
    """And what the forward dropped, the backward drops: dv = out^T dout with v the identity."""
    batch, seqlen = 3, 64
    q = torch.zeros(batch, seqlen, 2, 64, device=device, dtype=BF16)
    v = torch.eye(64, device=device, dtype=BF16)[:, None].expand(batch, 64, 2, 64).contiguous()
    torch.manual_seed(2)
    dense = attend(q, q, v, dropout_p=0.25)
    cu = offsets(device, *range(0, batch * seqlen + 1, seqlen))
    q, v = q.flatten(0, 1), v.flatten(0, 1).requires_grad_()
    torch.manual_seed(2)
    out = attend_packed(q, q, v, cu, cu, dropout_p=0.25)
    assert torch.equal(out.unflatten(0, (batch, seqlen)) != 0, dense != 0)
    upstream = randn(device, BF16, *out.shape, seed=4)
    (dv,) = torch.autograd.grad(out, v, upstream)
    weights, rows = (x.double().unflatten(0, (batch, seqlen)) for x in (out, upstream))
    exact = torch.einsum("bihj,bihd->bjhd", weights, rows).flatten(0, 1)
    torch.testing.assert_close(dv.double(), exact, atol=2e-2, rtol=2e-2)


def test_gradients_of_mixed_lengths_are_the_same_bits(attend_packed, device) -> None:
    cu = offsets(device, 0, 17, 17, 147, 260)
    inputs = packed(device, BF16, 260, 260, 6, 2, 64)
    first = None
    for _ in range(3 if device == "cpu" else 30):
        out = attend_packed(*inputs, cu, cu, causal=True, deterministic=True)
        found = (out, *torch.autograd.grad(out, inputs, torch.ones_like(out)))
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


def test_row_strides_that_reach_beyond_int32(attend_packed, device) -> None:
    cu = offsets(device, 0, 17, 70)
    inputs = [x.detach() for x in packed(device, BF16, 70, 70, 4, 2, 64)]
    expected = attend_packed(*inputs, cu, cu, causal=True)
    for n in range(3):
        far = [spread(x, 0) if n == m else x for m, x in enumerate(inputs)]
        assert torch.equal(attend_packed(*far, cu, cu, causal=True), expected)


@only_cuda
def test_more_sequences_than_a_grid_dimension_holds(attend_packed, attend, device) -> None:
    """Every sequence has one query and 16 keys: a dense batch of decode steps."""
    batch = 70000
    inputs = packed(device, BF16, batch, 16 * batch, 1, 1, 64)
    cu_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
    with poisoned(device):
        out = attend_packed(*inputs, cu_q, 16 * cu_q, causal=True)
        found = torch.autograd.grad(out, inputs, torch.ones_like(out))
    dense = [x.detach().unflatten(0, (batch, -1)).requires_grad_() for x in inputs]
    dense_out = attend(*dense, causal=True)
    wanted = torch.autograd.grad(dense_out, dense, torch.ones_like(dense_out))
    for a, b in zip((out, *found), (dense_out, *wanted), strict=True):
        torch.testing.assert_close(a, b.flatten(0, 1), atol=2e-2, rtol=2e-2)
