"""Keys of calls: everything that a call of the public functions depends on but the values in its
tensors.

Whatever is out of the ordinary (torch.compile, modes, subclasses, another current device, autocast
that casts) has no key.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from flashdig.checks import FP8_DTYPES
from flashdig.kernels.plans import ALIGNMENT, plan_key
from flashdig.ops.eager import current_device, is_plain, unwatched
from flashdig.packing import Packing, values_are_checked
from flashdig.validate import tf32_allowed

Key = tuple[Hashable, ...]

PLACES, OTHERS, OPTIONS = 12, 13, 14  # in a key
_deterministic = torch._C._get_deterministic_algorithms
any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


def dense_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> Key | None:
    """The key of a call of `flashdig.attention`, None where it has to take the long way.

    Args:
        options: every other argument, the window first, as the caller gave it.
    """
    if torch.compiler.is_compiling():
        return None
    if bias is None and alibi_slopes is None and sinks is None:
        return _key(q, k, v, None, options)
    if not _slopes_fit(alibi_slopes):
        return None
    return _key(q, k, v, (bias, alibi_slopes, sinks), options)


def packed_key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> Key | None:
    """`dense_key` of a call of `flashdig.attention_varlen`."""
    if (
        torch.compiler.is_compiling()
        or packing.page_table is not None
        or values_are_checked("cuda")
        or not _slopes_fit(alibi_slopes)
    ):
        return None
    lengths = (
        packing.cu_seqlens_q,
        packing.cu_seqlens_k,
        packing.seqused_q,
        packing.seqused_k,
    )
    return _key(q, k, v, (*lengths, alibi_slopes, sinks), options)


def _key(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    others: tuple[torch.Tensor | None, ...] | None,
    options: tuple[Any, ...],
) -> Key | None:
    if not (
        # subclasses and anything else take the long way
        type(q) is torch.Tensor
        and type(k) is torch.Tensor
        and type(v) is torch.Tensor
        and is_here(q.device, options)
        and unwatched()
        and not (any_autocast() and casts(q, k, v))
    ):
        return None
    dtype = q.dtype
    if dtype is not torch.bfloat16:  # which no view of complex numbers has
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None
        if dtype in FP8_DTYPES and torch.is_grad_enabled():  # whose gradient is refused
            return None
    try:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:  # a wrapper of torch.func that outlived its transform
        return None
    if not (at_q and at_k and at_v):  # nothing there, or zeros without memory
        return None
    places: Hashable = None
    if (at_q | at_k | at_v) % ALIGNMENT:
        places = (at_q % ALIGNMENT == 0, at_k % ALIGNMENT == 0, at_v % ALIGNMENT == 0)
    other_keys: Hashable = None
    if others is not None:
        if not all(x is None or is_plain(x) for x in others):
            return None
        other_keys = plan_key(others)
    window = options[0]
    if window is not None:  # a list cannot be in a key; neither can 1 stand for True
        if type(window) not in (tuple, list):
            return None
        options = (tuple(window), tuple(map(type, window)), *options[1:])
    return (
        q.shape,
        k.shape,
        v.shape,
        q.stride(),
        k.stride(),
        v.stride(),
        dtype,
        k.dtype,
        v.dtype,
        q.device,
        k.device,
        v.device,
        places,
        other_keys,
        options,
        # True equals 1 and 1.0, and not every argument may be each of them
        tuple(map(type, options)),
        _deterministic(),
        dtype is torch.float32 and tf32_allowed(),
    )


def is_here(device: torch.device, options: tuple[Any, ...]) -> bool:
    """The current GPU, or the CPU where kernels are interpreted."""
    if device.type == "cuda":
        return bool(device.index == current_device())
    return options[-1] == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def casts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether autocast may change a dtype."""
    device_type = "cuda" if q.is_cuda else "cpu"
    if not torch.is_autocast_enabled(device_type):
        return False
    dtype = torch.get_autocast_dtype(device_type)
    return not (q.dtype == k.dtype == v.dtype == dtype)


def _slopes_fit(slopes: torch.Tensor | None) -> bool:
    """Slopes that ask for a gradient are refused, the long way."""
    if slopes is None:
        return True
    return is_plain(slopes) and not (slopes.requires_grad and torch.is_grad_enabled())
