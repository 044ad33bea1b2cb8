"""The tensors of a conformance case: values, strides, and NaN wherever no query looks."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flashdig.bench.conformance_cases import HEADS, Case, head_dims_of

if TYPE_CHECKING:
    import torch

# what may take a gradient, in the order of the kernels' arguments
LEAVES = ("q", "k", "v", "bias", "sinks")


@dataclass(frozen=True)
class Inputs:
    """Operands of one call, in the kernels' layouts.

    Attributes:
        q, k, v: dense (batch, seqlen, heads, head_dim), packed (total, heads, head_dim).
        grad_out, grad_lse: as out and lse; grad_lse None where the case has no gradient of it.
        dropout_seed: (1,) int64.
        cu_seqlens, seqused: (queries, keys), int32; None for dense input.
        spans: for each sequence (index of its rows, index of its keys): what to take of q and of
            k to get (1, rows, heads, head_dim); dense input has one for the whole batch.
        visible: for each span, bool (batch, num_heads, rows, keys).
    """

    case: Case
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout_seed: torch.Tensor
    cu_seqlens: tuple[torch.Tensor, torch.Tensor] | None
    seqused: tuple[torch.Tensor, torch.Tensor] | None
    grad_out: torch.Tensor
    grad_lse: torch.Tensor | None
    visible: tuple[torch.Tensor, ...]

    def spans(self) -> list[tuple[slice, slice]]:
        """Rows and keys in use of each sequence of packed input."""
        starts_q, starts_k = _starts(self.case, 0), _starts(self.case, 1)
        return [
            (
                slice(starts_q[b], starts_q[b] + self.case.used(b)[0]),
                slice(starts_k[b], starts_k[b] + self.case.used(b)[1]),
            )
            for b in range(self.case.batch)
        ]

    def operands(self) -> tuple[Any, ...]:
        """The positional arguments that forward and backward share."""
        return (
            self.q,
            self.k,
            self.v,
            self.bias,
            self.alibi_slopes,
            self.sinks,
            self.dropout_seed if self.case.dropout_p > 0 else None,
            *(self.cu_seqlens or (None, None)),
            *(self.seqused or (None, None)),
        )

    def numbers(self) -> dict[str, Any]:
        """The keywords that forward and backward share."""
        left, right = self.case.mask.sides
        return {
            "softmax_scale": self.case.softmax_scale,
            "softcap": self.case.softcap,
            "dropout_p": self.case.dropout_p,
            "window_left": left,
            "window_right": right,
            "top_left": self.case.mask.alignment == "top-left",
            "allow_tf32": self.case.features["dtype"] == "tf32",
        }

    def wanted(self) -> tuple[bool, bool, bool, bool, bool]:
        """Which of (q, k, v, bias, sinks) take a gradient."""
        name = str(self.case.features["wanted"])
        terms = name in ("all", "terms")
        takes_bias = self.bias is not None and self.bias.dtype.is_floating_point
        return (
            name in ("all", "q"),
            name in ("all", "k", "kv"),
            name in ("all", "v", "kv"),
            terms and takes_bias,
            terms and self.sinks is not None,
        )


def distance_from_diagonal(
    case: Case, seqlen_q: int, seqlen_k: int, device: torch.device
) -> torch.Tensor:
    """j - (i + offset), int64 (seqlen_q, seqlen_k)."""
    import torch

    rows = torch.arange(seqlen_q, device=device) + case.mask.offset(seqlen_q, seqlen_k)
    return torch.arange(seqlen_k, device=device) - rows[:, None]


def make_inputs(case: Case, device: str) -> Inputs:
    """The tensors of a case; the same values in every run on one kind of device."""
    import torch

    dtype = _torch_dtype(case)
    draw = random.Random(case.seed)
    generator = torch.Generator(device).manual_seed(case.seed)
    num_heads, num_heads_kv = HEADS[str(case.features["heads"])]
    head_dim, head_dim_v = head_dims_of(case.features)
    rows, keys = _extent(case, 0), _extent(case, 1)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    q, k, v = (
        _values(case, name, randn(*extent, heads, width), draw)
        for name, extent, heads, width in (
            ("q", rows, num_heads, head_dim),
            ("k", keys, num_heads_kv, head_dim),
            ("v", keys, num_heads_kv, head_dim_v),
        )
    )
    grad_out = randn(*rows, num_heads, head_dim_v)
    lse_shape = (num_heads, *rows) if case.packed else (rows[0], num_heads, rows[1])
    grad_lse = randn(*lse_shape) if case.features["lse_gradient"] else None
    if case.grad_storage == "of a sum":
        grad_out = torch.ones((), dtype=dtype, device=device).expand(grad_out.shape)
        if grad_lse is not None:
            grad_lse = torch.ones((), device=device).expand(lse_shape)
    bias = _bias(case, randn, generator, device)
    if bias is not None and bias.dtype.is_floating_point:
        bias = bias.to(dtype)
    visible = _visible(case, bias, num_heads, device)
    if case.hidden_nan:
        _hide(case, (q, k, v, grad_out if case.own_grad_rows else None), visible)
    slopes = None
    if case.features["alibi"] != "none":
        slopes = 2.0 ** -torch.arange(1.0, num_heads + 1.0, device=device)
        if case.features["alibi"] == "bh":
            slopes = slopes * torch.arange(1.0, case.batch + 1.0, device=device)[:, None] / 3
    sinks = None
    if case.features["sinks"]:
        # float32 or the dtype of q, by specialisation
        sinks = randn(num_heads).to(torch.float32 if case.number[0] % 2 else dtype)
    q, k, v = (_stored(case, x.to(dtype), case.storage) for x in (q, k, v))
    return Inputs(
        case=case,
        q=q,
        k=k,
        v=v,
        bias=None if bias is None else _stored_bias(case, bias),
        alibi_slopes=slopes,
        sinks=sinks,
        dropout_seed=torch.tensor([case.seed], device=device),
        cu_seqlens=_int32_pair(case, (_starts(case, 0), _starts(case, 1)), device),
        seqused=_int32_pair(
            case, None if case.seqused is None else tuple(zip(*case.seqused, strict=True)), device
        ),
        grad_out=(
            grad_out
            if case.grad_storage == "of a sum"
            else _stored(case, grad_out.to(dtype), case.grad_storage)
        ),
        grad_lse=grad_lse,
        visible=visible,
    )


def _torch_dtype(case: Case) -> torch.dtype:
    import torch

    name = str(case.features["dtype"])
    return torch.float32 if name == "tf32" else getattr(torch, name)


def _starts(case: Case, side: int) -> list[int]:
    """cu_seqlens of the queries (side 0) or the keys (side 1)."""
    starts = [case.slack[0]]
    for lengths in case.lengths:
        starts.append(starts[-1] + lengths[side])
    return starts


def _extent(case: Case, side: int) -> tuple[int, ...]:
    """(batch, seqlen) of dense input, (total,) of packed input."""
    if case.packed:
        return (_starts(case, side)[-1] + case.slack[1],)
    return (case.batch, case.lengths[0][side])


def _int32_pair(
    case: Case, values: Sequence[Sequence[int]] | None, device: str
) -> tuple[torch.Tensor, torch.Tensor] | None:
    import torch

    if not case.packed or values is None:
        return None
    q, k = (torch.tensor(one, dtype=torch.int32, device=device) for one in values)
    return q, k


def _values(case: Case, name: str, noise: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """q, k or v (..., rows, heads, head_dim) of the case's distribution, from Gaussian noise."""
    import torch

    rows = noise.shape[-3]
    match case.distribution:
        case "constant":
            return torch.full_like(noise, {"q": 0.5, "k": -0.75, "v": 1.25}[name])
        case "rising":
            ramp = torch.linspace(-1.5, 1.5, rows, device=noise.device)[:, None, None]
            return noise * 0.1 + ramp
        case "huge key" if name == "k" and rows:
            noise[..., draw.randrange(rows), :, :] *= 40
        case "large logits" if name in "qk":
            noise *= 6
        case "zero":
            noise *= 0 if name == "q" else 1
    return noise


