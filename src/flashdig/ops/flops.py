"""FLOP of the attention operators for torch.utils.flop_counter.

The convention is that of `flashdig.costs.flops`: visible pairs only, so a causal call counts about
half of what torch's formula for its own attention counts, which is all pairs. A bias hides nothing
here: its values are not looked at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from flashdig.costs.flops import backward_flops, forward_flops
from flashdig.kernels.tiled_launch import segments
from flashdig.problem import AttentionProblem, Mask


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
    left, right, top_left = window
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
    return [
        AttentionProblem(
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
        for batch, seqlen_q, seqlen_k in sizes
    ]
