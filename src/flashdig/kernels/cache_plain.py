"""Attention over a cache in plain torch: append, rotate, gather, then attend to packed sequences.

It defines what the cache's kernels do, and serves the CPU. On a GPU it reads lengths back.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from flashdig.checks import FP8_DTYPES
from flashdig.kernels.reference import reference_attention_varlen, rows_in_use, sequence_offsets
from flashdig.kernels.tiled_launch import attention_forward

Rotary = tuple[torch.Tensor, torch.Tensor, bool]  # cos, sin, interleaved


@dataclass
class Gathered:
    """A call over a cache as packed sequences, after appending and rotating.

    Attributes:
        q, k, v: one tensor (tokens, heads, dim) a sequence, descaled.
        rows: where the tokens of each sequence stand among the rows of q.
        total_q: rows of q, those of no sequence among them.
        dense: (batch, seqlen_q) of q that is not packed.
    """

    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    rows: list[slice]
    total_q: int
    dense: tuple[int, int] | None


def append_and_gather(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    cu_seqlens_k_new: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_seqlens: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    *,
    rotary_interleaved: bool,
    advances: bool,
) -> Gathered:
    """Write k and v into the caches, and take every sequence's queries and keys out.

    Args:
        advances: token i of q is rotated i positions further (causal and windowed calls).
    """
    starts_q, total_q, dense = _rows_of(q, cu_seqlens_q)
    batch = len(starts_q) - 1
    slots = CacheSlots(k_cache, page_table, cache_batch_idx)
    starts_k = None if cu_seqlens_k is None else sequence_offsets(cu_seqlens_k, None)
    before = [slots.capacity] * batch
    if cache_seqlens is not None:
        before = [min(max(n, 0), slots.capacity) for n in cache_seqlens.tolist()]
    positions = before if rotary_seqlens is None else rotary_seqlens.tolist()
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = (rotary_cos, rotary_sin, rotary_interleaved)

    new = _new_rows(k, v, cu_seqlens_k_new)
    lengths = list(before)
    if new is not None:  # all of it before anything is read: sequences may share pages
        for b, (k_new, v_new) in enumerate(new):
            count = min(k_new.shape[0], slots.capacity - before[b])
            lengths[b] += count
            where = slots.of(b, before[b], lengths[b])
            turned = k_new
            if rotary is not None:
                turned = rotate(k_new, rotary, positions[b], advances=True)
            scaled = k_new.dtype not in FP8_DTYPES
            _store(k_cache, where, turned[:count], k_descale if scaled else None, b)
            _store(v_cache, where, v_new[:count], v_descale if scaled else None, b)

    used = [rows_in_use(starts_q[b], starts_q[b + 1], seqused_q, b) for b in range(batch)]
    found = Gathered([], [], [], used, total_q, dense)
    rows_q = q.reshape(total_q, *q.shape[-2:])
    mixed = k_cache.dtype in FP8_DTYPES
    for b in range(batch):
        length = lengths[b]
        if starts_k is not None:
            length = min(length, starts_k[b + 1] - starts_k[b])
        first = 0
        if cache_leftpad is not None:
            first = min(max(int(cache_leftpad[b]), 0), length)
        where = slots.of(b, first, length)
        q_b = rows_q[used[b]]
        if rotary is not None:
            q_b = rotate(q_b, rotary, positions[b], advances=advances).to(q.dtype)
        found.q.append(_descaled(q_b, q_descale, b, q.shape[-2], mixed))
        found.k.append(_descaled(_load(k_cache, where), k_descale, b, k_cache.shape[2], mixed))
        found.v.append(_descaled(_load(v_cache, where), v_descale, b, v_cache.shape[2], mixed))
    return found


def cache_attention(
    *,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    tiled: bool,
    **cache: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out in at least float32 or the dtype of q, and lse.

    Args:
        tiled: attend tile by tile in q's dtype; else by the oracle, in float32 or float64.
        cache: what `append_and_gather` takes besides `advances`; all meanings are the operator's.
    """
    q, v_cache = cache["q"], cache["v_cache"]
    found = append_and_gather(**cache, advances=window_left >= 0 or window_right >= 0)
    out, lse = _attend(
        found, q, v_cache, alibi_slopes, sinks, tiled,
        softmax_scale=softmax_scale, softcap=softcap, window_left=window_left,
        window_right=window_right, top_left=top_left, allow_tf32=allow_tf32,
    )  # fmt: skip
    rows = [torch.arange(r.start, r.stop) for r in found.rows]
    index = torch.cat(rows or [torch.arange(0)]).to(q.device)
    full = out.new_zeros(found.total_q, *out.shape[1:]).index_copy(0, index, out)
    full_lse = lse.new_full((q.shape[-2], found.total_q), -torch.inf).index_copy(1, index, lse)
    if found.dense is None:
        return full, full_lse
    return full.unflatten(0, found.dense), full_lse.unflatten(1, found.dense).transpose(
        0, 1
    ).contiguous()


