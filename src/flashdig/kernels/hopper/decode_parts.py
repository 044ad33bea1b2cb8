"""What the Hopper decoding kernel writes: whole results, or parts of them that the last block to
finish a tile of queries and KV head joins. Device code.

A part is float32: (piece, KV head, row of the tile), with its log-sum-exp.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, meet_in_partition
from flashdig.kernels.hopper.columns import scaled
from flashdig.kernels.hopper.problem import LN_2, LOG2_E
from flashdig.kernels.triton.sequences import _first_row, sequence_span

# of a tile that are joined at once: rows, one to each warp, and parts of them
JOINED_ROWS = gl.constexpr(4)
JOINED_PARTS = gl.constexpr(8)
# of a block's counter: for units, for blocks that are done, nothing, nothing; then for each KV head
# of each sequence, or of packed queries of each tile by the number of its first piece, the pieces
# that are done
ARRIVALS = gl.constexpr(4)


@aggregate
class Results:
    """Where results go, and how many rows and columns they have.

    Attributes:
        out_ptr, lse_ptr: (batch, seqlen_q, num_heads, head_dim_v) and (batch, num_heads, seqlen_q),
            or (total_q, num_heads, head_dim_v) and (num_heads, total_q).
        part_ptr, part_lse_ptr: parts.
        counter_ptr: see ARRIVALS.
        rows: of a tile, as many as are in use at most.
    """

    out_ptr: gl.tensor
    lse_ptr: gl.tensor
    part_ptr: gl.tensor
    part_lse_ptr: gl.tensor
    counter_ptr: gl.tensor
    rows: gl.tensor
    HEAD_DIM_V: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, out_ptr, lse_ptr, part_ptr, part_lse_ptr, counter_ptr, rows, HEAD_DIM_V):
        self.out_ptr = out_ptr
        self.lse_ptr = lse_ptr
        self.part_ptr = part_ptr
        self.part_lse_ptr = part_lse_ptr
        self.counter_ptr = counter_ptr
        self.rows = rows
        self.HEAD_DIM_V = gl.constexpr(HEAD_DIM_V)


@gluon.jit
def _store_block(pointer, x, places, known, results, FIRST: gl.constexpr):
    """places: of the rows of x, in elements; FIRST: its first column."""
    columns = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    inside = gl.convert_layout(known, rows)[:, None] & (columns < results.HEAD_DIM_V)[None, :]
    pointers = pointer + gl.convert_layout(places, rows)[:, None] + columns[None, :]
    gl.store(pointers, x.to(pointer.dtype.element_ty), mask=inside)


@gluon.jit
def _store_blocks(pointer, out, places, known, results):
    _store_block(pointer, out[0], places, known, results, 0)
    if len(out) == 2:
        _store_block(pointer, out[1], places, known, results, out[0].shape[1])


@gluon.jit
def _head_and_statistics(results, piece, sizes, rows):
    """(query head, place of the statistics, place of the result in rows) of rows of a tile."""
    GROUP: gl.constexpr = sizes.GROUP
    heads = sizes.num_heads * GROUP
    head = piece.head * GROUP + rows % GROUP
    token = rows // GROUP
    if sizes.PACKED:
        token = (piece.first_q + piece.start).to(gl.int64) + token
        statistics = head * sizes.seqlen_q.to(gl.int64) + token
        places = token * heads + head
    else:
        sequence = piece.sequence.to(gl.int64)
        statistics = (sequence * heads + head) * sizes.seqlen_q + token
        places = (sequence * sizes.seqlen_q + token) * heads + head
    return head, statistics, places


@gluon.jit
def _rows_in_use(results, piece, sizes):
    rows = results.rows
    if sizes.PACKED:
        rows = gl.minimum(rows, (piece.seqlen_q - piece.start) * sizes.GROUP)
    return rows


@gluon.jit
def _with_sinks(lse, head, known, sinks_ptr):
    """(what rows are multiplied with, log-sum-exp) with the sinks' logits in the softmax."""
    sink = gl.load(sinks_ptr + head, mask=known, other=0.0).to(gl.float32)
    largest = gl.maximum(lse, sink)
    shift = gl.where(largest == float("-inf"), 0.0, largest)
    kept = gl.exp2((lse - shift) * LOG2_E)
    total = kept + gl.exp2((sink - shift) * LOG2_E)
    total = gl.where(largest == float("-inf"), 1.0, total)
    return kept / total, largest + gl.log2(total) * LN_2


