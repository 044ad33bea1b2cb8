"""V of fp8 attention by columns, V^T, with the keys in the order in which P lies in registers.

The tensor cores take 8-bit operands with the dimension that is summed over contiguous: Q and K lie
so, V does not. One kernel writes V^T, and counts what it has written; the attention kernel begins
meanwhile and waits for the heads that it reads. Keys are permuted within groups of 16, since an
accumulator and an operand A of 8 bits spread a row over four threads differently (PTX ISA, wgmma,
register fragments):

    accumulator   thread t of a row holds columns 8 j + 2 t and 8 j + 2 t + 1, for every j
    operand A     thread t holds columns 16 j + 4 t ... 16 j + 4 t + 3

so what a thread has of P, in its order, are the columns of an operand A for a V^T whose position
16 j + 4 t + 2 h + i holds key 16 j + 8 h + 2 t + i (h and i are 0 or 1). P needs no exchange.

    v_by_column   (batch, head_kv, column of V, key), keys from the first one that a query sees;
                  packed (1, head_kv, column of V, slots of keys), each sequence in slots of its own
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flashdig.kernels.launch import Launch
from flashdig.kernels.triton.arguments import Call, check_grid
from flashdig.kernels.triton.sequences import (
    find_sequence,
    first_slot,
    seen_keys,
    sequence_span,
)

GROUP_KEYS = 16
WIDEST = 256  # columns that one program turns at once
# of a launch's counter: how many items of each section of heads are turned
SECTIONS = tl.constexpr(64)
FIRST_SECTION = tl.constexpr(4)
NUMBERS = FIRST_SECTION.value + SECTIONS.value


def key_at(position: int) -> int:
    """The key that lies at a position of a permuted row."""
    group, inside = divmod(position, GROUP_KEYS)
    thread, half, one = inside // 4, inside // 2 % 2, inside % 2
    return GROUP_KEYS * group + 8 * half + 2 * thread + one


@triton.jit
def _permuted(a, b, SELECTOR: tl.constexpr, PTX: tl.constexpr):
    """Bytes of two words as PTX's prmt selects them: digit i of SELECTOR, in base 16, is where
    byte i comes from, 0 to 3 in a and 4 to 7 in b."""
    if PTX:
        text: tl.constexpr = f"prmt.b32 $0, $1, $2, {SELECTOR};"
        mixed = tl.inline_asm_elementwise(text, "=r,r,r", [a, b], tl.uint32, True, 1)
    else:
        mixed = a & 0
        for i in tl.static_range(4):
            source = (SELECTOR >> 4 * i) % 8
            word = a if source < 4 else b
            mixed |= ((word >> (source % 4 * 8)) & 0xFF) << (8 * i)
    return mixed


@triton.jit
def _load(
    item,
    v_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    batch,
    heads,
    seqlen_q,
    seqlen_k,
    left,
    right,
    columns,
    stride_vb,
    stride_vn,
    stride_vh,
    WORDS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """Words of the keys 0, 1, 8 and 9 behind each `quad`'s first one; zeros past the last item."""
    slots = tl.cdiv(columns * 16, BLOCK)
    if PACKED:
        head = item // slots
        slot = item % slots
        sequence = find_sequence(cu_seqlens_k_ptr, slot, batch, seqlen_k, BLOCK)
        start = (slot - first_slot(cu_seqlens_k_ptr, sequence, seqlen_k, BLOCK)) * BLOCK
        _, length_q = sequence_span(cu_seqlens_q_ptr, seqused_q_ptr, sequence, seqlen_q)
        first_k, length_k = sequence_span(cu_seqlens_k_ptr, seqused_k_ptr, sequence, seqlen_k)
        past = head >= heads
    else:
        head = item // slots % heads
        sequence = item // slots // heads
        start = item % slots * BLOCK
        length_q = seqlen_q
        length_k = seqlen_k
        first_k = start * 0
        past = sequence >= batch
    offset = length_k - length_q
    if TOP_LEFT:
        offset = offset * 0
    begin, end = seen_keys(length_q, length_k, offset, left, right, LEFT, RIGHT)
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    quad = tl.arange(0, BLOCK // 4)[:, None]
    key = (quad // 4) * 16 + (quad % 4) * 2
    there = word < WORDS
    first = start + begin
    end = tl.where(past, 0, end - first)
    # in words; what all items share stands apart, it is worked out once
    step = stride_vn.to(tl.int64) * 4
    v_ptr += (first_k + first).to(tl.int64) * step + head.to(tl.int64) * stride_vh * 4
    if not PACKED:
        v_ptr += sequence.to(tl.int64) * stride_vb * 4
    rows = key.to(tl.int64) * step + word
    a = tl.load(v_ptr + rows, mask=there & (key < end), other=0)
    b = tl.load(v_ptr + step + rows, mask=there & (key + 1 < end), other=0)
    c = tl.load(v_ptr + 8 * step + rows, mask=there & (key + 8 < end), other=0)
    d = tl.load(v_ptr + 9 * step + rows, mask=there & (key + 9 < end), other=0)
    return a, b, c, d


@triton.jit(
    do_not_specialize=[
        "batch",
        "heads",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "columns",
        "stride_vb",
        "stride_vn",
        "stride_vh",
        "items",
        "section_units",
    ]
)
def flashdig_fp8_values_by_column(
    v_ptr,
    v_by_column_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    counter_ptr,
    batch,
    heads,
    seqlen_q,
    seqlen_k,
    left,
    right,
    columns,
    stride_vb,
    stride_vn,
    stride_vh,
    items,
    section_units,
    HEAD_DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LEADS: tl.constexpr,
):
    """Items of BLOCK keys of one unit, the heads that are turned together, unit by unit.

    Strides and `columns` (keys of a row of V^T) are in 16 bytes.

    LEADS: the kernel after it may begin at once; before it reads V^T it waits for the count of that
    section's items (`counted`).
    """
    if LEADS:
        gdc_launch_dependents()
    WORDS: tl.constexpr = HEAD_DIM_V // 4
    BLOCK_WORDS: tl.constexpr = triton.next_power_of_2(WORDS)
    v_ptr = v_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    v_by_column_ptr = v_by_column_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    quad = tl.arange(0, BLOCK // 4)[:, None]
    program = tl.program_id(0)
    a, b, c, d = _load(
        program, v_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr,
        batch, heads, seqlen_q, seqlen_k, left, right, columns, stride_vb, stride_vn, stride_vh,
        WORDS, BLOCK_WORDS, BLOCK, PACKED, TOP_LEFT, LEFT, RIGHT,
    )  # fmt: skip
    for item in range(program, items, tl.num_programs(0)):
        even, odd = _permuted(a, b, 0x6240, LEADS), _permuted(a, b, 0x7351, LEADS)
        even_after, odd_after = _permuted(c, d, 0x6240, LEADS), _permuted(c, d, 0x7351, LEADS)
        # of the next item, so that reads are always under way
        a, b, c, d = _load(
            item + tl.num_programs(0),
            v_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_q_ptr, seqused_k_ptr,
            batch, heads, seqlen_q, seqlen_k, left, right, columns, stride_vb, stride_vn, stride_vh,
            WORDS, BLOCK_WORDS, BLOCK, PACKED, TOP_LEFT, LEFT, RIGHT,
        )  # fmt: skip
        slots = tl.cdiv(columns * 16, BLOCK)
        unit = item // slots
        column = item % slots * BLOCK
        width = columns * 4
        targets = v_by_column_ptr + (unit.to(tl.int64) * HEAD_DIM_V * width + column // 4)
        targets += (word * 4).to(tl.int64) * width + quad
        # whole groups, so that stores stay wide
        inside = (word < WORDS) & (column + quad // 4 * 16 < columns * 16)
        tl.store(targets, _permuted(even, even_after, 0x5410, LEADS), mask=inside)
        tl.store(targets + width, _permuted(odd, odd_after, 0x5410, LEADS), mask=inside)
        tl.store(targets + 2 * width, _permuted(even, even_after, 0x7632, LEADS), mask=inside)
        tl.store(targets + 3 * width, _permuted(odd, odd_after, 0x7632, LEADS), mask=inside)
        if LEADS:
            tl.debug_barrier()  # every thread's stores come before the count
            section = counter_ptr + FIRST_SECTION + unit // section_units
            tl.atomic_add(section, 1, sem="release")


def by_column_shape(call: Call, block: int) -> tuple[int, int, int, int]:
    """Of V^T for a forward whose key tiles are `block` wide or less."""
    heads, head_dim_v = call.num_heads_kv, call.head_dim_v
    if call.packed:
        return 1, heads, head_dim_v, call.key_slots(block) * block
    begin, end = keys_seen(call)
    return call.batch, heads, head_dim_v, -(-max(end - begin, 1) // GROUP_KEYS) * GROUP_KEYS


def keys_seen(call: Call) -> tuple[int, int]:
    """Half-open range of keys that some query of a dense call may see."""
    offset = 0 if call.top_left else call.seqlen_k - call.seqlen_q
    begin, end = 0, call.seqlen_k
    if call.window_left >= 0:
        begin = max(offset - call.window_left, 0)
    if call.window_right >= 0:
        end = min(end, call.seqlen_q + offset + call.window_right)
    return begin, end


@dataclass(frozen=True)
class Turning:
    """How V is turned.

    Attributes:
        block: keys of an item; of packed input, what sequences begin at multiples of.
        warps: of a program.
        programs: at most.
    """

    block: int
    warps: int
    programs: int


# what turns V beside attention takes some 40 us on an H200 for 32 MiB: too long for short calls
LONG = 1024  # keys
BESIDE = Turning(block=256, warps=16, programs=32)


def turning_of(call: Call, tiles: int, multiprocessors: int) -> Turning:
    """Of long sequences by some multiprocessors, while attention begins on the others; else by all
    of them, at the memory's rate.

    Args:
        tiles: of queries, which blocks of attention share out. Where all take equally long, some
            multiprocessors have one less than the others: there must be enough of these.
    """
    alike = call.window_left < 0 and call.window_right < 0
    few = alike and -tiles % multiprocessors < BESIDE.programs
    if call.packed or call.seqlen_k < LONG or few or tiles <= multiprocessors:
        return Turning(block=128, warps=8, programs=2 * multiprocessors)
    return BESIDE


def by_column(call: Call, turning: Turning) -> Launch:
    """The launch that writes V^T: called with (v, v_by_column, cu_seqlens and seqused of q and k,
    counter)."""
    block = turning.block
    v = call.v
    shape = by_column_shape(call, block)
    unit = GROUP_KEYS // v.element_size()
    counts = counted(call, block)
    together = counts["unit_heads"]
    heads = call.num_heads_kv // together
    items = triton.cdiv(shape[3], block) * shape[0] * heads
    return Launch(
        flashdig_fp8_values_by_column,
        min(check_grid(items), turning.programs),
        {
            "batch": call.batch,
            "heads": heads,
            "seqlen_q": call.seqlen_q,
            "seqlen_k": call.seqlen_k,
            "left": max(call.window_left, 0),
            "right": max(call.window_right, 0),
            "columns": shape[3] // GROUP_KEYS,
            "stride_vb": 0 if call.packed else v.stride(0) // unit,
            "stride_vn": v.stride(-3) // unit,
            "stride_vh": v.stride(-2) * together // unit,
            "items": items,
            "section_units": counts["section_heads"] // together,
            "HEAD_DIM_V": call.head_dim_v * together,
            "BLOCK": block,
            "PACKED": call.packed,
            "TOP_LEFT": call.top_left,
            "LEFT": call.window_left >= 0,
            "RIGHT": call.window_right >= 0,
            "LEADS": v.device.type != "cpu",
        },
        num_warps=turning.warps,
    )


def counted(call: Call, block: int) -> dict[str, int]:
    """How items are counted, for the attention kernel: (batch, KV head) pairs of V^T that are a
    section and a unit, and items of a unit."""
    together = _heads_together(call)
    batch, heads, _, keys = by_column_shape(call, block)
    units = batch * heads // together
    return {
        "section_heads": triton.cdiv(units, SECTIONS.value) * together,
        "unit_heads": together,
        "unit_items": triton.cdiv(keys, block),
    }


def _heads_together(call: Call) -> int:
    """KV heads that one program turns: those side by side in V are one wider head here and there,
    and long rows are read at the memory's rate."""
    if call.v.stride(-2) != call.head_dim_v:
        return 1
    most = max(WIDEST // call.head_dim_v, 1)
    return max(n for n in range(1, most + 1) if call.num_heads_kv % n == 0)
