"""Kernels of inference engines and libraries: FlashInfer, vLLM, TensorRT-LLM."""

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
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_FORWARD: Pass = "forward"

# vLLM: base name -> role, words; the ones in Triton carry no namespace
_VLLM: dict[str, tuple[Role, str]] = {
    "paged_attention_v1_kernel": (
        "attention_forward",
        "attention of one query over a paged cache, one block a head",
    ),
    "paged_attention_v2_kernel": (
        "attention_forward",
        "attention of one query over a paged cache, the keys split over blocks",
    ),
    "paged_attention_v2_reduce_kernel": (
        "attention_part",
        "joins the partial results of paged attention v2",
    ),
    "merge_attn_states_kernel": ("attention_part", "joins two partial attention results by LSE"),
    "reshape_and_cache_kernel": ("copy", "writes new keys and values into the paged cache"),
    "reshape_and_cache_flash_kernel": ("copy", "writes new keys and values into the paged cache"),
    "rms_norm_kernel": ("norm", "RMS norm"),
    "fused_add_rms_norm_kernel": ("norm", "residual add and RMS norm"),
    "rotary_embedding_kernel": ("elementwise", "rotary embedding"),
    "act_and_mul_kernel": ("elementwise", "activation times gate"),
    "cross_device_reduce_1stage": ("communication", "all-reduce over NVLink, one stage"),
    "cross_device_reduce_2stage": ("communication", "all-reduce over NVLink, two stages"),
}
_VLLM_TRITON: dict[str, tuple[Role, str]] = {
    "kernel_unified_attention_2d": (
        "attention_forward",
        "attention over a paged cache in Triton, a block for each query tile",
    ),
    "kernel_unified_attention_3d": (
        "attention_forward",
        "attention over a paged cache in Triton, the keys split over blocks",
    ),
    "reduce_segments": ("attention_part", "joins the partial results of the split keys"),
}
_FLASHINFER = re.compile(r"^(Batch|Single)(Prefill|Decode)With\w*Kernel")
_TRTLLM_GEN = re.compile(
    r"^fmhaSm(?P<arch>\d{2,3})\w?Kernel_(?:Q(?:kv)?)(?P<dtype>Bfloat16|Bf16|Fp16|E4m3)(?P<rest>\w*)"
)
_TRTLLM_V2 = re.compile(
    r"^fmha_v2_flash_attention_(?P<dtype>fp16|bf16|e4m3)(?:_fp32)?_(?P<m>\d{1,4})_(?P<n>\d{1,4})_S_"
    r"(?P<rest>\w*?)_?sm(?P<arch>\d{2,3})"
)
_CAPITALS = {"Bfloat16": "bfloat16", "Bf16": "bfloat16", "Fp16": "float16", "E4m3": "float8_e4m3fn"}


def decode(symbol: Symbol) -> KernelName | None:
    """A kernel of FlashInfer, vLLM or TensorRT-LLM; None for anything else."""
    for read in (_vllm, _flashinfer, _trtllm_gen, _trtllm_v2):
        found = read(symbol)
        if found is not None:
            return found
    return None


def _vllm(symbol: Symbol) -> KernelName | None:
    triton = symbol.text in _VLLM_TRITON
    if triton:
        role, what = _VLLM_TRITON[symbol.text]
    elif symbol.function.startswith("vllm::") and symbol.base in _VLLM:
        role, what = _VLLM[symbol.base]
    elif symbol.function.startswith("vllm::"):
        role, what = "other", f"kernel {symbol.base}"
    else:
        return None
    dtype = next((DTYPES[a] for a in symbol.arguments if a in DTYPES and not a.isdigit()), None)
    # the caches are compiled for raw 16-bit words: "unsigned short" names no dtype
    attention = role.startswith("attention")
    v1_or_v2 = symbol.base.startswith("paged_attention_v")
    head_dim = None
    if v1_or_v2:
        # paged_attention_v1_kernel<scalar, cache, head_size, block_size, threads, ...>
        sizes = [int(a) for a in symbol.arguments if a.isdecimal() and len(a) < 6]
        head_dim = sizes[0] if len(sizes) > 1 else None
    return KernelName(
        name=symbol.name,
        family="vllm",
        backend="vllm",
        role=role,
        pass_=_FORWARD if attention else None,
        dtype=dtype,
        head_dim=head_dim,
        tensor_cores=False if v1_or_v2 and role == "attention_forward" else None,
        words=sentence(
            f"vLLM: {what}",
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
        ),
    )


