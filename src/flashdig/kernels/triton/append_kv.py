"""Appending new keys and values to a cache in place, with rotary embedding of keys and queries.

A program moves a few tokens of one head. Rows outside the cache are dropped: whatever lengths,
indices and page numbers hold, nothing else is written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from flashdig.kernels.launch import Launch
from flashdig.kernels.triton.arguments import check_grid
from flashdig.kernels.triton.decode_arguments import FP8_KINDS, as_bytes
from flashdig.kernels.triton.launch_order import begin_after
from flashdig.kernels.triton.paged import cache_row, cached_length, clamped, tile_of_slot

BLOCK_T = 8  # tokens of a program
_UNSPECIALIZED = [
    "batch",
    "seqlen",
    "num_heads",
    "capacity",
    "cache_rows",
    "rotary_rows",
    *(f"stride_{x}{d}" for x in "xcvw" for d in "bnh"),
    "stride_table",
    "stride_cos",
    "stride_sin",
]


@triton.jit
def _fp8_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):
    """float32 rounded to an fp8 format (nearest, ties to even, saturating), as bytes, on any chip.

    MANTISSA and BIAS are the format's bits and its exponent's bias, LARGEST its largest number's
    byte.
    """
    DROPPED: tl.constexpr = 23 - MANTISSA
    bits = x.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + ((magnitude >> DROPPED) & 1)
    normal = (rounded >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # below 2^(1 - BIAS) the step is 2^(1 - BIAS - MANTISSA), which is the last place of a number
    # 2^23 times as large: adding that rounds to it
    step: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (magnitude.to(tl.float32, bitcast=True) + step).to(tl.int32, bitcast=True) & 0xF
    byte = tl.where(magnitude < ((128 - BIAS) << 23), small, tl.minimum(normal, LARGEST))
    byte = tl.where(magnitude > 0x7F800000, 0x7F, byte)
    return (sign | byte).to(tl.uint8)


@triton.jit
def _to_cache(x, FP8: tl.constexpr, dtype: tl.constexpr):
    """Rows in the cache's dtype; fp8 ones as bytes, saturated."""
    if FP8 == "e4m3":
        x = _fp8_bits(x, 3, 7, 0x7E)
    elif FP8 == "e5m2":
        x = _fp8_bits(x, 2, 15, 0x7B)
    else:
        x = x.to(dtype)
    return x


