"""Triton kernels: Inductor's, FlexAttention's, well-known hand-written ones and flashdig's own."""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    Pass,
    Role,
    arch_words,
    dtype_words,
    sentence,
    tile_words,
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
_OURS = re.compile(
    r"^(?P<what>flash_fwd|flash_bwd(?:_[a-z]+)*|flash_decode|flash_combine|online_softmax)_"
    r"(?:(?P<generation>[a-z0-9]+(?:_[a-z0-9]+)*?)_)?"
    r"(?P<dtype>fp32|tf32|fp16|bf16)(?P<rest>(?:_[a-z0-9]+)*)$"
)
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
    return _ours(symbol) or _inductor(symbol) or _known(symbol)


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


def _ours(symbol: Symbol) -> KernelName | None:
    found = _OURS.match(symbol.text)
    if found is None:
        return None
    named = found["generation"] or ""
    words = (named + found["rest"]).split("_")
    arch = next((w for w in words if re.fullmatch(r"sm\d{2,3}a?", w)), None)
    generation = "_".join(w for w in named.split("_") if w != arch) or None
    dtype = DTYPES[found["dtype"]]
    rest = found["rest"].split("_")
    head_dim = next((int(w[1:]) for w in rest if re.fullmatch(r"d\d{1,4}", w)), None)
    blocks = next((m for w in rest if (m := re.fullmatch(r"m(\d{1,4})n(\d{1,4})", w))), None)
    tile = (int(blocks.group(1)), int(blocks.group(2))) if blocks else None
    causal = {True: True, False: None}["causal" in rest]
    if "full" in rest:
        causal = False
    role, pass_, what = _our_role(found["what"])
    if found["dtype"] == "tf32":
        tensor_cores: bool | None = True
    else:
        # Triton multiplies float32 on the CUDA cores with input_precision="ieee", which is what
        # the exhibits use; bfloat16 exists only where it has tensor cores for it
        tensor_cores = {"float32": False, "bfloat16": True}.get(dtype, True if arch else None)
    return KernelName(
        name=symbol.name,
        family="flashdig",
        backend="flashdig",
        role=role,
        pass_=pass_,
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=arch,
        tensor_cores=tensor_cores,
        pipeline=generation,
        causal=causal,
        words=sentence(
            f"flashdig: {what}" + (f", generation {generation}" if generation else ""),
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
            tile_words(tile),
            {True: "causal", False: "not causal", None: ""}[causal],
            arch_words(arch),
        ),
    )


def _our_role(what: str) -> tuple[Role, Pass, str]:
    if what.startswith("flash_bwd"):
        if re.search(r"pre|post|delta|convert", what):
            return "attention_part", "backward", "a helper of the attention backward"
        return "attention_backward", "backward", "attention backward"
    if what == "flash_combine":
        return "attention_part", "forward", "joins partial attention results"
    if what == "online_softmax":
        return "attention_part", "forward", "online softmax over scores in memory"
    if what == "flash_decode":
        return "attention_forward", "forward", "attention for few queries over a cache, forward"
    return "attention_forward", "forward", "attention forward"
