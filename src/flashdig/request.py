"""What dispatch must know of a call besides its problem, from its device and the environment."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch

from flashdig.dispatch import Request
from flashdig.validate import DenseCall

HAS_TRITON = importlib.util.find_spec("triton") is not None


def request_of(call: DenseCall, backend: str) -> Request:
    """The request of a checked call to `backend` (a name or "auto")."""
    device = call.q.device
    return Request(
        device_type=device.type,
        compute_capability=_capability(device.index) if device.type == "cuda" else None,
        triton=HAS_TRITON,
        interpreter=backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1",
        return_lse=call.return_lse,
        descale=any(x is not None for x in (call.q_descale, call.k_descale, call.v_descale)),
        out_dtype=str(call.out_dtype).removeprefix("torch."),
    )


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
