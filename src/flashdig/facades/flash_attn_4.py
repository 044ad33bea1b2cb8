"""FlashAttention-4's functions (package `flash_attn.cute`) over flashdig.

Names, argument orders, defaults and results are those of the original, with its conventions:
results are always a pair, None is an unlimited window side, causal masks align to the bottom right,
the lse of a row that sees no key is -inf, or the sink's logit. docs/migration-from-flash-attn.md
compares argument by argument.

Shared by `flash_attn_func` and `flash_attn_varlen_func`:

    qv: of the shape of q with the head_dim of v: adds qv v^T to q k^T. q and k are copied for it.
    softmax_scale: default head_dim ** -0.5, with `qv` (head_dim + head_dim_v) ** -0.5.
    causal: query i sees key j <= i + seqlen_k - seqlen_q.
    window_size: (left, right): query i sees keys from left before to right after its diagonal, both
        included; None is unlimited, and so are two negative sides. One negative side raises
        ValueError.
    learnable_sink: (num_heads,) logits beside the scores; take a gradient.
    softcap: c > 0 replaces each scaled score s by c * tanh(s / c).
    num_splits, pack_gqa: checked, without effect: flashdig schedules by itself.
    deterministic: gradients are the same bits in every run.
    gather_kv_indices, score_mod, score_mod_bwd, mask_mod, aux_tensors, aux_scalars,
        block_sparse_tensors, block_sparse_tensors_bwd: None. Others raise NotImplementedError.
    return_lse: return an lse that takes a gradient. Without it the lse is there, detached, where q,
        k, v, qv or learnable_sink require a gradient, and else None.

The lse is float32, natural logarithm, (batch, num_heads, seqlen_q) or (num_heads, total_q); with
`qv` its last two dimensions change places.

Bad arguments raise ValueError or TypeError, naming the argument, as in `flashdig.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashdig import checks
from flashdig.api import attention, attention_varlen
from flashdig.facades.arguments import (
    Pair,
    check_hints,
    known_length,
    refuse,
    window_pair,
    with_second_query,
)
from flashdig.facades.combine import combine

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_varlen_func"]

_NO_MODS = "scores and masks are changed by arguments, not by functions of CuTe DSL"
_NO_BLOCKS = "there are no block-sparse masks"


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_kv,
    head_dim) and v (batch, seqlen_k, num_heads_kv, head_dim_v); other arguments, results and errors
    as the module says.

    Returns: out (batch, seqlen_q, num_heads, head_dim_v), and lse or None.
    """
    check_hints(num_splits, pack_gqa)
    refuse("keys cannot be gathered by index", gather_kv_indices=gather_kv_indices)
    refuse(
        _NO_MODS,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    refuse(
        _NO_BLOCKS,
        block_sparse_tensors=block_sparse_tensors,
        block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )
    options = _options(
        q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic
    )
    wanted = _wants_lse(return_lse, q, k, v, qv, learnable_sink)
    if qv is not None:
        q, k = with_second_query(q, k, v, qv, {})
    results: Any = attention(q, k, v, **options, return_lse=wanted)
    return _pair(results, return_lse, wanted, heads_last=qv is not None)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Pair = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[Any] | None = None,
    aux_scalars: tuple[Any, ...] | None = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of sequences of different lengths, queries and keys each packed or padded.

    Args:
        q: (total_q, num_heads, head_dim), or without `cu_seqlens_q`
            (batch, seqlen_q, num_heads, head_dim).
        k: (total_k, num_heads_kv, head_dim); without `cu_seqlens_k`
            (batch, seqlen_k, num_heads_kv, head_dim); with `page_table`
            (num_pages, page_size, num_heads_kv, head_dim).
        v: as k, with head_dim_v.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 offsets of the sequences.
        max_seqlen_q, max_seqlen_k, min_seqlen_k: not needed; a tensor is not read back.
        seqused_q, seqused_k: (batch,) int32: how many rows at the start of each sequence count;
            default all.
        page_table: (batch, max_pages) int32 page numbers. The lengths of the keys are `seqused_k`,
            or those of `cu_seqlens_k`, or all pages.
        scheduler_metadata, seqlen_k_per_split: None. Others raise NotImplementedError.
        disable_scheduler_metadata: without effect, there is none.
        The others are as the module says.

    Returns: out (total_q, num_heads, head_dim_v) or (batch, seqlen_q, num_heads, head_dim_v), and
        lse or None.
    """
    check_hints(num_splits, pack_gqa)
    refuse("keys cannot be gathered by index", gather_kv_indices=gather_kv_indices)
    refuse(
        _NO_MODS,
        score_mod=score_mod,
        score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod,
        aux_tensors=aux_tensors,
        aux_scalars=aux_scalars,
    )
    refuse(_NO_BLOCKS, block_sparse_tensors=block_sparse_tensors)
    refuse(
        "flashdig schedules by itself",
        scheduler_metadata=scheduler_metadata,
        seqlen_k_per_split=seqlen_k_per_split,
    )
    checks.check_flags(disable_scheduler_metadata=disable_scheduler_metadata)
    checks.check_max_seqlen("min_seqlen_k", known_length(min_seqlen_k))
    options = _options(
        q, softmax_scale, causal, window_size, learnable_sink, softcap, deterministic
    )
    wanted = _wants_lse(return_lse, q, k, v, qv, learnable_sink)
    if qv is not None:
        q, k = with_second_query(q, k, v, qv, {})
    padded = None
    if cu_seqlens_q is None:
        _check_padded("q", q)
        padded = q.shape[:2]
        cu_seqlens_q = _equal_offsets(q)
        q = q.flatten(0, 1)
    if page_table is not None:
        cu_seqlens_k = _paged_offsets(cu_seqlens_k, seqused_k, page_table, k)
    elif cu_seqlens_k is None:
        _check_padded_keys(cu_seqlens_q, k, v)
        cu_seqlens_k = _equal_offsets(k)
        k, v = k.flatten(0, 1), v.flatten(0, 1)
    results: Any = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        known_length(max_seqlen_q),
        known_length(max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        page_table=page_table,
        **options,
        return_lse=wanted,
    )
    if padded is not None and wanted:
        out, lse = results
        results = (out.unflatten(0, padded), lse.unflatten(1, padded).transpose(0, 1))
    elif padded is not None:
        results = results.unflatten(0, padded)
    return _pair(results, return_lse, wanted, heads_last=qv is not None)


def flash_attn_combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    virtual_batch_idx: torch.Tensor | None = None,
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`flashdig.facades.combine.combine`: attention over all keys from parts of them.

    Args:
        cu_seqlens: without effect: every row is merged by itself.
        seqused, virtual_batch_idx: None. Others raise NotImplementedError.
        return_lse: whether the second result is the lse, or None.
    """
    refuse("every row is merged", seqused=seqused, virtual_batch_idx=virtual_batch_idx)
    checks.check_flags(return_lse=return_lse)
    merged, lse = combine(out_partial, lse_partial, out, out_dtype)
    return merged, lse if return_lse else None


def _options(
    q: torch.Tensor,
    softmax_scale: float | None,
    causal: bool,
    window_size: Pair,
    learnable_sink: torch.Tensor | None,
    softcap: float,
    deterministic: bool,
) -> dict[str, Any]:
    """flashdig's keywords."""
    _check_sink(learnable_sink, q)
    return {
        "softmax_scale": softmax_scale,
        "causal": causal,
        "window": _window(window_size),
        "sinks": learnable_sink,
        "softcap": softcap,
        "deterministic": deterministic,
    }


def _window(window_size: Pair) -> Pair:
    left, right = window_pair(window_size)
    if left is not None and right is not None and left < 0 and right < 0:
        return None, None
    if (left is not None and left < 0) or (right is not None and right < 0):
        raise ValueError(
            "window_size sides must be >= 0 or None, or both negative for unlimited, "
            f"got {(left, right)}"
        )
    return left, right


def _wants_lse(return_lse: bool, *tensors: torch.Tensor | None) -> bool:
    checks.check_flags(return_lse=return_lse)
    return return_lse or any(getattr(x, "requires_grad", False) for x in tensors)


def _pair(
    results: Any, return_lse: bool, wanted: bool, *, heads_last: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not wanted:
        return results, None
    out, lse = results
    lse = lse.mT if heads_last else lse
    return out, lse if return_lse else lse.detach()


def _check_padded(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != 4:
        side = "q" if name == "q" else "k"
        raise ValueError(
            f"{name} must be (batch, seqlen, num_heads, head_dim) without cu_seqlens_{side}, "
            f"got shape {checks.shape_of(x)}"
        )


def _check_padded_keys(cu_seqlens_q: Any, k: Any, v: Any) -> None:
    _check_padded("k", k)
    _check_padded("v", v)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            "v must be (batch, seqlen_k, num_heads_kv, head_dim_v) with batch and seqlen_k as in k "
            f"{checks.shape_of(k)}, got {checks.shape_of(v)}"
        )
    # another cu_seqlens_q is refused with its own message
    if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
        batch = cu_seqlens_q.shape[0] - 1
        if k.shape[0] != batch:
            raise ValueError(
                f"k must be (batch = {batch}, seqlen_k, num_heads_kv, head_dim) without "
                f"cu_seqlens_k, got {checks.shape_of(k)}"
            )


def _check_sink(learnable_sink: Any, q: Any) -> None:
    if learnable_sink is None:
        return
    if not isinstance(learnable_sink, torch.Tensor):
        raise TypeError(f"learnable_sink must be a tensor, got {type(learnable_sink).__name__}")
    checks.check_floating("learnable_sink", learnable_sink)
    # another q is refused with its own message
    if isinstance(q, torch.Tensor) and q.dim() > 1 and learnable_sink.shape != q.shape[-2:-1]:
        raise ValueError(
            f"learnable_sink must be (num_heads,) = ({q.shape[-2]},), "
            f"got {checks.shape_of(learnable_sink)}"
        )


def _equal_offsets(x: torch.Tensor) -> torch.Tensor:
    """cu_seqlens of a padded (batch, seqlen, ...) tensor."""
    return torch.arange(x.shape[0] + 1, dtype=torch.int32, device=x.device) * x.shape[1]


def _paged_offsets(
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    page_table: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor:
    """Offsets of which only the lengths count; without any, all pages of each sequence."""
    if cu_seqlens_k is not None:
        return cu_seqlens_k
    for name, x, sizes in (
        ("page_table", page_table, "batch, max_pages"),
        ("k", k, checks.PAGED.k),
    ):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != sizes.count(",") + 1:
            raise ValueError(f"{name} must be ({sizes}), got shape {checks.shape_of(x)}")
    checks.check_devices(k, seqused_k=seqused_k)
    batch, max_pages = page_table.shape
    if seqused_k is None:
        capacity = max_pages * k.shape[1]
        return torch.arange(batch + 1, dtype=torch.int32, device=k.device) * capacity
    checks.check_integers("seqused_k", seqused_k, "(batch,)", (batch,))
    # a negative length is refused, or clamped, where all are
    offsets = seqused_k.clamp(min=0).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(offsets, (1, 0))
