"""What is checked before anything is launched.

Every error is a ValueError or TypeError that names the argument and says what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from flashdig import checks
from flashdig.checks import FP8_DTYPES, HALF_DTYPES
from flashdig.packing import Packing, check_values, values_are_checked
from flashdig.problem import AttentionProblem, Causal, Mask, Slopes

Answer = TypeVar("Answer", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """The keywords that dense and packed calls share, as the caller gave them."""

    causal: Causal
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout_p: float
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out_dtype: torch.dtype | None
    deterministic: bool
    return_lse: bool


@dataclass(frozen=True)
class Call:
    """The checked arguments of one call: tensors, and the problem that they make."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    problem: AttentionProblem
    softmax_scale: float
    dropout_p: float
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out_dtype: torch.dtype
    return_lse: bool
    packing: Packing | None = None  # None: dense


def dense_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    options: Options,
) -> Call:
    """Check the arguments of `flashdig.attention`; raises ValueError or TypeError."""
    checks.check_tensors(checks.DENSE, q, k, v)
    checks.check_devices(q, k=k, v=v, bias=bias)
    q, k, v = (_under_autocast(x) for x in (q, k, v))
    checks.check_dtypes(q, k, v)
    checks.check_sizes(checks.DENSE, q, k, v)
    batch, seqlen_q, num_heads, _ = q.shape
    checks.check_bias(bias, (batch, num_heads, seqlen_q, k.shape[1]))
    checks.check_no_fp8_gradient(q, k=k, v=v, bias=bias, sinks=options.sinks)
    return _call(q, k, v, options, (batch, seqlen_q, k.shape[1]), bias=bias)


def packed_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: Packing,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    options: Options,
) -> Call:
    """Check the arguments of `flashdig.attention_varlen`; raises ValueError or TypeError.

    The values of the lengths and of the page table are checked on the CPU, and on a GPU when the
    environment variable FLASHDIG_CHECK is 1.
    """
    layout = checks.PACKED if packing.page_table is None else checks.PAGED
    checks.check_tensors(layout, q, k, v)
    checks.check_devices(
        q,
        k=k,
        v=v,
        cu_seqlens_q=packing.cu_seqlens_q,
        cu_seqlens_k=packing.cu_seqlens_k,
        seqused_q=packing.seqused_q,
        seqused_k=packing.seqused_k,
        page_table=packing.page_table,
    )
    q, k, v = (_under_autocast(x) for x in (q, k, v))
    checks.check_dtypes(q, k, v)
    checks.check_sizes(layout, q, k, v)
    batch = _check_packing(packing)
    checks.check_max_seqlen("max_seqlen_q", max_seqlen_q)
    checks.check_max_seqlen("max_seqlen_k", max_seqlen_k)
    if packing.page_table is None:
        capacity = k.shape[0]
    else:
        capacity = packing.page_table.shape[1] * k.shape[1]
    if values_are_checked(q.device.type):
        check_values(packing, q.shape[0], k.shape, (max_seqlen_q, max_seqlen_k))
    checks.check_no_fp8_gradient(q, k=k, v=v, sinks=options.sinks)
    lengths = (
        q.shape[0] if max_seqlen_q is None else max_seqlen_q,
        capacity if max_seqlen_k is None else max_seqlen_k,
    )
    return _call(q, k, v, options, (batch, *lengths), packing=packing)


