"""The producer warp of the Hopper forward: fetches tiles of queries, then copies Q, K and V.

Device code. Keys are those of dense or packed tensors, or of a cache, in pages or not.
"""

from flashdig.kernels.gluon_api import gl, gluon, mbarrier
from flashdig.kernels.hopper.columns import leave_out_blocks, load_blocks, put_blocks, tile_at
from flashdig.kernels.hopper.pages import Pages, page_numbers, put_pages
from flashdig.kernels.hopper.problem import key_tiles, problem_of
from flashdig.kernels.hopper.rows import Rows, rows_of_queries
from flashdig.kernels.hopper.schedule import (
    clear_counter,
    listed_place,
    next_program,
    place_of,
    send,
    send_end,
)

ROWS = gl.constexpr(64)  # of a warpgroup's tile


@gluon.jit
def pages_of(place, head_kv, sizes, cache, block_row):
    """The pages of a tile's sequence. block_row: the tile's first query; cache: see `produce`."""
    table_ptr, stride_table, count, rows = cache
    begin = block_row * 0
    if sizes.LEFT:
        begin = gl.maximum(block_row + place.offset - sizes.left, 0)
    row_ptr = table_ptr + place.batch.to(gl.int64) * stride_table
    return Pages(row_ptr, head_kv, begin, place.seqlen_k, count, rows, sizes.PAGE_SIZE)


@gluon.jit
def _put(ring, step, descs, rows, pages, numbers, start_n, PAGED: gl.constexpr):
    if PAGED:
        put_pages(ring, step, descs, pages, numbers, start_n)
    else:
        put_blocks(ring, step, descs, rows, start_n)


@gluon.jit
def put_queries(
    q_descs, q_tiles, q_full, q_empty, place, sizes, count, CONSUMERS: gl.constexpr
):  # fmt: skip
    """Start copying the queries of tile number `count`, each consumer's once it has room."""
    Q_BUFFERS: gl.constexpr = q_tiles[0].shape[0] // CONSUMERS
    rows = rows_of_queries(place, sizes)
    for c in gl.static_range(CONSUMERS):
        buffer = c * Q_BUFFERS + count % Q_BUFFERS
        mbarrier.wait(q_empty.index(buffer), ((count // Q_BUFFERS) & 1) ^ 1)
        row = place.start_m + c * ROWS
        load_blocks(q_descs, rows, row, q_full.index(buffer), tile_at(q_tiles, buffer))


@gluon.jit
def produce(
    q_descs, k_descs, v_descs, q_tiles, q_full, q_empty, keys, values, mail, sizes, terms,
    lengths, cache, counter_ptr, tiles, CONSUMERS: gl.constexpr, JOINT: gl.constexpr,
):  # fmt: skip
    """Until no tile is left.

    Args:
        lengths: of `place_of`.
        cache: of pages, the table, its stride, how many pages there are, and from one to the next
            in rows of the descriptors.
        counter_ptr: by which blocks share out the tiles; the list, where there is one.
        tiles: how many, where no list says it.
    """
    GROUP: gl.constexpr = sizes.GROUP
    BLOCK_M: gl.constexpr = ROWS * CONSUMERS
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    PAGED: gl.constexpr = sizes.PAGE_SIZE > 0
    if sizes.LISTED:
        tiles = gl.load(counter_ptr + 2) * sizes.num_heads
    program = gl.program_id(0)
    count = 0  # tiles of queries so far
    done = 0  # tiles of keys so far
    while program < tiles:
        following = program
        if sizes.LISTED:
            place = listed_place(sizes, program, counter_ptr)
        else:
            place = place_of(sizes, program, lengths, BLOCK_M)
        if place.start_m < place.seqlen_q * GROUP:
            send(mail, count, place, sizes)
            problem = problem_of(sizes, place, terms, None)
            first, _, _, end = key_tiles(problem, place.start_m // GROUP, BLOCK_M // GROUP, BLOCK_N)
            head_kv = place.head if GROUP > 1 else place.head // terms.group_size
            key_rows = Rows(place.batch, head_kv, place.first_k, place.seqlen_k, sizes.RAGGED, 1)
            pages = key_rows
            numbers = place.batch
            if PAGED:
                pages = pages_of(place, head_kv, sizes, cache, place.start_m // GROUP)
                numbers = page_numbers(pages, k_descs[0], (end - 1) * BLOCK_N, BLOCK_N)
            # the first keys find room before the queries do
            _put(keys, done, k_descs, key_rows, pages, numbers, (end - 1) * BLOCK_N, PAGED)
            put_queries(q_descs, q_tiles, q_full, q_empty, place, sizes, count, CONSUMERS)
            steps = end - first
            for step in range(steps):
                # claimed late: a block that took its next tile while it walks a long one would
                # keep it from those that have nothing left
                if step == steps - 1:
                    following = next_program(counter_ptr)
                start_n = (end - 1 - step) * BLOCK_N
                ahead = numbers
                if PAGED:  # those of the next step are on their way while this one waits for room
                    ahead = page_numbers(pages, k_descs[0], start_n - BLOCK_N, BLOCK_N)
                if step > 0:
                    _put(keys, done + step, k_descs, key_rows, pages, numbers, start_n, PAGED)
                if JOINT and step == 0:  # no values are multiplied in it
                    leave_out_blocks(values, done)
                value_step = done + step + JOINT
                _put(values, value_step, v_descs, key_rows, pages, numbers, start_n, PAGED)
                numbers = ahead
            if JOINT:
                leave_out_blocks(keys, done + steps)
            count += 1
            done += steps + JOINT
        else:
            following = next_program(counter_ptr)
        program = following
    send_end(mail, count, sizes)
    clear_counter(counter_ptr)
