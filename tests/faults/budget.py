"""The accuracy that is allowed: what eager attention in the same dtype loses, times a factor.

Outputs may have twice its largest error against float64, gradients three times, plus 1e-5.
"""

import math

import torch

from flashdig.bench.gate import (
    ERROR_FACTOR,
    ERROR_FLOOR,
    LSE_TOLERANCE,
    OVERFLOW_ALLOWANCE,
    _matmul_rounded,
)
from flashdig.kernels.reference import reference_attention
from flashdig.problem import Mask

GRADIENT_FACTOR = 3.0


def eager_rounded(
    q,
    k,
    v,
    *,
    causal=False,
    window=None,
    softmax_scale=None,
    softcap=0.0,
    bias=None,
    alibi_slopes=None,
    sinks=None,
):
    """(out, lse) as anyone writes it in PyTorch: every intermediate is rounded to the dtype."""
    mask = Mask.from_arguments(causal, window)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group_size = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group_size, 1), v.repeat_interleave(group_size, 1)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    scores = _matmul_rounded(q, k.transpose(-1, -2)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    offset = mask.offset(q.shape[2], k.shape[2])
    rows = torch.arange(q.shape[2], device=q.device)[:, None] + offset
    distance = torch.arange(k.shape[2], device=q.device) - rows
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if mask.window_left is not None:
        hidden |= distance < -mask.window_left
    if mask.window_right is not None:
        hidden |= distance > mask.window_right
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        scores = scores + bias.to(scores.dtype)
    if alibi_slopes is not None:
        slopes = alibi_slopes.expand(q.shape[0], q.shape[1])[..., None, None]
        scores = scores - (slopes * distance.abs()).to(scores.dtype)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    lse = torch.logsumexp(scores.float(), dim=-1)
    dead = torch.isneginf(scores).all(dim=-1, keepdim=True)
    # a softmax over no key is 0/0
    probs = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    probs = probs if sinks is None else probs[..., :-1]
    return _matmul_rounded(probs, v).transpose(1, 2), lse


def assert_within_budget(attend, q, k, v, *, deterministic=False, **options):
    """out, lse and the gradients of a random function of both against the float64 oracle.

    The function weighs the LSE of rows that see no key too: they must add nothing.
    """
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    tensors = {n: x for n, x in options.items() if n in ("bias", "sinks") and x is not None}
    taking = [n for n, x in tensors.items() if x.dtype != torch.bool]
    ours = {**options, **{n: tensors[n].detach().requires_grad_() for n in taking}}
    exact_options = {**options, **{n: _double(tensors[n]) for n in taking}}
    exact_inputs = [_double(x) for x in inputs]

    out, lse = attend(*inputs, **ours, deterministic=deterministic, return_lse=True)
    exact, exact_lse = reference_attention(*exact_inputs, **exact_options)
    eager, eager_lse = eager_rounded(*inputs, **ours)

    assert out.dtype == q.dtype
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    assert out.shape == exact.shape
    assert lse.shape == exact_lse.shape
    assert torch.equal(lse.isneginf(), exact_lse.isneginf())
    if "sinks" not in options:
        assert not out[lse.isneginf().transpose(1, 2)].any()
    sees = ~exact_lse.isneginf()
    # only float32 may be computed in TF32, as torch's setting says
    eager_sees = eager_lse[sees] if q.dtype == torch.float32 else None
    assert_lse_error(lse[sees], exact_lse[sees], eager_sees)
    assert_error(out, exact, eager, ERROR_FACTOR, "out")

    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(out.shape, generator=generator).to(out)
    row_weights = torch.randn(lse.shape, generator=generator).to(lse)
    names = ["q", "k", "v", *taking]
    found = torch.autograd.grad(
        (out, lse), [*inputs, *(ours[n] for n in taking)], (weights, row_weights)
    )
    wanted = torch.autograd.grad(
        (exact, exact_lse),
        [*exact_inputs, *(exact_options[n] for n in taking)],
        (weights.double(), row_weights.double()),
    )
    # the eager LSE of a row without keys has no gradient
    naive = torch.autograd.grad(
        (eager, eager_lse),
        [*inputs, *(ours[n] for n in taking)],
        (weights, row_weights.masked_fill(~sees, 0.0)),
    )
    for name, got, want, rounded in zip(names, found, wanted, naive, strict=True):
        assert_error(got, want, rounded, GRADIENT_FACTOR, f"gradient of {name}")
    return out, lse, found


def assert_error(got, exact, naive, factor, what):
    """Largest error of `got` against `exact` within `factor` times that of `naive`."""
    if exact.numel() == 0:
        return
    got, exact, naive = (x.detach().double() for x in (got, exact, naive))
    error = float((got - exact).abs().max())
    allowed = factor * float((naive - exact).abs().max()) + ERROR_FLOOR
    if not math.isfinite(allowed):
        allowed = OVERFLOW_ALLOWANCE * float(exact.abs().max())
    assert error <= allowed, f"{what}: error {error:.3g} is above the allowed {allowed:.3g}"


def assert_lse_error(lse, exact, eager=None):
    """Within 1e-4 * (1 + |lse|), plus twice the error of `eager` where it is given."""
    if exact.numel() == 0:
        return
    lse, exact = lse.detach().double(), exact.detach()
    allowed = LSE_TOLERANCE * (1 + exact.abs())
    if eager is not None:
        allowed = allowed + ERROR_FACTOR * (eager.detach().double() - exact).abs().max()
    error = (lse - exact).abs()
    assert (error <= allowed).all(), f"lse: error {float(error.max()):.3g}"


def _double(x):
    return x.detach().double().requires_grad_()
