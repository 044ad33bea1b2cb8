"""The article's slips: each wrong formula run beside the right one on the walk's numbers."""

from __future__ import annotations

import torch

from flashdig.generations.walk_data import Shown, Slip
from flashdig.generations.walk_loop import (
    QUERIES,
    RIGHT,
    Recurrence,
    RowStatistics,
    attention_scores,
    largest_difference,
    literal_inputs,
    naive_attention,
    numbers,
    rescale_factor,
    tiled_attention,
    unit_factor,
)

ROWS = tuple(f"query {row}" for row in range(len(QUERIES)))
COLUMNS = ("O[0]", "O[1]")


def slips() -> tuple[Slip, ...]:
    """Every slip, in the order in which the article makes them."""
    return (
        intensity_slip(),
        columns_slip(),
        recurrence_slip(
            "The sum is not rescaled",
            "3.3, the author's own first mistake",
            "l_new = l_old + l_block * exp(m_block - m_new)",
            "l_new = l_old * exp(m_old - m_new) + l_block * exp(m_block - m_new)",
            "Query 1 comes out right, because its maximum lies in the first tile and its factor "
            "stays 1: a test whose largest score comes first does not find this fault.",
            Recurrence(rescale_sum=unit_factor),
        ),
        recurrence_slip(
            "P, already relative to m_new, is rescaled again",
            "5.4",
            "O += (exp(m_block - m_new) * exp(S_block - m_new)) V_block",
            "O += exp(S_block - m_new) V_block",
            "The factor belongs to a P taken relative to m_block, as in section 3.3; section 5.1 "
            "takes P relative to m_new, where it is already inside. It shows only where a tile's "
            "maximum lies below the running one.",
            Recurrence(weigh_probs=_again_relative_to_new_maximum),
        ),
        recurrence_slip(
            "The un-normalised O is rescaled by the sum as well",
            "5.4",
            "O_new = O_old * l_old * exp(m_old - m_new) + P_block V_block",
            "O_new = O_old * exp(m_old - m_new) + P_block V_block",
            "l_old undoes a division by l_old. The normalised O of section 3.3 was divided, the "
            "un-normalised one never was.",
            Recurrence(rescale_out=_rescale_with_sum),
        ),
    )


def recurrence_slip(
    title: str,
    place: str,
    wrong_formula: str,
    right_formula: str,
    explanation: str,
    recurrence: Recurrence,
) -> Slip:
    """Runs the tiled loop with a wrong recurrence and with the right one."""
    q, k, v = literal_inputs()
    truth = naive_attention(q, k, v)
    wrong = tiled_attention(q, k, v, recurrence=recurrence).out
    right = tiled_attention(q, k, v, recurrence=RIGHT).out
    return Slip(
        title,
        place,
        wrong_formula,
        right_formula,
        explanation,
        Shown("O, wrong", numbers(wrong), ROWS, COLUMNS),
        Shown("O, right", numbers(right), ROWS, COLUMNS),
        largest_difference(wrong, truth),
        largest_difference(right, truth),
    )


def _rescale_with_sum(row: RowStatistics) -> torch.Tensor:
    return row.sum_old * rescale_factor(row)


def _again_relative_to_new_maximum(row: RowStatistics) -> torch.Tensor:
    return torch.exp(row.max_tile - row.max_new)


def columns_slip() -> Slip:
    """V cut by columns: block j of the keys adds to column j of O only."""
    q, k, v = literal_inputs()
    truth = naive_attention(q, k, v)
    probs = torch.softmax(attention_scores(q, k), dim=1)
    tile_n = k.shape[0] // v.shape[1]  # as many key blocks as columns of V, so that they pair up
    wrong, right = torch.zeros_like(truth), torch.zeros_like(truth)
    for column in range(v.shape[1]):
        keys = slice(column * tile_n, (column + 1) * tile_n)
        wrong[:, column] += probs[:, keys] @ v[keys, column]
        right += probs[:, keys] @ v[keys]
    return Slip(
        "V is cut by columns",
        "4.2",
        "O[:, j] += P_block_j V[block j, column j]",
        "O[:, :] += P_block_j V[block j, all columns]",
        "A tile of P covers some of the keys, so its partner is those rows of V, and every block "
        "adds to all columns of O. A true column of V needs all keys, which is the whole row of P "
        "that tiling avoids. K is cut by rows too.",
        Shown("O, wrong", numbers(wrong), ROWS, COLUMNS),
        Shown("O, right", numbers(right), ROWS, COLUMNS),
        largest_difference(wrong, truth),
        largest_difference(right, truth),
    )


def intensity_slip(head_dim: int = 64, seqlen: int = 4096, element_bytes: int = 4) -> Slip:
    """Arithmetic intensity of the naive form: FLOP per element of half the FLOPs against FLOP per
    byte of all."""
    elements_moved = 4 * seqlen * seqlen  # write S, read S, write P, read P
    one_product_multiply_adds_as_two = 2 * seqlen * seqlen * head_dim
    both_products = 2 * one_product_multiply_adds_as_two
    wrong = one_product_multiply_adds_as_two / elements_moved
    right = both_products / (elements_moved * element_bytes)
    counted = _count_intensity(head_dim, element_bytes)
    return Slip(
        "Arithmetic intensity 32",
        "2.2",
        "2 N^2 d FLOP / 4 N^2 elements = d / 2",
        "4 N^2 d FLOP / (4 N^2 elements * 4 bytes) = d / 4 FLOP per byte (float32)",
        "Each of the two products takes 2 N^2 d FLOP, so half are missing, and a ratio that is "
        "held against FLOP/s over bytes/s counts bytes, not elements. In float16 the two faults "
        "cancel. The conclusion stands: both lie far below the 150 FLOP per byte of a chip with "
        "300 TFLOP/s and 2 TB/s.",
        Shown("FLOP per element, one product", wrong),
        Shown("FLOP per byte, both products, float32", right),
        abs(wrong - counted),
        abs(right - counted),
    )


def _count_intensity(head_dim: int, element_bytes: int) -> float:
    """FLOP per byte counted one operation at a time on a 3 x 5 score matrix."""
    flops = bytes_moved = 0
    for _row in range(3):
        for _key in range(5):
            flops += sum(2 for _ in range(head_dim))  # a multiply and an add for each term of S
            bytes_moved += 4 * element_bytes
            flops += sum(2 for _ in range(head_dim))  # and for each column of O
    return flops / bytes_moved