@gluon.jit
def store_whole(out, factor, lse, results, piece, sizes, sinks_ptr):
    """The result of a tile whose keys were one piece.

    Args:
        out: accumulators; times `factor`, (rows,), they are the result.
        lse: (rows,), natural.
    """
    rows = gl.arange(0, lse.shape[0], lse.type.layout)
    known = rows < _rows_in_use(results, piece, sizes)
    head, statistics, places = _head_and_statistics(results, piece, sizes, rows)
    if sinks_ptr is not None:
        kept, lse = _with_sinks(lse, head, known, sinks_ptr)
        factor = factor * kept
    gl.store(results.lse_ptr + statistics, lse, mask=known)
    _store_blocks(results.out_ptr, scaled(out, factor), places * results.HEAD_DIM_V, known, results)


@gluon.jit
def _part_rows(results, number, piece, sizes, rows):
    first = (number.to(gl.int64) * sizes.num_heads + piece.head) * results.rows
    return first + rows


@gluon.jit
def _arrivals(results, piece, sizes):
    """Counts the pieces that are done of the piece's tile."""
    owner = piece.first_piece if sizes.PACKED else piece.sequence
    return results.counter_ptr + ARRIVALS + owner * sizes.num_heads + piece.head


@gluon.jit
def store_part(out, factor, lse, results, piece, sizes):
    """One piece's part; True where it was the last of its tile."""
    rows = gl.arange(0, lse.shape[0], lse.type.layout)
    known = rows < _rows_in_use(results, piece, sizes)
    places = _part_rows(results, piece.number, piece, sizes, rows)
    gl.store(results.part_lse_ptr + places, lse, mask=known)
    _store_blocks(
        results.part_ptr, scaled(out, factor), places * results.HEAD_DIM_V, known, results
    )
    meet_in_partition()  # all stores of the warpgroup lie before the arrival, which releases them
    return gl.atomic_add(_arrivals(results, piece, sizes), 1, sem="acq_rel") == piece.own - 1


