"""The path from naive to tiled attention on numbers small enough to check by hand.

It follows the article on the FlashAttention forward in CUTLASS (its sections 2 to 6) and computes
every number that it shows, the article's own ones included.
"""

from __future__ import annotations

import math

import torch

from flashdig.generations.walk_data import Check, Shown, Step, Walk
from flashdig.generations.walk_loop import (
    TILE_M,
    TILE_N,
    TileVisit,
    attention_scores,
    largest_difference,
    literal_inputs,
    naive_attention,
    numbers,
    tiled_attention,
)
from flashdig.generations.walk_machine import (
    butterfly_step,
    memory_step,
    mma_step,
    performance_step,
    shared_memory_step,
)
from flashdig.generations.walk_slips import slips
from flashdig.generations.walk_symptoms import symptoms

ROUNDING = 1e-12


def walk() -> Walk:
    """Computes the whole walk: steps, the article's slips, and its troubleshooting table."""
    return Walk(
        title="From naive attention to the tiled forward, on small numbers",
        source="an article on the FlashAttention forward in CUTLASS, sections 2 to 6",
        steps=(
            naive_step(),
            memory_step(),
            safe_softmax_step(),
            two_blocks_step(),
            tiled_loop_step(),
            values_by_rows_step(),
            shared_memory_step(),
            mma_step(),
            butterfly_step(),
            final_division_step(),
            performance_step(),
        ),
        slips=slips(),
        symptoms=symptoms(),
    )


def _labels(word: str, count: int) -> tuple[str, ...]:
    return tuple(f"{word} {i}" for i in range(count))


def naive_step() -> Step:
    """Three operations with the whole score matrix, beside a term-by-term computation."""
    q, k, v = literal_inputs()
    scores = attention_scores(q, k)
    exponentials = torch.exp(scores - scores.amax(1, keepdim=True))
    probs = exponentials / exponentials.sum(1, keepdim=True)
    out = naive_attention(q, k, v)
    by_hand = torch.tensor(
        _attention_term_by_term(q.tolist(), k.tolist(), v.tolist()), dtype=torch.float64
    )
    keys = _labels("key", k.shape[0])
    return Step(
        "Naive attention",
        "4 queries, 6 keys, head_dim 4 (2 for V). The article leaves out the scale "
        "1/sqrt(head_dim); it is 1/2 here, so every score is a multiple of 1/2.",
        "S = Q Kᵀ / sqrt(d);  P = softmax of each row of S;  O = P V",
        (
            Shown("Q", numbers(q), _labels("query", 4)),
            Shown("K", numbers(k), keys),
            Shown("V", numbers(v), keys),
            Shown("S", numbers(scores), _labels("query", 4), keys),
            Shown("P", numbers(probs), _labels("query", 4), keys),
            Shown("O", numbers(out), _labels("query", 4)),
        ),
        (
            Check(
                "largest difference from sums written term by term",
                float((out - by_hand).abs().max()),
                0.0,
                ROUNDING,
            ),
            Check("smallest row sum of P", float(probs.sum(1).min()), 1.0, ROUNDING),
        ),
    )


def _attention_term_by_term(
    q: list[list[float]], k: list[list[float]], v: list[list[float]]
) -> list[list[float]]:
    """Attention with plain Python sums and no maximum taken off."""
    out = []
    for query in q:
        weights = [
            math.exp(sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(len(query)))
            for key in k
        ]
        out.append(
            [
                sum(weight * value[column] for weight, value in zip(weights, v, strict=True))
                / sum(weights)
                for column in range(len(v[0]))
            ]
        )
    return out


