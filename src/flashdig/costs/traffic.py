"""Bytes that attention moves, in three columns, for kernels that work on tiles.

- compulsory: each input read once and each output written once. No kernel can do less.
- issued: what the load and store instructions ask for, as an interpreter run counts it. Lanes that
  are masked off at the edge of a tensor ask for nothing, so only existing rows count.
- expected at memory: what is left of the issued bytes behind the L2 cache, whose working set is
  that of the blocks that are resident together (`l2.py`).

The issued forms follow two loop orders. FlashAttention (2205.14135, algorithm 1): a program for
each head, K and V tiles outside, Q, O, m and l going through memory in every step. FlashAttention-2
(2307.08691, algorithm 1): a program for each tile of queries and head, K and V tiles inside,
everything else in registers until the end. K and V are loaded for each query head, GQA or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flashdig.problem import AttentionProblem

FLOAT32_BYTES = 4

Statistics = Literal["lse", "m_and_l", "none"]


@dataclass(frozen=True)
class Traffic:
    """Bytes loaded and stored."""

    load_bytes: int
    store_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.load_bytes + self.store_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.load_bytes + other.load_bytes, self.store_bytes + other.store_bytes)


@dataclass(frozen=True)
class TensorBytes:
    """Bytes of each tensor of a problem. lse is float32, one number for each query and head."""

    q: int
    k: int
    v: int
    o: int
    lse: int


def tensor_bytes(problem: AttentionProblem) -> TensorBytes:
    rows_q = problem.batch * problem.num_heads * problem.seqlen_q
    rows_k = problem.batch * problem.num_heads_kv * problem.seqlen_k
    size = problem.element_bytes
    return TensorBytes(
        q=rows_q * problem.head_dim * size,
        k=rows_k * problem.head_dim * size,
        v=rows_k * problem.head_dim_v * size,
        o=rows_q * problem.head_dim_v * size,
        lse=rows_q * FLOAT32_BYTES,
    )


def compulsory(
    problem: AttentionProblem, direction: str = "forward", *, stores_lse: bool = True
) -> Traffic:
    """Inputs once in, outputs once out.

    Forward and decode: Q, K, V in; O and, if `stores_lse`, LSE out. Backward: Q, K, V, O, dO and
    LSE in; dQ, dK, dV out. Keys that no query sees are counted too: dense kernels take whole
    tensors.
    """
    size = tensor_bytes(problem)
    if direction == "backward":
        return Traffic(
            load_bytes=size.q + size.k + size.v + 2 * size.o + size.lse,
            store_bytes=size.q + size.k + size.v,
        )
    return Traffic(size.q + size.k + size.v, size.o + (size.lse if stores_lse else 0))


@dataclass(frozen=True)
class TileVisits:
    """What the tiles of one head add up to.

    Attributes:
        tiles: (query tile, key tile) pairs that are worked on.
        key_rows: key rows loaded, summed over the query tiles.
        query_rows: query rows loaded, summed over the key tiles.
        pairs: (query, key) pairs inside the visited tiles, masked ones included.
    """

    tiles: int
    key_rows: int
    query_rows: int
    pairs: int


def visited_tiles(
    problem: AttentionProblem, block_m: int, block_n: int, *, skip_masked_tiles: bool
) -> TileVisits:
    """Sums over the tiles of one head.

    With `skip_masked_tiles`, tiles without a visible pair are left out, as by a loop whose bounds
    are the mask's; otherwise every tile is visited.
    """
    _check_blocks(block_m, block_n)
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.mask.is_full or not skip_masked_tiles:
        tiles_m, tiles_n = math.ceil(seqlen_q / block_m), math.ceil(seqlen_k / block_n)
        return TileVisits(
            tiles=tiles_m * tiles_n,
            key_rows=tiles_m * seqlen_k,
            query_rows=tiles_n * seqlen_q,
            pairs=seqlen_q * seqlen_k,
        )
    tiles = key_rows = query_rows = pairs = 0
    for rows, first_tile, end_tile in _tile_ranges(problem, block_m, block_n):
        keys = min(end_tile * block_n, seqlen_k) - min(first_tile * block_n, seqlen_k)
        tiles += end_tile - first_tile
        key_rows += keys
        query_rows += rows * (end_tile - first_tile)
        pairs += rows * keys
    return TileVisits(tiles, key_rows, query_rows, pairs)


def tiles_per_program(
    problem: AttentionProblem, block_m: int, block_n: int, *, skip_masked_tiles: bool = True
) -> list[int]:
    """Key tiles that the program of each query tile of one head works on, in program order."""
    _check_blocks(block_m, block_n)
    if problem.mask.is_full or not skip_masked_tiles:
        tiles_n = math.ceil(problem.seqlen_k / block_n)
        return [tiles_n] * math.ceil(problem.seqlen_q / block_m)
    return [end - first for _, first, end in _tile_ranges(problem, block_m, block_n)]


def v1_issued(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    *,
    accumulator_bytes: int = FLOAT32_BYTES,
    skip_masked_tiles: bool = False,
) -> Traffic:
    """Issued bytes of the first FlashAttention: key tiles outside, query tiles inside.

    Grid: one program for each (batch, head). A key tile loads K and V once; each of its query tiles
    loads Q (dtype), O (`accumulator_bytes` an element), m and l (float32) and stores O, m and l.
    """
    visits = visited_tiles(problem, block_m, block_n, skip_masked_tiles=skip_masked_tiles)
    heads = problem.batch * problem.num_heads
    size = problem.element_bytes
    state = problem.head_dim_v * accumulator_bytes + 2 * FLOAT32_BYTES
    keys = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * size
    return Traffic(
        load_bytes=heads * (keys + visits.query_rows * (problem.head_dim * size + state)),
        store_bytes=heads * visits.query_rows * state,
    )


def v2_issued(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    *,
    skip_masked_tiles: bool = True,
    statistics: Statistics = "lse",
) -> Traffic:
    """Issued bytes of FlashAttention-2's loop order: query tiles outside, key tiles inside.

    Grid: (query tiles, batch x heads). A program loads its Q once and the K and V tiles of its
    loop, and stores O (dtype) and `statistics` once: "lse" one float32 a row, "m_and_l" two, "none"
    none.
    """
    visits = visited_tiles(problem, block_m, block_n, skip_masked_tiles=skip_masked_tiles)
    heads = problem.batch * problem.num_heads
    size = tensor_bytes(problem)
    row_bytes = (problem.head_dim + problem.head_dim_v) * problem.element_bytes
    numbers = {"lse": 1, "m_and_l": 2, "none": 0}[statistics]
    return Traffic(
        load_bytes=size.q + heads * visits.key_rows * row_bytes,
        store_bytes=size.o + numbers * size.lse,
    )


def v1_surroundings(problem: AttentionProblem) -> Traffic:
    """Bytes of what has to run around `v1_issued`'s kernel.

    O (float32), m and l are filled before; O is rounded after when the input has fewer bits.
    """
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    accumulated = rows * problem.head_dim_v * FLOAT32_BYTES
    fills = Traffic(0, accumulated + 2 * rows * FLOAT32_BYTES)
    if problem.element_bytes >= FLOAT32_BYTES:
        return fills
    return fills + Traffic(accumulated, tensor_bytes(problem).o)


def transpose_copy(problem: AttentionProblem) -> Traffic:
    """Bytes of copying K to (…, head_dim, seqlen_k) before the kernel: read and written once."""
    return Traffic(tensor_bytes(problem).k, tensor_bytes(problem).k)


def flash_backward_issued(problem: AttentionProblem, block_m: int, block_n: int) -> Traffic:
    """Issued bytes of FlashAttention-2's backward (2307.08691, algorithm 2), all its kernels.

    Before: O and dO in, delta (float32 a row) out. Main, a program for each key tile and query
    head: K and V in, for each visited query tile Q, dO, LSE, delta in and dQ added in float32 (in
    and out), dK and dV out. After: dQ in float32 in, dQ out. With grouped heads dK and dV are
    stored for each query head and summed by one more pass.
    """
    visits = visited_tiles(problem, block_m, block_n, skip_masked_tiles=True)
    heads = problem.batch * problem.num_heads
    element = problem.element_bytes
    size = tensor_bytes(problem)
    dim, dim_v = problem.head_dim, problem.head_dim_v
    expanded = heads * problem.seqlen_k * (dim + dim_v) * element
    accumulated = heads * problem.seqlen_q * dim * FLOAT32_BYTES

    before = Traffic(2 * size.o, size.lse)
    row_bytes = (dim + dim_v) * element + 2 * FLOAT32_BYTES + dim * FLOAT32_BYTES
    main = Traffic(
        load_bytes=expanded + heads * visits.query_rows * row_bytes,
        store_bytes=expanded + heads * visits.query_rows * dim * FLOAT32_BYTES,
    )
    after = Traffic(accumulated, size.q)
    total = before + main + after
    if problem.group_size > 1:
        total += Traffic(expanded, size.k + size.v)
    return total


def decode_issued(problem: AttentionProblem, splits: int = 1) -> Traffic:
    """Issued bytes of a decode step that reads each KV head once and splits the keys.

    All query heads of a group share a program. With several splits, each stores a float32 partial
    output and LSE, which a second kernel reads.
    """
    if splits < 1:
        raise ValueError(f"splits must be >= 1, got {splits}")
    size = tensor_bytes(problem)
    once = Traffic(splits * size.q + size.k + size.v, size.o + size.lse)
    if splits == 1:
        return once
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    partial = splits * rows * (problem.head_dim_v + 1) * FLOAT32_BYTES
    return once + Traffic(partial, partial)


def _tile_ranges(
    problem: AttentionProblem, block_m: int, block_n: int
) -> Iterator[tuple[int, int, int]]:
    """(query rows, first key tile, end key tile) of each query tile, by the mask's ranges."""
    for first_row in range(0, problem.seqlen_q, block_m):
        end_row = min(first_row + block_m, problem.seqlen_q)
        begin, end = problem.mask.tile_key_range(
            first_row, end_row, problem.seqlen_q, problem.seqlen_k
        )
        first_tile = begin // block_n
        end_tile = math.ceil(end / block_n) if end > begin else first_tile
        yield end_row - first_row, first_tile, end_tile


def _check_blocks(block_m: int, block_n: int) -> None:
    if block_m < 1 or block_n < 1:
        raise ValueError(f"block_m and block_n must be >= 1, got {block_m} and {block_n}")
