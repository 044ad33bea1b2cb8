"""The oracle: attention written out in full, in any dtype up to float64. It defines the semantics.

Every step is a plain torch operation, so gradients (of any order) come from autograd. Memory is
O(seqlen_q * seqlen_k): this is for comparing against, not for running models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flashdig.kernels.philox import keep_mask
from flashdig.problem import Causal, Mask

Window = tuple[int | None, int | None]


def reference_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: Window | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int = 0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    precision: torch.dtype = torch.float64,
    first_sequence: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of dense sequences, computed and returned in `precision`.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim).
        k: (batch, seqlen_k, num_heads_kv, head_dim).
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        causal: False, True or "bottom-right" (query i sees key j <= i + seqlen_k - seqlen_q), or
            "top-left" (j <= i).
        window: (left, right), inclusive around the same diagonal; None or -1 is unlimited.
        softmax_scale: default head_dim ** -0.5.
        softcap: c > 0 replaces each scaled score s by c * tanh(s / c).
        bias: (1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k); bool (True is visible) or
            float (added; -inf hides).
        alibi_slopes: float32 (num_heads,) or (batch, num_heads); subtracts slope * distance from
            the diagonal.
        sinks: (num_heads,) logits that join each row's softmax and carry no value.
        dropout_p, dropout_seed: see `flashdig.kernels.philox`.
        q_descale, k_descale, v_descale: (batch, num_heads_kv) factors of quantised inputs.
        first_sequence: index of the first batch entry in the dropout counter (packed input).

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v) and lse (batch, num_heads, seqlen_q), natural
        logarithm. Rows that see no key have out 0 and lse -inf, or the sink's logit.

    Keys and values that no query of their sequence and KV head sees, and queries that see no key,
    are replaced by zeros first: whatever they hold cannot show in a result or a gradient.
    """
    batch, seqlen_q, num_heads, head_dim = q.shape
    seqlen_k, num_heads_kv = k.shape[1], k.shape[2]
    group_size = num_heads // num_heads_kv if num_heads_kv else 1
    mask = Mask.from_arguments(causal, window)
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    # (batch, num_heads, seqlen_q, seqlen_k)
    distance = _distance_from_diagonal(mask, seqlen_q, seqlen_k, q.device)
    visible = _visible(mask, distance, bias).expand(batch, num_heads, seqlen_q, seqlen_k)
    row_alive = visible.any(dim=-1)
    key_seen = visible.unflatten(1, (num_heads_kv, group_size)).any(dim=3).any(dim=2)

    q = _descaled(q.to(precision), q_descale, group_size)
    k = _descaled(k.to(precision), k_descale, 1)
    v = _descaled(v.to(precision), v_descale, 1)
    q = torch.where(row_alive[..., None], q.transpose(1, 2), 0.0)
    k = torch.where(key_seen[..., None], k.transpose(1, 2), 0.0)
    v = torch.where(key_seen[..., None], v.transpose(1, 2), 0.0)
    k = k.repeat_interleave(group_size, dim=1)
    v = v.repeat_interleave(group_size, dim=1)

    scores = scale * (q @ k.transpose(-1, -2))
    if softcap > 0.0:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + torch.where(visible, bias.to(precision), 0.0)
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(precision).expand(batch, num_heads)
        scores = scores - slopes[..., None, None] * distance.abs()
    scores = torch.where(visible, scores, -math.inf)

    lse = _log_sum_exp(scores, sinks)
    finite_lse = torch.where(torch.isneginf(lse), 0.0, lse)
    probs = torch.where(visible, torch.exp(scores - finite_lse[..., None]), 0.0)
    if dropout_p > 0.0:
        keep = keep_mask(
            dropout_seed,
            dropout_p,
            torch.arange(first_sequence, first_sequence + batch, device=q.device),
            torch.arange(num_heads, device=q.device),
            torch.arange(seqlen_q, device=q.device),
            torch.arange(seqlen_k, device=q.device),
        )
        probs = probs * keep / (1.0 - dropout_p) if dropout_p < 1.0 else probs * 0.0
    out = torch.where(row_alive[..., None], probs @ v, 0.0)
    return out.transpose(1, 2), lse


