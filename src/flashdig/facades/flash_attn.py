"""FlashAttention-2's functions (package `flash_attn` 2.8) over flashdig.

Names, argument orders, defaults and results are those of the original, with its conventions: the
lse of a row that sees no key is +inf, a negative window side is unlimited, causal masks align to
the bottom right. docs/migration-from-flash-attn.md compares argument by argument.

Shared by all functions:

    dropout_p: probability of dropping a pair, between 0 and 1.
    softmax_scale: default head_dim ** -0.5.
    causal: query i sees key j <= i + seqlen_k - seqlen_q.
    window_size: (left, right): query i sees keys from left before to right after its diagonal, both
        included; negative is unlimited.
    softcap: c > 0 replaces each scaled score s by c * tanh(s / c).
    alibi_slopes: (num_heads,) or (batch, num_heads), float32.
    deterministic: gradients are the same bits in every run.
    return_attn_probs: return (out, softmax_lse, S_dmask). softmax_lse is float32, natural
        logarithm, (batch, num_heads, seqlen_q) or (num_heads, total_q); +inf for rows that see no
        key, and with causal ALiBi of scores plus slope * j, as in the original (`softmax_lse`).
        S_dmask is empty without dropout; with it, (batch, num_heads, seqlen_q, seqlen_k) or
        (batch, num_heads, max_seqlen_q, max_seqlen_k), each row's probabilities over the largest of
        them, with the sign bit where the pair was dropped: it takes as much memory as it sounds
        like.

Bad arguments raise ValueError or TypeError, naming the argument, as in `flashdig.attention`.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from flashdig import checks
from flashdig.api import attention, attention_varlen, attention_with_kvcache
from flashdig.facades import dropout_mask
from flashdig.facades.arguments import as_length, known_length, unlimited_if_negative, unpacked
from flashdig.facades.softmax_lse import cached_lse, dense_lse, packed_lse

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Window = tuple[int, int]
Results = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """Attention of q (batch, seqlen_q, num_heads, head_dim), k and v (batch, seqlen_k,
    num_heads_kv, head_dim); other arguments, results and errors as the module says.

    Returns: out (batch, seqlen_q, num_heads, head_dim), or (out, softmax_lse, S_dmask).
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return _dense(q, k, v, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with k and v in kv (batch, seqlen_k, 2, num_heads_kv, head_dim), which is
    read in place."""
    k, v = unpacked("kv", kv, "batch, seqlen_k, 2, num_heads_kv, head_dim", 2, -3)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return _dense(q, k, v, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_func` with q, k and v in qkv (batch, seqlen, 3, num_heads, head_dim), which is
    read in place."""
    q, k, v = unpacked("qkv", qkv, "batch, seqlen, 3, num_heads, head_dim", 3, -3)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    return _dense(q, k, v, options, return_attn_probs)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Results:
    """Attention of packed sequences: q (total_q, num_heads, head_dim), k and v (total_k,
    num_heads_kv, head_dim), or with `block_table` (num_blocks, block_size, num_heads_kv, head_dim).

    Args:
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of the sequences; with `block_table`
            only the lengths of `cu_seqlens_k` count.
        max_seqlen_q, max_seqlen_k: longest lengths. A tensor is accepted and not read back, except
            for S_dmask, whose sizes they are.
        block_table: (batch, max_blocks) int32 block numbers; any block size.
        The others are as the module says.

    Returns: out (total_q, num_heads, head_dim), or (out, softmax_lse, S_dmask).

    Raises: NotImplementedError for S_dmask of a call with both dropout and `block_table`.
    """
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    if block_table is not None:
        _check_block_table(block_table)
        if return_attn_probs and dropout_p:
            raise NotImplementedError(
                "return_attn_probs is not supported with both dropout_p and block_table: there is "
                "no S_dmask of paged keys"
            )
        options["page_table"] = block_table
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _packed(q, k, v, lengths, options, return_attn_probs)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with k and v in kv (total_k, 2, num_heads_kv, head_dim), which is
    read in place."""
    k, v = unpacked("kv", kv, "total_k, 2, num_heads_kv, head_dim", 2, -3)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return _packed(q, k, v, lengths, options, return_attn_probs)


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Results:
    """`flash_attn_varlen_func` with q, k and v in qkv (total, 3, num_heads, head_dim), which is
    read in place; `cu_seqlens` and `max_seqlen` serve queries and keys."""
    q, k, v = unpacked("qkv", qkv, "total, 3, num_heads, head_dim", 3, -3)
    options = _options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic
    )
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    return _packed(q, k, v, lengths, options, return_attn_probs)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of q (batch, seqlen_q, num_heads, head_dim) over caches, to which k and v (batch,
    seqlen_new, num_heads_kv, head_dim) are appended first, in place. There is no backward.

    Args:
        k_cache, v_cache: (batch_cache, seqlen_cache, num_heads_kv, head_dim), or with `block_table`
            (num_blocks, block_size, num_heads_kv, head_dim), any block size.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2); k is rotated at cache_seqlens + i, and
            q too if causal or windowed, else all of q at cache_seqlens.
        cache_seqlens: int or (batch,) int32, keys in the cache; None: it is full.
        cache_batch_idx: (batch,) int32 rows of the cache, not with `block_table`.
        cache_leftpad: (batch,) int32 keys at the start that do not count.
        block_table: (batch, max_blocks) int32 block numbers.
        rotary_interleaved: dimensions (2i, 2i + 1) turn together, else (i, i + rotary_dim / 2).
        num_splits: parts that the keys are split into; 0 chooses.
        The others are as the module says.

    Returns: out (batch, seqlen_q, num_heads, head_dim); with `return_softmax_lse` also softmax_lse
        (batch, num_heads, seqlen_q).
    """
    checks.check_flags(return_softmax_lse=return_softmax_lse)
    if block_table is not None:
        _check_block_table(block_table)
    options: dict[str, Any] = {
        "causal": causal,
        "window": unlimited_if_negative(window_size),
        "alibi_slopes": alibi_slopes,
    }
    out, lse = attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        page_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        num_splits=num_splits,
        softmax_scale=softmax_scale,
        softcap=softcap,
        return_lse=True,
        **options,
    )
    if not return_softmax_lse:
        return out
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    seqlens_k = capacity if cache_seqlens is None else cache_seqlens
    seqlens_k = seqlens_k + (0 if k is None else k.shape[1])
    if cache_leftpad is not None:
        seqlens_k = seqlens_k - cache_leftpad
    return out, cached_lse(lse, seqlens_k, capacity, options)