def safe_softmax_step(shift: float = 1000.0) -> Step:
    """Softmax of one row with its maximum taken off, also where the plain one overflows."""
    q, k, _ = literal_inputs()
    row = attention_scores(q, k)[3]
    shifted = row + shift
    row_max = row.max()
    exponentials = torch.exp(row - row_max)
    row_sum = exponentials.sum()
    safe = exponentials / row_sum
    plain = torch.exp(row) / torch.exp(row).sum()
    plain_shifted = torch.exp(shifted) / torch.exp(shifted).sum()
    safe_shifted = torch.exp(shifted - shifted.max())
    safe_shifted = safe_shifted / safe_shifted.sum()
    return Step(
        "Safe softmax of one row",
        "Taking the same m off every score divides numerator and denominator by exp(m): the result "
        "stays, and the largest exponential becomes 1. With scores 1000 higher the plain form is "
        "inf / inf, the safe one unchanged.",
        "m = max(x);  l = sum_j exp(x_j - m);  p_j = exp(x_j - m) / l",
        (
            Shown("x = row 3 of S", numbers(row)),
            Shown("m", numbers(row_max)),
            Shown("exp(x - m)", numbers(exponentials)),
            Shown("l", numbers(row_sum)),
            Shown("p", numbers(safe)),
            Shown(f"plain softmax of x + {shift:g}", numbers(plain_shifted)),
            Shown(f"safe softmax of x + {shift:g}", numbers(safe_shifted)),
        ),
        (
            Check("difference from the plain form", largest_difference(safe, plain), 0, ROUNDING),
            Check("largest exponential", float(exponentials.max()), 1.0),
            Check(
                f"difference with x + {shift:g}", largest_difference(safe_shifted, safe), 0, 1e-10
            ),
            Check(
                f"numbers that the plain form loses with x + {shift:g}",
                float(plain_shifted.isnan().sum()),
                float(row.numel()),
            ),
        ),
    )


def two_blocks_step(row: int = 3) -> Step:
    """One row in two halves: m, l and O of each, merged in the normalised and in the
    un-normalised form."""
    q, k, v = literal_inputs()
    half = k.shape[0] // 2
    scores = attention_scores(q, k)[row]
    truth = naive_attention(q, k, v)[row]
    (m1, l1, o1), (m2, l2, o2) = (
        _block_of_row(scores[keys], v[keys]) for keys in (slice(0, half), slice(half, None))
    )
    m = torch.maximum(m1, m2)
    scale1, scale2 = torch.exp(m1 - m), torch.exp(m2 - m)
    total = l1 * scale1 + l2 * scale2
    unnormalised = o1 * scale1 + o2 * scale2
    # the same merge of two finished outputs, each already divided by its own l
    normalised = (o1 / l1) * (l1 * scale1 / total) + (o2 / l2) * (l2 * scale2 / total)
    return Step(
        f"Two blocks merged (query {row})",
        "Each half of the keys gives its own maximum, sum and un-normalised output. The larger "
        "maximum wins; what was summed under the smaller one is rescaled, l and O alike. Section "
        "3.3 writes the normalised form without l_block in the second term: its O_block is the "
        "un-normalised one, its O_old the normalised one.",
        "m = max(m1, m2);  l = l1 exp(m1-m) + l2 exp(m2-m);  "
        "O un-normalised = O1 exp(m1-m) + O2 exp(m2-m), divided by l at the end;  "
        "O normalised = (O1/l1) l1 exp(m1-m)/l + (O2/l2) l2 exp(m2-m)/l",
        (
            Shown(
                "blocks",
                (
                    (float(m1), float(l1), *o1.tolist()),
                    (float(m2), float(l2), *o2.tolist()),
                ),
                (f"keys 0-{half - 1}", f"keys {half}-{k.shape[0] - 1}"),
                ("m", "l", "O[0]", "O[1]"),
            ),
            Shown("exp(m1 - m), exp(m2 - m)", (float(scale1), float(scale2))),
            Shown(
                "merged",
                ((float(m), float(total), *unnormalised.tolist()),),
                columns=("m", "l", "O[0]", "O[1]"),
            ),
            Shown("O / l", numbers(unnormalised / total)),
            Shown("O merged normalised", numbers(normalised)),
            Shown("O naive", numbers(truth)),
        ),
        (
            Check("m against the whole row", float(m), float(scores.max())),
            Check(
                "l against the whole row",
                float(total),
                float(torch.exp(scores - scores.max()).sum()),
                ROUNDING,
            ),
            Check(
                "un-normalised form against naive",
                largest_difference(unnormalised / total, truth),
                0.0,
                ROUNDING,
            ),
            Check(
                "normalised form against naive",
                largest_difference(normalised, truth),
                0.0,
                ROUNDING,
            ),
        ),
    )


