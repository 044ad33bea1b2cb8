"""The operators `flashdig::attention_forward` and `flashdig::attention_backward`.

One pair serves dense and packed input and every backend with launchers of its own: the last
argument names the backend. All arguments are positional; their meaning is that of the launchers
(`flashdig.kernels.tiled_launch` documents them). Results are contiguous, and so are gradients.

The backward returns the wanted gradients only. It is an operator of its own, so differentiating it
again is one clear error.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad

from flashdig.kernels.plans import Plan, plan_of
from flashdig.ops import batching, eager, flops

TENSORS = 11  # q, k, v, bias, alibi_slopes, sinks, dropout_seed, cu_seqlens and seqused of q and k
INPUTS = 20
# positions of the inputs that take gradients: q, k, v, bias, sinks
DIFFERENTIABLE = (0, 1, 2, 3, 5)

# backend -> modules of its forward and its backward launcher
LAUNCHERS = {
    "tiled": ("flashdig.kernels.tiled_launch", "flashdig.kernels.tiled_launch"),
    "triton": ("flashdig.kernels.triton.forward_launch", "flashdig.kernels.triton.backward"),
    "hopper": (
        "flashdig.kernels.hopper.forward_launch",
        "flashdig.kernels.hopper.backward_operator",
    ),
    # the same where gradients must be the same bits in every run
    "hopper_deterministic": (
        "flashdig.kernels.hopper.forward_launch",
        "flashdig.kernels.hopper.backward_deterministic",
    ),
}

_TENSOR_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? dropout_seed, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k"
)
_SETTINGS = (
    "float softmax_scale, float softcap, float dropout_p, SymInt window_left, "
    "SymInt window_right, bool top_left, bool allow_tf32"
)

_library = torch.library.Library("flashdig", "DEF")
_library.define(
    f"attention_forward({_TENSOR_ARGUMENTS}, {_SETTINGS}, ScalarType? out_dtype, str backend) "
    "-> (Tensor out, Tensor lse)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    f"attention_backward(Tensor? grad_out, Tensor? grad_lse, {_TENSOR_ARGUMENTS}, Tensor out, "
    f"Tensor lse, {_SETTINGS}, bool[5] wanted, str backend) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def attention_op(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the inputs of `flashdig::attention_forward`, differentiable once.

    torch.func's transforms do not see an autograd function inside an operator, so there it runs
    above the operator; torch.compile breaks its graph there.
    """
    if _under_transform():
        out, lse = _transformed(*inputs)
    else:
        out, lse = torch.ops.flashdig.attention_forward.default(*inputs)
    return out, lse


@_disable_dynamo  # torch.compiler.disable, but imports the compiler only when it is called
def _transformed(*inputs: Any) -> Any:
    return _AttentionFunction.apply(*inputs)  # type: ignore[no-untyped-call, unused-ignore]


def planned_forward(inputs: tuple[Any, ...]) -> Plan | None:
    """The kept plan of the inputs of `flashdig::attention_forward`, None where there is none."""
    tensors, (*settings, out_dtype, backend) = inputs[:TENSORS], inputs[TENSORS:]
    plan = _planner(backend, 0)
    if plan is None:
        return None

    def make() -> Plan | None:
        made: Plan | None = plan(*tensors, **_settings(tuple(settings)), out_dtype=out_dtype)
        return made

    return plan_of(make, ("forward", backend), tensors, (*settings, out_dtype))


def planned_backward(inputs: tuple[Any, ...]) -> Plan | None:
    count = TENSORS + 4  # the two upstream gradients before, out and lse behind
    tensors, (*settings, wanted, backend) = inputs[:count], inputs[count:]
    plan = _planner(backend, 1)
    if plan is None:
        return None
    wanted = tuple(wanted)

    def make() -> Plan | None:
        made: Plan | None = plan(*tensors, **_settings(tuple(settings)), wanted=wanted)
        return made

    deterministic = torch.are_deterministic_algorithms_enabled()
    return plan_of(make, ("backward", backend), tensors, (*settings, wanted, deterministic))


def backward_op(*inputs: Any) -> tuple[torch.Tensor, ...]:
    operator = torch.ops.flashdig.attention_backward.default
    call: Any = _AttentionBackwardFunction.apply if _under_transform() else operator
    return tuple(call(*inputs))


def _under_transform() -> bool:
    return bool(torch._C._are_functorch_transforms_active())


@functools.cache
def _launcher(backend: str, direction: int) -> Callable[..., Any]:
    module = importlib.import_module(LAUNCHERS[backend][direction])
    name = ("attention_forward", "attention_backward")[direction]
    return cast(Callable[..., Any], getattr(module, name))


@functools.cache
def _planner(backend: str, direction: int) -> Callable[..., Plan | None] | None:
    module = importlib.import_module(LAUNCHERS[backend][direction])
    return getattr(module, ("plan_forward", "plan_backward")[direction], None)


def _on_device_of(
    q: torch.Tensor, function: Callable[..., Any], *arguments: Any, **settings: Any
) -> Any:
    """The function's result, with the device of q as the current one."""
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return function(*arguments, **settings)
    return function(*arguments, **settings)


def _settings(values: tuple[Any, ...]) -> dict[str, Any]:
    names = ("softmax_scale", "softcap", "dropout_p", "window_left", "window_right")
    return dict(zip((*names, "top_left", "allow_tf32"), values, strict=True))


