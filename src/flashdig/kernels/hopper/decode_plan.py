"""How the keys of all sequences are cut into pieces: made by every block of the Hopper decoding
kernel itself. Device code.

A producer's warp reads all lengths, a few in each lane, and works out how many pieces each sequence
has, as `triton.decode_plan` does. So no launch comes first.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon
from flashdig.kernels.hopper.problem import key_tiles, problem_of
from flashdig.kernels.hopper.schedule import Place
from flashdig.kernels.triton.paged import key_extent
from flashdig.kernels.triton.sequences import sequence_span

# of a piece, where lengths differ
LEAST_KEYS = gl.constexpr(512)
# queries, more than a sequence has
_ALL = gl.constexpr(1 << 30)


@aggregate
class Piece:
    """Keys that a tile of queries of one sequence and KV head meets.

    Attributes:
        sequence, head: of the batch, and KV head.
        first, end: tiles of keys, counted from the sequence's first key.
        seqlen_k: keys of the sequence.
        number: of the piece among all, once for every head.
        first_piece, own: number of the tile's first piece, and how many it has.
        start: the tile's first query.
        first_q, seqlen_q: the sequence's queries.
    """

    sequence: gl.tensor
    head: gl.tensor
    first: gl.tensor
    end: gl.tensor
    seqlen_k: gl.tensor
    number: gl.tensor
    first_piece: gl.tensor
    own: gl.tensor
    start: gl.tensor
    first_q: gl.tensor
    seqlen_q: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, sequence, head, first, end, seqlen_k, number, first_piece, own, start, first_q,
        seqlen_q,
    ):  # fmt: skip
        self.sequence = sequence
        self.head = head
        self.first = first
        self.end = end
        self.seqlen_k = seqlen_k
        self.number = number
        self.first_piece = first_piece
        self.own = own
        self.start = start
        self.first_q = first_q
        self.seqlen_q = seqlen_q


@aggregate
class Tiling:
    """How queries and keys are tiled.

    Attributes:
        TOKENS, BLOCK_N: queries and keys of a tile.
        MOST_TOKENS: of a packed sequence that is not left out; 0: any.
        SLOTS: sequences, at most.
    """

    TOKENS: gl.constexpr
    BLOCK_N: gl.constexpr
    MOST_TOKENS: gl.constexpr
    SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, TOKENS, BLOCK_N, MOST_TOKENS, SLOTS):
        self.TOKENS = gl.constexpr(TOKENS)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.MOST_TOKENS = gl.constexpr(MOST_TOKENS)
        self.SLOTS = gl.constexpr(SLOTS)


@gluon.jit
def place_of_piece(piece, sizes):
    """Of its tile of queries."""
    zero = piece.sequence * 0
    offset = piece.seqlen_k - piece.seqlen_q
    if sizes.TOP_LEFT:
        offset = zero
    return Place(
        piece.sequence, piece.head, piece.start * sizes.GROUP, piece.first_q, piece.seqlen_q, zero,
        piece.seqlen_k, offset,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def keys_of(sequence, sizes, lengths):
    """(padding, end) of a sequence's keys, or of a vector of sequences'.

    Args:
        lengths: pointers to the keys of each sequence, to cumulative ones and cumulative new ones,
            to their padding, how many were appended; pointers to cumulative queries and those used.
    """
    seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, seqlen_new, _, _ = lengths
    return key_extent(
        seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, sequence, seqlen_new, sizes.seqlen_k
    )


@gluon.jit
def _queries_of(sequence, sizes, lengths):
    """(first, count); of one or a vector of sequences."""
    first = sequence * 0
    count = sizes.seqlen_q + first
    if sizes.PACKED:
        first, count = sequence_span(lengths[5], lengths[6], sequence, sizes.seqlen_q)
    return first, count


@gluon.jit
def _tiles_of(
    sequence, first_q, seqlen_q, start, sizes, terms, lengths, TOKENS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):  # fmt: skip
    """(first, end) tiles of keys that TOKENS queries from `start` on see, (padding, keys) of the
    sequence; of one or a vector of them."""
    padding, end = keys_of(sequence, sizes, lengths)
    keys = end - padding
    if sizes.TOP_LEFT and sizes.RIGHT:  # what lies behind is seen by no query
        keys = gl.minimum(keys, seqlen_q + sizes.right)
    zero = sequence * 0
    piece = Piece(sequence, zero, zero, zero, keys, zero, zero, zero, start, first_q, seqlen_q)
    problem = problem_of(sizes, place_of_piece(piece, sizes), terms, None)
    first, _, _, last = key_tiles(problem, start, TOKENS, BLOCK_N)
    return first, last, padding, keys


@aggregate
class Plan:
    """How the keys of all sequences are cut.

    Attributes:
        pieces: how many there are, once for every head.
        each: of every sequence, or 0: they differ, and only then the vectors are made.
        own, until: of each sequence its pieces, and those up to and with it; each of its tiles of
            queries has as many.
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
def plan_of(sizes, terms, lengths, splits, wanted, tiling):
    """The first keys wait for it, so nothing is worked out that three numbers rule out: the
    longest, the shortest and all of them together."""
    TOKENS: gl.constexpr = tiling.TOKENS
    BLOCK_N: gl.constexpr = tiling.BLOCK_N
    PACKED: gl.constexpr = sizes.PACKED
    layout: gl.constexpr = gl.BlockedLayout([tiling.SLOTS // 32], [32], [1], [0])
    sequence = gl.arange(0, tiling.SLOTS, layout)
    own = sequence
    until = sequence
    KNOWN: gl.constexpr = lengths[0] is None and lengths[1] is None and lengths[2] is None
    ALIKE: gl.constexpr = KNOWN and lengths[3] is None and not PACKED
    if ALIKE:
        zero = splits * 0
        first, end, _, _ = _tiles_of(
            zero, zero, sizes.seqlen_q, zero, sizes, terms, lengths, TOKENS, BLOCK_N
        )
        each = gl.minimum(end - first, splits)
        pieces = sizes.batch_size * each
    else:
        clamped = gl.minimum(sequence, sizes.batch_size - 1)
        first_q, seqlen_q = _queries_of(clamped, sizes, lengths)
        # packed, all tiles of a sequence's queries have as many pieces
        first, end, _, _ = _tiles_of(
            clamped, first_q, seqlen_q, clamped * 0, sizes, terms, lengths,
            _ALL if PACKED else TOKENS, BLOCK_N,
        )  # fmt: skip
        tiles = gl.where(sequence < sizes.batch_size, end - first, 0)
        tiles_q = tiles
        total = gl.sum(tiles, 0)
        # at most a quarter longer than the mean
        even = gl.max(tiles, 0) * sizes.batch_size * 4 <= total * 5
        enough = gl.min(end - first, 0) >= splits
        if PACKED:
            tiles_q = gl.cdiv(seqlen_q, TOKENS)
            if tiling.MOST_TOKENS > 0:
                tiles_q = gl.where(seqlen_q > tiling.MOST_TOKENS, 0, tiles_q)
            enough = enough & (gl.min(tiles_q, 0) == 1) & (gl.max(tiles_q, 0) == 1)
            tiles_q = gl.where(sequence < sizes.batch_size, tiles_q, 0)
            total = gl.sum(tiles * tiles_q, 0)
        each = gl.where(even & enough, splits, 0)
        pieces = sizes.batch_size * each
        if each == 0:
            met = tiles
            if PACKED:
                met = tiles * tiles_q
            before = gl.associative_scan(met, 0, _add) - met
            piece = gl.maximum((total * sizes.num_heads + wanted - 1) // wanted, 1)
            # the last ones are short, so that all end at about one time
            size = gl.where(before * 2 >= total, (piece + 1) // 2, piece)
            size = gl.where(before * 5 >= total * 4, (piece + 3) // 4, size)
            size = gl.maximum(size, LEAST_KEYS // BLOCK_N)
            own = gl.where(even, gl.minimum(tiles, splits), (tiles + size - 1) // size)
            if PACKED:
                own = own * tiles_q
            until = gl.associative_scan(own, 0, _add)
            pieces = gl.max(until, 0)
    return Plan(pieces, each, own, until)


@gluon.jit
def piece_of(plan, unit, sizes, terms, lengths, tiling):
    """(the piece, keys of padding) of one KV head. The heads of a key lie side by side in memory:
    blocks that read them start together."""
    TOKENS: gl.constexpr = tiling.TOKENS
    number = unit // sizes.num_heads
    head = unit % sizes.num_heads
    sequence = number
    own = plan.each
    if plan.each == 0:
        owner = (plan.until > number) & (plan.until - plan.own <= number)
        own = gl.sum(gl.where(owner, plan.own, 0), 0)
        first_piece = gl.sum(gl.where(owner, plan.until, 0), 0) - own
        sequences = gl.arange(0, tiling.SLOTS, plan.own.type.layout)
        sequence = gl.sum(gl.where(owner, sequences, 0), 0)
    else:
        if own > 1:
            sequence = number // own
        first_piece = sequence * own
    first_q, seqlen_q = _queries_of(sequence, sizes, lengths)
    start = sequence * 0
    if sizes.PACKED:
        tiles_q = gl.cdiv(seqlen_q, TOKENS)
        if tiles_q > 1:
            own = own // tiles_q
            tile = (number - first_piece) // own
            first_piece += tile * own
            start = tile * TOKENS
    first, end, padding, seqlen_k = _tiles_of(
        sequence, first_q, seqlen_q, start, sizes, terms, lengths, TOKENS, tiling.BLOCK_N
    )
    begin = first
    stop = end
    place = number - first_piece
    if sizes.PACKED:  # a tile may see fewer keys than all of them do
        own = gl.minimum(own, end - first)
    if own > 1:  # at least one tile each, since there are no more pieces than tiles
        share = (end - first) // own
        longer = (end - first) % own  # pieces with one more
        begin = first + place * share + gl.minimum(place, longer)
        stop = begin + share + gl.where(place < longer, 1, 0)
    if sizes.PACKED:  # what is not needed is empty
        stop = gl.where(place < own, stop, begin)
    piece = Piece(
        sequence, head, begin, stop, seqlen_k, number, first_piece, own, start, first_q, seqlen_q
    )
    return piece, padding
