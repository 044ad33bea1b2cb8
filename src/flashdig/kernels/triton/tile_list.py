"""A list of the tiles of queries of long sequences, made on the device, which alone knows lengths.

For kernels whose blocks fetch tile after tile (`kernels.hopper.schedule`) and attend to all keys
of a sequence at once; `decode_plan` cuts the keys of all others into pieces.
"""

import triton
import triton.language as tl

from flashdig.kernels.triton.decode_arguments import UNSPECIALIZED
from flashdig.kernels.triton.decode_plan import tiles_of_slots
from flashdig.kernels.triton.launch_order import begin_after, end_after
from flashdig.kernels.triton.paged import cache_row, key_extent
from flashdig.kernels.triton.sequences import sequence_span

# two counters for whoever takes tiles, the number of tiles, nothing; then of each tile its
# sequence, its first row (GROUP of them a query), the sequence's first query, its queries, its
# keys behind the padding, the first row of these in the cache, and two numbers of nothing
LIST_HEAD = tl.constexpr(4)
TILE_FIELDS = tl.constexpr(8)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "shortest", "rows_of_cache_row"])
def flashdig_list_tiles(
    list_ptr,
    seqlens_ptr,
    cu_k_ptr,
    cu_new_ptr,
    leftpad_ptr,
    batch_idx_ptr,
    cu_q_ptr,
    used_q_ptr,
    batch,
    seqlen_q,
    seqlen_new,
    capacity,
    cache_rows,
    slots,
    shortest,
    rows_of_cache_row,
    GROUP: tl.constexpr,
    PACKED: tl.constexpr,
    PAGED: tl.constexpr,
    ORDER: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program writes the list of all sequences with at least `shortest` queries; the last tiles
    come first, which see most keys under causality.

    Args:
        leftpad_ptr: of a cache without pages only.
        rows_of_cache_row: from one row of a cache without pages to the next, in keys.
    """
    begin_after(ORDER)
    slot = tl.arange(0, BLOCK_S)
    sequence, start_row, length_q = tiles_of_slots(
        tl.minimum(slot, slots - 1),
        cu_q_ptr,
        used_q_ptr,
        batch,
        seqlen_q,
        GROUP,
        BLOCK_M,
        PACKED,
        "all",
    )
    first_q = slot * 0
    if PACKED:
        first_q, _length = sequence_span(cu_q_ptr, used_q_ptr, sequence, seqlen_q)
    padding, end = key_extent(
        seqlens_ptr, cu_k_ptr, cu_new_ptr, leftpad_ptr, sequence, seqlen_new, capacity
    )
    first_k = slot * 0
    if not PAGED:
        first_k = cache_row(batch_idx_ptr, sequence, cache_rows) * rows_of_cache_row + padding
    used = (slot < slots) & (start_row < length_q * GROUP) & (length_q >= shortest)
    count = tl.sum(used.to(tl.int32), 0)
    place = count - tl.cumsum(used.to(tl.int32), 0)
    fields_ptr = list_ptr + LIST_HEAD + place * TILE_FIELDS
    tl.store(fields_ptr, sequence, mask=used)
    tl.store(fields_ptr + 1, start_row, mask=used)
    tl.store(fields_ptr + 2, first_q, mask=used)
    tl.store(fields_ptr + 3, length_q, mask=used)
    tl.store(fields_ptr + 4, end - padding, mask=used)
    tl.store(fields_ptr + 5, first_k, mask=used)
    tl.store(list_ptr, 0)
    tl.store(list_ptr + 1, 0)
    tl.store(list_ptr + 2, count)
    end_after(ORDER)
