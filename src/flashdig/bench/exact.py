"""Attention and its gradients written out in plain torch, some rows at a time, for any length.

In float64 this is what outputs are compared with. With `rounded_to` it is eager attention in that
dtype: QK^T, P, O, and in the backward dP, dS and each gradient are rounded to it, and its error is
the allowance of others. `flashdig.kernels.reference` defines the semantics; unlike it, this keeps
no seqlen_q x seqlen_k matrix, so it serves 128k tokens.

In 8 bits it is what fp8 kernels do: scores and sums in float32, P in 8 bits with 2^8 for a row's
largest, O in bfloat16.

With dropout (float64 only) the results are means over all dropout masks, and the variances beside
them are exact too: with P and dP as without dropout, f = p / (1 - p), S' the derivative of softcap,
A = P^2 dP^2, kbar = sum_j S' P k:

    var out_i = f sum_j P^2 v_j^2              var dv_j = f sum_i P^2 dout_i^2
    var dq_i  = f scale^2 sum_j A (S' k_j - kbar_i)^2
    var dk_j  = f scale^2 sum_i S'^2 q_i^2 (A (1 - P)^2 + P^2 (sum_l A_il - A))
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.problem import Mask

if TYPE_CHECKING:
    import torch

# scores held at once in each of about ten matrices
CHUNK_SCORES_CPU = 2**22
CHUNK_SCORES_GPU = 2**26
# P of a row's largest score in 8 bits: e4m3 ends at 448
FP8_LARGEST = 2.0**8


@dataclass(frozen=True)
class Heads:
    """Some KV heads with the query heads that share them.

    Attributes:
        q: (n, group_size, seqlen_q, head_dim); dout: (n, group_size, seqlen_q, head_dim_v) or None
            where no gradient is wanted.
        k: (n, seqlen_k, head_dim); v: (n, seqlen_k, head_dim_v).
        bias: broadcastable to (n, group_size, seqlen_q, seqlen_k), in its last two whole.
        slopes, sinks: (n, group_size).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor | None
    mask: Mask
    softmax_scale: float
    softcap: float = 0.0
    bias: torch.Tensor | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    dropout_p: float = 0.0


@dataclass(frozen=True)
class Results:
    """Tensors by name: "out" (n, group_size, seqlen_q, head_dim_v) and, with dout, "dq" (n,
    group_size, seqlen_q, head_dim), "dk" (n, seqlen_k, head_dim), "dv". `variances` has the same
    names, and is empty without dropout."""

    values: dict[str, torch.Tensor]
    variances: dict[str, torch.Tensor]


def written_out(heads: Heads, rounded_to: torch.dtype | None = None) -> Results:
    """Output and gradients in float64, or as eager attention in `rounded_to` gets them (held in
    float32 where that is wider)."""
    import torch

    precision = torch.float64 if rounded_to in (None, torch.float64) else torch.float32
    with torch.no_grad():
        sums = _Sums(heads, precision, rounded_to)
        for rows in sums.row_slices():
            sums.add(rows)
        return sums.results()


