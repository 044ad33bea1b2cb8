"""Which tiles a block makes: blocks stay on their SM and fetch tile after tile. Device code.

The producer counts tiles with an atomic counter, works out where each lies and sends that to the
consumers through shared memory; they would all repeat the same divisions and searches.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, mbarrier
from flashdig.kernels.hopper.rows import tile_in_sections
from flashdig.kernels.triton.sequences import rows_of_slot, seen_keys
from flashdig.kernels.triton.tile_list import LIST_HEAD, TILE_FIELDS

SENT_AHEAD = gl.constexpr(2)
PLACE_FIELDS = gl.constexpr(8)
NO_TILE = gl.constexpr(-1)


@aggregate
class Place:
    """Where a tile of queries lies.

    Attributes:
        start_m: its first row within the sequence, in rows of a tile; NO_TILE where none is left.
        first_q, seqlen_q: the sequence's rows.
        first_k, seqlen_k: the keys that some query of the sequence sees; of a LISTED tile all keys
            up to the last of these.
        offset: key, counted from first_k, that lies on the diagonal of query row 0.
    """

    batch: gl.tensor
    head: gl.tensor
    start_m: gl.tensor
    first_q: gl.tensor
    seqlen_q: gl.tensor
    first_k: gl.tensor
    seqlen_k: gl.tensor
    offset: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, head, start_m, first_q, seqlen_q, first_k, seqlen_k, offset):
        self.batch = batch
        self.head = head
        self.start_m = start_m
        self.first_q = first_q
        self.seqlen_q = seqlen_q
        self.first_k = first_k
        self.seqlen_k = seqlen_k
        self.offset = offset


@aggregate
class Sizes:
    """Numbers of a call that decide where tiles lie.

    Attributes:
        seqlen_q, seqlen_k: of every sequence, or the totals of packed input.
        heads_together: heads whose keys share the L2 cache.
        GROUP: rows of a tile that belong to one query.
        LISTED: the device made a list of the tiles (`tile_list`), whose keys lie in a cache.
        PAGE_SIZE: of the cache; 0 where it has a row for each sequence.
        RAGGED: sequences differ in length.
    """

    batch_size: gl.tensor
    num_heads: gl.tensor
    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    heads_together: gl.tensor
    left: gl.tensor
    right: gl.tensor
    PACKED: gl.constexpr
    GROUP: gl.constexpr
    TOP_LEFT: gl.constexpr
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    LISTED: gl.constexpr
    PAGE_SIZE: gl.constexpr
    RAGGED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        batch_size,
        num_heads,
        seqlen_q,
        seqlen_k,
        heads_together,
        left,
        right,
        PACKED,
        GROUP,
        TOP_LEFT,
        LEFT,
        RIGHT,
        LISTED=False,
        PAGE_SIZE=0,
    ):
        self.batch_size = batch_size
        self.num_heads = num_heads
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.heads_together = heads_together
        self.left = left
        self.right = right
        self.PACKED = gl.constexpr(PACKED)
        self.GROUP = gl.constexpr(GROUP)
        self.TOP_LEFT = gl.constexpr(TOP_LEFT)
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.LISTED = gl.constexpr(LISTED)
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)
        self.RAGGED = gl.constexpr(PACKED or LISTED)


@aggregate
class Mail:
    """Letters of FIELDS numbers on their way from the producer to the consumers, SENT_AHEAD at
    most."""

    fields: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    FIELDS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, fields, full, empty, FIELDS):
        self.fields = fields
        self.full = full
        self.empty = empty
        self.FIELDS = gl.constexpr(FIELDS)


@gluon.jit
def new_mail(CONSUMERS: gl.constexpr, FIELDS: gl.constexpr = PLACE_FIELDS):
    """FIELDS: a power of two."""
    one_number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    fields = gl.allocate_shared_memory(gl.int32, [SENT_AHEAD * FIELDS, 1], one_number)
    full = gl.allocate_shared_memory(gl.int64, [SENT_AHEAD, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [SENT_AHEAD, 1], barrier)
    for n in gl.static_range(SENT_AHEAD):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=CONSUMERS)
    return Mail(fields, full, empty, FIELDS)


@gluon.jit
def write_mail(mail, slot, FIELD: gl.constexpr, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mail.fields.index(slot * mail.FIELDS + FIELD).store(gl.full([1], 0, gl.int32, layout) + number)


@gluon.jit
def read_mail(mail, slot, FIELD: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(mail.fields.index(slot * mail.FIELDS + FIELD).load(layout), 0)


@gluon.jit
def send(mail, count, place, sizes):
    """Producer: place number `count`; dense input has the same sequence everywhere."""
    slot = count % SENT_AHEAD
    mbarrier.wait(mail.empty.index(slot), ((count // SENT_AHEAD) & 1) ^ 1)
    write_mail(mail, slot, 0, place.batch)
    write_mail(mail, slot, 1, place.head)
    write_mail(mail, slot, 2, place.start_m)
    if sizes.RAGGED:
        write_mail(mail, slot, 3, place.first_q)
        write_mail(mail, slot, 4, place.seqlen_q)
        write_mail(mail, slot, 5, place.first_k)
        write_mail(mail, slot, 6, place.seqlen_k)
        write_mail(mail, slot, 7, place.offset)
    mbarrier.arrive(mail.full.index(slot), count=1)


@gluon.jit
def send_end(mail, count, sizes):
    """Producer: no tile is left."""
    zero = count * 0
    end = Place(zero, zero, zero + NO_TILE, zero, zero, zero, zero, zero)
    send(mail, count, end, sizes)


@gluon.jit
def receive(mail, count, sizes):
    """Consumer: place number `count`."""
    slot = count % SENT_AHEAD
    mbarrier.wait(mail.full.index(slot), (count // SENT_AHEAD) & 1)
    batch = read_mail(mail, slot, 0)
    head = read_mail(mail, slot, 1)
    start_m = read_mail(mail, slot, 2)
    if sizes.RAGGED:
        first_q = read_mail(mail, slot, 3)
        seqlen_q = read_mail(mail, slot, 4)
        first_k = read_mail(mail, slot, 5)
        seqlen_k = read_mail(mail, slot, 6)
        offset = read_mail(mail, slot, 7)
    else:
        first_q = start_m * 0
        seqlen_q = sizes.seqlen_q
        first_k, seqlen_k, offset = _keys_of(sizes, sizes.seqlen_q, sizes.seqlen_k)
    mbarrier.arrive(mail.empty.index(slot), count=1)
    return Place(batch, head, start_m, first_q, seqlen_q, first_k, seqlen_k, offset)


@gluon.jit
def _keys_of(sizes, seqlen_q, seqlen_k):
    """(first key that some query sees, keys from there to the last one, offset from there)."""
    offset = seqlen_k - seqlen_q
    if sizes.TOP_LEFT:
        offset = offset * 0
    begin, end = seen_keys(
        seqlen_q, seqlen_k, offset, sizes.left, sizes.right, sizes.LEFT, sizes.RIGHT
    )
    return offset * 0 + begin, end - begin, offset - begin


@gluon.jit
def listed_place(sizes, program, list_ptr):
    """Producer: where number `program` of the listed tiles lies, each once for every head."""
    fields_ptr = list_ptr + (LIST_HEAD + program // sizes.num_heads * TILE_FIELDS)
    seqlen_q = gl.load(fields_ptr + 3)
    seqlen_k = gl.load(fields_ptr + 4)
    offset = seqlen_k - seqlen_q
    if sizes.TOP_LEFT:
        offset = offset * 0
    _, end = seen_keys(seqlen_q, seqlen_k, offset, sizes.left, sizes.right, sizes.LEFT, sizes.RIGHT)
    return Place(
        gl.load(fields_ptr), program % sizes.num_heads, gl.load(fields_ptr + 1),
        gl.load(fields_ptr + 2), seqlen_q, gl.load(fields_ptr + 5), offset * 0 + end, offset,
    )  # fmt: skip


@gluon.jit
def place_of(sizes, program, lengths, BLOCK_M: gl.constexpr):
    """Producer: where tile number `program` lies; start_m is beyond the rows where it is none.

    Args:
        lengths: pointers to cu_seqlens and seqused, of queries and keys.
    """
    if sizes.PACKED:
        batch, head, start_m, first_q, first_k, seqlen_q, seqlen_k, _ = rows_of_slot(
            program, lengths[0], lengths[1], lengths[2], lengths[3],
            sizes.batch_size, sizes.num_heads, sizes.seqlen_q, sizes.seqlen_k,
            BLOCK_M // sizes.GROUP, True, sizes.RIGHT,
        )  # fmt: skip
        start_m = start_m * sizes.GROUP
    else:
        batch, head, start_m = tile_in_sections(
            program, sizes.batch_size, sizes.num_heads, sizes.seqlen_q * sizes.GROUP,
            sizes.heads_together, BLOCK_M,
        )  # fmt: skip
        first_q = start_m * 0
        first_k = start_m * 0
        seqlen_q = sizes.seqlen_q
        seqlen_k = sizes.seqlen_k
    begin, seqlen_k, offset = _keys_of(sizes, seqlen_q, seqlen_k)
    return Place(batch, head, start_m, first_q, seqlen_q, first_k + begin, seqlen_k, offset)


@gluon.jit
def next_program(counter_ptr):
    """Producer: the number of the next tile, the grid's first ones apart."""
    return gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)


@gluon.jit
def clear_counter(counter_ptr):
    """Producer: the last block to end leaves the counters as the next launch needs them."""
    if gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)
