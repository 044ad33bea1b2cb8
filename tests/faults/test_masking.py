"""Which keys a row sees: alignment, windows, ALiBi distances, rows without keys."""

import math

import pytest
import torch

from flashdig import attention
from tests.faults.budget import assert_within_budget
from tests.faults.targets import equal_scores, qkv, randn

INF = math.inf
LN2, LN3, LN4, LN5, LN7 = (math.log(n) for n in (2, 3, 4, 5, 7))


def close(found, expected, tolerance=2e-6):
    """Finite values within the tolerance, infinite ones exactly."""
    expected = torch.as_tensor(expected, dtype=torch.float64, device=found.device)
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=0)


def test_rows_that_see_no_key(attend, device) -> None:
    q, k, _ = equal_scores(device, torch.bfloat16, 4, 2)
    v = torch.ones_like(k)
    v[:, 1] = 3
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    expected = torch.tensor([0.0, 0.0, 1.0, 2.0], device=device, dtype=torch.bfloat16)
    assert torch.equal(out[0, :, 0], expected[:, None].expand(4, 64))
    assert torch.isneginf(lse[0, 0, :2]).all()
    close(lse[0, 0], [-INF, -INF, 0.0, LN2])
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert not dq[:, :2].any()
    assert torch.equal(dv[0, 0, 0], torch.full_like(dv[0, 0, 0], 1.5))
    assert torch.equal(dv[0, 1, 0], torch.full_like(dv[0, 1, 0], 0.5))
    assert all(x.isfinite().all() for x in (dq, dk, dv))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_many_rows_that_see_no_key(attend, device, head_dim) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 300, 17, 1, 1, head_dim)
    out, lse, (dq, _, _) = assert_within_budget(attend, *inputs, causal=True)
    assert not out[:, :283].any()
    assert torch.isneginf(lse[..., :283]).all()
    assert not dq[:, :283].any()


@pytest.mark.parametrize(
    ("lengths", "out_rows", "lse_rows"),
    [
        ((2, 5), [1.5, 2.0], [LN4, LN5]),
        ((5, 2), [0, 0, 0, 0, 0.5], [-INF, -INF, -INF, 0, LN2]),
        ((1, 7), [3.0], [LN7]),
    ],
)
def test_the_diagonal_ends_at_the_last_key(attend, device, lengths, out_rows, lse_rows) -> None:
    out, lse = attend(*equal_scores(device, torch.bfloat16, *lengths), causal=True, return_lse=True)
    close(out[0, :, 0, 0], out_rows)
    close(lse[0, 0], lse_rows)


def test_top_left_is_asked_for_by_name(attend, device) -> None:
    q, k, v = equal_scores(device, torch.bfloat16, 2, 5)
    out, lse = attend(q, k, v, causal="top-left", return_lse=True)
    close(out[0, :, 0, 0], [0.0, 0.5])
    close(lse[0, 0], [0.0, LN2])
    assert torch.equal(attend(q, k, v, causal="bottom-right"), attend(q, k, v, causal=True))


@pytest.mark.parametrize("lengths", [(37, 211), (129, 128), (1, 1000)])
def test_unequal_lengths_forward_and_backward(attend, device, lengths) -> None:
    inputs = qkv(device, torch.bfloat16, 1, *lengths, 2, 2, 64)
    assert_within_budget(attend, *inputs, causal=True)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_a_chunk_equals_the_last_rows_of_the_whole(attend, device, chunk) -> None:
    q, k, v = qkv(device, torch.float32, 1, 130, 130, 2, 1, 64, grad=False)
    out, lse = attend(q, k, v, causal=True, return_lse=True)
    chunk_out, chunk_lse = attend(q[:, -chunk:], k, v, causal=True, return_lse=True)
    torch.testing.assert_close(chunk_out, out[:, -chunk:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunk_lse, lse[..., -chunk:], atol=1e-5, rtol=1e-5)


WINDOW_OUT = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]
WINDOW_LSE = [0.0, LN2, LN3, LN3, LN3, LN3]


