"""Pieces of a cache's keys: how a block of the Hopper decoding kernel cuts them, claims one after
another, and copies them. Device code.

The producer's warp makes the plan itself: it reads all lengths, a few in each lane, and works out
how many pieces each sequence has, as `triton.decode_plan` does. So no launch comes first.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, mbarrier
from flashdig.kernels.hopper.forward_producer import pages_of, put_queries
from flashdig.kernels.hopper.pages import page_numbers, put_pages, put_pieces
from flashdig.kernels.hopper.problem import key_tiles, problem_of
from flashdig.kernels.hopper.rows import Rows
from flashdig.kernels.hopper.schedule import (
    SENT_AHEAD,
    Place,
    clear_counter,
    next_program,
    read_mail,
    write_mail,
)
from flashdig.kernels.triton.paged import cache_row, key_extent

NO_PIECE = gl.constexpr(-1)
# of a block's counter: for units, for blocks that are done, nothing, nothing; then for each
# sequence and KV head the pieces that are done
ARRIVALS = gl.constexpr(4)
# of a piece, where lengths differ
LEAST_KEYS = gl.constexpr(512)


@aggregate
class Piece:
    """Keys of one sequence and KV head.

    Attributes:
        sequence, head: of the batch, and KV head; `sequence` is NO_PIECE where none is left.
        first, end: tiles of keys, counted from the sequence's first key.
        seqlen_k: keys of the sequence.
        number: of the piece among all, once for every head.
        first_piece, own: number of the sequence's first piece, and how many it has.
    """

    sequence: gl.tensor
    head: gl.tensor
    first: gl.tensor
    end: gl.tensor
    seqlen_k: gl.tensor
    number: gl.tensor
    first_piece: gl.tensor
    own: gl.tensor

    @gluon.constexpr_function
    def __init__(self, sequence, head, first, end, seqlen_k, number, first_piece, own):
        self.sequence = sequence
        self.head = head
        self.first = first
        self.end = end
        self.seqlen_k = seqlen_k
        self.number = number
        self.first_piece = first_piece
        self.own = own


@gluon.jit
def _send(mail, count, piece):
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
    mbarrier.arrive(mail.full.index(slot), count=1)


@gluon.jit
def receive_piece(mail, count):
    """Consumer: piece number `count` of this block."""
    slot = count % SENT_AHEAD
    mbarrier.wait(mail.full.index(slot), (count // SENT_AHEAD) & 1)
    piece = Piece(
        read_mail(mail, slot, 0), read_mail(mail, slot, 1), read_mail(mail, slot, 2),
        read_mail(mail, slot, 3), read_mail(mail, slot, 4), read_mail(mail, slot, 5),
        read_mail(mail, slot, 6), read_mail(mail, slot, 7),
    )  # fmt: skip
    mbarrier.arrive(mail.empty.index(slot), count=1)
    return piece


@gluon.jit
def place_of_piece(piece, sizes):
    """As of a tile of all the sequence's queries."""
    zero = piece.sequence * 0
    offset = piece.seqlen_k - sizes.seqlen_q
    if sizes.TOP_LEFT:
        offset = zero
    return Place(
        piece.sequence, piece.head, zero, zero, sizes.seqlen_q + zero, zero, piece.seqlen_k, offset
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _tiles_of(sequence, sizes, terms, lengths, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(first, end) tiles of keys that a sequence's queries see, (padding, keys) of the sequence;
    of one or a vector of them."""
    seqlens_ptr, leftpad_ptr, seqlen_new = lengths
    padding, end = key_extent(
        seqlens_ptr, None, None, leftpad_ptr, sequence, seqlen_new, sizes.seqlen_k
    )
    keys = end - padding
    if sizes.TOP_LEFT and sizes.RIGHT:  # what lies behind is seen by no query
        keys = gl.minimum(keys, sizes.seqlen_q + sizes.right)
    zero = sequence * 0
    piece = Piece(sequence, zero, zero, zero, keys, zero, zero, zero)
    problem = problem_of(sizes, place_of_piece(piece, sizes), terms, None)
    first, _, _, last = key_tiles(problem, zero, BLOCK_M, BLOCK_N)
    return first, last, padding, keys


@aggregate
class Plan:
    """How the keys of all sequences are cut.

    Attributes:
        pieces: how many there are, once for every head.
        each: of every sequence, or 0: they differ, and only then the vectors are made.
        own, until: of each sequence its pieces, and those up to and with it.
    """

    pieces: gl.tensor
    each: gl.tensor
    own: gl.tensor
    until: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pieces, each, own, until):
        self.pieces = pieces
        self.each = each
        self.own = own
        self.until = until


@gluon.jit
def _plan(
    sizes, terms, lengths, splits, wanted, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    SLOTS: gl.constexpr,
):  # fmt: skip
    """Of at most SLOTS sequences. The first keys wait for it, so nothing is worked out that three
    numbers rule out: the longest, the shortest and all of them together."""
    layout: gl.constexpr = gl.BlockedLayout([SLOTS // 32], [32], [1], [0])
    sequence = gl.arange(0, SLOTS, layout)
    own = sequence
    until = sequence
    ALIKE: gl.constexpr = lengths[0] is None and lengths[1] is None
    if ALIKE:
        first, end, _, _ = _tiles_of(splits * 0, sizes, terms, lengths, BLOCK_M, BLOCK_N)
        each = gl.minimum(end - first, splits)
        pieces = sizes.batch_size * each
    else:
        clamped = gl.minimum(sequence, sizes.batch_size - 1)
        first, end, _, _ = _tiles_of(clamped, sizes, terms, lengths, BLOCK_M, BLOCK_N)
        tiles = gl.where(sequence < sizes.batch_size, end - first, 0)
        total = gl.sum(tiles, 0)
        # at most a quarter longer than the mean
        even = gl.max(tiles, 0) * sizes.batch_size * 4 <= total * 5
        enough = gl.min(end - first, 0) >= splits
        each = gl.where(even & enough, splits, 0)
        pieces = sizes.batch_size * each
        if each == 0:
            before = gl.associative_scan(tiles, 0, _add) - tiles
            piece = gl.maximum((total * sizes.num_heads + wanted - 1) // wanted, 1)
            # the last ones are short, so that all end at about one time
            size = gl.where(before * 2 >= total, (piece + 1) // 2, piece)
            size = gl.where(before * 5 >= total * 4, (piece + 3) // 4, size)
            size = gl.maximum(size, LEAST_KEYS // BLOCK_N)
            own = gl.where(even, gl.minimum(tiles, splits), (tiles + size - 1) // size)
            until = gl.associative_scan(own, 0, _add)
            pieces = gl.max(until, 0)
    return Plan(pieces, each, own, until)


@gluon.jit
def _piece_of(
    plan, unit, sizes, terms, lengths, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr
):  # fmt: skip
    """(the piece, keys of padding) of one KV head. The heads of a key lie side by side in memory:
    blocks that read them start together."""
    SLOTS: gl.constexpr = plan.own.shape[0]
    number = unit // sizes.num_heads
    head = unit % sizes.num_heads
    sequence = number
    own = plan.each
    if plan.each == 0:
        owner = (plan.until > number) & (plan.until - plan.own <= number)
        own = gl.sum(gl.where(owner, plan.own, 0), 0)
        first_piece = gl.sum(gl.where(owner, plan.until, 0), 0) - own
        sequences = gl.arange(0, SLOTS, plan.own.type.layout)
        sequence = gl.sum(gl.where(owner, sequences, 0), 0)
    else:
        if own > 1:
            sequence = number // own
        first_piece = sequence * own
    first, end, padding, seqlen_k = _tiles_of(sequence, sizes, terms, lengths, BLOCK_M, BLOCK_N)
    begin = first
    stop = end
    if own > 1:  # at least one tile each, since there are no more pieces than tiles
        share = (end - first) // own
        longer = (end - first) % own  # pieces with one more
        place = number - first_piece
        begin = first + place * share + gl.minimum(place, longer)
        stop = begin + share + gl.where(place < longer, 1, 0)
    return Piece(sequence, head, begin, stop, seqlen_k, number, first_piece, own), padding


@gluon.jit
def _source(piece, padding, sizes, cache):
    """Where a piece's keys lie: `Pages`, or rows of a cache without pages."""
    if sizes.PAGE_SIZE > 0:
        place = place_of_piece(piece, sizes)
        source = pages_of(place, piece.head, sizes, cache, place.start_m)
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
def produce_keys(
    q_descs, k_descs, q_tiles, q_full, q_empty, keys, mail, sizes, terms, lengths, cache,
    counter_ptr, splits, wanted, BLOCK_M: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Claims pieces until none is left, sends them, and copies their queries and keys.

    Args:
        lengths: pointers to the keys of each sequence and their padding, and how many were
            appended.
        cache: the page table or the rows of sequences, its stride, how many pages or rows there
            are, and from one to the next in rows of the descriptors.
        splits, wanted: pieces of a sequence where lengths are about even; of all, over all heads,
            where not.
    """
    BLOCK_N: gl.constexpr = keys.tiles[0].shape[1]
    PAGED: gl.constexpr = sizes.PAGE_SIZE > 0
    plan = _plan(sizes, terms, lengths, splits, wanted, BLOCK_M, BLOCK_N, SLOTS)
    units = plan.pieces * sizes.num_heads
    unit = gl.program_id(0)
    count = 0  # pieces so far
    done = 0  # tiles of keys so far
    while unit < units:
        following = unit
        piece, padding = _piece_of(plan, unit, sizes, terms, lengths, BLOCK_M, BLOCK_N)
        source = _source(piece, padding, sizes, cache)
        start_n = (piece.end - 1) * BLOCK_N
        numbers = _numbers(source, k_descs, start_n, BLOCK_N, PAGED)
        steps = piece.end - piece.first
        for step in range(steps):
            # claimed late: a block that took its next piece while it walks a long one would keep it
            # from those that have nothing left
            if step == steps - 1:
                following = next_program(counter_ptr)
            # those of the next step are on their way while this one waits for room
            ahead = _numbers(source, k_descs, start_n - BLOCK_N, BLOCK_N, PAGED)
            _put(keys, done + step, k_descs, source, numbers, start_n, PAGED)
            if step == 0:  # the first keys find room before the queries do
                _send(mail, count, piece)
                place = place_of_piece(piece, sizes)
                put_queries(q_descs, q_tiles, q_full, q_empty, place, sizes, count, 1)
            numbers = ahead
            start_n -= BLOCK_N
        count += 1
        done += steps
        unit = following
    zero = count * 0
    _send(mail, count, Piece(zero + NO_PIECE, zero, zero, zero, zero, zero, zero, zero))
    clear_counter(counter_ptr)


@gluon.jit
def produce_values(v_descs, values, mail, sizes, lengths, cache):
    """Copies the values of the pieces that come by mail; arguments as of `produce_keys`."""
    BLOCK_N: gl.constexpr = values.tiles[0].shape[1]
    PAGED: gl.constexpr = sizes.PAGE_SIZE > 0
    seqlens_ptr, leftpad_ptr, seqlen_new = lengths
    count = 0
    done = 0
    piece = receive_piece(mail, 0)
    while piece.sequence != NO_PIECE:
        padding, _ = key_extent(
            seqlens_ptr, None, None, leftpad_ptr, piece.sequence, seqlen_new, sizes.seqlen_k
        )
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
        piece = receive_piece(mail, count)
