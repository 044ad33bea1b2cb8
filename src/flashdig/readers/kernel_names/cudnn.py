"""cuDNN's generated attention kernels and their helpers, and its changes of layout.

The generated names read: native_sdpa, compute capability, flash, fprop or bprop, the tensor-core
instruction (wmma: mma.sync, wgmma: Hopper's), the operand width, the knob (which of the tuned
configurations), the tile, the warps or warp groups, the cluster.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    arch_words,
    sentence,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol, number

_NAME = re.compile(
    r"^cudnn_generated_fort_native_sdpa_sm(?P<arch>\d{2,3})_flash_(?P<pass>fprop|bprop)"
    r"(?:_(?P<instruction>wmma|wgmma))?(?:_(?P<dtype>f16|bf16|f8|e4m3|e5m2|fp8))?"
    r"(?:_knob_(?P<knob>\d+))?(?:_(?P<tile>\d{1,4}x\d{1,4}x\d{1,4}))?"
)
_HELPERS = {
    "compute_dot_do_o": "backward's first step, delta = rowsum(dO * O)",
    "convert_dq_to_16bits": "backward's last step, dq from float32 to 16 bits",
    "fmha_reduce_head": "backward's last step, sums dk and dv over the query heads of a KV head",
}
# nchwToNhwcKernel
_LAYOUT = re.compile(r"^(?P<before>n[chwd]{2,4})To(?P<after>N[chwd]{2,4})Kernel$")


def decode(symbol: Symbol) -> KernelName | None:
    """A cuDNN attention kernel or helper; None for anything else."""
    found = _NAME.match(symbol.text)
    if found is not None:
        return _generated(symbol, found)
    if symbol.base == "unpack_cudnn":
        return KernelName(
            name=symbol.name,
            family="cudnn",
            backend="cudnn",
            role="attention_part",
            pass_="forward",
            words="cuDNN attention: forward's first step, unpacks the seed of its dropout.",
        )
    if not symbol.function.startswith("cudnn::"):
        return None
    for stem, what in _HELPERS.items():
        if symbol.base.startswith(stem):
            return KernelName(
                name=symbol.name,
                family="cudnn",
                backend="cudnn",
                role="attention_part",
                pass_="backward",
                head_dim=number(symbol.arguments, 1) if stem == "compute_dot_do_o" else None,
                words=f"cuDNN attention: {what}.",
            )
    layouts = _LAYOUT.match(symbol.base)
    if layouts is not None:
        before, after = layouts["before"].upper(), layouts["after"].upper()
        return KernelName(
            name=symbol.name,
            family="cudnn",
            backend="cudnn",
            role="copy",
            dtype=DTYPES.get(symbol.arguments[0]) if symbol.arguments else None,
            words=f"cuDNN copies a tensor from the layout {before} to {after}.",
        )
    return KernelName(
        name=symbol.name,
        family="cudnn",
        backend="cudnn",
        role="other",
        words=f"A kernel of cuDNN ({symbol.base}).",
    )


def _generated(symbol: Symbol, found: re.Match[str]) -> KernelName:
    forward = found["pass"] == "fprop"
    tile = tuple(int(n) for n in found["tile"].split("x")) if found["tile"] else None
    arch = f"sm{found['arch']}"
    instruction = {"wmma": "mma.sync", "wgmma": "wgmma"}.get(found["instruction"] or "")
    dtype = {"bf16": "bfloat16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}.get(
        found["dtype"] or ""
    )
    # "f16" stands for both 16-bit types: the same name runs for bfloat16 inputs
    width = {"f16": "16-bit (fp16 or bf16, the name does not tell)", "f8": "fp8", "fp8": "fp8"}.get(
        found["dtype"] or "", dtype or ""
    )
    head_dim = tile[2] if tile is not None else None
    return KernelName(
        name=symbol.name,
        family="cudnn",
        backend="cudnn",
        role="attention_forward" if forward else "attention_backward",
        pass_="forward" if forward else "backward",
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=arch,
        tensor_cores=True,
        pipeline=f"knob {found['knob']}" if found["knob"] else None,
        words=sentence(
            f"cuDNN's generated flash attention: {'forward' if forward else 'backward'}",
            width,
            tile_words(tile),
            f"configuration (knob) {found['knob']}" if found["knob"] else "",
            (f"{instruction} " if instruction else "") + "on tensor cores",
            arch_words(arch),
        ),
    )
