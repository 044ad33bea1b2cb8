"""Launches of attention over a cache: the tile, the splits, the parts and their joining."""

from __future__ import annotations

from typing import Any

import torch
import triton

from flashdig.kernels.launch import multiprocessors
from flashdig.kernels.triton.arguments import architecture_of, check_grid, row_contiguous
from flashdig.kernels.triton.combine import flashdig_combine
from flashdig.kernels.triton.decode import flashdig_decode
from flashdig.kernels.triton.decode_arguments import CacheCall
from flashdig.kernels.triton.decode_choose import (
    CROWD,
    INVARIANT_SPLIT,
    LONG_BYTES,
    MAX_RAGGED_BATCH,
    MAX_SPLITS,
    PART_BYTES,
    PIECES,
    DecodeTile,
    block_rows,
    choose_decode_tile,
    choose_splits,
)
from flashdig.kernels.triton.decode_ragged import flashdig_combine_ragged, flashdig_decode_ragged

# multiprocessors in the interpreter, and for tensors without memory
INTERPRETED = 4


def cache_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    cu_seqlens_new: torch.Tensor | None,
    page_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    *,
    softmax_scale: float,
    softcap: float,
    window_left: int,
    window_right: int,
    top_left: bool,
    allow_tf32: bool,
    seqlen_new: int,
    num_splits: int,
    batch_invariant: bool,
    out_dtype: torch.dtype | None = None,
    tile: DecodeTile | None = None,
    ragged: bool | None = None,
    arch: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of queries over a cache that already holds every key; arguments were checked.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or (total_q, num_heads, head_dim) with
            `cu_seqlens_q` (batch + 1,) and perhaps `seqused_q` (batch,), int32.
        k, v: (rows, seqlen, num_heads_kv, dim), or (num_pages, page_size, num_heads_kv, dim) with
            `page_table` (batch, max_pages) int32.
        cache_seqlens: (batch,) int32 keys of each sequence, less `seqlen_new` or the lengths of
            `cu_seqlens_new` (whose total `seqlen_new` is then); None is all of the cache.
        cu_seqlens_k: (batch + 1,) whose differences bound the lengths as well.
        num_splits: parts of the keys; 0 chooses.
        batch_invariant: parts and tiles of fixed sizes, so that no bit of a row depends on others.
        ragged: the device cuts the keys by the sequences' lengths; None chooses.
        tile, arch: other than the ones that the device gets.

    Returns: out (as q with head_dim_v), and lse (batch, num_heads, seqlen_q) or (num_heads,
        total_q) in float32.
    """
    vectors = (cache_seqlens, cu_seqlens_k, cu_seqlens_new)
    more = (cache_batch_idx, cache_leftpad, cu_seqlens_q, seqused_q)
    call = CacheCall(
        row_contiguous(q),
        row_contiguous(k),
        row_contiguous(v),
        *map(_contiguous, vectors),
        page_table if page_table is None or page_table.stride(1) == 1 else page_table.contiguous(),
        *map(_contiguous, more),
        alibi_slopes
        if alibi_slopes is None or alibi_slopes.stride(-1) == 1
        else alibi_slopes.contiguous(),
        *map(_contiguous, (sinks, q_descale, k_descale, v_descale)),
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        allow_tf32=allow_tf32,
        seqlen_new=seqlen_new,
    )
    dtype = out_dtype or (torch.bfloat16 if q.element_size() == 1 else q.dtype)
    shape = (*q.shape[:-1], v.shape[-1])
    if call.empty:
        return _without_keys(call, shape, dtype)
    make_out, make_lse = (torch.zeros, torch.full) if call.packed else (torch.empty, None)
    out = make_out(shape, dtype=dtype, device=q.device)
    lse = (
        torch.empty(call.lse_shape, dtype=torch.float32, device=q.device)
        if make_lse is None  # slack rows of packed input belong to no program
        else make_lse(call.lse_shape, float("-inf"), device=q.device)
    )
    if tile is None:
        tile = _tile(call, arch or architecture_of(q.device), batch_invariant)
    if ragged is None:
        ragged = num_splits == 0 and not batch_invariant and _may_be_ragged(call, tile)
    splits = _splits(call, tile, num_splits, batch_invariant)
    if ragged:
        _launch_ragged(call, tile, splits, out, lse)
    else:
        _launch(call, tile, splits, batch_invariant, out, lse)
    return out, lse


def _tile(call: CacheCall, arch: str, batch_invariant: bool) -> DecodeTile:
    tokens = -(-call.seqlen_q // call.batch) if call.packed else call.seqlen_q
    head_dims = (call.q.shape[-1], call.v.shape[-1])
    element_bytes = max(2, call.q.element_size())  # fp8 queries are read as float16
    sizes = (tokens * call.group_size, call.group_size)
    block_m = block_rows(
        arch,
        element_bytes,
        call.k.element_size(),
        *head_dims,
        *sizes,
        batch_invariant=batch_invariant,
    )
    tiles = call.slots(block_m) * call.num_heads_kv
    room = call.batch * call.capacity * call.num_heads_kv * sum(head_dims) * call.k.element_size()
    return choose_decode_tile(
        arch,
        element_bytes,
        call.k.element_size(),
        *head_dims,
        *sizes,
        paged=call.page_table is not None,
        crowded=tiles >= CROWD * multiprocessors(call.q.device, INTERPRETED),
        long=room >= LONG_BYTES,
        batch_invariant=batch_invariant,
    )


def _splits(call: CacheCall, tile: DecodeTile, num_splits: int, batch_invariant: bool) -> int:
    if batch_invariant:
        return -(-call.capacity // INVARIANT_SPLIT)
    key_tiles = -(-call.capacity // tile.block_n)
    tiles = call.slots(tile.block_m) * call.num_heads_kv
    if num_splits > 0:
        splits = min(num_splits, key_tiles, MAX_SPLITS)
    else:
        processors = multiprocessors(call.q.device, INTERPRETED)
        if tiles < CROWD * processors:  # programs that share one have room for two
            processors *= min(tile.resident, 2)
        splits = choose_splits(tiles, call.capacity, tile.block_n, processors)
    row = 4 * tile.block_m * call.v.shape[-1]
    return max(1, min(splits, PART_BYTES // max(1, tiles * row)))


def _launch(
    call: CacheCall,
    tile: DecodeTile,
    splits: int,
    batch_invariant: bool,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    arguments = call.arguments(fp8_hardware=_fp8_hardware(call.q.device))
    split = splits > 1 or batch_invariant
    slots = call.slots(tile.block_m)
    at_once = slots
    part = part_lse = None
    block_dv = arguments["BLOCK_DV"]
    if split:
        rows = splits * call.num_heads_kv * tile.block_m
        at_once = max(1, min(slots, PART_BYTES // (4 * rows * block_dv)))
        part = torch.empty((at_once * rows, block_dv), dtype=torch.float32, device=out.device)
        part_lse = torch.empty(at_once * rows, dtype=torch.float32, device=out.device)
    for first_slot in range(0, slots, at_once):
        count = min(at_once, slots - first_slot)
        flashdig_decode[(check_grid(count * call.num_heads_kv * splits),)](
            **arguments,
            out_ptr=out,
            lse_ptr=lse,
            part_ptr=part,
            part_lse_ptr=part_lse,
            first_slot=first_slot,
            slots=count,
            splits=splits,
            SPLIT=split,
            SPLIT_SIZE=INVARIANT_SPLIT if batch_invariant else 0,
            ONE_PHASE=batch_invariant or tile.block_m < 64,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            NUM_STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
        if split:
            kept = ("sinks_ptr", "cu_q_ptr", "used_q_ptr", "batch", "num_heads_kv", "seqlen_q")
            constants = ("HEAD_DIM_V", "BLOCK_DV", "GROUP", "PACKED", "SINKS")
            flashdig_combine[(check_grid(count * call.num_heads_kv * tile.block_m),)](
                part_ptr=part,
                part_lse_ptr=part_lse,
                out_ptr=out,
                lse_ptr=lse,
                **{name: arguments[name] for name in (*kept, *constants)},
                first_slot=first_slot,
                slots=count,
                splits=splits,
                BLOCK_M=tile.block_m,
                num_warps=4,
            )


def _may_be_ragged(call: CacheCall, tile: DecodeTile) -> bool:
    """Several sequences with lengths of their own, each in one tile of rows."""
    rows = call.seqlen_q * call.group_size
    several = 1 < call.batch <= MAX_RAGGED_BATCH
    return several and not call.packed and rows <= tile.block_m and call.cache_seqlens is not None


def _launch_ragged(
    call: CacheCall, tile: DecodeTile, splits: int, out: torch.Tensor, lse: torch.Tensor
) -> None:
    arguments = call.arguments(fp8_hardware=_fp8_hardware(call.q.device))
    block_dv = arguments["BLOCK_DV"]
    pairs = call.batch * call.num_heads_kv
    wanted = PIECES * multiprocessors(call.q.device, INTERPRETED) * tile.resident
    programs = check_grid(max(pairs * splits, wanted + pairs))
    rows = programs * tile.block_m
    part = torch.empty((rows, block_dv), dtype=torch.float32, device=out.device)
    part_lse = torch.empty(rows, dtype=torch.float32, device=out.device)
    shared = {
        "out_ptr": out,
        "lse_ptr": lse,
        "part_ptr": part,
        "part_lse_ptr": part_lse,
        "splits": splits,
        "wanted": wanted,
        "BLOCK_B": max(128, triton.next_power_of_2(call.batch)),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
    }
    flashdig_decode_ragged[(programs,)](
        **arguments,
        **shared,
        SPLIT=True,
        NUM_STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )
    kept = ("seqlens_ptr", "cu_k_ptr", "cu_new_ptr", "leftpad_ptr", "sinks_ptr", "batch")
    sizes = ("num_heads_kv", "seqlen_q", "seqlen_new", "capacity", "left", "right")
    constants = ("HEAD_DIM_V", "BLOCK_DV", "GROUP", "TOP_LEFT", "LEFT", "RIGHT", "SINKS")
    flashdig_combine_ragged[(check_grid(call.batch * call.num_heads * call.seqlen_q),)](
        **{name: arguments[name] for name in (*kept, *sizes, *constants)},
        **shared,
        num_warps=4,
    )


def _without_keys(
    call: CacheCall, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see nothing: out 0; lse -inf, or the sink's logit."""
    out = torch.zeros(shape, dtype=dtype, device=call.q.device)
    lse = torch.full(call.lse_shape, float("-inf"), device=call.q.device)
    if call.sinks is not None and not call.packed:
        lse = lse.copy_(call.sinks.float()[:, None])
    return out, lse


def _contiguous(x: torch.Tensor | None) -> Any:
    return None if x is None else x.contiguous()


def _fp8_hardware(device: torch.device) -> bool:
    """Whether the chip converts e4m3 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
