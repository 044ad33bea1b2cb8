"""The producers of the Hopper decoding kernel: how a block claims one piece of the plan after
another, sends it to those who work on it, and copies its queries, keys and values. Device code.
"""

from flashdig.kernels.gluon_api import gl, gluon, mbarrier
from flashdig.kernels.hopper.decode_plan import Piece, keys_of, piece_of, place_of_piece, plan_of
from flashdig.kernels.hopper.forward_producer import pages_of, put_queries
from flashdig.kernels.hopper.pages import page_numbers, put_pages, put_pieces
from flashdig.kernels.hopper.rows import Rows
from flashdig.kernels.hopper.schedule import (
    PLACE_FIELDS,
    SENT_AHEAD,
    clear_counter,
    new_mail,
    read_mail,
    write_mail,
)
from flashdig.kernels.triton.paged import cache_row

NO_PIECE = gl.constexpr(-1)  # a piece's sequence, where none is left


@gluon.jit
def new_mail_of_pieces(PACKED: gl.constexpr):
    return new_mail(2, 2 * PLACE_FIELDS if PACKED else PLACE_FIELDS)


@gluon.jit
def _send(mail, count, piece, sizes):
    """Producer: piece number `count` of this block."""
    slot = count % SENT_AHEAD
    mbarrier.wait(mail.empty.index(slot), ((count // SENT_AHEAD) & 1) ^ 1)
    write_mail(mail, slot, 0, piece.sequence)
    write_mail(mail, slot, 1, piece.head)
    write_mail(mail, slot, 2, piece.first)
    write_mail(mail, slot, 3, piece.end)
    write_mail(mail, slot, 4, piece.seqlen_k)
    write_mail(mail, slot, 5, piece.number)
    write_mail(mail, slot, 6, piece.first_piece)
    write_mail(mail, slot, 7, piece.own)
    if sizes.PACKED:
        write_mail(mail, slot, 8, piece.start)
        write_mail(mail, slot, 9, piece.first_q)
        write_mail(mail, slot, 10, piece.seqlen_q)
    mbarrier.arrive(mail.full.index(slot), count=1)


@gluon.jit
def receive_piece(mail, count, sizes):
    """Consumer: piece number `count` of this block."""
    slot = count % SENT_AHEAD
    mbarrier.wait(mail.full.index(slot), (count // SENT_AHEAD) & 1)
    start = count * 0
    first_q = start
    seqlen_q = sizes.seqlen_q
    if sizes.PACKED:
        start = read_mail(mail, slot, 8)
        first_q = read_mail(mail, slot, 9)
        seqlen_q = read_mail(mail, slot, 10)
    piece = Piece(
        read_mail(mail, slot, 0), read_mail(mail, slot, 1), read_mail(mail, slot, 2),
        read_mail(mail, slot, 3), read_mail(mail, slot, 4), read_mail(mail, slot, 5),
        read_mail(mail, slot, 6), read_mail(mail, slot, 7), start, first_q, seqlen_q,
    )  # fmt: skip
    mbarrier.arrive(mail.empty.index(slot), count=1)
    return piece


@gluon.jit
def _source(piece, padding, sizes, cache):
    """Where a piece's keys lie: `Pages`, or rows of a cache without pages."""
    if sizes.PAGE_SIZE > 0:
        place = place_of_piece(piece, sizes)
        source = pages_of(place, piece.head, sizes, cache, piece.start)
    else:
        table_ptr, _, cache_rows, rows_between = cache
        first = cache_row(table_ptr, piece.sequence, cache_rows) * rows_between + padding
        source = Rows(piece.sequence, piece.head, first, piece.seqlen_k, True, 1)
    return source


@gluon.jit
def _numbers(source, descs, start_n, BLOCK_N: gl.constexpr, PAGED: gl.constexpr):
    return page_numbers(source, descs[0], start_n, BLOCK_N) if PAGED else start_n


@gluon.jit
def _put(ring, step, descs, source, numbers, start_n, PAGED: gl.constexpr):
    if PAGED:
        put_pages(ring, step, descs, source, numbers, start_n)
    else:
        put_pieces(ring, step, descs, source, start_n)


@gluon.jit
def _claim(counter_ptr, LATE: gl.constexpr):
    number = gl.atomic_add(counter_ptr, 1, sem="relaxed")  # nothing is handed on with it
    if not LATE:
        number += gl.num_programs(0)
    return number


@gluon.jit
def produce_keys(
    q_descs, k_descs, q_tiles, q_full, q_empty, keys, mail, sizes, terms, lengths, cache,
    counter_ptr, splits, wanted, most_pieces, tiling, LATE: gl.constexpr,
):  # fmt: skip
    """Claims pieces until none is left, sends them, and copies their queries and keys.

    Args:
        lengths: see `keys_of`.
        cache: the page table or the rows of sequences, its stride, how many pages or rows there
            are, and from one to the next in rows of the descriptors.
        splits, wanted: pieces of a sequence where lengths are about even; of all, over all heads,
            where not.
        most_pieces: once for every head; a plan of packed queries that has more was made of
            offsets that are none, and nothing is attended to.
        LATE: blocks start when they find room, so that the first piece too is claimed.
    """
    BLOCK_N: gl.constexpr = tiling.BLOCK_N
    PAGED: gl.constexpr = sizes.PAGE_SIZE > 0
    plan = plan_of(sizes, terms, lengths, splits, wanted, tiling)
    units = plan.pieces * sizes.num_heads
    if sizes.PACKED:
        units = gl.where(plan.pieces <= most_pieces, units, 0)
    unit = gl.program_id(0)
    if LATE:
        unit = _claim(counter_ptr, LATE)
    count = 0  # pieces so far
    done = 0  # tiles of keys so far
    while unit < units:
        piece, padding = piece_of(plan, unit, sizes, terms, lengths, tiling)
        source = _source(piece, padding, sizes, cache)
        start_n = (piece.end - 1) * BLOCK_N
        numbers = _numbers(source, k_descs, start_n, BLOCK_N, PAGED)
        steps = piece.end - piece.first
        for step in range(steps):
            # those of the next step are on their way while this one waits for room
            ahead = _numbers(source, k_descs, start_n - BLOCK_N, BLOCK_N, PAGED)
            _put(keys, done + step, k_descs, source, numbers, start_n, PAGED)
            if step == 0:  # the first keys find room before the queries do
                _send(mail, count, piece, sizes)
                place = place_of_piece(piece, sizes)
                put_queries(q_descs, q_tiles, q_full, q_empty, place, sizes, count, 1)
            numbers = ahead
            start_n -= BLOCK_N
        count += gl.where(steps > 0, 1, 0) if sizes.PACKED else 1
        done += steps
        # claimed late: a block that took its next piece while it walks a long one would keep it
        # from those that have nothing left; and no key waits for the answer
        unit = _claim(counter_ptr, LATE)
    zero = count * 0
    end = Piece(zero + NO_PIECE, zero, zero, zero, zero, zero, zero, zero, zero, zero, zero)
    _send(mail, count, end, sizes)
    clear_counter(counter_ptr)


@gluon.jit
def produce_values(v_descs, values, mail, sizes, lengths, cache):
    """Copies the values of the pieces that come by mail; arguments as of `produce_keys`."""
    BLOCK_N: gl.constexpr = values.tiles[0].shape[1]
    PAGED: gl.constexpr = sizes.PAGE_SIZE > 0
    count = 0
    done = 0
    piece = receive_piece(mail, 0, sizes)
    while piece.sequence != NO_PIECE:
        padding, _ = keys_of(piece.sequence, sizes, lengths)
        source = _source(piece, padding + count * 0, sizes, cache)
        start_n = (piece.end - 1) * BLOCK_N
        numbers = _numbers(source, v_descs, start_n, BLOCK_N, PAGED)
        steps = piece.end - piece.first
        for step in range(steps):
            ahead = _numbers(source, v_descs, start_n - BLOCK_N, BLOCK_N, PAGED)
            _put(values, done + step, v_descs, source, numbers, start_n, PAGED)
            numbers = ahead
            start_n -= BLOCK_N
        count += 1
        done += steps
        piece = receive_piece(mail, count, sizes)
