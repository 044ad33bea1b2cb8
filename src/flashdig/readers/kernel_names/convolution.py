"""Convolutions of cuDNN, computed as matrix products over windows of the input.

Names: `sm80_xmma_fprop_implicit_gemm_...` (fprop: the output, dgrad: the input's gradient, wgrad:
the weights'), `cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816fprop_...>`, and the older
templates `implicit_convolve_sgemm<...>` and `convolve_common_engine...`.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    Pass,
    arch_words,
    dtype_words,
    sentence,
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_XMMA = re.compile(
    r"^sm(?P<arch>\d{2,3})_xmma_(?P<pass>fprop|dgrad|wgrad)_(?:indexed_)?implicit_gemm_"
    r"(?:indexed_)?(?P<types>(?:tf32|bf16|f16|f32|f64|i8)\w{0,40}?)_n[ch]\w{0,40}?_tilesize"
    r"(?P<m>\d{1,4})x(?P<n>\d{1,4})x(?P<k>\d{1,4})_"
)
_CUTLASS = re.compile(
    r"cutlass(?:_(?P<arch>\d{2,3}))?_(?P<unit>tensorop|simt)_(?:(?P<dtype>bf16|f16|tf32)_)?"
    r"\w{0,20}?(?P<pass>fprop|dgrad|wgrad)_\w{0,60}?(?P<m>\d{1,4})x(?P<n>\d{1,4})_"
    r"(?P<k>\d{1,4})x(?P<stages>\d{1,2})_"
)
_TEMPLATES = re.compile(r"^(?:implicit_convolve|explicit_convolve|convolve_common_engine)")
_WORDS: dict[str, tuple[Pass, str]] = {
    "fprop": ("forward", "Convolution"),
    "dgrad": ("backward", "Convolution, gradient of the input"),
    "wgrad": ("backward", "Convolution, gradient of the weights"),
}


def decode(symbol: Symbol) -> KernelName | None:
    """A convolution of cuDNN; None for anything else."""
    found = _XMMA.match(symbol.text)
    if found is not None:
        return _xmma(symbol, found)
    if symbol.function.startswith("cutlass") and "cudnn" in symbol.function:
        found = _CUTLASS.search(symbol.text)
        if found is not None:
            return _cutlass(symbol, found)
    if _TEMPLATES.match(symbol.base):
        dtype = next((DTYPES[a] for a in symbol.arguments if a in DTYPES and a != "int"), None)
        return _convolution(symbol, "fprop", dtype=dtype, tensor_cores=False)
    return None


def _xmma(symbol: Symbol, found: re.Match[str]) -> KernelName:
    text = symbol.text
    # bf16bf16_bf16f32_f32: the operands in memory, then how they are multiplied
    multiplied = re.search(r"_(tf32|bf16|f16|f32|f64|i8)", "_" + found["types"].partition("_")[2])
    tensor_cores = False if "_ffma_" in text or "_dfma_" in text else None
    if re.search(r"_tensor\d|_warpgroupsize|_mma\d", text):
        tensor_cores = True
    stage = re.search(r"_stage(\d{1,2})_", text)
    return _convolution(
        symbol,
        found["pass"],
        dtype=DTYPES[multiplied.group(1)] if multiplied else None,
        tile=(int(found["m"]), int(found["n"]), int(found["k"])),
        stages=int(stage.group(1)) if stage else None,
        tensor_cores=tensor_cores,
        arch=f"sm{found['arch']}",
    )


def _cutlass(symbol: Symbol, found: re.Match[str]) -> KernelName:
    return _convolution(
        symbol,
        found["pass"],
        dtype=DTYPES[found["dtype"]] if found["dtype"] else None,
        tile=(int(found["m"]), int(found["n"]), int(found["k"])),
        stages=int(found["stages"]),
        tensor_cores=found["unit"] == "tensorop",
        arch=f"sm{found['arch']}" if found["arch"] else None,
    )


def _convolution(
    symbol: Symbol,
    direction: str,
    *,
    dtype: str | None,
    tensor_cores: bool | None,
    tile: tuple[int, int, int] | None = None,
    stages: int | None = None,
    arch: str | None = None,
) -> KernelName:
    pass_, what = _WORDS[direction]
    pipeline = None if stages is None else f"{stages} stage" + ("s" if stages != 1 else "")
    return KernelName(
        name=symbol.name,
        family="cudnn",
        backend="cudnn",
        role="convolution",
        pass_=pass_,
        dtype=dtype,
        tile=tile,
        arch=arch,
        tensor_cores=tensor_cores,
        pipeline=pipeline,
        words=sentence(
            f"{what} of cuDNN" if direction == "fprop" else f"{what}, of cuDNN",
            dtype_words(dtype),
            tile_words(tile),
            pipeline,
            tensor_core_words(tensor_cores),
            arch_words(arch),
        ),
    )