def reference_attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    precision: torch.dtype = torch.float64,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences: each is one dense call on its own rows.

    Args:
        q: (total_q, num_heads, head_dim); k, v: (total_k, num_heads_kv, ...), or with `page_table`
            (num_pages, page_size, num_heads_kv, ...).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) row offsets of the sequences; clamped to the
            tensors and made non-decreasing.
        seqused_q, seqused_k: (batch,) rows in use at the start of each sequence; default all.
        page_table: (batch, max_pages) page numbers; sequence b's keys are its pages in order.
        options: the remaining keywords of `reference_attention` (no bias).

    Returns: out (total_q, num_heads, head_dim_v), 0 in rows outside every sequence; lse
        (num_heads, total_q), -inf there.
    """
    if "bias" in options:
        raise ValueError("bias is not defined for packed input")
    total_q, num_heads, _ = q.shape
    starts_q = sequence_offsets(cu_seqlens_q, total_q)
    starts_k = sequence_offsets(cu_seqlens_k, k.shape[0] if page_table is None else None)
    out = q.new_zeros((total_q, num_heads, v.shape[-1]), dtype=precision)
    lse = q.new_full((num_heads, total_q), -math.inf, dtype=precision)
    for b in range(len(starts_q) - 1):
        rows = rows_in_use(starts_q[b], starts_q[b + 1], seqused_q, b)
        keys = rows_in_use(starts_k[b], starts_k[b + 1], seqused_k, b)
        if page_table is None:
            k_b, v_b = k[keys], v[keys]
        else:
            length = min(keys.stop - keys.start, page_table.shape[1] * k.shape[1])
            pages = page_table[b].long().clamp(0, k.shape[0] - 1)
            pages = pages[: -(-length // k.shape[1])]
            k_b, v_b = k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length]
        out_b, lse_b = reference_attention(
            q[rows][None],
            k_b[None],
            v_b[None],
            alibi_slopes=of_sequence(alibi_slopes, b),
            q_descale=of_sequence(q_descale, b),
            k_descale=of_sequence(k_descale, b),
            v_descale=of_sequence(v_descale, b),
            precision=precision,
            first_sequence=b,
            **options,  # type: ignore[arg-type]
        )
        index = torch.arange(rows.start, rows.stop, device=q.device)
        out = out.index_add(0, index, out_b[0])
        lse = lse.index_copy(1, index, lse_b[0])
    return out, lse


def merge_partials(
    outs: torch.Tensor | Sequence[torch.Tensor],
    lses: torch.Tensor | Sequence[torch.Tensor],
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a set of keys, from its values over disjoint parts of the set.

    Args:
        outs: partial outputs (batch, seqlen_q, num_heads, head_dim_v) or (total_q, num_heads,
            head_dim_v), stacked in a leading dimension or as a sequence.
        lses: their log-sum-exps (batch, num_heads, seqlen_q) or (num_heads, total_q), likewise.
        sinks: (num_heads,) logits to add once; partials carry none.

    Returns: out in the dtype of `outs` and lse in that of `lses`, summed in at least float32.
    """
    stacked_outs = outs if isinstance(outs, torch.Tensor) else torch.stack(tuple(outs))
    stacked_lses = lses if isinstance(lses, torch.Tensor) else torch.stack(tuple(lses))
    precision = torch.promote_types(stacked_lses.dtype, torch.float32)
    scores = stacked_lses.to(precision).movedim(0, -1)
    lse = _log_sum_exp(scores, sinks)
    finite_lse = torch.where(torch.isneginf(lse), 0.0, lse)
    weights = torch.exp(scores - finite_lse[..., None]).movedim(-1, 0).transpose(-1, -2)
    # a part that saw no key weighs exactly nothing, whatever its output holds
    parts = torch.where(weights[..., None] > 0, stacked_outs.to(precision), 0.0)
    out = (weights[..., None] * parts).sum(dim=0)
    return out.to(stacked_outs.dtype), lse.to(stacked_lses.dtype)


def _log_sum_exp(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Over the last dimension of (..., num_heads, rows, n), and the sinks (num_heads,) if any."""
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None]
        scores = torch.cat((scores, column.expand(*scores.shape[:-1], 1)), dim=-1)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -math.inf)
    alive = (scores > -math.inf).any(dim=-1) | scores.isnan().any(dim=-1)
    # torch.logsumexp has NaN gradients in rows of -inf alone: give those rows something harmless
    lse = torch.logsumexp(torch.where(alive[..., None], scores, 0.0), dim=-1)
    return torch.where(alive, lse, -math.inf)


def _distance_from_diagonal(
    mask: Mask, seqlen_q: int, seqlen_k: int, device: torch.device
) -> torch.Tensor:
    """j - (i + offset) for every pair, int64 (seqlen_q, seqlen_k)."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + mask.offset(seqlen_q, seqlen_k)
    return torch.arange(seqlen_k, device=device)[None, :] - rows


def _visible(mask: Mask, distance: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Bool, broadcastable to (batch, num_heads, seqlen_q, seqlen_k)."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if mask.window_left is not None:
        visible &= distance >= -mask.window_left
    if mask.window_right is not None:
        visible &= distance <= mask.window_right
    visible = visible[None, None]
    if bias is not None:
        visible = visible & (bias if bias.dtype == torch.bool else ~torch.isneginf(bias))
    return visible


def _descaled(x: torch.Tensor, descale: torch.Tensor | None, group_size: int) -> torch.Tensor:
    if descale is None:
        return x
    return x * descale.to(x.dtype).repeat_interleave(group_size, dim=1)[:, None, :, None]


def sequence_offsets(cu_seqlens: torch.Tensor, total: int | None) -> list[int]:
    """cu_seqlens as numbers, non-decreasing and clamped to [0, total]."""
    offsets = [max(0, int(n)) for n in cu_seqlens.tolist()]
    for b in range(1, len(offsets)):
        offsets[b] = max(offsets[b], offsets[b - 1])
    return offsets if total is None else [min(n, total) for n in offsets]


def rows_in_use(start: int, stop: int, used: torch.Tensor | None, b: int) -> slice:
    """The rows of sequence b in [start, stop) that count: the first used[b] of them, or all."""
    length = stop - start if used is None else min(max(int(used[b]), 0), stop - start)
    return slice(start, start + length)


def of_sequence(per_batch: torch.Tensor | None, b: int) -> torch.Tensor | None:
    """Row b of a (batch, heads) tensor; a (heads,) tensor is every sequence's own."""
    return per_batch[b : b + 1] if per_batch is not None and per_batch.dim() == 2 else per_batch