def _options(
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Window,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
) -> dict[str, Any]:
    """flashdig's keywords."""
    return {
        "dropout_p": dropout_p,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": unlimited_if_negative(window_size),
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "deterministic": deterministic,
    }


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Results:
    checks.check_flags(return_attn_probs=return_attn_probs)
    if not return_attn_probs:
        return cast(torch.Tensor, attention(q, k, v, **options))
    checks.check_tensors(checks.DENSE, q, k, v)
    drops = bool(options["dropout_p"])
    kept = dropout_mask.dense_kept(q, k, options["dropout_p"]) if drops else None
    out, lse = attention(q, k, v, **options, return_lse=True)
    mask = q.new_empty(0) if kept is None else dropout_mask.dense_mask(q, k, kept, options)
    return out, dense_lse(lse, k.shape[1], options), mask


def _packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: tuple[torch.Tensor, torch.Tensor, int, int],
    options: dict[str, Any],
    return_attn_probs: bool,
) -> Results:
    checks.check_flags(return_attn_probs=return_attn_probs)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = lengths
    known = (cu_seqlens_q, cu_seqlens_k, known_length(max_seqlen_q), known_length(max_seqlen_k))
    if not return_attn_probs:
        return cast(torch.Tensor, attention_varlen(q, k, v, *known, **options))
    if not options["dropout_p"]:
        out, lse = attention_varlen(q, k, v, *known, **options, return_lse=True)
        return out, packed_lse(lse, *known[:2], known[3], options), q.new_empty(0)
    checks.check_tensors(checks.PACKED, q, k, v)
    sizes = (
        cu_seqlens_q,
        cu_seqlens_k,
        as_length("max_seqlen_q", max_seqlen_q),
        as_length("max_seqlen_k", max_seqlen_k),
    )
    kept = dropout_mask.packed_kept(q, k, sizes, options["dropout_p"])
    out, lse = attention_varlen(q, k, v, *sizes, **options, return_lse=True)
    mask = dropout_mask.packed_mask(q, k, sizes, kept, options)
    return out, packed_lse(lse, cu_seqlens_q, cu_seqlens_k, sizes[3], options), mask


def _check_block_table(block_table: Any) -> None:
    if not isinstance(block_table, torch.Tensor):
        raise TypeError(f"block_table must be a tensor, got {type(block_table).__name__}")
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, got {block_table.dtype}")
    if block_table.dim() != 2:
        raise ValueError(
            f"block_table must be (batch, max_blocks), got shape {checks.shape_of(block_table)}"
        )
