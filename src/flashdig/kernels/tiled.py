"""Attention tile by tile in plain torch, forward and backward, with O(seqlen) memory.

The algorithm of FlashAttention-2 (Dao 2023, algorithms 1 and 2) that can be stepped through in a
debugger; also the CPU backend for what torch's fused CPU attention does not serve. A step handles
one tile of queries against one tile of keys, for all batches and heads at once:

    scores (batch, num_heads_kv, group_size, tile_m, tile_n)

Running statistics are float32 (float64 for float64 input). The backward recomputes probabilities
from the log-sum-exp that the forward kept. `flashdig.kernels.tiled_launch` calls both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashdig.kernels.philox import keep_mask
from flashdig.problem import Mask

TILE_M = 128
TILE_N = 128


@dataclass(frozen=True)
class Terms:
    """What turns q.k into scores, apart from tensors that take gradients."""

    mask: Mask
    softmax_scale: float
    softcap: float = 0.0
    dropout_p: float = 0.0
    dropout_seed: int = 0
    first_sequence: int = 0  # index of the first batch entry in the dropout counter


class Tiles:
    """The inputs of one call seen tile by tile, in the dtype of the computation."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bias: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        terms: Terms,
    ) -> None:
        self.terms = terms
        self.dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.batch, self.seqlen_q, self.num_heads = q.shape[:3]
        self.seqlen_k, self.num_heads_kv = k.shape[1:3]
        self.group_size = self.num_heads // self.num_heads_kv if self.num_heads_kv else 1
        self.heads = (self.num_heads_kv, self.group_size)
        self.q = q.transpose(1, 2).unflatten(1, self.heads)
        self.k = k.transpose(1, 2)[:, :, None]
        self.v = v.transpose(1, 2)[:, :, None]
        self.offset = terms.mask.offset(self.seqlen_q, self.seqlen_k)
        self.bias = None if bias is None else self._per_group(bias, 1)
        self.slopes = None
        if alibi_slopes is not None:
            slopes = alibi_slopes.to(self.dtype).expand(self.batch, self.num_heads)
            self.slopes = self._per_group(slopes[..., None, None], 1)
        self.key_seen = self._seen_keys()

    def _per_group(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Split a (num_heads or 1) dimension into (num_heads_kv, group_size) or (1, 1)."""
        heads = self.heads if x.shape[dim] == self.num_heads else (1, 1)
        return x.reshape(*x.shape[:dim], *heads, *x.shape[dim + 1 :])

    def row_tiles(self) -> Iterator[slice]:
        for start in range(0, self.seqlen_q, TILE_M):
            yield slice(start, min(start + TILE_M, self.seqlen_q))

    def key_tiles(self, rows: slice) -> Iterator[slice]:
        """The key tiles that some row of the tile sees; the others are skipped."""
        begin, end = self.terms.mask.tile_key_range(
            rows.start, rows.stop, self.seqlen_q, self.seqlen_k
        )
        for start in range(begin - begin % TILE_N, end, TILE_N):
            yield slice(start, min(start + TILE_N, self.seqlen_k))

    def visible(self, rows: slice, keys: slice) -> torch.Tensor:
        """Bool, broadcastable to the scores of the tile."""
        distance = self._distance(rows, keys)
        visible = torch.ones_like(distance, dtype=torch.bool)
        if self.terms.mask.window_left is not None:
            visible &= distance >= -self.terms.mask.window_left
        if self.terms.mask.window_right is not None:
            visible &= distance <= self.terms.mask.window_right
        if self.bias is None:
            return visible
        tile = self._bias_tile(rows, keys)
        return visible & (tile if tile.dtype == torch.bool else ~torch.isneginf(tile))

    def query(self, rows: slice, row_alive: torch.Tensor | None = None) -> torch.Tensor:
        """Queries of a tile; those that see no key are zeroed when they are known."""
        q = self.q[..., rows, :].to(self.dtype)
        return q if row_alive is None else torch.where(row_alive[..., rows, None], q, 0.0)

    def key_value(self, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a tile; what no query sees is zero, whatever is stored there."""
        seen = self.key_seen[:, :, None, keys, None]
        k = torch.where(seen, self.k[..., keys, :].to(self.dtype), 0.0)
        v = torch.where(seen, self.v[..., keys, :].to(self.dtype), 0.0)
        return k, v

    def scores(
        self, q: torch.Tensor, k: torch.Tensor, rows: slice, keys: slice, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Final scores, -inf where hidden, and tanh(s / softcap) where there is a softcap."""
        scores = self.terms.softmax_scale * (q @ k.transpose(-1, -2))
        tanh = None
        if self.terms.softcap > 0.0:
            tanh = torch.tanh(scores / self.terms.softcap)
            scores = self.terms.softcap * tanh
        if self.bias is not None and self.bias.dtype != torch.bool:
            scores = scores + self._bias_tile(rows, keys).to(self.dtype)
        if self.slopes is not None:
            scores = scores - self.slopes * self._distance(rows, keys).abs()
        return torch.where(visible, scores, -math.inf), tanh

    def dropped(self, x: torch.Tensor, rows: slice, keys: slice) -> torch.Tensor:
        """x with the dropped pairs 0 and the kept ones scaled up."""
        if self.terms.dropout_p == 0.0:
            return x
        if self.terms.dropout_p == 1.0:
            return torch.zeros_like(x)
        device = x.device
        keep = keep_mask(
            self.terms.dropout_seed,
            self.terms.dropout_p,
            torch.arange(self.batch, device=device) + self.terms.first_sequence,
            torch.arange(self.num_heads, device=device),
            torch.arange(rows.start, rows.stop, device=device),
            torch.arange(keys.start, keys.stop, device=device),
        ).unflatten(1, self.heads)
        return torch.where(keep, x / (1.0 - self.terms.dropout_p), 0.0)

    def _bias_tile(self, rows: slice, keys: slice) -> torch.Tensor:
        assert self.bias is not None
        tile = self.bias if self.bias.shape[-2] == 1 else self.bias[..., rows, :]
        return tile if tile.shape[-1] == 1 else tile[..., keys]

    def _distance(self, rows: slice, keys: slice) -> torch.Tensor:
        device = self.q.device
        i = torch.arange(rows.start, rows.stop, device=device)[:, None] + self.offset
        return torch.arange(keys.start, keys.stop, device=device)[None, :] - i

    def _seen_keys(self) -> torch.Tensor:
        """Bool (batch, num_heads_kv, seqlen_k): some query of the KV head's group sees the key."""
        seen = torch.zeros(
            (self.batch, self.num_heads_kv, self.seqlen_k), dtype=torch.bool, device=self.q.device
        )
        if self.bias is None:  # the ranges of neighbouring rows join without gaps
            begin, _ = self.terms.mask.key_range(0, self.seqlen_q, self.seqlen_k)
            _, end = self.terms.mask.tile_key_range(0, self.seqlen_q, self.seqlen_q, self.seqlen_k)
            if self.seqlen_q:
                seen[..., begin:end] = True
            return seen
        for rows in self.row_tiles():
            for keys in self.key_tiles(rows):
                some_row = self.visible(rows, keys).any(dim=-2)
                seen[..., keys] |= some_row.any(dim=-2) if some_row.dim() > 1 else some_row
        return seen


def walk_forward(
    tiles: Tiles, sinks: torch.Tensor | None, head_dim_v: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, each (batch, num_heads_kv, group_size, seqlen_q[, head_dim_v])."""
    shape = (tiles.batch, *tiles.heads, tiles.seqlen_q)
    out = torch.zeros((*shape, head_dim_v), dtype=tiles.dtype, device=tiles.q.device)
    lse = torch.full(shape, -math.inf, dtype=tiles.dtype, device=tiles.q.device)
    for rows in tiles.row_tiles():
        q = tiles.query(rows)
        alive = torch.zeros(lse[..., rows].shape, dtype=torch.bool, device=tiles.q.device)
        row_max, row_sum = lse[..., rows].clone(), torch.zeros_like(lse[..., rows])
        accumulator = torch.zeros_like(out[..., rows, :])
        if sinks is not None:  # the sink is a first key whose value is zero
            row_max = row_max.maximum(sinks.to(tiles.dtype).view(*tiles.heads, 1))
            row_sum = (row_max > -math.inf).to(tiles.dtype)
        for keys in tiles.key_tiles(rows):
            k, v = tiles.key_value(keys)
            visible = tiles.visible(rows, keys)
            scores, _ = tiles.scores(q, k, rows, keys, visible)
            alive |= visible.any(dim=-1)
            new_max = torch.maximum(row_max, scores.amax(dim=-1))
            shift = torch.where(torch.isneginf(new_max), 0.0, new_max)
            rescale = torch.exp(row_max - shift)
            probs = torch.where(visible, torch.exp(scores - shift[..., None]), 0.0)
            row_sum = row_sum * rescale + probs.sum(dim=-1)
            accumulator = accumulator * rescale[..., None] + tiles.dropped(probs, rows, keys) @ v
            row_max = new_max
        has_mass = row_sum != 0.0
        lse[..., rows] = torch.where(has_mass, row_max + row_sum.log(), -math.inf)
        normalised = accumulator / torch.where(has_mass, row_sum, 1.0)[..., None]
        out[..., rows, :] = torch.where(alive[..., None], normalised, 0.0)
    return out, lse


def walk_backward(
    tiles: Tiles,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor | None,
    grad_lse: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """dq (grouped), dk, dv (batch, num_heads_kv, seqlen_k, ...), dbias, dsinks.

    dS = P * (dropout(dO V^T) - delta + dlse), delta = rowsum(dO * O): the log-sum-exp's own
    gradient joins delta (Dao 2023, section 3.1.2, extended by dlse).
    """
    dtype, device = tiles.dtype, tiles.q.device
    dq = torch.zeros(tiles.q.shape, dtype=dtype, device=device)
    dk = torch.zeros(
        (tiles.batch, tiles.num_heads_kv, *tiles.k.shape[-2:]), dtype=dtype, device=device
    )
    dv = torch.zeros(
        (tiles.batch, tiles.num_heads_kv, *tiles.v.shape[-2:]), dtype=dtype, device=device
    )
    dbias = None if bias is None else torch.zeros(bias.shape, dtype=dtype, device=device)
    dsinks = torch.zeros(tiles.num_heads, dtype=dtype, device=device)
    row_alive = _alive_rows(tiles)
    for rows in tiles.row_tiles():
        alive = row_alive[..., rows]
        q = tiles.query(rows, row_alive)
        row_lse = torch.where(torch.isneginf(lse[..., rows]), 0.0, lse[..., rows])
        dout = torch.zeros_like(out[..., rows, :], dtype=dtype)
        if grad_out is not None:
            # one layout: sums over a tile then do not depend on the strides of grad_out
            dout = torch.where(alive[..., None], grad_out[..., rows, :].to(dtype), 0.0).contiguous()
        minus_delta = -(dout * out[..., rows, :].to(dtype)).sum(dim=-1)
        if grad_lse is not None:
            minus_delta = minus_delta + torch.where(
                torch.isneginf(lse[..., rows]), 0.0, grad_lse[..., rows].to(dtype)
            )
        if sinks is not None:
            sink_probs = torch.exp(sinks.to(dtype).view(*tiles.heads, 1) - row_lse)
            sink_probs = torch.where(torch.isneginf(lse[..., rows]), 0.0, sink_probs)
            dsinks += (sink_probs * minus_delta).sum(dim=(0, 3)).flatten()
        for keys in tiles.key_tiles(rows):
            k, v = tiles.key_value(keys)
            visible = tiles.visible(rows, keys)
            scores, tanh = tiles.scores(q, k, rows, keys, visible)
            probs = torch.where(visible, torch.exp(scores - row_lse[..., None]), 0.0)
            dprobs = tiles.dropped(dout @ v.transpose(-1, -2), rows, keys)
            dv_tile = tiles.dropped(probs, rows, keys).transpose(-1, -2) @ dout
            dv[..., keys, :] += dv_tile.sum(dim=2)
            dscores = probs * (dprobs + minus_delta[..., None])
            if dbias is not None:
                _add_over_broadcast(dbias, dscores.flatten(1, 2), rows, keys)
            if tanh is not None:
                dscores = dscores * (1.0 - tanh * tanh)
            dscores = dscores * tiles.terms.softmax_scale
            dq[..., rows, :] += dscores @ k
            dk[..., keys, :] += (dscores.transpose(-1, -2) @ q).sum(dim=2)
    return dq, dk, dv, dbias, dsinks


def _alive_rows(tiles: Tiles) -> torch.Tensor:
    """Bool (batch, num_heads_kv, group_size, seqlen_q): the row sees a key."""
    alive = torch.zeros(tiles.q.shape[:-1], dtype=torch.bool, device=tiles.q.device)
    for rows in tiles.row_tiles():
        for keys in tiles.key_tiles(rows):
            alive[..., rows] |= tiles.visible(rows, keys).any(dim=-1)
    return alive


def _add_over_broadcast(total: torch.Tensor, tile: torch.Tensor, rows: slice, keys: slice) -> None:
    """Add a tile (batch, num_heads, rows, keys) into a gradient of a broadcast bias."""
    for dim in range(4):
        if total.shape[dim] == 1:
            tile = tile.sum(dim=dim, keepdim=True)
    target = total if total.shape[2] == 1 else total[:, :, rows]
    target = target if target.shape[3] == 1 else target[..., keys]
    target += tile
