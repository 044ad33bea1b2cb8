"""From flat arguments to the tiled walk: dense input in one walk, packed input one sequence a time.

The two functions have the signature that every backend's launchers share, so that the operators in
`flashdig.ops.attention` can call any of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from flashdig.kernels.reference import of_sequence, rows_in_use, sequence_offsets
from flashdig.kernels.tiled import Terms, Tiles, walk_backward, walk_forward
from flashdig.problem import Mask

Gradients = tuple[torch.Tensor | None, ...]


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; shapes and semantics as in `flashdig.kernels.reference`.

    Args:
        dropout_seed: (1,) int64, needed when dropout_p > 0.
        cu_seqlens_q, cu_seqlens_k: None for dense input, else (batch + 1,) offsets of packed input,
            whose values are read (on a GPU: a synchronisation).
        window_left, window_right: -1 is unlimited.
        allow_tf32: unused; torch's own matmul setting decides.
        out_dtype: dtype of `out`; default that of q.

    Returns: contiguous out (batch, seqlen_q, num_heads, head_dim_v) or (total_q, ...), and lse
        (batch, num_heads, seqlen_q) or (num_heads, total_q), float32 (float64 for float64).
    """
    terms = _terms(
        softmax_scale, softcap, dropout_p, dropout_seed, window_left, window_right, top_left
    )
    out_dtype = out_dtype or q.dtype
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return _dense_forward(q, k, v, bias, alibi_slopes, sinks, terms, out_dtype)
    total_q, num_heads, _ = q.shape
    out = q.new_zeros((total_q, num_heads, v.shape[-1]), dtype=out_dtype)
    lse = q.new_full((num_heads, total_q), -math.inf, dtype=_statistics_dtype(q))
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for b, rows, keys in segments(lengths, total_q, k.shape[0]):
        out_b, lse_b = _dense_forward(
            q[None, rows],
            k[None, keys],
            v[None, keys],
            None,
            of_sequence(alibi_slopes, b),
            sinks,
            replace(terms, first_sequence=b),
            out_dtype,
        )
        out[rows], lse[:, rows] = out_b[0], lse_b[0]
    return out, lse


def attention_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    wanted: tuple[bool, bool, bool, bool, bool],
) -> Gradients:
    """dq, dk, dv, dbias and dsinks in the dtype and shape of their input, None where not wanted.

    Args:
        grad_out, grad_lse: gradients of the two results of `attention_forward`; None is zero.
        out, lse: those results.
        wanted: which of the five gradients to return.
    """
    terms = _terms(
        softmax_scale, softcap, dropout_p, dropout_seed, window_left, window_right, top_left
    )
    if cu_seqlens_q is None or cu_seqlens_k is None:
        gradients = _dense_backward(
            grad_out, grad_lse, q, k, v, bias, alibi_slopes, sinks, out, lse, terms, wanted[3]
        )
        return _as_inputs(gradients, (q, k, v, bias, sinks), wanted)
    dtype = _statistics_dtype(q)
    dq, dk, dv = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
    dsinks = q.new_zeros(q.shape[1], dtype=dtype)
    lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    for b, rows, keys in segments(lengths, q.shape[0], k.shape[0]):
        dq_b, dk_b, dv_b, _, dsinks_b = _dense_backward(
            None if grad_out is None else grad_out[None, rows],
            None if grad_lse is None else grad_lse[None, :, rows],
            q[None, rows],
            k[None, keys],
            v[None, keys],
            None,
            of_sequence(alibi_slopes, b),
            sinks,
            out[None, rows],
            lse[None, :, rows],
            replace(terms, first_sequence=b),
            False,
        )
        dq[rows], dk[keys], dv[keys] = dq_b[0], dk_b[0], dv_b[0]
        dsinks += dsinks_b
    return _as_inputs((dq, dk, dv, None, dsinks), (q, k, v, None, sinks), wanted)


def _terms(
    softmax_scale: float,
    softcap: float,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    window_left: int,
    window_right: int,
    top_left: bool,
) -> Terms:
    seed = 0 if dropout_seed is None or dropout_p == 0.0 else int(dropout_seed)
    return Terms(
        mask=Mask(
            None if window_left < 0 else window_left,
            None if window_right < 0 else window_right,
            "top-left" if top_left else "bottom-right",
        ),
        softmax_scale=softmax_scale,
        softcap=softcap,
        dropout_p=dropout_p,
        dropout_seed=seed,
    )


def _statistics_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def segments(
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    total_q: int,
    total_k: int,
) -> Iterator[tuple[int, slice, slice]]:
    """(sequence, its rows of q, its rows of k) for every sequence, empty ones included."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = lengths
    starts_q = sequence_offsets(cu_seqlens_q, total_q)
    starts_k = sequence_offsets(cu_seqlens_k, total_k)
    for b in range(len(starts_q) - 1):
        yield (
            b,
            rows_in_use(starts_q[b], starts_q[b + 1], seqused_q, b),
            rows_in_use(starts_k[b], starts_k[b + 1], seqused_k, b),
        )


def _dense_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    terms: Terms,
    out_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    tiles = Tiles(q, k, v, bias, alibi_slopes, terms)
    # autocast has cast the inputs; inside it would round the tiles' products too
    with torch.autocast(q.device.type, enabled=False):
        out, lse = walk_forward(tiles, sinks, v.shape[-1])
    return _contiguous(out.flatten(1, 2).transpose(1, 2).to(out_dtype)), lse.flatten(1, 2)


def _dense_backward(
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    terms: Terms,
    want_bias: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dq, dk, dv, dbias and dsinks in the dtype of the computation, laid out as the inputs."""
    tiles = Tiles(q, k, v, bias, alibi_slopes, terms)
    with torch.autocast(q.device.type, enabled=False):
        dq, dk, dv, dbias, dsinks = walk_backward(
            tiles,
            sinks,
            _grouped(out, tiles),
            lse.unflatten(1, tiles.heads),
            None if grad_out is None else _grouped(grad_out, tiles),
            None if grad_lse is None else grad_lse.unflatten(1, tiles.heads),
            bias if want_bias else None,
        )
    return (
        dq.flatten(1, 2).transpose(1, 2),
        dk.transpose(1, 2),
        dv.transpose(1, 2),
        dbias,
        dsinks,
    )


def _grouped(x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """(batch, seqlen, num_heads, n) -> (batch, num_heads_kv, group_size, seqlen, n)."""
    grouped: torch.Tensor = x.transpose(1, 2).unflatten(1, tiles.heads)
    return grouped


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    # whatever their strides, empty tensors count as contiguous
    return x.contiguous() if x.numel() else x.new_empty(x.shape)


def _as_inputs(
    gradients: Gradients, inputs: Gradients, wanted: tuple[bool, bool, bool, bool, bool]
) -> Gradients:
    return tuple(
        _contiguous(gradient.to(x.dtype))
        if want and gradient is not None and x is not None
        else None
        for gradient, x, want in zip(gradients, inputs, wanted, strict=True)
    )
