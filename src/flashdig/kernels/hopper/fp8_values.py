"""V of fp8 attention by columns, V^T, with the keys in the order in which P lies in registers.

The tensor cores take 8-bit operands with the dimension that is summed over contiguous: Q and K lie
so, V does not. One kernel writes V^T before the attention kernel runs. It permutes the keys within
groups of 16, since an accumulator and an operand A of 8 bits spread a row over four threads
differently (PTX ISA, wgmma, register fragments):

    accumulator   thread t of a row holds columns 8 j + 2 t and 8 j + 2 t + 1, for every j
    operand A     thread t holds columns 16 j + 4 t ... 16 j + 4 t + 3

so what a thread has of P, in its order, are the columns of an operand A for a V^T whose position
16 j + 4 t + 2 h + i holds key 16 j + 8 h + 2 t + i (h and i are 0 or 1). P needs no exchange.

    v_by_column   (batch, head_kv, column of V, key), keys from the first one that a query sees;
                  packed (1, head_kv, column of V, slots of keys), each sequence in slots of its own
"""

from __future__ import annotations

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
WIDEST = 256  # columns that one program turns


def key_at(position: int) -> int:
    """The key that lies at a position of a permuted row."""
    group, inside = divmod(position, GROUP_KEYS)
    thread, half, one = inside // 4, inside // 2 % 2, inside % 2
    return GROUP_KEYS * group + 8 * half + 2 * thread + one


@triton.jit
def _low(a, b):
    """Bytes (a0, b0, a2, b2) of two words."""
    return (a & 0x00FF00FF) | ((b & 0x00FF00FF) << 8)


@triton.jit
def _high(a, b):
    """Bytes (a1, b1, a3, b3)."""
    return ((a >> 8) & 0x00FF00FF) | (b & 0xFF00FF00)


@triton.jit
def _lower_halves(a, b):
    return (a & 0xFFFF) | (b << 16)


@triton.jit
def _upper_halves(a, b):
    return (a >> 16) | (b & 0xFFFF0000)