class CacheSlots:
    """Where positions of sequences lie: (first index, second index) into a cache."""

    def __init__(
        self,
        cache: torch.Tensor,
        page_table: torch.Tensor | None,
        cache_batch_idx: torch.Tensor | None,
    ) -> None:
        self.rows, self.size = cache.shape[:2]
        self.device = cache.device
        self.page_table, self.cache_batch_idx = page_table, cache_batch_idx
        pages = 1 if page_table is None else page_table.shape[1]
        self.capacity = pages * self.size if self.rows else 0

    def of(self, b: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices of positions first to end, exclusive, of sequence b."""
        position = torch.arange(first, max(first, end), device=self.device)
        if self.page_table is None:
            row = b if self.cache_batch_idx is None else int(self.cache_batch_idx[b])
            row = min(max(row, 0), max(self.rows - 1, 0))
            return torch.full_like(position, row), position
        size = max(self.size, 1)
        pages = self.page_table[b].long()[position // size]
        return pages.clamp(0, max(self.rows - 1, 0)), position % size


def rotate(x: torch.Tensor, rotary: Rotary, position: int, *, advances: bool) -> torch.Tensor:
    """x (rows, heads, head_dim) with its first 2 * cos.shape[1] dimensions turned in pairs, in at
    least float32.

    Row i is at `position` + i, or all are at `position`; positions outside the tables are clamped.
    Pairs are (2i, 2i + 1) if interleaved, else (i, i + half).
    """
    cos, sin, interleaved = rotary
    precision = torch.float64 if x.dtype == torch.float64 else torch.float32
    rows = torch.arange(x.shape[0], device=x.device) * int(advances) + position
    rows = rows.clamp(0, cos.shape[0] - 1)
    c, s = (table[rows].to(precision)[:, None] for table in (cos, sin))
    half = cos.shape[1]
    turned, kept = x[..., : 2 * half].to(precision), x[..., 2 * half :]
    if interleaved:
        one, two = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((one * c - two * s, one * s + two * c), dim=-1).flatten(-2)
    else:
        one, two = turned.chunk(2, dim=-1)
        pairs = torch.cat((one * c - two * s, one * s + two * c), dim=-1)
    return torch.cat((pairs, kept.to(precision)), dim=-1)


def _rows_of(
    q: torch.Tensor, cu_seqlens_q: torch.Tensor | None
) -> tuple[list[int], int, tuple[int, int] | None]:
    """(first row of each sequence and the end, rows, (batch, seqlen) of dense input)."""
    if cu_seqlens_q is not None:
        return sequence_offsets(cu_seqlens_q, q.shape[0]), q.shape[0], None
    batch, seqlen = q.shape[:2]
    return [b * seqlen for b in range(batch + 1)], batch * seqlen, (batch, seqlen)


def _new_rows(
    k: torch.Tensor | None, v: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
    """New keys and values of each sequence."""
    if k is None or v is None:
        return None
    if cu_seqlens is None:
        return list(zip(k.unbind(0), v.unbind(0), strict=True))
    starts = sequence_offsets(cu_seqlens, k.shape[0])
    return [(k[a:b], v[a:b]) for a, b in itertools.pairwise(starts)]


def _store(
    cache: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
    descale: torch.Tensor | None,
    b: int,
) -> None:
    if cache.dtype in FP8_DTYPES:
        if rows.dtype not in FP8_DTYPES:
            rows = rows.float()
            if descale is not None:
                rows = rows / descale[b, :, None]
            largest = torch.finfo(cache.dtype).max
            rows = rows.clamp(-largest, largest).to(cache.dtype)
        cache.view(torch.uint8)[where] = rows.view(torch.uint8)
    else:
        cache[where] = rows.to(cache.dtype)


def _load(cache: torch.Tensor, where: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    if cache.dtype in FP8_DTYPES:
        return cache.view(torch.uint8)[where].view(cache.dtype)
    return cache[where]


def _descaled(
    x: torch.Tensor, descale: torch.Tensor | None, b: int, heads: int, mixed: bool
) -> torch.Tensor:
    if x.dtype in FP8_DTYPES or mixed or descale is not None:
        x = x.float() if x.dtype != torch.float64 else x
    if descale is None:
        return x
    factors = descale[b].repeat_interleave(heads // descale.shape[1])
    return x * factors[:, None].to(x.dtype)


def _attend(
    found: Gathered,
    q: torch.Tensor,
    v_cache: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    tiled: bool,
    **settings: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of the gathered sequences, packed."""
    offsets = {
        name: torch.tensor(
            list(itertools.accumulate((len(x) for x in rows), initial=0)),
            dtype=torch.int32,
            device=q.device,
        )
        for name, rows in (("q", found.q), ("k", found.k))
    }
    if not found.q:
        heads, dim = q.shape[-2], v_cache.shape[-1]
        return q.new_zeros((0, heads, dim), dtype=torch.float32), q.new_zeros(
            (heads, 0), dtype=torch.float32
        )
    rows_q, keys, values = (torch.cat(x) for x in (found.q, found.k, found.v))
    widest = torch.promote_types(torch.promote_types(rows_q.dtype, keys.dtype), values.dtype)
    rows_q, keys, values = (x.to(widest) for x in (rows_q, keys, values))
    if tiled:
        out, lse = attention_forward(
            rows_q, keys, values, None, alibi_slopes, sinks, None,
            offsets["q"], offsets["k"], None, None,
            dropout_p=0.0, **settings,
        )  # fmt: skip
        return out, lse
    left, right = settings["window_left"], settings["window_right"]
    return reference_attention_varlen(
        rows_q,
        keys,
        values,
        offsets["q"],
        offsets["k"],
        causal="top-left" if settings["top_left"] else False,
        window=(left, right),
        softmax_scale=settings["softmax_scale"],
        softcap=settings["softcap"],
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        precision=torch.float64 if widest == torch.float64 else torch.float32,
    )
