"""Triton kernels: Inductor's, FlexAttention's and well-known hand-written ones."""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    KernelName,
    Pass,
    Role,
    sentence,
)
from flashdig.readers.kernel_names.symbol import Symbol

_INDUCTOR = re.compile(r"^triton_(?P<kind>poi|red|per|tem|for|mm|unk)(?:_fused)?_(?P<ops>\w+)$")
_KINDS: dict[str, tuple[Role, str]] = {
    "poi": ("elementwise", "pointwise kernel"),
    "red": ("reduction", "reduction in a loop"),
    "per": ("reduction", "reduction that keeps a row on chip"),
    "tem": ("other", "template kernel"),
    "for": ("elementwise", "kernel over many tensors (foreach)"),
    "mm": ("matmul", "matrix product"),
    "unk": ("unknown", "kernel"),
}
# names of hand-written Triton attention kernels that many projects share
_KNOWN: dict[str, tuple[Role, Pass, str]] = {
    "_attn_fwd": ("attention_forward", "forward", "Triton attention (the tutorial's): forward"),
    "_attn_bwd": ("attention_backward", "backward", "Triton attention (the tutorial's): backward"),
    "_attn_bwd_preprocess": (
        "attention_part",
        "backward",
        "Triton attention (the tutorial's): backward's first step, delta = rowsum(dO * O)",
    ),
    "_attn_bwd_dkdv": ("attention_backward", "backward", "Triton attention: backward, dk and dv"),
    "_attn_bwd_dq": ("attention_backward", "backward", "Triton attention: backward, dq"),
    "_fwd_kernel_splitK": (
        "attention_forward",
        "forward",
        "xformers' Triton attention with the keys split over blocks: forward",
    ),
    "_splitK_reduce": (
        "attention_part",
        "forward",
        "xformers' Triton attention: joins the partial results of the splits",
    ),
}


def decode(symbol: Symbol) -> KernelName | None:
    """A Triton kernel of a known kind; None for anything else."""
    return _inductor(symbol) or _known(symbol)


def _inductor(symbol: Symbol) -> KernelName | None:
    found = _INDUCTOR.match(symbol.text)
    if found is None:
        return None
    ops, kind = found["ops"], found["kind"]
    if "flex_attention" in ops or "flex_decoding" in ops:
        return _flex(symbol, ops, kind)
    role, what = _KINDS[kind]
    if kind == "tem" and re.search(r"(^|_)(mm|addmm|bmm|baddbmm|_scaled_mm)(_|$)", ops):
        role, what = "matmul", "matrix product from a template"
    elif kind in ("red", "per"):
        if "softmax" in ops:
            role = "softmax"
        elif re.search(r"layer_norm|rms_norm|rsqrt", ops):
            role = "norm"
    operators = re.sub(r"_?\d+$", "", ops).strip("_")
    return KernelName(
        name=symbol.name,
        family="inductor",
        backend="triton",
        role=role,
        tensor_cores=None if role in ("matmul", "other", "unknown") else False,
        words=sentence(
            f"torch.compile (Inductor, Triton): {what}", operators and f"of {operators}"
        ),
    )


def _flex(symbol: Symbol, ops: str, kind: str) -> KernelName:
    backward = "backward" in ops
    if kind != "tem":
        role: Role = "attention_part"
        what = "helper of the backward" if backward else "helper of the forward"
        if backward and kind in ("per", "red"):
            what = "backward's first step, delta = rowsum(dO * O)"
    else:
        role = "attention_backward" if backward else "attention_forward"
        what = "backward, dq, dk and dv" if backward else "forward"
        if "flex_decoding" in ops:
            what = "forward for few queries (FlexDecoding)"
    return KernelName(
        name=symbol.name,
        family="flex_attention",
        backend="flex_attention",
        role=role,
        pass_="backward" if backward else "forward",
        words=f"FlexAttention (torch.compile, Triton): {what}.",
    )


def _known(symbol: Symbol) -> KernelName | None:
    # before Triton 3, names carried a suffix of argument kinds: _fwd_kernel_splitK_0d1d2d34d...
    base = re.sub(r"_0d[0-9dec]+$", "", symbol.text)
    if base not in _KNOWN:
        return None
    role, pass_, what = _KNOWN[base]
    xformers = "xformers" in what
    return KernelName(
        name=symbol.name,
        family="xformers" if xformers else "triton",
        backend="xformers" if xformers else "triton",
        role=role,
        pass_=pass_,
        words=what + ".",
    )