@triton.jit(
    do_not_specialize=[
        "batch",
        "num_heads_kv",
        "seqlen_q",
        "seqlen_k",
        "left",
        "right",
        "columns",
        "stride_vb",
        "stride_vn",
        "stride_vh",
    ]
)
def flashdig_fp8_values_by_column(
    v_ptr,
    v_by_column_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_q_ptr,
    seqused_k_ptr,
    batch,
    num_heads_kv,
    seqlen_q,
    seqlen_k,
    left,
    right,
    columns,
    stride_vb,
    stride_vn,
    stride_vh,
    HEAD_DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
    TOP_LEFT: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    LEADS: tl.constexpr,
):
    """BLOCK keys of one head. Strides and `columns` (keys of a row of V^T) are in 16 bytes.

    LEADS: the kernel after it may begin at once; it waits before it reads V^T.
    """
    if LEADS:
        gdc_launch_dependents()
    WORDS: tl.constexpr = HEAD_DIM_V // 4
    BLOCK_WORDS: tl.constexpr = triton.next_power_of_2(WORDS)
    v_ptr = v_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    v_by_column_ptr = v_by_column_ptr.to(tl.pointer_type(tl.uint32), bitcast=True)
    program = tl.program_id(0)
    head = program % num_heads_kv
    slot = program // num_heads_kv
    if PACKED:
        sequence = find_sequence(cu_seqlens_k_ptr, slot, batch, seqlen_k, BLOCK)
        start = (slot - first_slot(cu_seqlens_k_ptr, sequence, seqlen_k, BLOCK)) * BLOCK
        _, length_q = sequence_span(cu_seqlens_q_ptr, seqused_q_ptr, sequence, seqlen_q)
        first_k, length_k = sequence_span(cu_seqlens_k_ptr, seqused_k_ptr, sequence, seqlen_k)
        row = head * 1
        column = slot * BLOCK
    else:
        slots = tl.cdiv(columns * 16, BLOCK)
        sequence = slot // slots
        start = slot % slots * BLOCK
        length_q = seqlen_q
        length_k = seqlen_k
        first_k = start * 0
        row = sequence * num_heads_kv + head
        column = start
    offset = length_k - length_q
    if TOP_LEFT:
        offset = offset * 0
    begin, end = seen_keys(length_q, length_k, offset, left, right, LEFT, RIGHT)
    word = tl.arange(0, BLOCK_WORDS)[None, :]
    quad = tl.arange(0, BLOCK // 4)[:, None]
    key = start + begin + (quad // 4) * 16 + (quad % 4) * 2
    there = word < WORDS
    # in words
    v_ptr += (first_k.to(tl.int64) * stride_vn + head.to(tl.int64) * stride_vh) * 4 + word
    if not PACKED:
        v_ptr += sequence.to(tl.int64) * stride_vb * 4
    rows = v_ptr + key.to(tl.int64) * (stride_vn * 4)
    step = stride_vn.to(tl.int64) * 4
    a = tl.load(rows, mask=there & (key < end), other=0)
    b = tl.load(rows + step, mask=there & (key + 1 < end), other=0)
    c = tl.load(rows + 8 * step, mask=there & (key + 8 < end), other=0)
    d = tl.load(rows + 9 * step, mask=there & (key + 9 < end), other=0)
    even, odd = _low(a, b), _high(a, b)
    even_after, odd_after = _low(c, d), _high(c, d)
    place = (row.to(tl.int64) * HEAD_DIM_V + word * 4) * (columns * 4) + (column // 4 + quad)
    inside = there & (column + quad * 4 < columns * 16)
    targets = v_by_column_ptr + place
    width = columns * 4
    tl.store(targets, _lower_halves(even, even_after), mask=inside)
    tl.store(targets + width, _lower_halves(odd, odd_after), mask=inside)
    tl.store(targets + 2 * width, _upper_halves(even, even_after), mask=inside)
    tl.store(targets + 3 * width, _upper_halves(odd, odd_after), mask=inside)


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


def by_column(call: Call, block: int, num_warps: int = 4) -> Launch:
    """The launch that writes V^T: called with (v, v_by_column, cu_seqlens and seqused of q and k).

    Args:
        block: keys of a program; of packed input, what sequences begin at multiples of.
    """
    shape = by_column_shape(call, block)
    v = call.v
    unit = GROUP_KEYS // v.element_size()
    slots = shape[3] // block if call.packed else triton.cdiv(shape[3], block) * call.batch
    together = _heads_together(call)
    heads = call.num_heads_kv // together
    return Launch(
        flashdig_fp8_values_by_column,
        check_grid(slots * heads),
        {
            "batch": call.batch,
            "num_heads_kv": heads,
            "seqlen_q": call.seqlen_q,
            "seqlen_k": call.seqlen_k,
            "left": max(call.window_left, 0),
            "right": max(call.window_right, 0),
            "columns": shape[3] // GROUP_KEYS,
            "stride_vb": 0 if call.packed else v.stride(0) // unit,
            "stride_vn": v.stride(-3) // unit,
            "stride_vh": v.stride(-2) * together // unit,
            "HEAD_DIM_V": call.head_dim_v * together,
            "BLOCK": block,
            "PACKED": call.packed,
            "TOP_LEFT": call.top_left,
            "LEFT": call.window_left >= 0,
            "RIGHT": call.window_right >= 0,
            "LEADS": v.device.type != "cpu",
        },
        num_warps=num_warps,
    )


def _heads_together(call: Call) -> int:
    """KV heads that one program turns: those side by side in V are one wider head here and there,
    and long rows are read at the memory's rate."""
    if call.v.stride(-2) != call.head_dim_v:
        return 1
    most = max(WIDEST // call.head_dim_v, 1)
    return max(n for n in range(1, most + 1) if call.num_heads_kv % n == 0)
