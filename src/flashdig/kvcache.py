"""Attention over a key-value cache: the public function, and which backend runs it."""

from __future__ import annotations

import os
from typing import Any

import torch

from flashdig import kept_cache_calls
from flashdig.cache_support import reasons_against_triton
from flashdig.kvcache_checks import CacheArguments, cache_call
from flashdig.ops.kvcache import cache_op, operator_inputs
from flashdig.problem import Causal
from flashdig.run import HAS_TRITON, _capability

BACKENDS = ("triton", "tiled", "reference")


def attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int | None,
    page_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: torch.Tensor | None = None,
    num_splits: int = 0,
    batch_invariant: bool = False,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of new queries over a key-value cache, which k and v are appended to first.

    One query token a sequence (decoding) or many (chunked prefill, speculative decoding). Masks
    align as in `attention`: the last query stands at the last key, appended ones among them. There
    is no backward: asking for one raises RuntimeError.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or with `cu_seqlens_q` (total_q, num_heads,
            head_dim).
        k_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or with `page_table`
            (num_pages, page_size, num_heads_kv, head_dim), any page size; the dtype of q, or fp8.
        v_cache: the same with head_dim_v; it may be a part of k_cache, as in latent attention.
        k, v: new keys and values, written to the caches behind those of each sequence: (batch,
            seqlen_new, num_heads_kv, ..), or (total_new, num_heads_kv, ..) with
            `cu_seqlens_k_new`, which defaults to `cu_seqlens_q`. An fp8 cache stores k / k_descale
            and v / v_descale, saturated.
        cache_seqlens: (batch,) int32 or an int: keys in the cache before k and v are appended;
            None without k and v: the cache is full.
        page_table: (batch, max_pages) int32 page numbers, a sequence's pages in order. Pages may be
            shared; entries behind the last page may hold anything.
        cache_batch_idx: (batch,) int32: the row of the cache that each sequence uses.
        cache_leftpad: (batch,) int32: keys at the start of each sequence that do not count.
        cu_seqlens_q: (batch + 1,) int32 offsets of packed queries.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): k and q are rotated in their first
            rotary_dim dimensions: token i of k at position cache_seqlens + i, token i of q there
            too if causal or windowed, else all of q at cache_seqlens.
        rotary_interleaved: dimensions (2i, 2i + 1) turn together, else (i, i + rotary_dim / 2).
        rotary_seqlens: (batch,) int32 positions instead of cache_seqlens.
        num_splits: parts that the keys are split into; 0 chooses by the chip and the sizes.
        batch_invariant: no bit of a sequence's result depends on other sequences, on packing or
            pages, or on how many query tokens come together.
        q_descale, k_descale, v_descale: (batch, num_heads_kv), float32 factors of fp8 tensors.
        out_dtype: default the dtype of q, bfloat16 for fp8.
        backend: "auto", "triton", "tiled" or "reference": obeyed, or refused with reasons.
        The other keywords are those of `attention`; there is no bias and no dropout.

    Returns:
        out (as q with head_dim_v), 0 in rows that see no key; with `return_lse` also lse (batch,
        num_heads, seqlen_q) or (num_heads, total_q), natural logarithm, float32 (float64 for
        float64), -inf in such rows, or the sink's logit.

    Raises:
        ValueError, TypeError: an argument is outside the above; the message names it. Values of
            lengths, indices and page numbers are checked on the CPU; on a GPU they are clamped (new
            keys without room are dropped), and checked only with FLASHDIG_CHECK=1.
    """
    tensors = (
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cache_leftpad,
        cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_seqlens, alibi_slopes,
        sinks, q_descale, k_descale, v_descale,
    )  # fmt: skip
    options = (
        rotary_interleaved, num_splits, batch_invariant, causal, window, softmax_scale, softcap,
        out_dtype, return_lse, backend,
    )  # fmt: skip
    known: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None
    known = kept_cache_calls.again(tensors, options)
    if known is not None:
        return known
    given = CacheArguments(
        q, k_cache, v_cache, k, v, cache_seqlens, page_table, cache_batch_idx, cache_leftpad,
        cu_seqlens_q, cu_seqlens_k_new, rotary_cos, rotary_sin, rotary_interleaved,
        rotary_seqlens, num_splits, batch_invariant, causal, window, softmax_scale, softcap,
        alibi_slopes, sinks, q_descale, k_descale, v_descale, out_dtype, return_lse,
    )  # fmt: skip
    arguments = cache_call(given)
    inputs = operator_inputs(**arguments, backend=_choose(arguments, backend))
    out, lse = cache_op(inputs)
    kept_cache_calls.remember(tensors, options, return_lse, inputs)
    return (out, lse) if return_lse else out


def _choose(arguments: dict[str, Any], backend: str) -> str:
    if backend not in ("auto", *BACKENDS):
        names = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend must be 'auto' or one of {names} for a cache, got {backend!r}")
    if backend in ("tiled", "reference"):
        return backend
    q = arguments["q"]
    reasons = ["Triton is not installed"] if not HAS_TRITON else []
    reasons += reasons_against_triton(
        q.device.type,
        _capability(q.device.index) if q.device.type == "cuda" else None,
        str(q.dtype).removeprefix("torch."),
        q.shape[-1],
        arguments["v_cache"].shape[-1],
        interpreter=backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1",
    )
    if not reasons:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot serve this call: {'; '.join(reasons)}")
    return "tiled"