def test_a_window_of_two_sees_three_keys(attend, device) -> None:
    """The whole, in chunks of 2 + 4, and token by token against the keys so far."""
    options = {"causal": True, "window": (2, 0)}
    q, k, v = equal_scores(device, torch.bfloat16, 6, 6)
    pieces = [[(0, 6)], [(0, 2), (2, 6)], [(n, n + 1) for n in range(6)]]
    for spans in pieces:
        for first, end in spans:
            out, lse = attend(q[:, first:end], k[:, :end], v[:, :end], **options, return_lse=True)
            # the weights 1/3 are rounded to bfloat16 for the product with v
            close(out[0, :, 0, 0], WINDOW_OUT[first:end], tolerance=0.02)
            close(lse[0, 0], WINDOW_LSE[first:end])


@pytest.mark.parametrize("left", [0, 1, 63, 64, 65])
def test_windows_about_the_size_of_a_tile(attend, device, left) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 300, 300, 2, 1, 64)
    assert_within_budget(attend, *inputs, causal=True, window=(left, 0))


def test_a_window_with_two_sides(attend, device) -> None:
    inputs = qkv(device, torch.bfloat16, 1, 300, 300, 2, 1, 64)
    assert_within_budget(attend, *inputs, window=(127, 129))


def test_a_causal_window_opens_no_right_side(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 300, 300, 2, 1, 64, grad=False)
    closed = attend(q, k, v, causal=True, window=(65, 0))
    for right in (None, -1, 129):
        assert torch.equal(attend(q, k, v, causal=True, window=(65, right)), closed)


def test_a_row_that_sees_itself_alone_returns_its_value(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 300, 300, 2, 1, 64, grad=False)
    out = attend(q, k, v, causal=True, window=(0, 0))
    assert torch.equal(out, v.expand_as(out))


def test_keys_left_of_every_window_take_no_gradient(attend, device) -> None:
    q, k, v = qkv(device, torch.bfloat16, 1, 20, 300, 2, 1, 64)
    _, _, (_, dk, dv) = assert_within_budget(attend, q, k, v, causal=True, window=(16, 0))
    hidden = 300 - 20 - 16
    assert not dk[:, :hidden].any()
    assert not dv[:, :hidden].any()
    assert dk[:, hidden:].any(dim=-1).all()


def test_alibi_at_decode_measures_from_the_last_key(attend, device) -> None:
    slopes = torch.tensor([0.5], device=device)
    inputs = equal_scores(device, torch.float32, 1, 4)
    out, lse = attend(*inputs, causal=True, alibi_slopes=slopes, return_lse=True)
    close(out[0, 0, 0, 0], 2.084576)
    close(lse[0, 0, 0], 0.787339)
    inputs = equal_scores(device, torch.float32, 2, 4)
    out = attend(*inputs, alibi_slopes=slopes)
    close(out[0, :, 0, 0], [1.714926, 2.084576])


@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi_with_twelve_heads(attend, device, per_batch) -> None:
    slopes = randn(device, torch.float32, *((2, 12) if per_batch else (12,))).abs()
    inputs = qkv(device, torch.float32, 2, 17, 33, 12, 12, 64)
    assert_within_budget(attend, *inputs, causal=True, alibi_slopes=slopes)


def test_alibi_token_by_token_equals_the_whole(attend, device) -> None:
    slopes = randn(device, torch.float32, 12).abs()
    q, k, v = qkv(device, torch.float32, 2, 33, 33, 12, 12, 64, grad=False)
    options = {"causal": True, "alibi_slopes": slopes, "return_lse": True}
    out, lse = attend(q, k, v, **options)
    for n in range(33):
        step_out, step_lse = attend(q[:, n : n + 1], k[:, : n + 1], v[:, : n + 1], **options)
        torch.testing.assert_close(step_out[:, 0], out[:, n], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(step_lse[..., 0], lse[..., n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "slopes",
    [torch.ones(11), torch.ones(12, 2), torch.ones(1, 12), torch.ones(12, dtype=torch.float16)],
    ids=["heads", "transposed", "one batch", "dtype"],
)
def test_alibi_slopes_of_another_shape_or_dtype_are_refused(slopes) -> None:
    q, k, v = qkv("cpu", torch.float32, 2, 5, 5, 12, 12, 8)
    with pytest.raises((ValueError, TypeError), match="alibi_slopes"):
        attention(q, k, v, alibi_slopes=slopes)
