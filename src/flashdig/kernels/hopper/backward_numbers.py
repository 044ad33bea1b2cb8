"""Numbers of tiles, from the producer of the Hopper backward to its consumers. Device code."""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, mbarrier

SENT_AHEAD = gl.constexpr(2)


@aggregate
class Numbers:
    """Room for SENT_AHEAD numbers; none are sent where tiles are not COUNTED out.

    Attributes:
        mail: the numbers; full, empty: their barriers.
    """

    mail: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    COUNTED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, mail, full, empty, COUNTED):
        self.mail = mail
        self.full = full
        self.empty = empty
        self.COUNTED = gl.constexpr(COUNTED)


@gluon.jit
def new_numbers(unused, COUNTED: gl.constexpr):
    """`unused` is memory that stands there where no numbers are sent."""
    one_number: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    # Made only where used: Triton lends the memory of an mbarrier that nobody waits on to other
    # buffers without invalidating it, and where processes take turns on the GPU, the barrier comes
    # back in their place (seen as NaN; PTX forbids the loan)
    mail = unused
    full = unused
    empty = unused
    if COUNTED:
        mail = gl.allocate_shared_memory(gl.int32, [SENT_AHEAD, 1], one_number)
        full = gl.allocate_shared_memory(gl.int64, [SENT_AHEAD, 1], barrier)
        empty = gl.allocate_shared_memory(gl.int64, [SENT_AHEAD, 1], barrier)
        for slot in gl.static_range(SENT_AHEAD):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=2)
    return Numbers(mail, full, empty, COUNTED)


@gluon.jit
def send_tile(numbers, count, number):
    """Producer: tell the consumers what comes after tile number `count` of this block."""
    slot = count % SENT_AHEAD
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(numbers.empty.index(slot), ((count // SENT_AHEAD) & 1) ^ 1)
    numbers.mail.index(slot).store(gl.full([1], 0, gl.int32, layout) + number)
    mbarrier.arrive(numbers.full.index(slot), count=1)


@gluon.jit
def following_tile(numbers, count, tile):
    """Consumer: the tile after number `count` of this block, which is `tile`."""
    following = tile + gl.num_programs(0)
    if numbers.COUNTED:
        slot = count % SENT_AHEAD
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        mbarrier.wait(numbers.full.index(slot), (count // SENT_AHEAD) & 1)
        following = gl.max(numbers.mail.index(slot).load(layout), 0)
        mbarrier.arrive(numbers.empty.index(slot), count=1)
    return following