class _Sums:
    """What the rows so far add up to."""

    def __init__(
        self, heads: Heads, precision: torch.dtype, rounded_to: torch.dtype | None
    ) -> None:
        import torch

        self._heads = heads
        self._precision = precision
        self._rounded_to = rounded_to
        self._k = heads.k.to(precision)[:, None]
        self._v = heads.v.to(precision)[:, None]
        n, group, self._seqlen_q, head_dim = heads.q.shape
        self._seqlen_k, head_dim_v = heads.v.shape[1:]

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=precision, device=heads.q.device)

        self.values = {"out": zeros(n, group, self._seqlen_q, head_dim_v)}
        if heads.dout is not None:
            self.values["dq"] = zeros(n, group, self._seqlen_q, head_dim)
            # one for each query head: eager attention rounds each before it adds up the group
            self.values["dk"] = zeros(n, group, self._seqlen_k, head_dim)
            self.values["dv"] = zeros(n, group, self._seqlen_k, head_dim_v)
        dropout = heads.dropout_p > 0 and rounded_to is None
        self.variances = (
            {name: torch.zeros_like(x) for name, x in self.values.items()} if dropout else {}
        )

    def row_slices(self) -> Iterator[slice]:
        q = self._heads.q
        most = CHUNK_SCORES_CPU if q.device.type == "cpu" else CHUNK_SCORES_GPU
        count = max(1, most // max(1, q.shape[0] * q.shape[1] * self._seqlen_k))
        for start in range(0, self._seqlen_q, count):
            yield slice(start, min(start + count, self._seqlen_q))

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        if self._rounded_to is None or self._rounded_to.itemsize == 1:
            return x
        return x.to(self._rounded_to).to(self._precision)

    def _round_probs(self, probs: torch.Tensor) -> torch.Tensor:
        if self._rounded_to is None or self._rounded_to.itemsize > 1:
            return self._round(probs)
        factor = FP8_LARGEST / probs.amax(dim=-1, keepdim=True).clamp(min=2.0**-100)
        return (probs * factor).to(self._rounded_to).to(self._precision) / factor

    def _round_out(self, out: torch.Tensor) -> torch.Tensor:
        import torch

        if self._rounded_to is None or self._rounded_to.itemsize > 1:
            return self._round(out)
        return out.to(torch.bfloat16).to(self._precision)

    def add(self, rows: slice) -> None:
        """One stretch of query rows; keys that none of them sees cost nothing."""
        heads = self._heads
        begin, end = heads.mask.tile_key_range(
            rows.start, rows.stop, self._seqlen_q, self._seqlen_k
        )
        if begin == end:
            return
        keys = slice(begin, end)
        q, k, v = heads.q[:, :, rows].to(self._precision), self._k[:, :, keys], self._v[:, :, keys]
        probs, slope = self._probabilities(q, k, rows, keys)
        self.values["out"][:, :, rows] = self._round_out(probs @ v)
        if self.variances:
            self.variances["out"][:, :, rows] = probs**2 @ v**2
        if heads.dout is None:
            return
        dout = heads.dout[:, :, rows].to(self._precision)
        dprobs = self._round(dout @ v.transpose(-1, -2))
        dscores = self._round(probs * (dprobs - (probs * dprobs).sum(dim=-1, keepdim=True)))
        if slope is not None:
            dscores = self._round(dscores * slope)
        dscores = self._round(dscores * heads.softmax_scale)
        self.values["dq"][:, :, rows] = self._round(dscores @ k)
        self.values["dk"][:, :, keys] += dscores.transpose(-1, -2) @ q
        self.values["dv"][:, :, keys] += probs.transpose(-1, -2) @ dout
        if self.variances:
            self._add_variances(rows, keys, probs, dprobs, slope, q, k, dout)

    def _probabilities(
        self, q: torch.Tensor, k: torch.Tensor, rows: slice, keys: slice
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """P of some rows and keys, and d score / d (scaled score) where there is a softcap."""
        import torch

        heads, slope = self._heads, None
        scores = self._round(self._round(q @ k.transpose(-1, -2)) * heads.softmax_scale)
        if heads.softcap > 0:
            tanh = torch.tanh(scores / heads.softcap)
            scores, slope = self._round(heads.softcap * tanh), 1 - tanh**2
        offset = heads.mask.offset(self._seqlen_q, self._seqlen_k)
        i = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        distance = torch.arange(keys.start, keys.stop, device=q.device) - (i + offset)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if heads.mask.window_left is not None:
            visible &= distance >= -heads.mask.window_left
        if heads.mask.window_right is not None:
            visible &= distance <= heads.mask.window_right
        if heads.bias is not None:
            bias = heads.bias[..., rows, keys]
            if bias.dtype == torch.bool:
                visible = visible & bias
            else:
                scores = self._round(scores + bias.to(self._precision))
        if heads.slopes is not None:
            slopes = heads.slopes.to(self._precision)[..., None, None]
            scores = self._round(scores - slopes * distance.abs())
        scores = scores.masked_fill_(~visible, -torch.inf)
        row_max = scores.amax(dim=-1, keepdim=True)
        sinks = None
        if heads.sinks is not None:
            sinks = heads.sinks.to(self._precision)[..., None, None]
            row_max = torch.maximum(row_max, sinks)
        # rows that see no key: -inf - -inf is no number, and 0 / 0 none either
        row_max = row_max.masked_fill_(row_max == -torch.inf, 0.0)
        probs = scores.sub_(row_max).exp_()
        row_sum = probs.sum(dim=-1, keepdim=True)
        if sinks is not None:
            row_sum = row_sum + torch.exp(sinks - row_max)
        probs = self._round_probs(probs.div_(row_sum.masked_fill_(row_sum == 0, 1.0)))
        return probs, slope

    def _add_variances(
        self,
        rows: slice,
        keys: slice,
        probs: torch.Tensor,
        dprobs: torch.Tensor,
        slope: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        dout: torch.Tensor,
    ) -> None:
        """See the head of this file; factors common to all are applied in `results`."""
        squares = (probs * dprobs) ** 2
        row_squares = squares.sum(dim=-1, keepdim=True)
        of_key = squares * (1 - probs) ** 2 + probs**2 * (row_squares - squares)
        once = squares if slope is None else squares * slope
        twice = squares if slope is None else once * slope
        centre = (probs if slope is None else probs * slope) @ k
        of_query = twice @ k**2 - 2 * centre * (once @ k) + centre**2 * row_squares
        self.variances["dq"][:, :, rows] = of_query
        if slope is not None:
            of_key = of_key * slope**2
        self.variances["dk"][:, :, keys] += of_key.transpose(-1, -2) @ q**2
        self.variances["dv"][:, :, keys] += (probs**2).transpose(-1, -2) @ dout**2

    def results(self) -> Results:
        """The sums over all rows, those of a group of heads added up."""
        values = dict(self.values)
        for name in ("dk", "dv"):
            if name in values:
                values[name] = self._round(self._round(values[name]).sum(dim=1))
        p = self._heads.dropout_p
        variances = {}
        for name, variance in self.variances.items():
            factor = p / (1 - p)
            if name in ("dq", "dk"):
                factor *= self._heads.softmax_scale**2
            summed = variance.sum(dim=1) if name in ("dk", "dv") else variance
            variances[name] = (factor * summed).clamp_(min=0)
        return Results(values, variances)