def _flashinfer(symbol: Symbol) -> KernelName | None:
    found = _FLASHINFER.match(symbol.base)
    if found is None and not symbol.function.startswith("flashinfer::"):
        return None
    if found is None:
        role: Role = "other"
        if "allreduce" in symbol.text:
            role = "communication"
        elif "Norm" in symbol.base:
            role = "norm"
        elif "MergeState" in symbol.base or "VariableLengthMerge" in symbol.base:
            role = "attention_part"
        return KernelName(
            name=symbol.name,
            family="flashinfer",
            backend="flashinfer",
            role=role,
            words=f"FlashInfer: kernel {symbol.base}.",
        )
    many = "a batch of" if found.group(1) == "Batch" else "one"
    prefill = found.group(2) == "Prefill"
    paged = "Paged" in symbol.base
    traits = symbol.inner("KernelTraits")
    dtype = next((DTYPES[a] for a in traits if a in DTYPES and not a.isdigit()), None)
    mask = re.search(r"MaskMode\)?(?:::k)?(\w+)", symbol.text)
    causal = (
        {"0": False, "None": False, "1": True, "Causal": True}.get(mask.group(1))
        if (mask)
        else None
    )
    layout = "a paged cache" if paged else "packed keys and values"
    return KernelName(
        name=symbol.name,
        family="flashinfer",
        backend="flashinfer",
        role="attention_forward",
        pass_=_FORWARD,
        dtype=dtype,
        # its decode kernels multiply on the CUDA cores, its prefill kernels with mma.sync
        tensor_cores=prefill,
        causal=causal,
        words=sentence(
            f"FlashInfer: {'prefill' if prefill else 'decode'} attention of {many} "
            f"{'sequences' if many != 'one' else 'sequence'} over {layout}",
            dtype_words(dtype),
            {True: "causal", False: "not causal", None: ""}[causal],
            tensor_core_words(prefill),
        ),
    )


def _trtllm_gen(symbol: Symbol) -> KernelName | None:
    found = _TRTLLM_GEN.match(symbol.text)
    if found is None:
        return None
    rest = found["rest"]
    head = re.search(r"H(?:Qk)?(\d{2,4})", rest)
    queries = re.search(r"(?:TileSize)?Q(\d{1,4})(?:TileSize)?Kv(\d{1,4})", rest)
    tile = (int(queries.group(1)), int(queries.group(2))) if queries else None
    head_dim = int(head.group(1)) if head else None
    arch = f"sm{found['arch']}"
    dtype = _CAPITALS[found["dtype"]]
    causal = True if "Causal" in rest else None
    return KernelName(
        name=symbol.name,
        family="trtllm",
        backend="trtllm",
        role="attention_forward",
        pass_=_FORWARD,
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=arch,
        tensor_cores=True,
        causal=causal,
        words=sentence(
            "TensorRT-LLM's generated attention"
            + (" over a paged cache" if "PagedKv" in rest else ""),
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
            tile_words(tile),
            "for decoding" if "Gen" in rest else "",
            arch_words(arch),
        ),
    )


def _trtllm_v2(symbol: Symbol) -> KernelName | None:
    found = _TRTLLM_V2.match(symbol.text)
    if found is None:
        return None
    head = re.search(r"(?:^|_)(\d{2,3})(?=_|$|x)", found["rest"])
    head_dim = int(head.group(1)) if head else None
    causal = True if "causal" in found["rest"] else None
    arch, dtype = f"sm{found['arch']}", DTYPES[found["dtype"]]
    tile = (int(found["m"]), int(found["n"]))
    return KernelName(
        name=symbol.name,
        family="trtllm",
        backend="trtllm",
        role="attention_forward",
        pass_=_FORWARD,
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=arch,
        tensor_cores=True,
        causal=causal,
        words=sentence(
            "TensorRT-LLM's fused attention (fmha v2)",
            dtype_words(dtype),
            "" if head_dim is None else f"head_dim {head_dim}",
            tile_words(tile),
            "causal" if causal else "",
            arch_words(arch),
        ),
    )
