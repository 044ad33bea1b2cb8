"""Where the rows of one sequence and head lie, and how a tile of them is copied. Device code.

Three kinds of descriptors (`descriptors` makes them):

    dense     (batch, head, row, column)
    grouped   (batch, head_kv, row, head of the group, column): a tile's rows are the query heads
              that share keys, for each query in turn
    packed    (turn, end, head, row, column), of groups (turn, end, row, head, column): rows past
              the sequence's end count as outside the tensor, so they arrive as zeros and are never
              written, whatever lies behind them. An address is turn * (2**34 - stride) +
              (end + row) * stride elements; with turn = 2**30
              the first term is -2**30 * stride in 64 bits, so that row 2**30 - length + i, which
              the descriptor bounds by 2**30, is row i of the sequence
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, load_tile, store_tile
from flashdig.kernels.hopper.ring import as_block_of

TURN = gl.constexpr(1 << 30)


@aggregate
class Rows:
    """Rows of one sequence and head.

    Attributes:
        batch, head: of a dense descriptor; `head` is the KV head of a grouped one.
        first: the row of the tensor that is row 0 here.
        length: rows that there are.
        GROUP: rows of a tile that belong to one query: heads of its group, up to a power of two.
    """

    batch: gl.tensor
    head: gl.tensor
    first: gl.tensor
    length: gl.tensor
    PACKED: gl.constexpr
    GROUP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, batch, head, first, length, PACKED, GROUP):
        self.batch = batch
        self.head = head
        self.first = first
        self.length = length
        self.PACKED = gl.constexpr(PACKED)
        self.GROUP = gl.constexpr(GROUP)


@gluon.jit
def rows_of_queries(place, sizes):
    """Of a `schedule.Place`."""
    return Rows(place.batch, place.head, place.first_q, place.seqlen_q, sizes.PACKED, sizes.GROUP)


@gluon.jit
def _coordinates(rows, row, COLUMN: gl.constexpr):
    """Where a tile from `row` and COLUMN on begins, by the descriptor's dimensions."""
    GROUP: gl.constexpr = rows.GROUP
    if rows.PACKED:
        end = rows.first + rows.length
        place = TURN - rows.length + row // GROUP
        if GROUP > 1:
            found = (TURN, end, place, rows.head * GROUP, COLUMN)
        else:
            found = (TURN, end, rows.head, place, COLUMN)
    elif GROUP > 1:
        found = (rows.batch, rows.head, rows.first + row // GROUP, 0, COLUMN)
    else:
        found = (rows.batch, rows.head, rows.first + row, COLUMN)
    return found


@gluon.jit
def load_rows(desc, rows, row, COLUMN: gl.constexpr, barrier, tile):
    """Start copying a tile from `row` and COLUMN on; `barrier` counts its bytes."""
    load_tile(desc, _coordinates(rows, row, COLUMN), barrier, as_block_of(tile, desc))


@gluon.jit
def store_rows(desc, rows, row, COLUMN: gl.constexpr, tile):
    """Start writing a tile from `row` and COLUMN on; rows past the last one are not written."""
    store_tile(desc, _coordinates(rows, row, COLUMN), as_block_of(tile, desc))


@gluon.jit
def tile_in_sections(program, batch_size, num_heads, rows, heads_together, BLOCK_M: gl.constexpr):
    """(batch, head, start_m) of a tile. `heads_together` heads share the L2 cache; within them
    the last rows, which see most keys under causality, come first."""
    tiles_m = gl.cdiv(rows, BLOCK_M)
    section = program // (tiles_m * heads_together)
    inside = program % (tiles_m * heads_together)
    section_heads = gl.minimum(heads_together, batch_size * num_heads - section * heads_together)
    batch_head = section * heads_together + inside % section_heads
    start_m = (tiles_m - 1 - inside // section_heads) * BLOCK_M
    return batch_head // num_heads, batch_head % num_heads, start_m
