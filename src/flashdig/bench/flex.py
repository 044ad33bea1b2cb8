"""FlexAttention's view of a cell: its block mask and its score_mod."""

from __future__ import annotations

import functools
import importlib
import operator
from typing import TYPE_CHECKING, Any

from flashdig.bench.cell_inputs import CellInputs

if TYPE_CHECKING:
    import torch

# a suite compiles a variant for each of its cells, forward and backward
COMPILED_VARIANTS = 4096
# above this many pairs a block mask is made by a compiled function: eager code would hold them all
EAGER_MASK_PAIRS = 2**28


@functools.cache
def compiled_flex_attention() -> Any:
    """flex_attention under torch.compile.

    `fullgraph` makes it raise where it could not be compiled; by default it would go on unfused,
    with the whole score matrix in memory, and be measured as that. For the same reason the number
    of variants is raised: beyond torch's limit of eight it stops compiling. Donated buffers are off
    because a backward that is timed alone runs again and again on one kept graph.
    """
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    dynamo: Any = torch._dynamo.config
    dynamo.recompile_limit = COMPILED_VARIANTS
    dynamo.accumulated_recompile_limit = 4 * COMPILED_VARIANTS
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def block_mask(inputs: CellInputs) -> Any:
    """A BlockMask of what is hidden by position; None where nothing is."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    cell = inputs.cell
    is_bool = inputs.bias is not None and inputs.bias.dtype == torch.bool
    if cell.mask.is_full and not cell.packed and not is_bool:
        return None
    rows, keys = cell.seqlen_q, cell.seqlen_k
    if cell.packed:
        rows = keys = sum(cell.lengths)
    make: Any = create_block_mask
    if rows * keys > EAGER_MASK_PAIRS:
        make = torch.compile(create_block_mask, dynamic=False)
    return make(mask_mod(inputs), None, None, rows, keys, device=str(inputs.q.device))


def mask_mod(inputs: CellInputs) -> Any:
    """(batch, head, query, key) -> visible."""
    import torch

    cell, mask = inputs.cell, inputs.cell.mask
    left, right = mask.window_left, mask.window_right
    offset = mask.offset(cell.seqlen_q, cell.seqlen_k)
    bias = inputs.bias if inputs.bias is not None and inputs.bias.dtype == torch.bool else None
    sequence = None
    if cell.packed:
        numbers = torch.arange(len(cell.lengths), device=inputs.q.device)
        lengths = torch.tensor(cell.lengths, device=inputs.q.device)
        sequence = torch.repeat_interleave(numbers, lengths)

    def visible(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
        # queries and keys of a sequence start at the same row, so distances are as in its own
        distance = j - i - offset
        conditions = []
        if left is not None:
            conditions.append(distance >= -left)
        if right is not None:
            conditions.append(distance <= right)
        if bias is not None:
            conditions.append(bias[0, 0, i, j])
        if sequence is not None:
            conditions.append(sequence[i] == sequence[j])
        return functools.reduce(operator.and_, conditions)

    return visible


def score_mod(inputs: CellInputs) -> Any:
    """(score, batch, head, query, key) -> score with softcap, bias and ALiBi; None without any."""
    import torch

    cell, slopes = inputs.cell, inputs.alibi_slopes
    softcap = cell.softcap
    offset = cell.mask.offset(cell.seqlen_q, cell.seqlen_k)
    bias = inputs.bias if inputs.bias is not None and inputs.bias.dtype != torch.bool else None
    if not softcap and bias is None and slopes is None:
        return None

    def changed(
        score: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + bias[0, h, i, j]
        if slopes is not None:
            # distances in a packed sequence are those of its rows: both start at the same one
            score = score - slopes[h] * (j - i - offset).abs()
        return score

    return changed
