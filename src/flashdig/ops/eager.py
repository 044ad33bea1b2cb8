"""Whether torch's dispatcher may be passed by: nobody watches, records or transforms the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

# index of the current GPU
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_transforms = torch._C._are_functorch_transforms_active
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_profiled = torch._C._autograd._profiler_enabled
_traced = torch._C._get_tracing_state


def unwatched() -> bool:
    """False under torch.func, any mode of torch's (fake tensors, FLOP counters, a default device),
    the profiler, jit tracing and forward-mode differentiation. Callers have asked
    `torch.compiler.is_compiling()` before."""
    return not (
        _transforms()
        or _dispatch_modes()
        or _function_modes()
        or _profiled()
        or forward_ad._current_level >= 0
        or _traced() is not None
    )


def is_plain(x: torch.Tensor) -> bool:
    """An ordinary tensor, whose memory holds what it says: no subclass, no lazy negation, no tensor
    of zeros without memory, no wrapper of torch.func that outlived its transform."""
    kind = type(x)
    if (kind is not torch.Tensor and kind is not torch.nn.Parameter) or x.is_neg():
        return False
    try:
        return x.data_ptr() != 0 or x.numel() == 0
    except RuntimeError:  # no memory
        return False


Check = Callable[..., bool]


def same_as(*tensors: torch.Tensor) -> Check | None:
    """A fast check whether other tensors are as these: class, dtype, device, sizes, strides,
    dispatch keys (subclasses, lazy negation, modes and transforms among them), and whether a
    gradient is asked for. None where this release of torch has none that is known.

    It is torch.compile's own guard, in C++: a fifth of the time of reading all this in Python.
    """
    return _same_as(tensors) if _guards_are_known() else None


def _same_as(tensors: tuple[torch.Tensor, ...]) -> Check:
    make: Any = torch._C._dynamo.guards.TensorGuards
    guards = make(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )
    check: Check = guards.check
    return check


@functools.cache
def _guards_are_known() -> bool:
    x, y, taller = (torch.empty(rows, 3, device="cpu") for rows in (2, 2, 3))
    asking = torch.empty(2, 3, device="cpu", requires_grad=True)
    others = (
        taller,
        torch.empty(3, 2, device="cpu").t(),
        x.double(),
        x.to("meta"),
        asking,
        None,
    )
    try:
        check = _same_as((x, y))
        return (
            check(y, x)
            and not any(check(y, other) for other in others)
            and not _same_as((asking, y))(x, y)
        )
    except Exception:  # private to torch: whatever it raises, it is not the guard that is known
        return False