@triton.jit
def _from_input(x, FP8: tl.constexpr):
    """Rows of an input as float32; fp8 ones are bytes."""
    if FP8 == "e4m3":
        wide = x.to(tl.uint16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        x = tl.where((wide & 0x7F) == 0x7F, float("nan"), value)
    elif FP8 == "e5m2":
        x = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)
    return x.to(tl.float32)


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def flashdig_append_kv(
    x_ptr,
    cache_ptr,
    seqlens_ptr,
    table_ptr,
    batch_idx_ptr,
    cu_ptr,
    cos_ptr,
    sin_ptr,
    rotary_seqlens_ptr,
    descale_ptr,
    v_ptr,
    v_cache_ptr,
    v_descale_ptr,
    batch,
    seqlen,
    num_heads,
    capacity,
    cache_rows,
    rotary_rows,
    stride_xb,
    stride_xn,
    stride_xh,
    stride_xd,
    stride_cb,
    stride_cn,
    stride_ch,
    stride_cd,
    stride_vb,
    stride_vn,
    stride_vh,
    stride_vd,
    stride_wb,
    stride_wn,
    stride_wh,
    stride_wd,
    stride_table,
    stride_cos,
    stride_sin,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PACKED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INTO_CACHE: tl.constexpr,
    ADVANCES: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    X_FP8: tl.constexpr,
    CACHE_FP8: tl.constexpr,
    ORDER: tl.constexpr,
):
    """Copy rows x, rotated by their positions, into the cache, and rows v, as they are, into
    theirs; or (not INTO_CACHE) rows x to a tensor of x's shape. The rows of one sequence are all at
    one position unless it ADVANCES."""
    begin_after(ORDER)
    program = tl.program_id(0)
    head = program % num_heads
    sequence, start, first_x, length = tile_of_slot(
        program // num_heads, cu_ptr, None, batch, seqlen, 1, BLOCK_T, PACKED
    )
    if start >= length:
        return
    token = start + tl.arange(0, BLOCK_T)
    begin = cached_length(seqlens_ptr, sequence, capacity)
    inside = token < length
    if INTO_CACHE:
        inside = inside & (begin + token < capacity)
    offs_d = tl.arange(0, BLOCK_D)
    wide = inside[:, None] & (offs_d < HEAD_DIM)[None, :]
    x_batch = sequence.to(tl.int64)
    if PACKED:
        x_batch = x_batch * 0
    x_rows = x_batch * stride_xb + head.to(tl.int64) * stride_xh
    x_rows += (first_x + token).to(tl.int64) * stride_xn
    x = _from_input(
        tl.load(x_ptr + x_rows[:, None] + (offs_d * stride_xd)[None, :], mask=wide, other=0), X_FP8
    )
    if ROTARY_DIM > 0:
        position = begin
        if rotary_seqlens_ptr is not None:
            position = tl.load(rotary_seqlens_ptr + sequence)
        position = position + token * 0
        if ADVANCES:
            position += token
        position = clamped(position, 0, rotary_rows - 1).to(tl.int64)
        HALF: tl.constexpr = ROTARY_DIM // 2
        rotated = offs_d < ROTARY_DIM
        if INTERLEAVED:
            partner = offs_d ^ 1
            angle = offs_d // 2
            first_of_pair = offs_d % 2 == 0
        else:
            partner = tl.where(offs_d < HALF, offs_d + HALF, offs_d - HALF)
            angle = offs_d % HALF
            first_of_pair = offs_d < HALF
        turned = inside[:, None] & rotated[None, :]
        other = _from_input(
            tl.load(x_ptr + x_rows[:, None] + (partner * stride_xd)[None, :], mask=turned, other=0),
            X_FP8,
        )
        cos = tl.load(
            cos_ptr + (position * stride_cos)[:, None] + angle[None, :], mask=turned, other=1.0
        ).to(tl.float32)
        sin = tl.load(
            sin_ptr + (position * stride_sin)[:, None] + angle[None, :], mask=turned, other=0.0
        ).to(tl.float32)
        x = x * cos + tl.where(first_of_pair[None, :], -other, other) * sin
    if descale_ptr is not None:
        # to the last bit: beside a tie, fp8 shows an error of one place as a whole step
        x = tl.div_rn(x, tl.load(descale_ptr + sequence * num_heads + head))
    # where rows go: a page or a row of the cache, and a place in it
    there = inside
    page = x_batch + token * 0
    place = first_x + token
    if INTO_CACHE:
        place = begin + token
        if PAGE_SIZE > 0:
            table = table_ptr + sequence.to(tl.int64) * stride_table
            page = tl.load(table + place // PAGE_SIZE, mask=inside, other=0)
            # a wrong page number is dropped: a clamped one would overwrite another sequence
            there = inside & (page >= 0) & (page < cache_rows)
            place = place % PAGE_SIZE
        else:
            page = cache_row(batch_idx_ptr, sequence, cache_rows) + token * 0
    page, place = page.to(tl.int64), place.to(tl.int64)
    rows = page * stride_cb + place * stride_cn + head.to(tl.int64) * stride_ch
    tl.store(
        cache_ptr + rows[:, None] + (offs_d * stride_cd)[None, :],
        _to_cache(x, CACHE_FP8, cache_ptr.dtype.element_ty),
        mask=there[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    if v_ptr is not None:
        offs_dv = tl.arange(0, BLOCK_DV)
        wide = there[:, None] & (offs_dv < HEAD_DIM_V)[None, :]
        v_rows = x_batch * stride_vb + head.to(tl.int64) * stride_vh
        v_rows += (first_x + token).to(tl.int64) * stride_vn
        v_ptrs = v_ptr + v_rows[:, None] + (offs_dv * stride_vd)[None, :]
        v = _from_input(tl.load(v_ptrs, mask=wide, other=0), X_FP8)
        if v_descale_ptr is not None:
            v = tl.div_rn(v, tl.load(v_descale_ptr + sequence * num_heads + head))
        rows = page * stride_wb + place * stride_wn + head.to(tl.int64) * stride_wh
        tl.store(
            v_cache_ptr + rows[:, None] + (offs_dv * stride_wd)[None, :],
            _to_cache(v, CACHE_FP8, v_cache_ptr.dtype.element_ty),
            mask=wide,
        )


def append_rows(
    x: torch.Tensor,
    cache: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    descale: torch.Tensor | None,
    *,
    interleaved: bool,
) -> None:
    """Write new keys or values behind those of each sequence; arguments were checked.

    Args:
        x: (batch, seqlen_new, num_heads_kv, dim), or (total_new, num_heads_kv, dim) with
            `cu_seqlens` (batch + 1,) int32.
        cache: (rows, seqlen, num_heads_kv, dim), or pages with `page_table`.
        rotary: cos and sin (positions, rotary_dim / 2), and (batch,) int32 positions of the first
            new tokens, None: `cache_seqlens`.
        descale: (batch, num_heads_kv); stored values are x / descale.
    """
    capacity = cache.shape[1] if page_table is None else page_table.shape[1] * cache.shape[1]
    _run(x, cache, cache_seqlens, page_table, cache_batch_idx, cu_seqlens, rotary, descale,
         capacity=capacity, into_cache=True, advances=True, interleaved=interleaved)  # fmt: skip


def rotated(
    x: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    *,
    capacity: int,
    advances: bool,
    interleaved: bool,
) -> torch.Tensor:
    """Queries rotated by their positions: cache_seqlens (or those given) plus i if `advances`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, out, cache_seqlens, None, None, cu_seqlens, rotary, None,
         capacity=capacity, into_cache=False, advances=advances,
         interleaved=interleaved)  # fmt: skip
    return out


def _run(
    x: torch.Tensor,
    target: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    rotary: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None,
    descale: torch.Tensor | None,
    *,
    capacity: int,
    into_cache: bool,
    advances: bool,
    interleaved: bool,
) -> None:
    cos, sin, positions = rotary if rotary is not None else (None, None, None)
    if cos is not None and sin is not None:  # an angle's rows are read as vectors
        cos, sin = (t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin))
    table = page_table
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    tensors = (
        x,
        target,
        _flat(cache_seqlens),
        table,
        _flat(cache_batch_idx),
        _flat(cu_seqlens),
        cos,
        sin,
        _flat(positions),
        _flat(descale),
        *(None,) * 3,
    )
    launch = append_launch(
        tensors,
        capacity=capacity,
        into_cache=into_cache,
        advances=advances,
        interleaved=interleaved,
    )
    if launch is not None:
        launch(as_bytes(x), as_bytes(target), *tensors[2:])


def append_launch(
    tensors: Sequence[torch.Tensor | None],
    *,
    capacity: int,
    into_cache: bool,
    advances: bool,
    interleaved: bool,
    order: str = "none",
    early: bool = False,
) -> Launch | None:
    """The launch for the kernel's tensors (fp8 ones are given to it as bytes); None where there is
    nothing to move. Vectors, and rows of the table and of the angles, are contiguous. `order` as in
    `launch_order`; early: the launch may start before the one ahead has ended."""
    x, target, _, table, _, cu_seqlens, cos, sin, _, _, v, v_target, _ = tensors
    assert x is not None
    assert target is not None
    if v is None or v_target is None:  # any numbers
        v, v_target = x, target
    packed = cu_seqlens is not None
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if 0 in (x.numel(), target.numel(), capacity, batch):
        return None
    num_heads, head_dim = x.shape[-2:]
    seqlen = x.shape[-3]
    slots = seqlen // BLOCK_T + batch if packed else triton.cdiv(seqlen, BLOCK_T) * batch
    strides: dict[str, int] = {}
    for name, one in (("x", x), ("c", target), ("v", v), ("w", v_target)):
        four = (0, *one.stride()) if one.dim() == 3 else one.stride()
        strides |= {f"stride_{name}{d}": n for d, n in zip("bnhd", four, strict=True)}
    return Launch(
        flashdig_append_kv,
        check_grid(slots * num_heads),
        {
            "batch": batch,
            "seqlen": seqlen,
            "num_heads": num_heads,
            "capacity": capacity,
            "cache_rows": target.shape[0],
            "rotary_rows": 1 if cos is None else cos.shape[0],
            **strides,
            "stride_table": 0 if table is None else table.stride(0),
            "stride_cos": 0 if cos is None else cos.stride(0),
            "stride_sin": 0 if sin is None else sin.stride(0),
            "HEAD_DIM": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "HEAD_DIM_V": v.shape[-1],
            "BLOCK_DV": triton.next_power_of_2(v.shape[-1]),
            "BLOCK_T": BLOCK_T,
            "PACKED": packed,
            "PAGE_SIZE": 0 if table is None else target.shape[1],
            "INTO_CACHE": into_cache,
            "ADVANCES": advances,
            "ROTARY_DIM": 0 if cos is None else 2 * cos.shape[1],
            "INTERLEAVED": interleaved,
            "X_FP8": FP8_KINDS.get(x.dtype, "none"),
            "CACHE_FP8": FP8_KINDS.get(target.dtype, "none"),
            "ORDER": order,
        },
        num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )


def _flat(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