@gluon.jit
def join_parts(results, piece, sizes, sinks_ptr, COLUMNS: gl.constexpr):
    """The result of a tile whose pieces are all done, a row to each warp at a time; leaves the
    count of its pieces as the next launch needs it.

    Nothing hides its instructions, which come from memory when they run for the first time, so they
    are few: a thread has one row, and a load brings all its columns.
    """
    layout: gl.constexpr = gl.BlockedLayout(
        [JOINED_PARTS, 1, COLUMNS // 32], [1, 1, 32], [1, JOINED_ROWS, 1], [2, 1, 0]
    )
    by_row: gl.constexpr = gl.SliceLayout(2, layout)
    each: gl.constexpr = gl.SliceLayout(0, by_row)
    wide: gl.constexpr = gl.SliceLayout(0, layout)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, wide))
    in_parts = gl.convert_layout(column, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    first_part = gl.arange(0, JOINED_PARTS, gl.SliceLayout(1, by_row))
    between = sizes.num_heads.to(gl.int64) * results.rows
    rows = _rows_in_use(results, piece, sizes)
    for start in range(0, rows, JOINED_ROWS):
        row = start + gl.arange(0, JOINED_ROWS, each)
        known = row < rows
        first = _part_rows(results, piece.first_piece, piece, sizes, row)
        largest = gl.full([JOINED_ROWS], float("-inf"), gl.float32, each)
        total = gl.full([JOINED_ROWS], 0.0, gl.float32, each)
        out = gl.zeros([JOINED_ROWS, COLUMNS], gl.float32, wide)
        for part in range(0, piece.own, JOINED_PARTS):
            number = part + first_part
            places = first[None, :] + (number * between)[:, None]
            there = known[None, :] & (number < piece.own)[:, None]
            lses = gl.load(results.part_lse_ptr + places, mask=there, other=float("-inf"))
            pointers = results.part_ptr + (places * results.HEAD_DIM_V)[:, :, None]
            read = _read_columns(pointers, there[:, :, None], in_parts, results.HEAD_DIM_V)
            new_largest = gl.maximum(largest, gl.max(lses, 0))
            shift = gl.where(new_largest == float("-inf"), 0.0, new_largest)
            weights = gl.exp2((lses - shift[None, :]) * LOG2_E)
            rescale = gl.exp2((largest - shift) * LOG2_E)
            total = total * rescale + gl.sum(weights, 0)
            out = out * gl.convert_layout(rescale, gl.SliceLayout(1, wide))[:, None]
            out += gl.sum(read * weights[:, :, None], 0)
            largest = new_largest
        total = gl.where(total == 0.0, 1.0, total)
        lse = largest + gl.log2(total) * LN_2
        factor = 1.0 / total
        head, statistics, places = _head_and_statistics(results, piece, sizes, row)
        if sinks_ptr is not None:
            kept, lse = _with_sinks(lse, head, known, sinks_ptr)
            factor = factor * kept
        gl.store(results.lse_ptr + statistics, lse, mask=known)
        out = out * gl.convert_layout(factor, gl.SliceLayout(1, wide))[:, None]
        rows_at = gl.convert_layout(places * results.HEAD_DIM_V, gl.SliceLayout(1, wide))
        inside = gl.convert_layout(known, gl.SliceLayout(1, wide))[:, None]
        inside = inside & (column < results.HEAD_DIM_V)[None, :]
        pointers = results.out_ptr + rows_at[:, None] + column[None, :]
        gl.store(pointers, out.to(results.out_ptr.dtype.element_ty), mask=inside)
    gl.store(_arrivals(results, piece, sizes), 0)


@gluon.jit
def _read_columns(pointers, there, columns, HEAD_DIM_V: gl.constexpr):
    """0 where nothing is; pointers and there: (parts, rows, 1)."""
    COLUMNS: gl.constexpr = columns.shape[0]
    if HEAD_DIM_V < COLUMNS:
        there = there & (columns < HEAD_DIM_V)[None, None, :]
    pointers, there = gl.broadcast(pointers + columns[None, None, :], there)
    return gl.load(pointers, mask=there, other=0.0)


@gluon.jit
def _clear_rows(begin, end, every, results, sizes):
    """0 and -inf, in rows of packed results from `begin` on."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    column = gl.arange(0, 1024, layout)
    heads = sizes.num_heads * sizes.GROUP
    width = heads * results.HEAD_DIM_V
    zeros = gl.zeros([1024], gl.float32, layout)
    for row in range(begin, end, every):
        place = row.to(gl.int64)
        for first in range(0, width, 1024):
            pointers = results.out_ptr + place * width + (first + column)
            mask = first + column < width
            gl.store(pointers, zeros.to(results.out_ptr.dtype.element_ty), mask=mask)
        for first in range(0, heads, 1024):
            head = first + column
            pointers = results.lse_ptr + head * sizes.seqlen_q.to(gl.int64) + place
            gl.store(pointers, zeros + float("-inf"), mask=head < heads)


@gluon.jit
def clear_slack(results, sizes, lengths):
    """Results of packed queries that belong to no sequence: out is 0 there, the LSE -inf. Blocks
    share the rows out."""
    cu_ptr, used_ptr = lengths[5], lengths[6]
    total = sizes.seqlen_q
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    _clear_rows(block, _first_row(cu_ptr, 0, total), blocks, results, sizes)
    end = _first_row(cu_ptr, sizes.batch_size, total)
    _clear_rows(end + block, total, blocks, results, sizes)
    if used_ptr is not None:
        for sequence in range(block, sizes.batch_size, blocks):
            begin, length = sequence_span(cu_ptr, used_ptr, sequence, total)
            _, owned = sequence_span(cu_ptr, None, sequence, total)
            _clear_rows(begin + length, begin + owned, 1, results, sizes)
