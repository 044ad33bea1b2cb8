"""Kernel names in plain words: `decode(name)` says who made a kernel, what it does and how.

Each family is a module with `decode(symbol) -> KernelName | None`; the first one that knows the
name wins, and what nobody knows comes back as unknown. `decode` never raises.
"""

from __future__ import annotations

from functools import lru_cache

from flashdig.readers.kernel_names import (
    aten,
    communication,
    convolution,
    cublas,
    cudnn,
    cutlass_fmha,
    flash,
    flashdig,
    flashdig_cache,
    guess,
    rocm,
    serving,
    triton,
)
from flashdig.readers.kernel_names.kernel_name import ATTENTION_ROLES, KernelName, Pass, Role
from flashdig.readers.kernel_names.symbol import Symbol

__all__ = ["ATTENTION_ROLES", "KernelName", "Pass", "Role", "decode"]

# attention first: its names also hold the words of GEMMs and of elementwise kernels; convolutions
# before products, for the same reason
_FAMILIES = (
    *(communication, flash, flashdig, flashdig_cache, cutlass_fmha, cudnn, convolution),
    *(serving, rocm, triton, cublas, aten),
)


@lru_cache(maxsize=8192)
def decode(name: str) -> KernelName:
    """Decode a kernel name as it stands in a trace, demangled or mangled; any string will do."""
    symbol = Symbol(name)
    for family in _FAMILIES:
        found: KernelName | None = family.decode(symbol)
        if found is not None:
            return found
    return guess.decode(symbol)
