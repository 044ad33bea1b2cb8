"""Calls that were served before: their arguments are not checked, their problem not built again.

The key holds everything that a call depends on but the values in its tensors: what was once checked
and chosen for a key holds for every call that has it. Whatever is out of the ordinary
(torch.compile, modes, subclasses, another current device, autocast that casts) has no key, and its
call takes the long way.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from typing import Any

import torch

from flashdig.checks import FP8_DTYPES
from flashdig.kernels.plans import ALIGNMENT, Kept, Plan, plan_key
from flashdig.ops.attention import TENSORS, differentiable, planned_forward
from flashdig.ops.eager import is_plain, same_as, unwatched
from flashdig.packing import Packing, values_are_checked
from flashdig.validate import tf32_allowed

Key = tuple[Hashable, ...]

_kept = Kept()
# by options: what was called last, without other tensors and windows
_last = Kept()
_PLACES = 12  # of the alignment in a key
_current_device = getattr(torch._C, "_cuda_getDevice", lambda: -1)
_deterministic = torch._C._get_deterministic_algorithms
_any_autocast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)


class KeptCall:
    """How to serve the calls of one key.

    Attributes:
        plan: of the operator's tensors.
        tail: the operator's inputs behind its tensors.
        dropout: whether each call draws a seed.
        same: whether q, k and v are as they were; None where that is not known fast.
        device: index of the GPU; -1 elsewhere.
        deterministic, tf32: torch's settings; tf32 is None where products do not follow it.
        backward: the plan of the gradients that were asked for last, see `ops.attention`.
    """

    __slots__ = (
        "backward",
        "deterministic",
        "device",
        "dropout",
        "plan",
        "same",
        "tail",
        "tf32",
    )

    def __init__(self, plan: Plan, inputs: tuple[Any, ...]) -> None:
        self.plan = plan
        self.tail = inputs[TENSORS:]
        self.dropout = inputs[6] is not None
        # fp8 that asks for a gradient is refused, which the key sees
        self.same = None if inputs[0].dtype in FP8_DTYPES else same_as(*inputs[:3])
        self.device = inputs[0].get_device()
        self.deterministic = _deterministic()
        self.tf32 = tf32_allowed() if inputs[0].dtype is torch.float32 else None
        self.backward: Any = None

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        sinks: torch.Tensor | None,
        *lengths: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse."""
        seed = draw_seed(q.device) if self.dropout else None
        if torch.is_grad_enabled() and (
            q.requires_grad
            or k.requires_grad
            or v.requires_grad
            or (bias is not None and bias.requires_grad)
            or (sinks is not None and sinks.requires_grad)
        ):
            out, lse = differentiable(self, q, k, v, bias, sinks, alibi_slopes, (seed, *lengths))
        else:
            out, lse = self.plan(q, k, v, bias, alibi_slopes, sinks, seed, *lengths)
        return out, lse

    def serves(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Any) -> bool:
        """Whether a call with the same options and no other tensors is this one again. False where
        only the key can say."""
        return (
            self.same is not None
            and self.same(q, k, v)
            and (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0
            and (
                _current_device() == self.device
                if self.device >= 0
                else _is_here(q.device, options)
            )
            and _deterministic() == self.deterministic
            and (self.tf32 is None or tf32_allowed() == self.tf32)
            and not _any_autocast()
            and unwatched()
        )


def find(key: Key | None) -> KeptCall | None:
    if key is None:
        return None
    try:
        found: KeptCall | None = _kept.get(key)
    except TypeError:  # an argument that no key can hold is none that is allowed
        return None
    return found


def find_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *options: Any,
) -> tuple[KeptCall | None, Key | None]:
    """The kept call that a call of `flashdig.attention` is, or the key to keep it under; neither
    where it has to take the long way.

    What was called last with these options is asked first: nothing is read from tensors that are
    as they were then.
    """
    if torch.compiler.is_compiling():
        return None, None
    plain = bias is None and alibi_slopes is None and sinks is None and options[0] is None
    if plain:
        try:
            last: KeptCall | None = _last.get((options, tuple(map(type, options))))
        except TypeError:  # an argument that no key can hold is none that is allowed
            return None, None
        if last is not None and last.serves(q, k, v, options):
            return last, None
    key = dense_key(q, k, v, bias, alibi_slopes, sinks, *options)
    found = find(key)
    if plain and found is not None and key is not None and key[_PLACES] is None:
        _last.keep((options, tuple(map(type, options))), found)
    return found, key


def keep(key: Key, inputs: tuple[Any, ...]) -> None:
    """Keep how a call was served, where its backend has a plan for it.

    Args:
        inputs: of `flashdig::attention_forward`, whose tensors are the caller's.
    """
    plan = planned_forward(inputs)
    if plan is not None:
        _kept.keep(key, KeptCall(plan, inputs))


def forget() -> None:
    """Drop every kept call."""
    _kept.clear()
    _last.clear()


def draw_seed(device: torch.device) -> torch.Tensor:
    """A Philox key, (1,) int64, from the device's default generator."""
    return torch.randint(2**63 - 1, (1,), device=device)


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
        and _is_here(q.device, options)
        and unwatched()
        and not (_any_autocast() and _casts(q, k, v))
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


def _is_here(device: torch.device, options: tuple[Any, ...]) -> bool:
    """The current GPU, or the CPU where kernels are interpreted."""
    if device.type == "cuda":
        return bool(device.index == _current_device())
    return options[-1] == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def _casts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
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
