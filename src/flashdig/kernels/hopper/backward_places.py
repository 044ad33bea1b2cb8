"""Device functions: which tile of keys or rows of which sequence a block of the backward works on.

Rows that see no key and keys that no row sees are cut off first: what they hold shows nowhere.
"""

import triton
import triton.language as tl

from flashdig.kernels.gluon_api import aggregate, gl, gluon
from flashdig.kernels.triton.sequences import (
    find_sequence,
    first_slot,
    rows_of_slot,
    seeing_rows,
    seen_keys,
    sequence_span,
)

# row statistics and sums of dQ are padded to whole tiles of so many rows
PADDED_ROWS = gl.constexpr(128)


@aggregate
class Grid:
    """How tiles of keys are dealt to blocks.

    Attributes:
        tiles: of all heads together; tiles_n: of one head, of packed input those of all sequences.
        batch_size: sequences.
        heads_together: heads that share the L2 cache; within them the longest columns come first.
        padded_q: rows of one head in padded buffers.
    """

    tiles: gl.tensor
    tiles_n: gl.tensor
    batch_size: gl.tensor
    num_heads_kv: gl.tensor
    group_size: gl.tensor
    heads_together: gl.tensor
    padded_q: gl.tensor
    PACKED: gl.constexpr
    TOP_LEFT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        tiles,
        tiles_n,
        batch_size,
        num_heads_kv,
        group_size,
        heads_together,
        padded_q,
        PACKED,
        TOP_LEFT,
    ):
        self.tiles = tiles
        self.tiles_n = tiles_n
        self.batch_size = batch_size
        self.num_heads_kv = num_heads_kv
        self.group_size = group_size
        self.heads_together = heads_together
        self.padded_q = padded_q
        self.PACKED = gl.constexpr(PACKED)
        self.TOP_LEFT = gl.constexpr(TOP_LEFT)


@triton.jit
def live_parts(
    first_q, seqlen_q, first_k, seqlen_k, offset, left, right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(first_q, seqlen_q, first_k, seqlen_k, offset) of the rows of a sequence that see some key
    and the keys that some row sees."""
    row, row_end = seeing_rows(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    seqlen_q = tl.maximum(row_end - row, 0) + first_q * 0
    offset += row
    key, key_end = seen_keys(seqlen_q, seqlen_k, offset, left, right, LEFT, RIGHT)
    seqlen_k = tl.maximum(key_end - key, 0) + first_k * 0
    if seqlen_q == 0:
        seqlen_k = seqlen_k * 0
    return first_q + row, seqlen_q, first_k + key, seqlen_k, offset - key


@triton.jit
def live_rows_of_program(
    cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, batch_size, num_heads, total_q, total_k, left,
    right, BLOCK_M: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """`live_rows_of_tile` of a one-dimensional grid's program."""
    return live_rows_of_tile(
        tl.program_id(0), cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, batch_size, num_heads,
        total_q, total_k, left, right, BLOCK_M, TOP_LEFT, LEFT, RIGHT,
    )  # fmt: skip


@triton.jit
def live_rows_of_tile(
    tile, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, batch_size, num_heads, total_q, total_k, left,
    right, BLOCK_M: tl.constexpr, TOP_LEFT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """A tile of live rows of packed input: (sequence, head, start_m, padded_row, first_q, seqlen_q,
    first_k, seqlen_k, offset).

    start_m is relative to the first live row, and past the last one where there is nothing to do;
    padded_row is the tile's first in padded buffers, among the rows of its head.
    """
    sequence, head, start_m, first_q, first_k, seqlen_q, seqlen_k, _ = rows_of_slot(
        tile, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, batch_size, num_heads, total_q, total_k,
        BLOCK_M, True, False,
    )  # fmt: skip
    padded_row = (tile % (total_q // BLOCK_M + batch_size)) * BLOCK_M
    offset = seqlen_k - seqlen_q
    if TOP_LEFT:
        offset = offset * 0
    first_q, seqlen_q, first_k, seqlen_k, offset = live_parts(
        first_q, seqlen_q, first_k, seqlen_k, offset, left, right, LEFT, RIGHT
    )
    return (
        sequence, head, start_m, padded_row, first_q, seqlen_q, first_k, seqlen_k, offset
    )  # fmt: skip


@gluon.jit
def columns_of_tile(
    grid, problem, cu_q_ptr, cu_k_ptr, used_q_ptr, used_k_ptr, tile, BLOCK_N: gl.constexpr
):
    """A tile of keys: (batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset,
    padded_row).

    Lengths are those of the live parts; start_n is relative to the first live key and past the last
    one where there is nothing to do; padded_row is the sequence's first in padded buffers.
    """
    if grid.PACKED:
        head_kv = tile // grid.tiles_n
        slot = tile % grid.tiles_n
        batch = find_sequence(cu_k_ptr, slot, grid.batch_size, problem.seqlen_k, BLOCK_N)
        start_n = (slot - first_slot(cu_k_ptr, batch, problem.seqlen_k, BLOCK_N)) * BLOCK_N
        first_q, seqlen_q = sequence_span(cu_q_ptr, used_q_ptr, batch, problem.seqlen_q)
        first_k, seqlen_k = sequence_span(cu_k_ptr, used_k_ptr, batch, problem.seqlen_k)
        padded_row = first_slot(cu_q_ptr, batch, problem.seqlen_q, PADDED_ROWS) * PADDED_ROWS
        offset = seqlen_k - seqlen_q
        if grid.TOP_LEFT:
            offset = offset * 0
        first_q, seqlen_q, first_k, seqlen_k, offset = live_parts(
            first_q, seqlen_q, first_k, seqlen_k, offset, problem.left, problem.right,
            problem.LEFT, problem.RIGHT,
        )  # fmt: skip
    else:
        section = tile // (grid.tiles_n * grid.heads_together)
        inside = tile % (grid.tiles_n * grid.heads_together)
        heads_before = section * grid.heads_together
        heads = grid.batch_size * grid.num_heads_kv - heads_before
        heads = gl.minimum(grid.heads_together, heads)
        batch_head = heads_before + inside % heads
        batch = batch_head // grid.num_heads_kv
        head_kv = batch_head % grid.num_heads_kv
        start_n = (inside // heads) * BLOCK_N
        first_q = tile * 0
        first_k = first_q
        padded_row = first_q
        seqlen_q = problem.seqlen_q
        seqlen_k = problem.seqlen_k
        offset = problem.offset
    return batch, head_kv, start_n, first_q, seqlen_q, first_k, seqlen_k, offset, padded_row


@gluon.jit
def padded_start(grid, batch, head, padded_row):
    """Where the rows of a sequence and query head begin in padded buffers."""
    heads_before = head
    if not grid.PACKED:
        heads_before += batch * (grid.num_heads_kv * grid.group_size)
    return heads_before.to(gl.int64) * grid.padded_q + padded_row
