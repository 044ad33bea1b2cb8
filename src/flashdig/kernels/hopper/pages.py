"""Keys of a cache in pages: where they lie, and how a tile of them is copied. Device code.

A tile is copied in pieces that do not cross pages; `descriptors.cache_tiles_of` makes what copies
a piece: packed rows (`rows`) as many columns wide as shared memory keeps together. Rows of a page
behind the last key arrive as zeros, and so do pages that nobody needs, whose numbers are not read.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, load_tile, mbarrier, reinterpreted
from flashdig.kernels.hopper.columns import tile_at
from flashdig.kernels.hopper.ring import as_block_of, wait_until_empty
from flashdig.kernels.hopper.rows import TURN
from flashdig.kernels.triton.paged import clamped

LANES = gl.constexpr(32)  # of the producer's warp: a page number in each
NO_PAGE = gl.constexpr(-1)


@aggregate
class Pages:
    """Keys of one sequence and KV head.

    Attributes:
        table_ptr: the sequence's row of the page table.
        begin, length: the first key that a tile of queries sees; keys up to the last.
        count: pages that there are.
        rows: from one page to the next, in rows of a descriptor.
    """

    table_ptr: gl.tensor
    head: gl.tensor
    begin: gl.tensor
    length: gl.tensor
    count: gl.tensor
    rows: gl.tensor
    PAGE_SIZE: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, table_ptr, head, begin, length, count, rows, PAGE_SIZE):
        self.table_ptr = table_ptr
        self.head = head
        self.begin = begin
        self.length = length
        self.count = count
        self.rows = rows
        self.PAGE_SIZE = gl.constexpr(PAGE_SIZE)


@gluon.jit
def _lanes():
    return gl.arange(0, LANES, gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def page_numbers(pages, desc, start_n, BLOCK_N: gl.constexpr):
    """The page of each piece of the tile from key start_n on, in a lane; NO_PAGE: none needed."""
    PIECE: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 2]
    lanes = _lanes()
    keys = start_n + lanes * PIECE
    needed = (lanes < BLOCK_N // PIECE) & (keys < pages.length) & (keys + PIECE > pages.begin)
    numbers = gl.load(pages.table_ptr + keys // pages.PAGE_SIZE, mask=needed, other=0)
    return gl.where(needed, clamped(numbers, 0, pages.count - 1), NO_PAGE)


@gluon.jit
def put_pages(ring, step, descs, pages, numbers, start_n):
    """Producer: `columns.put_blocks` of the keys from start_n on, whose pages are `numbers`."""
    full = wait_until_empty(ring.ring, step)
    tile = tile_at(ring.tiles, step % ring.ring.STAGES)
    ROWS: gl.constexpr = tile[0].shape[0]
    COLUMNS: gl.constexpr = tile[0].shape[1]
    bytes_of: gl.constexpr = descs[0].dtype.primitive_bitwidth // 8
    if len(descs) == 1:
        mbarrier.expect(full, ROWS * COLUMNS * bytes_of)
    else:
        REST: gl.constexpr = tile[1].shape[1]
        mbarrier.expect(full, ROWS * (COLUMNS + REST) * bytes_of)
    _load_pages(descs[0], pages, numbers, start_n, 0, full, tile[0])
    if len(descs) == 2:
        _load_pages(descs[1], pages, numbers, start_n, COLUMNS, full, tile[1])


@gluon.jit
def _load_pages(desc, pages, numbers, start_n, COLUMN: gl.constexpr, barrier, tile):
    BLOCK: gl.constexpr = desc.block_type.shape
    PIECE: gl.constexpr = BLOCK[len(BLOCK) - 2]
    WIDTH: gl.constexpr = BLOCK[len(BLOCK) - 1]
    PIECES: gl.constexpr = tile.shape[0] // PIECE
    WIDTHS: gl.constexpr = tile.shape[1] // WIDTH
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PIECE, WIDTH], desc.dtype)
    # columns that are kept together lie behind one another, all rows of each
    parts = reinterpreted(tile, desc.dtype, [WIDTHS * PIECES, PIECE, WIDTH], layout)
    lanes = _lanes()
    for piece in gl.static_range(PIECES):
        number = gl.max(gl.where(lanes == piece, numbers, NO_PAGE), 0)
        key = start_n + piece * PIECE
        row = key % pages.PAGE_SIZE
        used = gl.minimum(gl.maximum(pages.length - (key - row), 0), pages.PAGE_SIZE)
        used = gl.where(number == NO_PAGE, 0, used)
        end = gl.maximum(number, 0) * pages.rows + used
        for width in gl.static_range(WIDTHS):
            place = (TURN, end, pages.head, TURN - used + row, COLUMN + width * WIDTH)
            load_tile(desc, place, barrier, as_block_of(parts.index(width * PIECES + piece), desc))
