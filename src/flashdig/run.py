"""From a checked call to its results: what dispatch must know, the choice, the run."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashdig import kept_calls
from flashdig.dispatch import Request, choose
from flashdig.kept_calls import draw_seed
from flashdig.kernels.reference import (
    reference_attention,
    reference_attention_varlen,
    rows_in_use,
    sequence_offsets,
)
from flashdig.ops.attention import LAUNCHERS, attention_op
from flashdig.ops.fp8 import fp8_op
from flashdig.ops.kvcache import cache_op
from flashdig.ops.kvcache import operator_inputs as cache_inputs
from flashdig.packing import Packing
from flashdig.problem import Causal
from flashdig.validate import Call, constant_in_graphs

HAS_TRITON = importlib.util.find_spec("triton") is not None

Results = tuple[torch.Tensor, torch.Tensor]


def serve(call: Call, backend: str, key: kept_calls.Key | None = None) -> Results:
    """out and lse by the backend of that name, or the one that "auto" chooses.

    A call with a `key` is kept under it where it can be served the cheap way from now on.

    Raises ValueError when `backend` is unknown or cannot serve the call; it says why. The lse of
    "fused_cpu" is empty: it only serves calls that want none.
    """
    chosen = choose(call.problem, request_of(call, backend), backend)
    if chosen.name not in LAUNCHERS:
        return _RUN[chosen.name](call)
    name = chosen.name
    packing = call.packing
    if name == "triton" and packing is not None and _in_place(call, packing):
        return _run_pages(call, packing)
    if name == "hopper" and call.problem.deterministic:
        name += "_deterministic"  # the other backends' gradients are so anyway
    inputs = operator_inputs(call, name)
    results = attention_op(*inputs)
    if key is not None:
        kept_calls.keep(key, inputs)
    return results


def request_of(call: Call, backend: str) -> Request:
    """The request of a call to `backend` (a name or "auto")."""
    device = call.q.device
    return Request(
        device_type=device.type,
        compute_capability=_capability(device.index) if device.type == "cuda" else None,
        triton=HAS_TRITON,
        interpreter=backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1",
        return_lse=call.return_lse,
        descale=any(x is not None for x in (call.q_descale, call.k_descale, call.v_descale)),
        paged=call.packing is not None and call.packing.page_table is not None,
        gradient=torch.is_grad_enabled()
        and any(x is not None and x.requires_grad for x in (call.q, call.k, call.v, call.sinks)),
        out_dtype=str(call.out_dtype).removeprefix("torch."),
    )


@constant_in_graphs
def _capability(device: int) -> tuple[int, int]:
    return _kept_capability(device)


@functools.cache
def _kept_capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _run_fused_cpu(call: Call) -> Results:
    # torch's kernel wants unit strides in head_dim, and refuses others
    q, k, v = (
        (x if x.stride(3) == 1 else x.contiguous()).transpose(1, 2)
        for x in (call.q, call.k, call.v)
    )
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=call.problem.causal, scale=call.softmax_scale
        )
    return out.transpose(1, 2), out.new_empty(0)


def operator_inputs(call: Call, backend: str) -> tuple[Any, ...]:
    """The inputs of `flashdig::attention_forward`; draws the seed of a call with dropout."""
    q, k, v = call.q, call.k, call.v
    packing = call.packing
    if packing is None:
        lengths: tuple[torch.Tensor | None, ...] = (None,) * 4
        rows_q = rows_k = None
    else:
        cu_seqlens_k, seqused_k = packing.cu_seqlens_k, packing.seqused_k
        if packing.page_table is not None:
            k, v, cu_seqlens_k = _gather_pages(call, packing.page_table)
            seqused_k = None
        lengths = (packing.cu_seqlens_q, cu_seqlens_k, packing.seqused_q, seqused_k)
        rows_q, rows_k = packing.cu_seqlens_q, cu_seqlens_k
    mask = call.problem.mask
    return (
        _plain(q, call.q_descale, call.problem.group_size, rows_q),
        _plain(k, call.k_descale, 1, rows_k),
        _plain(v, call.v_descale, 1, rows_k),
        call.bias,
        call.alibi_slopes,
        call.sinks,
        None if call.dropout_p == 0.0 else draw_seed(call.q.device),
        *lengths,
        call.softmax_scale,
        call.problem.softcap,
        call.dropout_p,
        *mask.sides,
        mask.alignment == "top-left",
        call.problem.allow_tf32,
        call.out_dtype,
        backend,
    )


def _in_place(call: Call, packing: Packing) -> bool:
    """Whether pages are read where they lie: a cache has neither gradients nor dropout."""
    if packing.page_table is None or call.dropout_p > 0.0:
        return False
    tensors = (call.q, call.k, call.v, call.sinks)
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def _terms(call: Call) -> dict[str, Any]:
    """Score terms, mask and scales of a call, as the operators name them."""
    left, right = call.problem.mask.sides
    return {
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "q_descale": call.q_descale,
        "k_descale": call.k_descale,
        "v_descale": call.v_descale,
        "softmax_scale": call.softmax_scale,
        "softcap": call.problem.softcap,
        "window_left": left,
        "window_right": right,
        "top_left": call.problem.mask.alignment == "top-left",
        "out_dtype": call.out_dtype,
    }


def _run_pages(call: Call, packing: Packing) -> Results:
    """Packed queries over pages, in place: lengths and pages are not read back."""
    return cache_op(
        cache_inputs(
            q=call.q,
            k_cache=call.k,
            v_cache=call.v,
            cache_seqlens=packing.seqused_k,
            cu_seqlens_k=packing.cu_seqlens_k,
            page_table=packing.page_table,
            cu_seqlens_q=packing.cu_seqlens_q,
            seqused_q=packing.seqused_q,
            allow_tf32=call.problem.allow_tf32,
            rotary_interleaved=True,
            num_splits=0,
            batch_invariant=False,
            backend="triton",
            **_terms(call),
        )
    )


def _run_hopper_fp8(call: Call) -> Results:
    lengths: dict[str, Any] = {}
    if call.packing is not None:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
        lengths = {name: getattr(call.packing, name) for name in names}
    return fp8_op(
        q=call.q,
        k=call.k,
        v=call.v,
        **_terms(call),
        **lengths,
    )


def _run_reference(call: Call) -> Results:
    mask = call.problem.mask
    seed = None if call.dropout_p == 0.0 else draw_seed(call.q.device)
    causal: Causal = "top-left" if mask.alignment == "top-left" else False
    options: dict[str, Any] = {
        "causal": causal or mask.is_causal,
        "window": (mask.window_left, mask.window_right),
        "softmax_scale": call.softmax_scale,
        "softcap": call.problem.softcap,
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "dropout_p": call.dropout_p,
        "dropout_seed": 0 if seed is None else int(seed),
        "q_descale": call.q_descale,
        "k_descale": call.k_descale,
        "v_descale": call.v_descale,
        "precision": torch.float64 if call.q.dtype == torch.float64 else torch.float32,
    }
    # autocast has cast the inputs; inside it would round the products too
    with torch.autocast(call.q.device.type, enabled=False):
        if call.packing is None:
            out, lse = reference_attention(call.q, call.k, call.v, bias=call.bias, **options)
        else:
            where = vars(call.packing)
            out, lse = reference_attention_varlen(call.q, call.k, call.v, **where, **options)
    return out.to(call.out_dtype), lse


_RUN = {
    "fused_cpu": _run_fused_cpu,
    "hopper_fp8": _run_hopper_fp8,
    "reference": _run_reference,
}


def _plain(
    x: torch.Tensor,
    descale: torch.Tensor | None,
    heads_per_factor: int,
    cu_seqlens: torch.Tensor | None,
) -> torch.Tensor:
    """x in a dtype that plain torch computes in, with its descale factors applied."""
    if descale is None:
        return x.float() if x.element_size() == 1 else x
    factors = descale.repeat_interleave(heads_per_factor, dim=1)[..., None]  # (batch, heads, 1)
    if cu_seqlens is None:
        return x.float() * factors[:, None]
    if factors.shape[0] == 0:
        return x.float()
    # rows outside every sequence take a neighbour's factor: nobody reads them
    row = torch.arange(x.shape[0], device=x.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return x.float() * factors[sequence.clamp(max=factors.shape[0] - 1)]


def _gather_pages(
    call: Call, page_table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v of the pages as packed sequences, and their cu_seqlens_k; lengths are read back.

    Where k or v takes a gradient they are float32 (or float64), in which the gradients of a page
    that several sequences share add up.
    """
    assert call.packing is not None
    starts = sequence_offsets(call.packing.cu_seqlens_k, None)
    num_pages, page_size = call.k.shape[0], max(call.k.shape[1], 1)
    capacity = page_table.shape[1] * call.k.shape[1] if num_pages else 0
    parts, offsets = [], [0]
    for b in range(len(starts) - 1):
        keys = rows_in_use(starts[b], starts[b + 1], call.packing.seqused_k, b)
        position = torch.arange(min(keys.stop - keys.start, capacity), device=call.k.device)
        pages = page_table[b].long().clamp(0, max(num_pages - 1, 0))
        parts.append(
            pages[position // max(page_size, 1)] * page_size + position % max(page_size, 1)
        )
        offsets.append(offsets[-1] + len(position))
    rows = torch.cat(parts) if parts else torch.empty(0, dtype=torch.long, device=call.k.device)
    k, v = (
        (x.float() if x.requires_grad and x.dtype != torch.float64 else x)
        .flatten(0, 1)
        .index_select(0, rows)
        for x in (call.k, call.v)
    )
    cu_seqlens_k = torch.tensor(offsets, dtype=torch.int32, device=call.k.device)
    return k, v, cu_seqlens_k
