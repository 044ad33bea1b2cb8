"""Whether torch's dispatcher may be passed by: nobody watches, records or transforms the call."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

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