def _bias(case: Case, randn: Any, generator: torch.Generator, device: str) -> torch.Tensor | None:
    """Contiguous; a float bias hides every tenth pair, and some rows and keys are hidden whole."""
    import torch

    kind = str(case.features["bias"])
    if kind == "none":
        return None
    is_bool = kind.startswith("bool")
    broadcast = kind.removeprefix("bool").removeprefix("full").strip()
    num_heads, _ = HEADS[str(case.features["heads"])]
    sizes = zip("bhqk", (case.batch, num_heads, *case.lengths[0]), strict=True)
    shape = tuple(1 if name in broadcast else size for name, size in sizes)

    def share(probability: float, *of: int) -> torch.Tensor:
        return torch.rand(of, generator=generator, device=device) < probability

    hidden = share(0.4 if is_bool else 0.1, *shape)
    if "q" not in broadcast:
        hidden = hidden | share(0.05, *shape[:3], 1)
    if "k" not in broadcast:
        hidden = hidden | share(0.05, 1, 1, 1, shape[3])
    return ~hidden if is_bool else torch.where(hidden, -torch.inf, randn(*shape))


def _visible(
    case: Case, bias: torch.Tensor | None, num_heads: int, device: str
) -> tuple[torch.Tensor, ...]:
    import torch

    found = []
    for b in range(case.batch if case.packed else 1):
        distance = distance_from_diagonal(case, *case.used(b), torch.device(device))
        visible = torch.ones_like(distance, dtype=torch.bool)
        if case.mask.window_left is not None:
            visible &= distance >= -case.mask.window_left
        if case.mask.window_right is not None:
            visible &= distance <= case.mask.window_right
        if bias is not None:
            visible = visible & (bias if bias.dtype == torch.bool else bias > -torch.inf)
        batch = 1 if case.packed else case.batch
        found.append(visible.expand(batch, num_heads, *distance.shape))
    return tuple(found)


