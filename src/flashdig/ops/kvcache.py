"""The operators `flashdig::cache_attention` and `flashdig::cache_append_attention_`.

Both attend to a cache; the second first appends new keys and values to it, in place, and says so in
its schema, so that torch.compile keeps the order. There is no backward through a cache: results of
inputs that take gradients carry a node that raises when it is asked for them.
"""

from __future__ import annotations

from typing import Any

import torch

from flashdig.kernels.plans import Plan, plan_of
from flashdig.ops import flops

TENSORS = 21
_SCHEMA = (
    "(Tensor q, Tensor{a} k_cache, Tensor{b} v_cache, Tensor? k, Tensor? v, "
    "Tensor? cache_seqlens, Tensor? cu_seqlens_k, Tensor? page_table, Tensor? cache_batch_idx, "
    "Tensor? cache_leftpad, Tensor? cu_seqlens_q, Tensor? seqused_q, Tensor? cu_seqlens_k_new, "
    "Tensor? rotary_cos, Tensor? rotary_sin, Tensor? rotary_seqlens, Tensor? alibi_slopes, "
    "Tensor? sinks, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float softmax_scale, float softcap, SymInt window_left, SymInt window_right, bool top_left, "
    "bool allow_tf32, bool rotary_interleaved, int num_splits, bool batch_invariant, "
    "ScalarType? out_dtype, str backend) -> (Tensor out, Tensor lse)"
)
NAMES = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cu_seqlens_k", "page_table"),
    *("cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "seqused_q", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "alibi_slopes", "sinks"),
    *("q_descale", "k_descale", "v_descale"),
    *("softmax_scale", "softcap", "window_left", "window_right", "top_left", "allow_tf32"),
    *("rotary_interleaved", "num_splits", "batch_invariant", "out_dtype", "backend"),
)

_library = torch.library.Library("flashdig", "FRAGMENT")
_library.define("cache_attention" + _SCHEMA.format(a="", b=""), tags=(torch.Tag.pt2_compliant_tag,))
_library.define(
    "cache_append_attention_" + _SCHEMA.format(a="(a!)", b="(b!)"),
    tags=(torch.Tag.pt2_compliant_tag,),
)


def operator_inputs(**arguments: Any) -> tuple[Any, ...]:
    """The operators' inputs by their names; those left out are None."""
    inputs = tuple([arguments.pop(name, None) for name in NAMES])
    assert not arguments, arguments
    return inputs


def cache_op(inputs: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by the operator that the inputs need: with k and v, they are appended to the
    caches first."""
    operators = torch.ops.flashdig
    operator = (
        operators.cache_attention.default
        if inputs[3] is None
        else operators.cache_append_attention_.default
    )
    out, lse = operator(*inputs)
    return out, lse


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = inputs[0]
    if q.is_cuda and q.device.index != torch.cuda.current_device():
        with torch.cuda.device(q.device):
            return _run_here(*inputs)
    return _run_here(*inputs)


def _run_here(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = dict(zip(NAMES, inputs, strict=True))
    backend = arguments.pop("backend")
    if arguments["k"] is not None:
        for cache in (arguments["k_cache"], arguments["v_cache"]):
            torch.autograd.graph.increment_version(cache)
    if backend == "triton":
        plan = planned(inputs)
        if plan is not None:
            out, lse = plan(*inputs[:TENSORS])
            return out, lse
        return _triton(arguments)
    out_dtype = arguments.pop("out_dtype") or arguments["q"].dtype
    for name in ("num_splits", "batch_invariant"):  # one walk over all keys, a sequence at a time
        del arguments[name]
    from flashdig.kernels.cache_plain import cache_attention

    with torch.autocast(arguments["q"].device.type, enabled=False):
        out, lse = cache_attention(**arguments, tiled=backend == "tiled")
    return out.to(out_dtype), lse


def planned(inputs: tuple[Any, ...]) -> Plan | None:
    """The kept plan of the portable kernels for an operator's inputs, None where there is none."""
    from flashdig.kernels.triton.cache_plan import plan_cache_operator

    tensors, settings = inputs[:TENSORS], inputs[TENSORS:-1]
    names = NAMES[TENSORS:-1]

    def make() -> Plan | None:
        return plan_cache_operator(tensors, **dict(zip(names, settings, strict=True)))

    return plan_of(make, "cache", tensors, settings)


def _triton(arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    from flashdig.kernels.triton.append_kv import append_rows, rotated
    from flashdig.kernels.triton.decode_launch import cache_attention

    k, v = arguments.pop("k"), arguments.pop("v")
    cos, sin = arguments.pop("rotary_cos"), arguments.pop("rotary_sin")
    positions = arguments.pop("rotary_seqlens")
    interleaved = arguments.pop("rotary_interleaved")
    cu_new = arguments.pop("cu_seqlens_k_new")
    q, k_cache, v_cache = (arguments.pop(name) for name in ("q", "k_cache", "v_cache"))
    seqlen_new = 0
    if k is not None:
        seqlen_new = k.shape[-3]
        lengths, table = arguments["cache_seqlens"], arguments["page_table"]
        where = (lengths, table, arguments["cache_batch_idx"], cu_new)
        rotary = None if cos is None else (cos, sin, positions)
        for new, cache, turned, descale in (
            (k, k_cache, rotary, arguments["k_descale"]),
            (v, v_cache, None, arguments["v_descale"]),
        ):
            scaled = descale if new.element_size() > 1 and cache.element_size() == 1 else None
            append_rows(new, cache, *where, turned, scaled, interleaved=interleaved)
        if rotary is not None:
            pages = 1 if table is None else table.shape[1]
            q = rotated(
                q,
                lengths,
                arguments["cu_seqlens_q"],
                rotary,
                capacity=k_cache.shape[1] * pages,
                advances=arguments["window_left"] >= 0 or arguments["window_right"] >= 0,
                interleaved=interleaved,
            )
    return cache_attention(
        q, k_cache, v_cache, cu_seqlens_new=cu_new, seqlen_new=seqlen_new, **arguments
    )


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = dict(zip(NAMES, inputs, strict=True))
    q, v_cache = arguments["q"], arguments["v_cache"]
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=arguments["out_dtype"] or q.dtype)
    *batch, rows, heads = q.shape[:-1]
    shape = (*batch, heads, rows)
    statistics = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_empty(shape, dtype=statistics)


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, operator: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = operator(*inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise RuntimeError(
            "attention over a cache has no backward: use flashdig.attention or attention_varlen, "
            "or call it under torch.no_grad()"
        )


def _with_autograd(operator: Any, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:TENSORS]):
        out, lse = _WithoutBackward.apply(operator, *inputs)  # type: ignore[no-untyped-call, unused-ignore]
        return out, lse
    with torch._C._AutoDispatchBelowAutograd():
        out, lse = operator(*inputs)
    return out, lse


def _register() -> None:
    for name in ("cache_attention", "cache_append_attention_"):
        operator = getattr(torch.ops.flashdig, name).default

        def with_autograd(*inputs: Any, operator: Any = operator) -> Any:
            return _with_autograd(operator, *inputs)

        _library.impl(name, _run, "CompositeExplicitAutograd")
        _library.impl(name, with_autograd, "Autograd")
        torch.library.register_fake(f"flashdig::{name}", _fake, lib=_library)
    flops.register_cache(NAMES)


_register()
