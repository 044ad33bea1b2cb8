"""The memory-efficient attention of xformers, and its copy in PyTorch (`fmha_cutlassF/B_...`).

The name is made by PyTorch's `mem_eff_attention/kernels/generate_kernels.py`: F or B, dtype,
aligned or not, queries x keys of a block, where the output is kept (rf, registers; gmem), k64 the
largest head_dim of a backward, the compute capability.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    arch_words,
    dtype_words,
    sentence,
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol, number

_NAME = re.compile(
    r"^fmha_cutlass(?P<pass>[FB])_(?P<dtype>f16|bf16|f32)_(?P<aligned>aligned|notaligned)"
    r"(?:_(?P<queries>\d{1,4})x(?P<keys>\d{1,4}))?(?:_k(?P<k>\d{1,6}))?(?P<rest>\w*?)"
    r"_sm(?P<arch>\d{2,3})\b"
)
_UNBOUNDED = 65536  # the value that stands for "any head_dim"


def decode(symbol: Symbol) -> KernelName | None:
    """A CUTLASS fused attention kernel of xformers or PyTorch; None for anything else."""
    found = _NAME.match(symbol.text)
    if found is None:
        return None
    forward = found["pass"] == "F"
    dtype = DTYPES[found["dtype"]]
    arch = int(found["arch"])
    tile = (int(found["queries"]), int(found["keys"])) if found["queries"] else None
    place = next((p for p in ("rf", "gmem") if f"_{p}" in found["rest"]), None)
    options = [o for o in ("dropout", "seqaligned") if o in found["rest"]]
    head_dim = _head_dim(symbol, int(found["k"]) if found["k"] else None, tile, place)
    # CUTLASS' choice in xformers' gemm_kernel_utils.h: plain FMAs for float32 before Ampere (from
    # then on three TF32 products) and for everything before Volta
    tensor_cores = arch >= 80 or (arch >= 70 and dtype == "float16")
    in_torch = "PyTorchMemEffAttention" in symbol.text
    return KernelName(
        name=symbol.name,
        family="fmha_cutlass",
        backend="efficient",
        role="attention_forward" if forward else "attention_backward",
        pass_="forward" if forward else "backward",
        dtype=dtype,
        tile=tile,
        head_dim=head_dim,
        arch=f"sm{arch}",
        tensor_cores=tensor_cores,
        pipeline=", ".join(filter(None, [place, *options])) or None,
        words=sentence(
            ("Memory-efficient attention of PyTorch" if in_torch else "Memory-efficient attention")
            + f" (CUTLASS, from xformers): {'forward' if forward else 'backward'}",
            dtype_words(dtype),
            tile_words(tile),
            "" if head_dim is None else f"head_dim up to {head_dim}",
            {"rf": "output kept in registers", "gmem": "output summed in global memory"}.get(
                place or ""
            ),
            "with dropout" if "dropout" in options else "",
            tensor_core_words(tensor_cores),
            arch_words(f"sm{arch}"),
        ),
    )


def _head_dim(
    symbol: Symbol, named: int | None, tile: tuple[int, int] | None, place: str | None
) -> int | None:
    """From k64 in the name, else kMaxK of the parameters, else the key tile of an rf kernel."""
    largest = named
    if largest is None:
        # AttentionKernel<scalar, arch, aligned, queries, keys, kMaxK, ...>
        largest = number(symbol.inner("AttentionKernel"), 5)
    if largest is None and place == "rf" and tile is not None:
        largest = tile[1]
    return None if largest in (None, _UNBOUNDED) else largest
