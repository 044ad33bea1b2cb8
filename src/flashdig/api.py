"""The public functions."""

from __future__ import annotations

import torch

from flashdig import kept_calls, kept_keys
from flashdig.kernels.reference import merge_partials
from flashdig.kvcache import attention_with_kvcache
from flashdig.packing import Packing
from flashdig.problem import Causal
from flashdig.run import serve
from flashdig.validate import Options, dense_call, packed_call

__all__ = ["attention", "attention_varlen", "attention_with_kvcache", "merge_partials"]


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention, softmax(q k^T) v, with everything that changes its scores.

    The order is: scores = softmax_scale * q k^T; softcap; + bias; - ALiBi; mask; softmax over the
    keys and the optional sink; dropout; times v. `flashdig.kernels.reference` defines each step.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); float16, bfloat16, float32, float64 or fp8.
        k: (batch, seqlen_k, num_heads_kv, head_dim); query head h uses KV head
            h // (num_heads // num_heads_kv).
        v: (batch, seqlen_k, num_heads_kv, head_dim_v).
        causal: False; True or "bottom-right" (query i sees key j <= i + seqlen_k - seqlen_q); or
            "top-left" (j <= i).
        window: (left, right): query i sees keys from left before to right after its diagonal,
            both included; None or -1 is unlimited.
        softmax_scale: default head_dim ** -0.5.
        softcap: c > 0 replaces each scaled score s by c * tanh(s / c).
        bias: (1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k); float (added) or bool
            (True is visible). A float bias takes a gradient.
        alibi_slopes: (num_heads,) or (batch, num_heads), float32.
        sinks: (num_heads,) logits beside the scores; take a gradient.
        dropout_p: probability of dropping a pair, between 0 and 1.
        q_descale, k_descale, v_descale: (batch, num_heads_kv), float32, for quantised inputs.
        out_dtype: default the dtype of q, bfloat16 for fp8.
        deterministic: gradients are the same bits in every run.
        return_lse: return (out, lse).
        backend: "auto", or a name of `flashdig.dispatch.BACKENDS`: obeyed, or refused with reasons.

    Returns:
        out (batch, seqlen_q, num_heads, head_dim_v), 0 in rows that see no key; with `return_lse`
        also lse (batch, num_heads, seqlen_q), natural logarithm, float32 (float64 for float64),
        -inf in such rows. Both are differentiable.

    Raises:
        ValueError, TypeError: an argument is outside the above; the message names it.
    """
    key = kept = None
    if q_descale is None and k_descale is None and v_descale is None:
        if (
            window is None
            and bias is None
            and alibi_slopes is None
            and sinks is None
            and not torch.compiler.is_dynamo_compiling()
        ):
            known: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = kept_calls.again(
                q,
                k,
                v,
                causal,
                softmax_scale,
                softcap,
                dropout_p,
                out_dtype,
                deterministic,
                return_lse,
                backend,
            )
            if known is not None:
                return known
        kept, key = kept_calls.find_dense(
            q,
            k,
            v,
            bias,
            alibi_slopes,
            sinks,
            window,
            causal,
            softmax_scale,
            softcap,
            dropout_p,
            out_dtype,
            deterministic,
            return_lse,
            backend,
        )
    if kept is not None:
        out, lse = kept(q, k, v, bias, alibi_slopes, sinks, None, None, None, None)
        return (out, lse) if return_lse else out
    options = Options(
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    out, lse = serve(dense_call(q, k, v, bias, options), backend, key)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: Causal = False,
    window: tuple[int | None, int | None] | None = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention of sequences of different lengths, packed one behind the other.

    Each sequence is attended to as `attention` would attend to it alone: masks, ALiBi and dropout
    go by its own lengths and positions. Sequences may be empty, and rows may belong to none.

    Args:
        q: (total_q, num_heads, head_dim); dtypes as in `attention`.
        k: (total_k, num_heads_kv, head_dim), or with `page_table`
            (num_pages, page_size, num_heads_kv, head_dim).
        v: (total_k, num_heads_kv, head_dim_v), or (num_pages, page_size, num_heads_kv, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32: sequence b has rows cu_seqlens[b] to
            cu_seqlens[b + 1], exclusive. With `page_table` only the lengths of `cu_seqlens_k`
            count.
        max_seqlen_q, max_seqlen_k: longest lengths. Not needed: nothing is scheduled by them.
        seqused_q, seqused_k: (batch,) int32: how many rows at the start of each sequence count;
            default all.
        page_table: (batch, max_pages) int32 page numbers: the keys of a sequence are its pages in
            order.
        The other keywords are those of `attention`; there is no bias. `alibi_slopes` is
            (num_heads,) or (batch, num_heads); descale factors are (batch, num_heads_kv).

    Returns:
        out (total_q, num_heads, head_dim_v), 0 in rows that see no key and in rows of no sequence;
        with `return_lse` also lse (num_heads, total_q), natural logarithm, float32 (float64 for
        float64), -inf there. Both are differentiable.

    Raises:
        ValueError, TypeError: an argument is outside the above; the message names it. Values of
            cu_seqlens, seqused, max_seqlen and page_table are checked on the CPU; on a GPU they
            are clamped, and checked only when the environment variable FLASHDIG_CHECK is 1, at the
            price of a synchronisation.
    """
    packing = Packing(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)
    key = kept = None
    if q_descale is None and k_descale is None and v_descale is None:
        key = kept_keys.packed_key(
            q,
            k,
            v,
            packing,
            alibi_slopes,
            sinks,
            window,
            max_seqlen_q,
            max_seqlen_k,
            causal,
            softmax_scale,
            softcap,
            dropout_p,
            out_dtype,
            deterministic,
            return_lse,
            backend,
        )
        kept = kept_calls.find(key)
    if kept is not None:
        lengths = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        out, lse = kept(q, k, v, None, alibi_slopes, sinks, *lengths)
        return (out, lse) if return_lse else out
    options = Options(
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        dropout_p=dropout_p,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype,
        deterministic=deterministic,
        return_lse=return_lse,
    )
    call = packed_call(q, k, v, packing, max_seqlen_q, max_seqlen_k, options)
    out, lse = serve(call, backend, key)
    return (out, lse) if return_lse else out