def _block_of_row(
    scores: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m, l and un-normalised O of one row over one block of keys."""
    block_max = scores.max()
    exponentials = torch.exp(scores - block_max)
    return block_max, exponentials.sum(), exponentials @ v


def tiled_loop_step() -> Step:
    """Every visit of a query tile to a key/value tile with the state it leaves."""
    q, k, v = literal_inputs()
    result = tiled_attention(q, k, v)
    return Step(
        f"The tiled loop: tiles of {TILE_M} queries and {TILE_N} keys",
        "A query tile starts with m = -inf, l = 0, O = 0 and meets the key tiles in turn; no score "
        "outlives its tile. Where a tile brings a new maximum, exp(m_old - m_new) falls below 1 "
        "and everything before it shrinks; in the first tile it is exp(-inf) = 0.",
        "m_new = max(m_old, max of S_tile);  P = exp(S_tile - m_new);  "
        "l_new = l_old exp(m_old - m_new) + row sum of P;  "
        "O_new = O_old exp(m_old - m_new) + P V_tile",
        (
            *(_visit_table(visit) for visit in result.visits),
            Shown("O / l", numbers(result.out)),
        ),
        (
            Check(
                "largest difference from naive",
                largest_difference(result.out, naive_attention(q, k, v)),
                0.0,
                ROUNDING,
            ),
            Check(
                "tiles visited",
                float(len(result.visits)),
                float(math.ceil(q.shape[0] / TILE_M) * math.ceil(k.shape[0] / TILE_N)),
            ),
        ),
    )


def _visit_table(visit: TileVisit) -> Shown:
    state = torch.cat(
        (
            visit.max_tile[:, None],
            visit.rescale[:, None],
            visit.row_max[:, None],
            visit.row_sum[:, None],
            visit.accumulator,
        ),
        dim=1,
    )
    last_row = visit.first_row + state.shape[0] - 1
    return Shown(
        f"queries {visit.first_row}-{last_row}, keys {visit.first_key}-{visit.end_key - 1}",
        numbers(state),
        tuple(f"query {row}" for row in range(visit.first_row, last_row + 1)),
        ("max S_tile", "exp(m_old-m_new)", "m", "l", "O[0]", "O[1]"),
    )


def values_by_rows_step() -> Step:
    """What each row block of V adds to every column of O."""
    q, k, v = literal_inputs()
    probs = torch.softmax(attention_scores(q, k), dim=1)
    parts = [
        probs[:, first : first + TILE_N] @ v[first : first + TILE_N]
        for first in range(0, k.shape[0], TILE_N)
    ]
    touched = min(int((part.abs().amax(0) > 0).sum()) for part in parts)
    return Step(
        "K and V are cut by rows",
        "A row of K or V is one key. A tile of keys takes the same rows of both, and its share of "
        "the output reaches every column; the shares add up to O.",
        "O = sum over tiles of P[:, tile] V[tile, :]",
        tuple(
            Shown(f"share of keys {i * TILE_N}-{(i + 1) * TILE_N - 1}", numbers(part))
            for i, part in enumerate(parts)
        ),
        (
            Check(
                "sum of the shares against naive",
                largest_difference(torch.stack(parts).sum(0), naive_attention(q, k, v)),
                0.0,
                ROUNDING,
            ),
            Check("fewest columns that a share reaches", touched, float(v.shape[1])),
        ),
    )


def final_division_step() -> Step:
    """One division at the end, and the log-sum-exp that a backward needs."""
    q, k, v = literal_inputs()
    result = tiled_attention(q, k, v)
    last = [visit for visit in result.visits if visit.end_key == k.shape[0]]
    row_max = torch.cat([visit.row_max for visit in last])
    row_sum = torch.cat([visit.row_sum for visit in last])
    scores = attention_scores(q, k)
    restored = torch.exp(scores - result.lse[:, None])
    tiles = k.shape[0] // TILE_N
    return Step(
        "The final division and the log-sum-exp",
        "Un-normalised, each output is divided once; normalised, once in every tile. The one "
        "number a row that is kept, LSE, restores P from S without m and l: that is all a backward "
        "needs.",
        "O = O_acc / l;  LSE = m + ln(l);  P = exp(S - LSE)",
        (
            Shown(
                "rows",
                numbers(torch.stack((row_max, row_sum, result.lse), dim=1)),
                _labels("query", q.shape[0]),
                ("m", "l", "LSE"),
            ),
            Shown("O", numbers(result.out)),
            Shown(
                "divisions, at the end and in every tile",
                (float(result.out.numel()), float(result.out.numel() * tiles)),
            ),
        ),
        (
            Check(
                "LSE against ln(sum exp(S))",
                largest_difference(result.lse, torch.log(torch.exp(scores).sum(1))),
                0.0,
                ROUNDING,
            ),
            Check(
                "exp(S - LSE) V against naive",
                largest_difference(restored @ v, naive_attention(q, k, v)),
                0.0,
                ROUNDING,
            ),
        ),
    )
