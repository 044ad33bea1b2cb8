"""FlashAttention-3's functions (packages `flash_attn_interface`, `flash_attn_3`) over flashdig.

Names, argument orders, defaults and results are those of the original, with its conventions: the
lse of a row that sees no key is -inf, a negative window side is unlimited, causal masks align to
the bottom right. docs/migration-from-flash-attn.md compares argument by argument.

Shared by all functions:

    softmax_scale: default head_dim ** -0.5, with `qv` (head_dim + head_dim_v) ** -0.5.
    causal: query i sees key j <= i + seqlen_k - seqlen_q.
    qv: of the shape of q with the head_dim of v: adds qv v^T to q k^T. q and k are copied for it.
    q_descale, k_descale, v_descale: (batch, num_heads_kv), float32.
    window_size: (left, right): query i sees keys from left before to right after its diagonal, both
        included; negative is unlimited.
    attention_chunk: 0. Others raise NotImplementedError.
    softcap: c > 0 replaces each scaled score s by c * tanh(s / c).
    num_splits, pack_gqa: checked, without effect: flashdig schedules by itself.
    deterministic: gradients are the same bits in every run.
    sm_margin: 0. Others raise NotImplementedError.
    return_attn_probs: return (out, softmax_lse); softmax_lse is float32, natural logarithm,
        (batch, num_heads, seqlen_q) or (num_heads, total_q).

Bad arguments raise ValueError or TypeError, naming the argument, as in `flashdig.attention`.
"""

from __future__ import annotations

from typing import Any

import torch

from flashdig import checks
from flashdig.api import attention, attention_varlen, attention_with_kvcache
from flashdig.facades.arguments import (
    check_hints,
    known_length,
    refuse,
    unlimited_if_negative,
    unpacked,
    with_second_query,
)
from flashdig.facades.combine import combine

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Window = tuple[int, int]
Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv,
    head_dim) and v (batch, seqlen_k, num_heads_kv, head_dim_v); other arguments, results and errors
    as the module says.

    Returns: out (batch, seqlen_q, num_heads, head_dim_v), or (out, softmax_lse).
    """
    check_hints(num_splits, pack_gqa)
    _refuse_chunks_and_margins(attention_chunk, sm_margin)
    checks.check_flags(return_attn_probs=return_attn_probs)
    descales: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    if qv is not None:
        q, k = with_second_query(q, k, v, qv, descales)
    return attention(
        q,
        k,
        v,
        softmax_scale=softmax_scale,
        causal=causal,
        window=unlimited_if_negative(window_size),
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        **descales,
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with q, k and v in one tensor, which is read in place.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or with `num_heads_q`
            (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim), q's heads first.
        The others are as the module says.
    """
    q, k, v = _unpacked_qkv(qkv, num_heads_q)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of packed sequences: q (total_q, num_heads, head_dim), k (total_k, num_heads_kv,
    head_dim), v (total_k, num_heads_kv, head_dim_v).

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of the sequences.
        max_seqlen_q, max_seqlen_k: longest lengths. A tensor is accepted and not read back.
        seqused_q, seqused_k: (batch,) int32: how many rows at the start of each sequence count.
        The others are as the module says.

    Returns: out (total_q, num_heads, head_dim_v), or (out, softmax_lse).
    """
    check_hints(num_splits, pack_gqa)
    _refuse_chunks_and_margins(attention_chunk, sm_margin)
    checks.check_flags(return_attn_probs=return_attn_probs)
    descales: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    if qv is not None:
        q, k = with_second_query(q, k, v, qv, descales)
    return attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        known_length(max_seqlen_q),
        known_length(max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window=unlimited_if_negative(window_size),
        softcap=softcap,
        deterministic=deterministic,
        return_lse=return_attn_probs,
        **descales,
    )


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Results:
    """Attention over caches, to which k and v are appended first, in place; `flashdig.
    attention_with_kvcache` describes shapes and semantics. There is no backward.

    Args:
        qv: only without k and v, and the caches are copied for it.
        cu_seqlens_q, cu_seqlens_k_new: (batch + 1,) int32 offsets of packed q, and of packed k, v.
        max_seqlen_q, scheduler_metadata: without effect: flashdig schedules by itself.
        num_splits: parts that the keys are split into; 0 chooses.
        The others are as there and as the module says.

    Returns: out, or with `return_softmax_lse` (out, softmax_lse).
    """
    check_hints(num_splits, pack_gqa)
    _refuse_chunks_and_margins(attention_chunk, sm_margin)
    checks.check_flags(return_softmax_lse=return_softmax_lse)
    checks.check_max_seqlen("max_seqlen_q", known_length(max_seqlen_q))
    if scheduler_metadata is not None and not isinstance(scheduler_metadata, torch.Tensor):
        raise TypeError(
            f"scheduler_metadata must be a tensor or None, got {type(scheduler_metadata).__name__}"
        )
    descales: dict[str, Any] = {
        "q_descale": q_descale,
        "k_descale": k_descale,
        "v_descale": v_descale,
    }
    if qv is not None:
        refuse("qv comes with a cache that holds all keys", k=k, v=v)
        q, k_cache = with_second_query(q, k_cache, v_cache, qv, descales)
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=page_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        rotary_seqlens=rotary_seqlens,
        num_splits=num_splits,
        causal=causal,
        window=unlimited_if_negative(window_size),
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=return_softmax_lse,
        **descales,
    )


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`flashdig.facades.combine.combine`: attention over all keys from parts of them."""
    return combine(out_partial, lse_partial, out, out_dtype)


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """What `flash_attn_with_kvcache` takes as `scheduler_metadata`: empty, (0,) int32 on the device
    of `cache_seqlens`, because flashdig schedules in the call itself.

    Raises: what the call that it is made for would raise for `attention_chunk`, `sm_margin`,
        `num_splits`, `pack_gqa` and `window_size`, and TypeError or ValueError for the sizes and
        for a `cache_seqlens` that is not (batch_size,) int32.
    """
    check_hints(num_splits, pack_gqa)
    _refuse_chunks_and_margins(attention_chunk, sm_margin)
    checks.check_flags(causal=causal, has_softcap=has_softcap)
    unlimited_if_negative(window_size)
    for name, size in (
        ("batch_size", batch_size),
        ("max_seqlen_q", max_seqlen_q),
        ("max_seqlen_k", max_seqlen_k),
        ("num_heads_q", num_heads_q),
        ("num_heads_kv", num_heads_kv),
        ("headdim", headdim),
        ("headdim_v", headdim_v),
        ("page_size", page_size),
        ("max_seqlen_k_new", max_seqlen_k_new),
    ):
        checks.check_max_seqlen(name, size)
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens must be a tensor, got {type(cache_seqlens).__name__}")
    checks.check_integers("cache_seqlens", cache_seqlens, "(batch_size,)", (batch_size,))
    return cache_seqlens.new_empty(0)


