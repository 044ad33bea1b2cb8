"""The operator `flashdig::fp8_attention`: attention of e4m3 inputs with descale factors.

It has no backward; `flashdig.attention` refuses inputs of 8 bits that ask for a gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from flashdig.kernels.plans import plan_of

TENSORS = (
    *("q", "k", "v", "alibi_slopes", "sinks"),
    *("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"),
    *("q_descale", "k_descale", "v_descale"),
)
SETTINGS = ("softmax_scale", "softcap", "window_left", "window_right", "top_left", "out_dtype")

_library = torch.library.Library("flashdig", "FRAGMENT")
_library.define(
    "fp8_attention(Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, float softcap, "
    "SymInt window_left, SymInt window_right, bool top_left, ScalarType out_dtype) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def fp8_op(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse; tensors that are left out are None."""
    inputs = [arguments.pop(name, None) for name in TENSORS]
    settings = [arguments.pop(name) for name in SETTINGS]
    assert not arguments, arguments
    out, lse = torch.ops.flashdig.fp8_attention.default(*inputs, *settings)
    return out, lse


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from flashdig.kernels.hopper.fp8_launch import attention_forward, plan_forward

    tensors, settings = inputs[: len(TENSORS)], inputs[len(TENSORS) :]
    numbers = dict(zip(SETTINGS, settings, strict=True))
    q = tensors[0]
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _run(*inputs)
    plan = plan_of(lambda: plan_forward(*tensors, **numbers), "fp8", tensors, settings)
    if plan is not None:
        out, lse = plan(*tensors)
        return out, lse
    return attention_forward(*tensors, **numbers)


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v, out_dtype = inputs[0], inputs[2], inputs[-1]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype)
    *batch, rows, heads = q.shape[:-1]
    return out, q.new_empty((*batch, heads, rows), dtype=torch.float32)


_library.impl("fp8_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("flashdig::fp8_attention", _fake, lib=_library)
