"""FLOP of the attention operators for torch.utils.flop_counter.

The convention is that of `flashdig.costs.flops`: visible pairs only, so a causal call counts about
half of what torch's formula for its own attention counts, which is all pairs. A bias hides nothing
here: its values are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashdig.costs.flops import backward_flops, forward_flops
from flashdig.kernels.tiled_launch import segments
from flashdig.problem import AttentionProblem, Mask

# what says how many queries and keys a sequence over a cache has
_LENGTHS = (
    *("cu_seqlens_q", "seqused_q", "cache_seqlens", "cu_seqlens_k", "cu_seqlens_k_new"),
    "cache_leftpad",
)


def register() -> None:
    """Tell torch's FLOP counter; called once, by the module that defines the operators."""
    operators = torch.ops.flashdig
    register_flop_formula(operators.attention_forward, get_raw=True)(_forward)
    register_flop_formula(operators.attention_backward, get_raw=True)(_backward)


def _forward(*inputs: Any, out_val: Any = None) -> int:
    del out_val
    return sum(map(forward_flops, _problems(inputs[:11], inputs[14:17])))


def _backward(*inputs: Any, out_val: Any = None) -> int:
    del out_val
    return sum(map(backward_flops, _problems(inputs[2:13], inputs[18:21])))


def _problems(tensors: tuple[Any, ...], window: tuple[Any, ...]) -> list[AttentionProblem]:
    """One problem for dense input, one a sequence for packed input."""
    q, k, v = tensors[:3]
    lengths = tensors[7:11]
    if lengths[0] is None:
        sizes = [(q.shape[0], q.shape[1], k.shape[1])]
    else:
        if lengths[0].device.type == "meta" or torch._subclasses.fake_tensor.is_fake(lengths[0]):
            raise NotImplementedError(
                "the FLOP of packed attention depend on the values of cu_seqlens_q and "
                "cu_seqlens_k, which tensors without data do not have"
            )
        sizes = [
            (1, rows.stop - rows.start, keys.stop - keys.start)
            for _, rows, keys in segments(lengths, q.shape[0], k.shape[0])
        ]
    return [_problem(q, k, v, one, window) for one in sizes]


def _problem(
    q: Any, k: Any, v: Any, sizes: tuple[int, int, int], window: tuple[Any, ...]
) -> AttentionProblem:
    """Of q, k and v, whose heads and head_dims come last, with (batch, seqlen_q, seqlen_k)."""
    batch, seqlen_q, seqlen_k = sizes
    left, right, top_left = window
    return AttentionProblem(
        batch=batch,
        num_heads=q.shape[-2],
        num_heads_kv=k.shape[-2],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=Mask(
            None if left < 0 else left,
            None if right < 0 else right,
            "top-left" if top_left else "bottom-right",
        ),
    )


def register_cache(names: Sequence[str]) -> None:
    """The same for the operators over a cache, whose inputs have these names."""

    def formula(*inputs: Any, out_val: Any = None) -> int:
        del out_val
        return sum(map(forward_flops, _cache_problems(dict(zip(names, inputs, strict=True)))))

    for name in ("cache_attention", "cache_append_attention_"):
        register_flop_formula(getattr(torch.ops.flashdig, name), get_raw=True)(formula)


def _cache_problems(given: Mapping[str, Any]) -> list[AttentionProblem]:
    """One a sequence: the keys that it has, new ones among them. Lengths are read back."""
    q, k, v = given["q"], given["k_cache"], given["v_cache"]
    lengths = [given[name] for name in _LENGTHS if given[name] is not None]
    if any(x.device.type == "meta" or torch._subclasses.fake_tensor.is_fake(x) for x in lengths):
        raise NotImplementedError(
            "the FLOP of attention over a cache depend on the values of its lengths, which tensors "
            "without data do not have"
        )
    cu_q = given["cu_seqlens_q"]
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    table = given["page_table"]
    capacity = k.shape[1] * (1 if table is None else table.shape[1])

    def values(name: str, otherwise: int) -> list[int]:
        x = given[name]
        if x is None:
            return [otherwise] * batch
        return [int(n) for n in (x.diff() if name.startswith("cu_") else x).tolist()]

    new = 0 if given["k"] is None else given["k"].shape[-3]
    queries = values("cu_seqlens_q", q.shape[-3])
    used = values("seqused_q", q.shape[-3])
    stored, bound = values("cache_seqlens", capacity), values("cu_seqlens_k", capacity)
    added, pad = values("cu_seqlens_k_new", new), values("cache_leftpad", 0)
    window = (given["window_left"], given["window_right"], given["top_left"])
    problems = []
    for b in range(batch):
        end = min(min(stored[b], bound[b], capacity) + added[b], capacity)
        sizes = (1, min(queries[b], used[b]), max(end - pad[b], 0))
        problems.append(_problem(q, k, v, sizes, window))
    return problems