def _unpacked_qkv(qkv: torch.Tensor, num_heads_q: int | None) -> tuple[torch.Tensor, ...]:
    if num_heads_q is None:
        return unpacked("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim", 3, -3)
    if isinstance(num_heads_q, bool) or not isinstance(num_heads_q, int):
        raise TypeError(f"num_heads_q must be an int or None, got {num_heads_q!r}")
    if not isinstance(qkv, torch.Tensor):
        raise TypeError(f"qkv must be a tensor, got {type(qkv).__name__}")
    if qkv.dim() == 5:  # as in the original, the form with a 3 in it says it all
        return unpacked("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim", 3, -3)
    num_heads_kv, odd = divmod(qkv.shape[-2] - num_heads_q, 2) if qkv.dim() == 4 else (0, 0)
    if qkv.dim() != 4 or num_heads_q < 0 or num_heads_kv < 0 or odd:
        raise ValueError(
            "qkv must be (batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim) with "
            f"num_heads_q = {num_heads_q}, got shape {checks.shape_of(qkv)}"
        )
    return tuple(qkv.split([num_heads_q, num_heads_kv, num_heads_kv], dim=-2))


def _refuse_chunks_and_margins(attention_chunk: int, sm_margin: int) -> None:
    if attention_chunk != 0:
        raise NotImplementedError(
            f"attention_chunk must be 0, got {attention_chunk!r}: there is no mask of chunks"
        )
    if sm_margin != 0:
        raise NotImplementedError(
            f"sm_margin must be 0, got {sm_margin!r}: no multiprocessors can be kept free"
        )