def _check_packing(packing: Packing) -> int:
    """Shapes and dtypes of the lengths; returns the batch size."""
    cu_seqlens_q, cu_seqlens_k = packing.cu_seqlens_q, packing.cu_seqlens_k
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is None or x.dim() != 1 or x.shape[0] < 1:
            got = None if x is None else checks.shape_of(x)
            raise ValueError(f"{name} must be (batch + 1,) offsets of the sequences, got {got}")
    batch = cu_seqlens_q.shape[0] - 1
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, "(batch + 1,)", (batch + 1,))
    checks.check_integers("cu_seqlens_k", cu_seqlens_k, "(batch + 1,)", (batch + 1,))
    checks.check_integers("seqused_q", packing.seqused_q, "(batch,)", (batch,))
    checks.check_integers("seqused_k", packing.seqused_k, "(batch,)", (batch,))
    if packing.page_table is not None:
        if packing.page_table.dim() != 2:
            raise ValueError(
                "page_table must be (batch, max_pages), "
                f"got shape {checks.shape_of(packing.page_table)}"
            )
        shape = (batch, packing.page_table.shape[1])
        checks.check_integers("page_table", packing.page_table, "(batch, max_pages)", shape)
    return batch


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: Options,
    sizes: tuple[int, int, int],
    *,
    bias: torch.Tensor | None = None,
    packing: Packing | None = None,
) -> Call:
    """Check what dense and packed calls share; `sizes` are batch, seqlen_q and seqlen_k."""
    batch, seqlen_q, seqlen_k = sizes
    num_heads, head_dim = q.shape[-2:]
    num_heads_kv = k.shape[-2]
    checks.check_devices(
        q,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        q_descale=options.q_descale,
        k_descale=options.k_descale,
        v_descale=options.v_descale,
    )
    checks.check_numbers(options.softmax_scale, options.softcap, options.dropout_p)
    checks.check_flags(deterministic=options.deterministic, return_lse=options.return_lse)
    checks.check_alibi(options.alibi_slopes, batch, num_heads)
    checks.check_sinks(options.sinks, num_heads)
    checks.check_descale("q_descale", options.q_descale, batch, num_heads_kv)
    checks.check_descale("k_descale", options.k_descale, batch, num_heads_kv)
    checks.check_descale("v_descale", options.v_descale, batch, num_heads_kv)
    checks.check_out_dtype(options.out_dtype)
    problem = AttentionProblem(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=num_heads_kv,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=head_dim,
        head_dim_v=v.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=Mask.from_arguments(options.causal, options.window),
        softcap=float(options.softcap),
        dropout=options.dropout_p > 0.0,
        alibi=_alibi_kind(options.alibi_slopes),
        bias="none" if bias is None else ("bool" if bias.dtype == torch.bool else "float"),
        sinks=options.sinks is not None,
        packed=packing is not None,
        deterministic=options.deterministic or torch.are_deterministic_algorithms_enabled(),
        allow_tf32=q.dtype == torch.float32 and tf32_allowed(),
    )
    scale = options.softmax_scale
    return Call(
        q=q,
        k=k,
        v=v,
        problem=problem,
        softmax_scale=problem.softmax_scale if scale is None else float(scale),
        dropout_p=float(options.dropout_p),
        bias=bias,
        alibi_slopes=options.alibi_slopes,
        sinks=options.sinks,
        q_descale=options.q_descale,
        k_descale=options.k_descale,
        v_descale=options.v_descale,
        out_dtype=options.out_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype),
        return_lse=options.return_lse,
        packing=packing,
    )


def _alibi_kind(slopes: torch.Tensor | None) -> Slopes:
    if slopes is None:
        return "none"
    return "heads" if slopes.dim() == 1 else "batch_heads"


def constant_in_graphs(function: Answer) -> Answer:
    """torch.compiler.assume_constant_result, which would import the compiler: a second."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_in_graphs
def tf32_allowed() -> bool:
    """Torch's setting for float32 products on CUDA devices, now."""
    # torch.backends.cuda.matmul.allow_tf32 raises once anyone has used the newer settings
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    """As autocast treats a matmul: float16, bfloat16 and float32 are cast, others are kept."""
    device_type = x.device.type
    if x.dtype in (*HALF_DTYPES, torch.float32) and torch.is_autocast_enabled(device_type):
        return x.to(torch.get_autocast_dtype(device_type))
    return x
