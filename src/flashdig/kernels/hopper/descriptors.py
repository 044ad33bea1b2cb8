"""TMA descriptors of attention's tensors: in which form each tensor is taken, and its blocks.

Host code. The forms are those of `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton

from flashdig.kernels.gluon_api import gl
from flashdig.kernels.launch import Tiles

# head_dim up to so much -> widths of its column blocks; what a tensor lacks arrives as zeros
BLOCKS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
TURN = 1 << 30
_UNBOUNDED = 0x7FFF0000
_ALIGNMENT = 16  # bytes, of addresses and strides
_SWIZZLED = 128  # bytes of a row that shared memory keeps together
_DTYPES = {
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def padded(head_dim: int) -> int:
    """The head_dim that a kernel is compiled for.

    Raises ValueError above 256.
    """
    for width in BLOCKS:
        if head_dim <= width:
            return width
    raise ValueError(f"head_dim must be at most {max(BLOCKS)}, got {head_dim}")


def fits_into(head_dim: int, other: int) -> bool:
    """A tile of one width fits into the memory of a tile of the other, block by block."""
    blocks, others = BLOCKS[padded(head_dim)], BLOCKS[padded(other)]
    return blocks[0] == others[0] and blocks[1] in (0, others[1])


def taken_by_tma(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy of it where its address or strides are none that TMA takes."""
    if strides_fit(x) and x.data_ptr() % _ALIGNMENT == 0:
        return x
    return x.contiguous() if not x.is_contiguous() else x.clone()


def strides_fit(x: torch.Tensor) -> bool:
    """Whether TMA takes the strides of x."""
    unit = _ALIGNMENT // x.element_size()
    strides = [s for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1]
    fits = all(s % unit == 0 and 0 <= s < 2**40 // x.element_size() for s in strides)
    return fits and x.stride(-1) == 1


def tiles_of(
    name: str, x: torch.Tensor, tile_rows: int, *, seqlen: int | None = None, group: int = 1
) -> dict[str, Tiles]:
    """What a kernel copies of x through its argument `name`, and `name`_rest for a second column
    block.

    Args:
        x: dense (batch, seqlen, heads, head_dim) or packed (total, heads, head_dim).
        tile_rows: rows that are copied at once.
        seqlen: rows of a dense x that are there; None is all.
        group: query heads that share a KV head, to be copied together; of a packed x a power of
            two, since a tile of more rows would reach into the next group.

    Raises ValueError for a packed x of more than 2**30 rows.
    """
    form = _packed if x.dim() == 3 else _dense if group == 1 else _grouped
    shape, strides, rows = form(x, tile_rows, seqlen, group)
    dtype = _DTYPES[x.dtype]
    widths = _column_blocks(name, x.shape[-1])
    return {at: _tiles(shape, strides, [*rows, width], dtype) for at, width in widths.items()}


def cache_tiles_of(name: str, x: torch.Tensor, piece: int, *, paged: bool) -> dict[str, Tiles]:
    """`tiles_of` a cache (rows or pages, seqlen, heads, head_dim), as packed rows.

    Args:
        piece: keys that are copied at once. A piece of a page is as wide as shared memory keeps
            together, so that a tile of several pieces is laid out as one that came at once.

    Raises ValueError for a cache of more than 2**31 rows.
    """
    of_row, of_head = _strides(x)[1:3]
    rows = rows_between(x)
    if x.shape[0] * rows >= _UNBOUNDED:
        raise ValueError(f"a cache may have less than 2**31 rows here, got {x.shape[0] * rows}")
    shape, strides, block = _packed_form(*x.shape[2:], of_row, of_head, piece)
    dtype = _DTYPES[x.dtype]
    most = _SWIZZLED // x.element_size() if paged else max(BLOCKS)
    widths = _column_blocks(name, x.shape[-1])
    return {
        at: _tiles(shape, strides, [*block, min(width, most)], dtype)
        for at, width in widths.items()
    }


def rows_between(cache: torch.Tensor) -> int:
    """From one row or page of a cache to the next, in keys; 0 where that is no whole number."""
    of_first, of_row = cache.stride()[:2]
    if cache.shape[1] == 1:
        of_row = _strides(cache)[1]
    return of_first // of_row if of_row > 0 and of_first % of_row == 0 else 0


def values_by_column(
    name: str, shape: tuple[int, int, int, int], tile_keys: int
) -> dict[str, Tiles]:
    """`tiles_of` a contiguous e4m3 (batch, num_heads_kv, head_dim_v, keys); column blocks of V are
    blocks of rows here."""
    _, heads, head_dim_v, keys = shape
    strides = (heads * head_dim_v * keys, head_dim_v * keys, keys, 1)
    return {
        at: _tiles(shape, strides, [1, 1, width, tile_keys], gl.float8e4nv)
        for at, width in _column_blocks(name, head_dim_v).items()
    }


def _column_blocks(name: str, head_dim: int) -> dict[str, int]:
    """The arguments of a tensor's column blocks, and the widths of these."""
    first, rest = BLOCKS[padded(head_dim)]
    return {name: first, f"{name}_rest": rest} if rest else {name: first}


def _tiles(shape: Sequence[int], strides: Sequence[int], block: list[int], dtype: Any) -> Tiles:
    layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
    return Tiles(tuple(shape), tuple(strides), tuple(block), layout)


Form = tuple[list[int], list[int], list[int]]


def _dense(x: torch.Tensor, tile_rows: int, seqlen: int | None, group: int) -> Form:
    batch, rows, heads, head_dim = x.shape
    of_batch, of_row, of_head, _ = _strides(x)
    shape = [batch, heads, rows if seqlen is None else seqlen, head_dim]
    return shape, [of_batch, of_head, of_row, 1], [1, 1, tile_rows]


def _grouped(x: torch.Tensor, tile_rows: int, seqlen: int | None, group: int) -> Form:
    batch, rows, heads, head_dim = x.shape
    of_batch, of_row, of_head, _ = _strides(x)
    together = triton.next_power_of_2(group)
    shape = [batch, heads // group, rows if seqlen is None else seqlen, group, head_dim]
    strides = [of_batch, of_head * group, of_row, of_head, 1]
    return shape, strides, [1, 1, tile_rows // together, together]


def _packed(x: torch.Tensor, tile_rows: int, seqlen: int | None, group: int) -> Form:
    total, heads, head_dim = x.shape
    if total > TURN:
        raise ValueError(f"packed tensors may have at most 2**30 rows on this backend, got {total}")
    of_row, of_head, _ = _strides(x)
    if group > 1:
        shape = [_UNBOUNDED, _UNBOUNDED, TURN, heads, head_dim]
        strides = [2**34 - of_row, of_row, of_row, of_head, 1]
        return shape, strides, [1, 1, tile_rows // group, group]
    return _packed_form(heads, head_dim, of_row, of_head, tile_rows)


def _packed_form(heads: int, head_dim: int, of_row: int, of_head: int, tile_rows: int) -> Form:
    shape = [_UNBOUNDED, _UNBOUNDED, heads, TURN, head_dim]
    return shape, [2**34 - of_row, of_row, of_head, of_row, 1], [1, 1, 1, tile_rows]


def _strides(x: torch.Tensor) -> list[int]:
    """Those of x, with one that TMA takes where a dimension has one element."""
    unit = _ALIGNMENT // x.element_size()
    return [s if n > 1 else unit for s, n in zip(x.stride(), x.shape, strict=True)]
