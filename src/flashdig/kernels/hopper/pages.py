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
    full, tile = _expected(ring, step, descs)
    _load_pages(descs[0], pages, numbers, start_n, 0, full, tile[0])
    if len(descs) == 2:
        _load_pages(descs[1], pages, numbers, start_n, tile[0].shape[1], full, tile[1])


@gluon.jit
def put_pieces(ring, step, descs, rows, start_n):
    """Producer: `columns.put_blocks` of a cache's rows from start_n on, by descriptors of pieces:
    both halves of a row come one soon after the other, which the memory likes better."""
    full, tile = _expected(ring, step, descs)
    _load_pieces(descs[0], rows, start_n, 0, full, tile[0])
    if len(descs) == 2:
        _load_pieces(descs[1], rows, start_n, tile[0].shape[1], full, tile[1])


@gluon.jit
def _expected(ring, step, descs):
    """(barrier, tile) of number `step`, empty; the barrier knows all bytes of the tile."""
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
    return full, tile


@gluon.jit
def _parts_of(tile, desc):
    """The memory of a tile by pieces, (width, piece): columns that are kept together lie behind one
    another, all rows of each."""
    BLOCK: gl.constexpr = desc.block_type.shape
    PIECE: gl.constexpr = BLOCK[len(BLOCK) - 2]
    WIDTH: gl.constexpr = BLOCK[len(BLOCK) - 1]
    COUNT: gl.constexpr = tile.shape[0] // PIECE * (tile.shape[1] // WIDTH)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PIECE, WIDTH], desc.dtype)
    return reinterpreted(tile, desc.dtype, [COUNT, PIECE, WIDTH], layout)


@gluon.jit
def _load_piece(
    desc, head, end, place, COLUMN: gl.constexpr, PIECE_NUMBER: gl.constexpr, barrier, tile
):
    """One piece of a tile, all its columns; `end` and `place`: see `rows`, of packed rows."""
    BLOCK: gl.constexpr = desc.block_type.shape
    WIDTH: gl.constexpr = BLOCK[len(BLOCK) - 1]
    PIECES: gl.constexpr = tile.shape[0] // BLOCK[len(BLOCK) - 2]
    parts = _parts_of(tile, desc)
    for width in gl.static_range(tile.shape[1] // WIDTH):
        part = as_block_of(parts.index(width * PIECES + PIECE_NUMBER), desc)
        load_tile(desc, (TURN, end, head, place, COLUMN + width * WIDTH), barrier, part)


@gluon.jit
def _load_pages(desc, pages, numbers, start_n, COLUMN: gl.constexpr, barrier, tile):
    BLOCK: gl.constexpr = desc.block_type.shape
    PIECE: gl.constexpr = BLOCK[len(BLOCK) - 2]
    lanes = _lanes()
    keys = start_n + lanes * PIECE
    row = keys % pages.PAGE_SIZE
    used = gl.minimum(gl.maximum(pages.length - (keys - row), 0), pages.PAGE_SIZE)
    used = gl.where(numbers == NO_PAGE, 0, used)
    ends = gl.maximum(numbers, 0) * pages.rows + used
    places = TURN - used + row
    for piece in gl.static_range(tile.shape[0] // PIECE):
        end = gl.max(gl.where(lanes == piece, ends, 0), 0)
        place = gl.max(gl.where(lanes == piece, places, 0), 0)
        _load_piece(desc, pages.head, end, place, COLUMN, piece, barrier, tile)


@gluon.jit
def _load_pieces(desc, rows, start_n, COLUMN: gl.constexpr, barrier, tile):
    BLOCK: gl.constexpr = desc.block_type.shape
    PIECE: gl.constexpr = BLOCK[len(BLOCK) - 2]
    end = rows.first + rows.length
    place = TURN - rows.length + start_n
    for piece in gl.static_range(tile.shape[0] // PIECE):
        _load_piece(desc, rows.head, end, place + piece * PIECE, COLUMN, piece, barrier, tile)
