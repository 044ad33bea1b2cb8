"""How the keys of sequences of different lengths are cut into pieces, without knowing them on the
host.

The lengths live on the device, so the device decides, in a small kernel of its own: where all tiles
of rows see about as many keys, each is cut as `decode` would cut it; else the keys of all are cut
into pieces of about one size, so that a long sequence holds no multiprocessor when the others are
done.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED
from flashdig.kernels.triton.launch_order import begin_after, end_after
from flashdig.kernels.triton.paged import key_extent, seen_by_tile
from flashdig.kernels.triton.sequences import _first_row, sequence_span

# a plan: of each slot its first piece, how many it has, its sequence, its first row; then how many
# pieces there are, and how many were taken by programs that had done their first; then the slot of
# each piece
SLOT_FIELDS = tl.constexpr(4)
COUNTERS = tl.constexpr(2)
# tiles of rows from which on a sequence is a chunk of a prompt, where those are planned apart
CHUNK_TILES = tl.constexpr(4)


@triton.jit
def tiles_of_slots(
    slot,
    cu_q_ptr,
    used_q_ptr,
    batch,
    seqlen_q,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,
):
    """(sequence, first row, query tokens of the sequence) of a vector of slots: as
    `paged.tile_of_slot` has them, or, of short sequences alone, CHUNK_TILES slots each."""
    if KIND == "short":
        sequence = slot // CHUNK_TILES
        start_row = slot % CHUNK_TILES * BLOCK_M
        _first, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    elif PACKED:
        sequence = slot * 0
        high = sequence + (batch - 1)
        span = batch
        while span > 1:
            middle = (sequence + high + 1) // 2
            first = _first_row(cu_q_ptr, middle, seqlen_q) * GROUP // BLOCK_M + middle
            before = first <= slot
            sequence = tl.where(before, middle, sequence)
            high = tl.where(before, high, tl.maximum(middle - 1, sequence))
            span = (span + 1) // 2
        first = _first_row(cu_q_ptr, sequence, seqlen_q) * GROUP // BLOCK_M + sequence
        start_row = (slot - first) * BLOCK_M
        _first, length_q = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    else:
        tiles = tl.cdiv(seqlen_q * GROUP, BLOCK_M)
        sequence = slot // tiles
        start_row = (slot % tiles) * BLOCK_M
        length_q = slot * 0 + seqlen_q
    return sequence, start_row, length_q


@triton.jit
def keys_of_tile(
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    sequence,
    start_row,
    length_q,
    seqlen_new,
    capacity,
    left,
    right,
    GROUP: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(key_begin, key_end, offset, tiles) of one tile of rows or a vector of them; at least one
    tile of keys, so that rows without keys have a piece, which writes them."""
    first, length_k = key_extent(
        seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, sequence, seqlen_new, capacity
    )
    offset = length_k - length_q
    if TOP_LEFT:
        offset = first
    key_begin, key_end = seen_by_tile(
        start_row, length_q, first, length_k, offset, left, right, GROUP, BLOCK_M, LEFT, RIGHT
    )
    tiles = tl.cdiv(key_end - key_begin // BLOCK_N * BLOCK_N, BLOCK_N)
    tiles = tl.where(key_end > key_begin, tl.maximum(tiles, 1), 1)
    return key_begin, key_end, offset, tiles


@triton.jit(do_not_specialize=UNSPECIALIZED)
def flashdig_plan_pieces(
    plan_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    cu_q_ptr,
    used_q_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    seqlen_new,
    capacity,
    slots,
    splits,
    wanted,
    left,
    right,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    TAPER: tl.constexpr,
    KIND: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write the plan; a program writes one slot's part of it. KIND "short": of sequences of at most
    SHORT_ROWS rows alone; "long": of the others; "all" of them."""
    begin_after(ORDER)
    slot = tl.program_id(0)
    all_slots = tl.arange(0, BLOCK_S)
    sequence, start_row, length_q = tiles_of_slots(
        tl.minimum(all_slots, slots - 1),
        cu_q_ptr,
        used_q_ptr,
        batch,
        seqlen_q,
        GROUP,
        BLOCK_M,
        PACKED,
        KIND,
    )
    _begin, _end, _offset, tiles = keys_of_tile(
        seqlens_ptr,
        cu_k_ptr,
        cu_new_ptr,
        leftpad_ptr,
        sequence,
        start_row,
        length_q,
        seqlen_new,
        capacity,
        left,
        right,
        GROUP,
        TOP_LEFT,
        LEFT,
        RIGHT,
        BLOCK_M,
        BLOCK_N,
    )
    used = (all_slots < slots) & (start_row < length_q * GROUP)
    if KIND == "short":
        used = used & (length_q * GROUP <= SHORT_ROWS)
    elif KIND == "long":
        used = used & (length_q * GROUP > SHORT_ROWS)
    tiles = tl.where(used, tiles, 0)
    before = tl.cumsum(tiles.to(tl.int64), 0) - tiles
    total = tl.sum(tiles.to(tl.int64), 0)
    # at most a quarter longer than the mean
    count = tl.sum(used.to(tl.int64), 0)
    even = tl.max(tiles, 0).to(tl.int64) * count * 4 <= total * 5
    piece = tl.maximum(tl.cdiv(total * num_heads_kv, wanted), 1).to(tl.int32)
    if TAPER:  # the last ones are short, so that all end at about one time
        half = tl.where(before * 2 >= total, tl.cdiv(piece, 2), piece)
        piece = tl.where(before * 5 >= total * 4, tl.cdiv(piece, 4), half)
    pieces = tl.cdiv(tiles, piece)
    if KIND == "all":
        pieces = tl.where(even, tl.minimum(splits, tiles), pieces)
    own = tl.sum(tl.where(all_slots == slot, pieces, 0), 0)
    first = tl.sum(tl.where(all_slots < slot, pieces, 0), 0)
    fields_ptr = plan_ptr + slot * SLOT_FIELDS
    tl.store(fields_ptr, first)
    tl.store(fields_ptr + 1, own)
    tl.store(fields_ptr + 2, tl.sum(tl.where(all_slots == slot, sequence, 0), 0))
    tl.store(fields_ptr + 3, tl.sum(tl.where(all_slots == slot, start_row, 0), 0))
    counters_ptr = plan_ptr + slots * SLOT_FIELDS
    if slot == slots - 1:
        tl.store(counters_ptr, first + own)
        tl.store(counters_ptr + 1, 0)
    owner_ptr = counters_ptr + COUNTERS
    for start in tl.range(first, first + own, BLOCK_S):
        tl.store(owner_ptr + start + all_slots, slot, mask=start + all_slots < first + own)
    end_after(ORDER)