def _hide(
    case: Case, tensors: tuple[torch.Tensor | None, ...], visible: tuple[torch.Tensor, ...]
) -> None:
    """Write NaN, in place, into rows of q and dout that see no key, and keys that no query sees."""
    import torch

    q, k, v, grad_out = tensors
    num_heads_kv = HEADS[str(case.features["heads"])][1]
    alive = [seen.any(-1).transpose(1, 2) for seen in visible]
    seen_keys = [
        seen.unflatten(1, (num_heads_kv, -1)).any(dim=3).any(dim=2).transpose(1, 2)
        for seen in visible
    ]
    for side, marks, hiding in ((0, alive, (q, grad_out)), (1, seen_keys, (k, v))):
        keep = marks[0]
        if case.packed:
            (total,), starts = _extent(case, side), _starts(case, side)
            keep = torch.zeros(total, keep.shape[-1], dtype=torch.bool, device=keep.device)
            for b, mark in enumerate(marks):
                keep[starts[b] : starts[b] + case.used(b)[side]] = mark[0]
        for x in hiding:
            if x is not None:
                x.masked_fill_(~keep[..., None], torch.nan)


def _stored(case: Case, x: torch.Tensor, storage: str) -> torch.Tensor:
    """x in memory of another kind; what lies between its elements is NaN.

    Aligned strides are multiples of 16 bytes; others are not, and in every second specialisation
    the first element lies at an odd place too.
    """
    import torch

    aligned = bool(case.features["aligned"])
    unit = 16 // x.element_size()
    width = x.shape[-1]
    if aligned:
        width = -(-width // unit) * unit
    elif width % unit == 0:
        width += 1
    shape = [*x.shape[:-1], width]
    rows, heads = x.dim() - 3, x.dim() - 2
    view: Any = (..., slice(x.shape[-1]))
    if storage == "transposed":
        shape[rows], shape[heads] = shape[heads], shape[rows]
    elif storage == "sliced rows":
        shape[rows] += 5
        view = (..., slice(2, 2 + x.shape[rows]), slice(None), slice(x.shape[-1]))
    elif storage == "sliced heads":
        shape[heads] *= 3
        view = (..., slice(x.shape[heads], 2 * x.shape[heads]), slice(x.shape[-1]))
    elif storage == "expanded" and x.shape[heads]:
        shape[heads] = 1
    offset = 0 if aligned else case.number[0] % 2
    memory = torch.full((offset + math.prod(shape),), torch.nan, dtype=x.dtype, device=x.device)
    base = memory[offset:].view(shape)
    if storage == "transposed":
        base = base.transpose(rows, heads)
    found = base[view]
    if storage == "expanded":
        found.copy_(x[..., :1, :])
        return found.expand(x.shape)
    return found.copy_(x)


def _stored_bias(case: Case, bias: torch.Tensor) -> torch.Tensor:
    """Contiguous, or cut out of something larger."""
    import torch

    if case.storage == "contiguous" and case.features["aligned"]:
        return bias
    batch, heads, rows, keys = bias.shape
    first = 0 if case.features["aligned"] else case.number[0] % 2
    transposed = case.storage == "transposed"
    across, along = (keys, rows) if transposed else (rows, keys)
    memory = torch.zeros(
        first + batch * heads * across * (along + 16), dtype=bias.dtype, device=bias.device
    )
    view = memory[first:].view(batch, heads, across, along + 16)[..., :along]
    return (view.transpose(2, 3) if transposed else view).copy_(bias)