def _forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tensors, (*settings, out_dtype, backend) = inputs[:TENSORS], inputs[TENSORS:]
    plan = planned_forward(inputs)
    if plan is not None:
        out, lse = _on_device_of(inputs[0], plan, *tensors)
        return out, lse
    numbers = _settings(tuple(settings))
    out, lse = _on_device_of(
        inputs[0], _launcher(backend, 0), *tensors, **numbers, out_dtype=out_dtype
    )
    return out, lse


def run_backward(*inputs: Any) -> list[torch.Tensor]:
    tensors = inputs[: TENSORS + 4]
    plan = planned_backward(inputs)
    if plan is not None:
        gradients = _on_device_of(inputs[2], plan, *tensors)
    else:
        *settings, wanted, backend = inputs[TENSORS + 4 :]
        numbers = _settings(tuple(settings))
        gradients = _on_device_of(
            inputs[2], _launcher(backend, 1), *tensors, **numbers, wanted=tuple(wanted)
        )
    return [gradient for gradient in gradients if gradient is not None]


def _fake_forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, v, cu_seqlens_q, out_dtype = inputs[0], inputs[2], inputs[7], inputs[-2]
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=out_dtype or q.dtype)
    rows = q.shape[:-1] if cu_seqlens_q is None else (1, *q.shape[:-1])
    batch, seqlen_q, num_heads = rows
    shape = (batch, num_heads, seqlen_q) if cu_seqlens_q is None else (num_heads, seqlen_q)
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(shape, dtype=statistics)


def _fake_backward(*inputs: Any) -> list[torch.Tensor]:
    wanted = inputs[-2]
    sources = [inputs[2 + position] for position in DIFFERENTIABLE]
    return [x.new_empty(x.shape) for x, want in zip(sources, wanted, strict=True) if want]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:TENSORS], *output)
    ctx.settings, ctx.backend = inputs[TENSORS:-2], inputs[-1]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    result: list[torch.Tensor | None] = [None] * INPUTS
    if grad_out is None and grad_lse is None:
        return tuple(result)
    wanted = [ctx.needs_input_grad[position] for position in DIFFERENTIABLE]
    inputs = (grad_out, grad_lse, *ctx.saved_tensors, *ctx.settings, wanted, ctx.backend)
    gradients = iter(backward_op(*inputs))
    for position, want in zip(DIFFERENTIABLE, wanted, strict=True):
        if want:
            result[position] = next(gradients)
    return tuple(result)


def _forward_below_autograd(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch._C._AutoDispatchBelowAutograd():
        if nothing_below(inputs[:TENSORS]):
            return _forward(*inputs)
        out, lse = torch.ops.flashdig.attention_forward.default(*inputs)
    return out, lse


def _backward_below_autograd(*inputs: Any) -> tuple[torch.Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        if nothing_below(inputs[: TENSORS + 4]):
            return tuple(run_backward(*inputs))
        return tuple(torch.ops.flashdig.attention_backward.default(*inputs))


def nothing_below(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Whether the dispatcher would go from autograd straight to the implementation."""
    return eager.unwatched() and all(x is None or eager.is_plain(x) for x in tensors)


def _refuse_second(ctx: Any, *gradients: Any) -> Any:
    raise RuntimeError(
        f"attention is not twice differentiable with backend {ctx.backend!r}; "
        "backend 'reference' is"
    )


def _save_backend(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[-1]


_batched_forward = functools.partial(batching.forward, attention_op)
_batched_backward = functools.partial(batching.backward, backward_op)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.flashdig.attention_forward.default(*inputs)
        return out, lse

    setup_context = staticmethod(_save)
    backward = staticmethod(_differentiate)
    vmap = staticmethod(_batched_forward)


class _AttentionBackwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ops.flashdig.attention_backward.default(*inputs))

    setup_context = staticmethod(_save_backend)
    backward = staticmethod(_refuse_second)
    vmap = staticmethod(_batched_backward)


class _PlainAttentionFunction(torch.autograd.Function):
    """Without torch.func: without the cost of binding the arguments for `setup_context`."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _forward_below_autograd(*inputs)
        _save(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)


class _PlainAttentionBackwardFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[torch.Tensor, ...]:
        ctx.backend = inputs[-1]
        return _backward_below_autograd(*inputs)

    backward = staticmethod(_refuse_second)


def _forward_with_autograd(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if not _differentiated(inputs[:TENSORS]):
        return _forward_below_autograd(*inputs)
    apply: Any = _PlainAttentionFunction.apply
    out, lse = apply(*inputs)
    return out, lse


def _backward_with_autograd(*inputs: Any) -> list[torch.Tensor]:
    if not _differentiated(inputs[: TENSORS + 4]):
        return list(_backward_below_autograd(*inputs))
    apply: Any = _PlainAttentionBackwardFunction.apply
    return list(apply(*inputs))


def _takes_gradient(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _differentiated(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    """Also in forward mode, which autograd functions without a rule for it refuse."""
    return _takes_gradient(tensors) or (
        forward_ad._current_level >= 0
        and any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    )


def _register() -> None:
    # torch.library.register_autograd takes a millisecond a call for so many arguments (torch 2.13
    # looks every one up in the schema)
    _library.impl("attention_forward", _forward_with_autograd, "Autograd")
    _library.impl("attention_backward", _backward_with_autograd, "Autograd")
    _library.impl("attention_forward", _forward, "CompositeExplicitAutograd")
    _library.impl("attention_backward", run_backward, "CompositeExplicitAutograd")
    for name, fake, batched in (
        ("flashdig::attention_forward", _fake_forward, _batched_forward),
        ("flashdig::attention_backward", _fake_backward, _batched_backward),
    ):
        torch.library.register_fake(name, fake, lib=_library)
        torch.library.register_vmap(name, batched, lib=_library)
    flops.register()


_register()
