"""Kernels of AMD's libraries: Composable Kernel (ck_tile), AITER, Tensile."""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    KernelName,
    Pass,
    Role,
    dtype_words,
    sentence,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_CK: tuple[tuple[str, Role, Pass | None, str], ...] = (
    ("FmhaFwdSplitKVCombine", "attention_part", "forward", "joins the partial attention results"),
    ("FmhaFwd", "attention_forward", "forward", "fused attention, forward"),
    ("FmhaBatchPrefill", "attention_forward", "forward", "fused attention over a paged cache"),
    ("UnifiedAttention", "attention_forward", "forward", "fused attention over a paged cache"),
    (
        "FmhaBwdOGradDotO",
        "attention_part",
        "backward",
        "backward's first step, delta = rowsum(dO * O)",
    ),
    ("FmhaBwdConvertQGrad", "attention_part", "backward", "backward's last step, dq to the dtype"),
    ("FmhaBwd", "attention_backward", "backward", "fused attention, backward"),
    ("Rmsnorm2dFwd", "norm", None, "RMS norm"),
    ("Layernorm2dFwd", "norm", None, "layer norm"),
    ("Gemm", "matmul", None, "matrix product"),
)
_AITER = re.compile(
    r"^fmha_(?P<pass>fwd|bwd)_hd(?P<head>\d{2,4})_(?P<dtype>bf16|fp16|fp8)(?P<rest>\w*)"
)
# Tensile: types of the operands and the sum after the index names, MT is the macro tile
_TENSILE = re.compile(r"^(?:Custom_)?Cijk_A\w{3}_B\w{3}_(?P<types>[A-Z0-9]+)_")
_TENSILE_TILE = re.compile(r"_MT(\d{1,4})x(\d{1,4})x(\d{1,4})")
_TENSILE_TYPES = {"B": "bfloat16", "H": "float16", "S": "float32", "D": "float64"}


def decode(symbol: Symbol) -> KernelName | None:
    """A kernel of ck_tile, AITER or Tensile; None for anything else."""
    return _ck_tile(symbol) or _aiter(symbol) or _tensile(symbol)


def _ck_tile(symbol: Symbol) -> KernelName | None:
    if "ck_tile::" not in symbol.text:
        return None
    role, pass_, what = next(
        ((r, p, w) for stem, r, p, w in _CK if stem in symbol.text),
        ("other", None, "kernel"),
    )
    return KernelName(
        name=symbol.name,
        family="ck_tile",
        backend="ck",
        role=role,
        pass_=pass_,
        words=f"AMD's Composable Kernel: {what}.",
    )


def _aiter(symbol: Symbol) -> KernelName | None:
    if not symbol.function.startswith("aiter::"):
        return None
    found = _AITER.match(symbol.base)
    if found is None:
        norm = "norm" in symbol.base
        return KernelName(
            name=symbol.name,
            family="aiter",
            backend="aiter",
            role="norm" if norm else "other",
            words=f"AMD's AITER: kernel {symbol.base}.",
        )
    forward = found["pass"] == "fwd"
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}[found["dtype"]]
    head_dim = int(found["head"])
    causal = True if "causal" in found["rest"] else None
    return KernelName(
        name=symbol.name,
        family="aiter",
        backend="aiter",
        role="attention_forward" if forward else "attention_backward",
        pass_="forward" if forward else "backward",
        dtype=dtype,
        head_dim=head_dim,
        tensor_cores=True,
        causal=causal,
        words=sentence(
            f"AMD's AITER: fused attention in assembly, {'forward' if forward else 'backward'}",
            dtype_words(dtype),
            f"head_dim {head_dim}",
            "causal" if causal else "",
            "on matrix cores",
        ),
    )


def _tensile(symbol: Symbol) -> KernelName | None:
    found = _TENSILE.match(symbol.text)
    if found is None:
        return None
    dtype = _TENSILE_TYPES.get(found["types"][0])
    sizes = _TENSILE_TILE.search(symbol.text)
    tile = tuple(int(n) for n in sizes.groups()) if sizes else None
    matrix = True if re.search(r"_MI\d+x\d+", symbol.text) else None
    return KernelName(
        name=symbol.name,
        family="tensile",
        backend="hipblaslt",
        role="matmul",
        dtype=dtype,
        tile=tile,
        tensor_cores=matrix,
        words=sentence(
            "Matrix product of AMD's rocBLAS or hipBLASLt (Tensile)",
            dtype_words(dtype),
            tile_words(tile),
            "on matrix cores" if matrix else "",
        ),
    )
