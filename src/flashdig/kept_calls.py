"""Calls that were served before: their arguments are not checked, their problem not built again.

The key holds everything that a call depends on but the values in its tensors: what was once checked
and chosen for a key holds for every call that has it. Whatever is out of the ordinary
(torch.compile, modes, subclasses, another current device, autocast that casts) has no key, and its
call takes the long way.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from flashdig import kept_keys
from flashdig.checks import FP8_DTYPES
from flashdig.kept_keys import any_autocast
from flashdig.kernels.plans import ALIGNMENT, Kept, Plan, replay_of
from flashdig.ops.attention import TENSORS, planned_forward
from flashdig.ops.eager import Check, current_device, same_as, unwatched
from flashdig.ops.kept_gradients import differentiable, differentiable_dense
from flashdig.validate import tf32_allowed

Key = kept_keys.Key

_kept = Kept()
RECENT = 4
_ALONE = (None,) * (TENSORS - 3)  # what q, k and v come without
_deterministic = torch._C._get_deterministic_algorithms


class KeptCall:
    """How to serve the calls of one key.

    Attributes:
        plan: of the operator's tensors.
        replay: of q, k and v alone; None where there are others, or the plan has none.
        tail: the operator's inputs behind its tensors.
        dropout: whether each call draws a seed.
        return_lse: whether the lse is wanted; known of calls of q, k and v alone.
        device: index of the GPU; -1 elsewhere.
        deterministic, tf32: torch's settings; tf32 is None where products do not follow it.
        backward: what the gradients were made with last, see `ops.kept_gradients`.
        recent: by torch's modes: this call as `again` knows it.
    """

    __slots__ = (
        "backward",
        "deterministic",
        "device",
        "dropout",
        "plan",
        "recent",
        "replay",
        "return_lse",
        "tail",
        "tf32",
    )

    def __init__(self, plan: Plan, inputs: tuple[Any, ...]) -> None:
        self.plan = plan
        self.tail = inputs[TENSORS:]
        self.dropout = inputs[6] is not None
        self.device = inputs[0].get_device()
        self.replay = None
        if all(x is None for x in inputs[3:TENSORS]):
            self.replay = replay_of(plan, self.device, range(3), TENSORS)
        self.return_lse = True
        self.deterministic = _deterministic()
        self.tf32 = tf32_allowed() if inputs[0].dtype is torch.float32 else None
        self.backward: Any = None
        self.recent: dict[Hashable, Recent] = {}

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

    def both(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """out and lse of q, k and v alone, without gradients."""
        if self.replay is not None:
            return self.replay(q, k, v)
        return self.plan(q, k, v, *_ALONE)

    def alone(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        """What `flashdig.attention` returns of q, k and v alone, without gradients."""
        if self.replay is not None and not self.return_lse:
            return self.replay.first(q, k, v)
        out, lse = self.both(q, k, v)
        return (out, lse) if self.return_lse else out


class Recent:
    """A kept call of q, k and v alone as it was made last.

    Attributes:
        same: whether q, k and v are as they were.
        wanted: whether one of them asks for a gradient.
        The others are arguments of `flashdig.attention`, by name.
    """

    __slots__ = (
        "backend",
        "causal",
        "deterministic",
        "dropout_p",
        "kept",
        "out_dtype",
        "return_lse",
        "same",
        "softcap",
        "softmax_scale",
        "wanted",
    )

    def __init__(self, kept: KeptCall, same: Check, wanted: bool, options: tuple[Any, ...]) -> None:
        self.kept = kept
        self.same = same
        self.wanted = wanted
        (
            self.causal,
            self.softmax_scale,
            self.softcap,
            self.dropout_p,
            self.out_dtype,
            self.deterministic,
            self.return_lse,
            self.backend,
        ) = options


class _Latest:
    """What was called last, the newest first: a tuple, which other threads may be reading."""

    calls: tuple[Recent, ...] = ()


_latest = _Latest()


def again(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: Any,
    softmax_scale: Any,
    softcap: Any,
    dropout_p: Any,
    out_dtype: Any,
    deterministic: Any,
    return_lse: Any,
    backend: Any,
) -> Any:
    """What a call of `flashdig.attention` without other arguments returns, if it is one of those
    that were made last; None if that is not known fast.

    True equals 1, and not every option may be each of them: types are compared too.
    """
    for recent in _latest.calls:
        if (
            causal is recent.causal
            and return_lse is recent.return_lse
            and (
                softmax_scale is recent.softmax_scale or _equal(softmax_scale, recent.softmax_scale)
            )
            and (softcap is recent.softcap or _equal(softcap, recent.softcap))
            and (dropout_p is recent.dropout_p or _equal(dropout_p, recent.dropout_p))
            and out_dtype is recent.out_dtype
            and deterministic is recent.deterministic
            and (backend is recent.backend or _equal(backend, recent.backend))
            and recent.same(q, k, v)
        ):
            break
    else:
        return None
    kept = recent.kept
    at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if (
        (at_q | at_k | at_v) % ALIGNMENT
        or not (at_q and at_k and at_v)
        or _deterministic() is not kept.deterministic
        or not (
            kept.device == current_device()
            if kept.device >= 0
            else kept_keys.is_here(q.device, (backend,))
        )
        or (kept.tf32 is not None and tf32_allowed() != kept.tf32)
        or not unwatched()
        or (any_autocast() and kept_keys.casts(q, k, v))
    ):
        return None
    if recent.wanted and torch.is_grad_enabled():
        return differentiable_dense(kept, q, k, v)
    return kept.alone(q, k, v)


def _equal(option: Any, before: Any) -> bool:
    """Whether an option that is another object has the type and the value that it had."""
    return type(option) is type(before) and bool(option == before)


def _remember(kept: KeptCall, key: Key, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Let `again` know a call that its key found."""
    options: Any = key[kept_keys.OPTIONS]
    # dropout draws a seed; fp8 that asks for a gradient is refused, which the key sees
    if kept.dropout or q.dtype in FP8_DTYPES or options[0] is not None:
        return
    if key[kept_keys.PLACES] is not None or key[kept_keys.OTHERS] is not None:
        return
    wanted = (q.requires_grad, k.requires_grad, v.requires_grad)
    modes = (any_autocast(), torch.is_inference_mode_enabled(), q.is_inference(), wanted)
    before = kept.recent.get(modes)
    same = same_as(q, k, v) if before is None else before.same
    if same is None:
        return
    # made anew: equal options may be other objects than they were
    recent = Recent(kept, same, any(wanted), options[1:])
    kept.return_lse = recent.return_lse
    kept.recent[modes] = recent
    others = [one for one in _latest.calls if one is not before]
    _latest.calls = (recent, *others[: RECENT - 1])


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
    """
    if torch.compiler.is_compiling():
        return None, None
    key = kept_keys.dense_key(q, k, v, bias, alibi_slopes, sinks, *options)
    found = find(key)
    if (
        found is not None
        and key is not None
        and key[kept_keys.OTHERS] is None
        and options[0] is None
    ):
        _remember(found, key, q, k, v)
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
    _latest.calls = ()


def draw_seed(device: torch.device) -> torch.Tensor:
    """A Philox key, (1,) int64, from the device's default generator."""
    return torch.randint(2**63 - 1, (1,), device=device)
