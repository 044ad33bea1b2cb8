"""The public functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashdig import dispatch
from flashdig.kernels.reference import merge_partials, reference_attention
from flashdig.ops.attention import attention_op
from flashdig.problem import Causal
from flashdig.request import request_of
from flashdig.validate import DenseCall, dense_call

__all__ = ["attention", "merge_partials"]


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
    call = dense_call(
        q,
        k,
        v,
        causal=causal,
        window=window,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias=bias,
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
    request = request_of(call, backend)
    chosen = dispatch.choose(call.problem, request, backend)
    out, lse = _RUN[chosen.name](call, chosen.name)
    return (out, lse) if return_lse else out


def _run_fused_cpu(call: DenseCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    # torch's kernel wants unit strides in head_dim, and refuses others
    q, k, v = (
        (x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2)
        for x in (call.q, call.k, call.v)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=call.problem.causal, scale=call.softmax_scale
        )
    return out.transpose(1, 2), out.new_empty(0)


def _run_operator(call: DenseCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = _dequantised(call)
    mask = call.problem.mask
    return attention_op(
        q,
        k,
        v,
        call.bias,
        call.alibi_slopes,
        call.sinks,
        _draw_seed(call),
        None,
        None,
        None,
        None,
        call.softmax_scale,
        call.problem.softcap,
        call.dropout_p,
        -1 if mask.window_left is None else mask.window_left,
        -1 if mask.window_right is None else mask.window_right,
        mask.alignment == "top-left",
        call.problem.allow_tf32,
        call.out_dtype,
        backend,
    )


def _run_reference(call: DenseCall, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    mask = call.problem.mask
    precision = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    causal: Causal = "top-left" if mask.alignment == "top-left" else False
    seed = _draw_seed(call)
    out, lse = reference_attention(
        call.q,
        call.k,
        call.v,
        causal=causal or mask.is_causal,
        window=(mask.window_left, mask.window_right),
        softmax_scale=call.softmax_scale,
        softcap=call.problem.softcap,
        bias=call.bias,
        alibi_slopes=call.alibi_slopes,
        sinks=call.sinks,
        dropout_p=call.dropout_p,
        dropout_seed=0 if seed is None else int(seed),
        q_descale=call.q_descale,
        k_descale=call.k_descale,
        v_descale=call.v_descale,
        precision=precision,
    )
    return out.to(call.out_dtype), lse


_RUN = {
    "fused_cpu": _run_fused_cpu,
    "triton": _run_operator,
    "tiled": _run_operator,
    "reference": _run_reference,
}


def _dequantised(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v in a dtype that plain torch computes in, with their descale factors applied."""
    group_size = call.problem.group_size
    return (
        _plain(call.q, call.q_descale, group_size),
        _plain(call.k, call.k_descale, 1),
        _plain(call.v, call.v_descale, 1),
    )


def _plain(x: torch.Tensor, descale: torch.Tensor | None, heads_per_factor: int) -> torch.Tensor:
    if descale is not None:
        return x.float() * descale.repeat_interleave(heads_per_factor, dim=1)[:, None, :, None]
    return x.float() if x.element_size() == 1 else x


def _draw_seed(call: DenseCall) -> torch.Tensor | None:
    """A Philox key, (1,) int64, from the device's default generator; None without dropout."""
    if call.dropout_p == 0.0:
        return None
    return torch.randint(2**63 - 1, (1,), device=call.q.device)
