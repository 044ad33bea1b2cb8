"""The tensors of a cell, made once on the device and shared by everyone who is measured on it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashdig.bench.cells import Cell
from flashdig.bench.exact import Heads
from flashdig.bench.fp8 import quantised, quantised_sequences

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class CellInputs:
    """Tensors of one cell.

    Attributes:
        q: (batch, seqlen_q, num_heads, head_dim), or packed (tokens, num_heads, head_dim).
        k, v: (batch, seqlen_k, num_heads_kv, ...), or packed (tokens, num_heads_kv, ...).
        dout: gradient of the output, in its shape; None where no backward is measured.
        cu_seqlens: int32 (sequences + 1,) of packed input.
        bias: (1, num_heads, seqlen_q, seqlen_k), or bool (1, 1, seqlen_q, seqlen_k).
        alibi_slopes, sinks: float32 (num_heads,).
        descales: q_descale, k_descale and v_descale of fp8 inputs, float32 (sequences,
            num_heads_kv); empty for others.
    """

    cell: Cell
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    cu_seqlens: torch.Tensor | None
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    descales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def out_dtype(self) -> torch.dtype:
        import torch

        return torch.bfloat16 if self.cell.fp8 else self.q.dtype

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Of "out", "dq", "dk" or "dv"."""
        if name == "out":
            return self.out_shape
        return tuple(getattr(self, name.removeprefix("d")).shape)

    def sequence(self, name: str, x: torch.Tensor, number: int) -> torch.Tensor:
        """Rows (seqlen, heads, ...) of one sequence, of a tensor in the layout of q or k."""
        if not self.cell.packed:
            return x[number]
        start = sum(self.cell.lengths[:number])
        return x[start : start + self.cell.lengths[number]]

    def heads(self, sequence: int, head_kv: int) -> Heads:
        """One KV head of one sequence with its query heads, ready to be written out."""
        cell = self.cell
        group = cell.num_heads // cell.num_heads_kv
        queries = slice(head_kv * group, (head_kv + 1) * group)

        def of_queries(x: torch.Tensor) -> torch.Tensor:
            return self.sequence("q", x, sequence)[:, queries].transpose(0, 1)[None]

        def descaled(name: str, x: torch.Tensor) -> torch.Tensor:
            if not self.descales:
                return x
            return x.double() * self.descales[f"{name}_descale"][sequence, head_kv].double()

        bias = self.bias
        if bias is not None and bias.shape[1] > 1:
            bias = bias[:, queries]
        return Heads(
            q=descaled("q", of_queries(self.q)),
            k=descaled("k", self.sequence("k", self.k, sequence)[None, :, head_kv]),
            v=descaled("v", self.sequence("v", self.v, sequence)[None, :, head_kv]),
            dout=None if self.dout is None else of_queries(self.dout),
            mask=cell.mask,
            softmax_scale=cell.problem.softmax_scale,
            softcap=cell.softcap,
            bias=bias,
            slopes=None if self.alibi_slopes is None else self.alibi_slopes[None, queries],
            sinks=None if self.sinks is None else self.sinks[None, queries],
            dropout_p=cell.dropout_p,
        )


def make_inputs(cell: Cell, device: torch.device | str, seed: int, backward: bool) -> CellInputs:
    """Standard normal tensors; the same seed gives the same numbers on the same kind of device.

    fp8: quantised, with a factor for each sequence and KV head.
    """
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    dtype = torch.float32 if cell.fp8 else getattr(torch, cell.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    rows_q: tuple[int, ...] = (cell.batch, cell.seqlen_q)
    rows_k: tuple[int, ...] = (cell.batch, cell.seqlen_k)
    cu_seqlens = None
    if cell.packed:
        rows_q = rows_k = (sum(cell.lengths),)
        starts = [0, *itertools.accumulate(cell.lengths)]
        cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    scores = (cell.seqlen_q, cell.seqlen_k)
    bias = None
    if cell.bias == "float":
        bias = normal(1, cell.num_heads, *scores)
    elif cell.bias == "bool":
        drawn = torch.rand((1, 1, *scores), generator=generator, device=device)
        # torch's backends disagree about rows that see nothing: the diagonal is always seen
        bias = (drawn < 0.75) | torch.eye(*scores, dtype=torch.bool, device=device)
    slopes = None
    if cell.alibi:
        h = torch.arange(1, cell.num_heads + 1, dtype=torch.float32, device=device)
        slopes = 2 ** (-8 * h / cell.num_heads)
    tensors = {
        "q": normal(*rows_q, cell.num_heads, cell.head_dim),
        "k": normal(*rows_k, cell.num_heads_kv, cell.head_dim),
        "v": normal(*rows_k, cell.num_heads_kv, cell.head_dim_v),
    }
    descales = {}
    if cell.fp8:
        to = getattr(torch, cell.dtype)
        for name, x in tensors.items():
            if cell.packed:
                made = quantised_sequences(x, cell.num_heads_kv, cell.lengths, to)
            else:
                made = quantised(x, cell.num_heads_kv, to)
            tensors[name], descales[f"{name}_descale"] = made
    return CellInputs(
        cell=cell,
        **tensors,
        dout=normal(*rows_q, cell.num_heads, cell.head_dim_v) if backward else None,
        cu_seqlens=cu_seqlens,
        bias=bias,
        alibi_slopes=slopes,
        # values that the cell's dtype holds exactly, for peers that take them in it
        sinks=normal(cell.num_heads).float() if cell.sinks else None,
        descales=descales,
    )
