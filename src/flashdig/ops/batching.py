"""torch.vmap over the attention operators.

Where nothing depends on a batch entry's number or sums over entries, the mapped dimension joins the
batch and one call serves all; else there is one call a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_BIAS, _ALIBI, _SINKS, _SEED, _CU_SEQLENS = 3, 4, 5, 6, 7
_GRADIENTS = 2  # the backward has the upstream gradients of out and lse before the inputs

Operator = Callable[..., Any]


def forward(operator: Operator, info: Any, in_dims: Sequence[Any], *inputs: Any) -> tuple[Any, Any]:
    """Rule of `flashdig::attention_forward`, which `operator` calls.

    Returns (results, their mapped dimensions).
    """
    if not _joins_batch(in_dims, inputs, 0):
        return _one_by_one(operator, info.batch_size, in_dims, inputs)
    size, batch = info.batch_size, _batch_of(inputs[0], in_dims[0])
    results = operator(*_joined(inputs, in_dims, 0, size, batch))
    return tuple(x.unflatten(0, (size, batch)) for x in results), (0, 0)


def backward(
    operator: Operator, info: Any, in_dims: Sequence[Any], *inputs: Any
) -> tuple[Any, Any]:
    """Rule of `flashdig::attention_backward`, which `operator` calls."""
    wanted = inputs[-2]
    if wanted[3] or wanted[4] or not _joins_batch(in_dims, inputs, _GRADIENTS):
        return _one_by_one(operator, info.batch_size, in_dims, inputs)
    size, batch = info.batch_size, _batch_of(inputs[_GRADIENTS], in_dims[_GRADIENTS])
    results = operator(*_joined(inputs, in_dims, _GRADIENTS, size, batch))
    return tuple(x.unflatten(0, (size, batch)) for x in results), (0,) * len(results)


def _joins_batch(in_dims: Sequence[Any], inputs: Sequence[Any], first: int) -> bool:
    packed = inputs[first + _CU_SEQLENS] is not None
    dropout = inputs[first + _SEED] is not None
    return not packed and not dropout and in_dims[first + _SINKS] is None


def _batch_of(q: torch.Tensor, dim: int | None) -> int:
    return q.shape[0] if dim is None else q.movedim(dim, 0).shape[1]


def _joined(
    inputs: Sequence[Any], in_dims: Sequence[Any], first: int, size: int, batch: int
) -> list[Any]:
    """The inputs of one call with batch size * batch."""
    joined = list(inputs)
    for position, x in enumerate(inputs):
        if not isinstance(x, torch.Tensor) or position == first + _SINKS:
            continue
        dim = in_dims[position]
        mapped = x[None] if dim is None else x.movedim(dim, 0)
        if position == first + _ALIBI and mapped.dim() == 2:  # slopes of the heads alone
            if dim is None:
                continue
            mapped = mapped[:, None]
        if position == first + _BIAS and dim is None and mapped.shape[1] == 1:
            continue
        joined[position] = mapped.expand(size, batch, *mapped.shape[2:]).flatten(0, 1)
    return joined


def _one_by_one(
    operator: Operator, size: int, in_dims: Sequence[Any], inputs: Sequence[Any]
) -> tuple[Any, Any]:
    slices = []
    for i in range(size):
        one = [
            x.select(dim, i) if isinstance(x, torch.Tensor) and dim is not None else x
            for x, dim in zip(inputs, in_dims, strict=True)
        ]
        slices.append(operator(*one))
    results = tuple(torch.stack(parts) for parts in zip(*slices, strict=True))
    return results, (0,) * len(results)
