"""The walk's literal inputs, naive attention and the tiled loop, with the recurrence as a value.

A wrong recurrence can be put in place of the right one, so that a slip runs through the same loop
as the truth.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashdig.generations.walk_data import Numbers

# With head_dim 4 the softmax scale is 1/2 and every score is a multiple of 1/2. The running maximum
# of row 1 is final after the first tile of keys, that of row 3 rises in each, and row 2 has its
# largest score in the middle.
QUERIES = ((1, 0, 1, 0), (0, 2, 0, 1), (0, 1, 0, -1), (2, 0, 0, -1))
KEYS = ((0, 1, 0, 1), (1, 0, -1, 0), (2, 0, 1, 0), (0, 2, 0, -1), (3, 1, 0, 1), (-1, 1, 2, 0))
VALUES = ((1, 0), (0, 1), (2, -1), (-1, 2), (4, 0), (0, -2))
TILE_M = 2
TILE_N = 2


def literal_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q (4, 4), k (6, 4) and v (6, 2) of the walk, float64."""
    q, k, v = (torch.tensor(rows, dtype=torch.float64) for rows in (QUERIES, KEYS, VALUES))
    return q, k, v


def numbers(tensor: torch.Tensor) -> Numbers:
    """A scalar, vector or matrix as a float or nested tuples of floats."""
    if tensor.dim() == 0:
        return float(tensor)
    if tensor.dim() == 1:
        return tuple(float(x) for x in tensor)
    return tuple(tuple(float(x) for x in row) for row in tensor)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference, in float64."""
    return float((a.double() - b.double()).abs().max())


def attention_scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """softmax_scale q kᵀ: (seqlen_q, seqlen_k)."""
    return q @ k.T * float(q.shape[1] ** -0.5)


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v with the whole score matrix in memory."""
    scores = attention_scores(q, k)
    probs = torch.exp(scores - scores.amax(1, keepdim=True))
    return probs / probs.sum(1, keepdim=True) @ v


@dataclass(frozen=True)
class RowStatistics:
    """What a row knows when it meets a tile; each (rows,)."""

    max_old: torch.Tensor
    max_tile: torch.Tensor
    max_new: torch.Tensor
    sum_old: torch.Tensor


Factor = Callable[[RowStatistics], torch.Tensor]


def rescale_factor(row: RowStatistics) -> torch.Tensor:
    """exp(m_old - m_new): what everything summed so far is multiplied by."""
    return torch.exp(row.max_old - row.max_new)


def unit_factor(row: RowStatistics) -> torch.Tensor:
    """1 for every row."""
    return torch.ones_like(row.max_new)


@dataclass(frozen=True)
class Recurrence:
    """The three per-row factors of a tile's update; the defaults are the right ones.

    l_new = l_old * rescale_sum + l_tile * exp(m_tile - m_new)
    O_new = O_old * rescale_out + weigh_probs * exp(S_tile - m_new) V_tile
    """

    rescale_sum: Factor = rescale_factor
    rescale_out: Factor = rescale_factor
    weigh_probs: Factor = unit_factor


RIGHT = Recurrence()


@dataclass(frozen=True)
class TileVisit:
    """State of a query tile after a key tile: m, l (rows,), un-normalised O (rows, head_dim_v)."""

    first_row: int
    first_key: int
    end_key: int
    max_tile: torch.Tensor
    rescale: torch.Tensor
    row_max: torch.Tensor
    row_sum: torch.Tensor
    accumulator: torch.Tensor


@dataclass(frozen=True)
class TiledResult:
    """out (seqlen_q, head_dim_v), lse (seqlen_q,) and every tile visit in order."""

    out: torch.Tensor
    lse: torch.Tensor
    visits: tuple[TileVisit, ...]


def tiled_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tile_m: int = TILE_M,
    tile_n: int = TILE_N,
    recurrence: Recurrence = RIGHT,
) -> TiledResult:
    """Attention of one head over query tiles and, inside, key/value tiles.

    q (seqlen_q, head_dim), k (seqlen_k, head_dim), v (seqlen_k, head_dim_v); sums stay in the
    inputs' dtype.
    """
    outs, lses, visits = [], [], []
    for first_row in range(0, q.shape[0], tile_m):
        q_tile = q[first_row : first_row + tile_m]
        row_max = q.new_full((q_tile.shape[0],), -math.inf)
        row_sum = q.new_zeros(q_tile.shape[0])
        accumulator = q.new_zeros(q_tile.shape[0], v.shape[1])
        for first_key in range(0, k.shape[0], tile_n):
            end_key = min(first_key + tile_n, k.shape[0])
            scores = attention_scores(q_tile, k[first_key:end_key])
            max_tile = scores.amax(1)
            sum_tile = torch.exp(scores - max_tile[:, None]).sum(1)
            max_new = torch.maximum(row_max, max_tile)
            row = RowStatistics(row_max, max_tile, max_new, row_sum)

            row_sum = row_sum * recurrence.rescale_sum(row)
            row_sum = row_sum + sum_tile * torch.exp(max_tile - max_new)
            probs = torch.exp(scores - max_new[:, None]) * recurrence.weigh_probs(row)[:, None]
            accumulator = accumulator * recurrence.rescale_out(row)[:, None]
            accumulator = accumulator + probs @ v[first_key:end_key]
            row_max = max_new
            visits.append(
                TileVisit(
                    first_row,
                    first_key,
                    end_key,
                    max_tile,
                    rescale_factor(row),
                    row_max,
                    row_sum,
                    accumulator,
                )
            )
        outs.append(accumulator / row_sum[:, None])
        lses.append(row_max + torch.log(row_sum))
    return TiledResult(torch.cat(outs), torch.cat(lses), tuple(visits))
