"""Launches of attention over a cache: the tile, the splits, where the parts lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from flashdig.kernels.launch import Launch, allocation, multiprocessors
from flashdig.kernels.plans import Plan
from flashdig.kernels.triton.arguments import architecture_of, check_grid, row_contiguous
from flashdig.kernels.triton.arrivals import arrival_counters
from flashdig.kernels.triton.combine import HELD
from flashdig.kernels.triton.decode import flashdig_decode
from flashdig.kernels.triton.decode_arguments import CacheCall, as_bytes
from flashdig.kernels.triton.decode_choose import (
    CROWD,
    INVARIANT_SPLIT,
    LONG_BYTES,
    MAX_RAGGED_BATCH,
    MAX_SPLITS,
    PART_BYTES,
    PIECES,
    DecodeTile,
    block_of,
    block_rows,
    choose_decode_tile,
    choose_splits,
    registers_for,
)
from flashdig.kernels.triton.decode_ragged import flashdig_decode_ragged
from flashdig.kernels.triton.slack import clearing

_CU_SEQLENS_Q = 6  # behind q, k and v
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
    lengths = (cache_seqlens, cu_seqlens_k, cu_seqlens_new, page_table, cache_batch_idx)
    more = (cache_leftpad, cu_seqlens_q, seqused_q, alibi_slopes, sinks)
    call = _prepared(
        (q, k, v, *lengths, *more, q_descale, k_descale, v_descale),
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        allow_tf32=allow_tf32,
        seqlen_new=seqlen_new,
    )
    dtype = out_dtype or _out_dtype(q)
    if call.empty:
        return _without_keys(call, dtype)
    schedule = _schedule(call, num_splits, batch_invariant, tile, ragged, arch)
    return _CachePlan(call, dtype, schedule)(*call.tensors)


def plan_cache_attention(
    *tensors: torch.Tensor | None,
    num_splits: int,
    batch_invariant: bool,
    out_dtype: torch.dtype | None = None,
    **numbers: Any,
) -> Plan | None:
    """The plan of `cache_attention`'s arguments; see `flashdig.kernels.launch`."""
    call = _prepared(tensors, **numbers)
    if call.empty or call.copies(tensors):
        return None
    schedule = _schedule(call, num_splits, batch_invariant, None, None, None)
    return _CachePlan(call, out_dtype or _out_dtype(call.q), schedule)


def _prepared(tensors: Sequence[torch.Tensor | None], **numbers: Any) -> CacheCall:
    """The call with its tensors as the kernels take them, copied where need be."""
    names = [field.name for field in fields(CacheCall)]
    arranged: dict[str, Any] = dict(zip(names, tensors, strict=False))
    for name, x in arranged.items():
        if x is None:
            continue
        if name in ("q", "k", "v"):
            arranged[name] = row_contiguous(x)
        elif name in ("page_table", "alibi_slopes"):  # rows at any distance
            arranged[name] = x if x.stride(-1) == 1 else x.contiguous()
        else:
            arranged[name] = x.contiguous()
    return CacheCall(**arranged, **numbers)


def _out_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.bfloat16 if q.element_size() == 1 else q.dtype


@dataclass(frozen=True)
class _Schedule:
    """How the rows and keys of a call are shared out.

    Attributes:
        splits: parts of each sequence's keys; `ragged`: where their lengths are about equal.
        split_size: keys of a part, 0: by their number.
    """

    tile: DecodeTile
    splits: int
    split_size: int
    ragged: bool


def _schedule(
    call: CacheCall,
    num_splits: int,
    batch_invariant: bool,
    tile: DecodeTile | None,
    ragged: bool | None,
    arch: str | None,
) -> _Schedule:
    if tile is None:
        tile = _tile(call, arch or architecture_of(call.q.device), batch_invariant)
    if ragged is None:
        ragged = num_splits == 0 and not batch_invariant and _may_be_ragged(call, tile)
    splits = _splits(call, tile, num_splits, batch_invariant)
    return _Schedule(tile, splits, INVARIANT_SPLIT if batch_invariant else 0, ragged)


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


class _CachePlan:
    """Allocates results and parts, and launches the kernels of one kind of call."""

    __slots__ = (
        "_allocations",
        "_clear_slack",
        "_counters",
        "_device",
        "_fp8",
        "_launches",
    )

    def __init__(self, call: CacheCall, dtype: torch.dtype, schedule: _Schedule) -> None:
        self._device = call.q.device
        self._fp8 = call.q.element_size() == 1 or call.k.element_size() == 1
        sizes: tuple[int, int]
        if schedule.ragged:
            self._launches, sizes = _ragged_launches(call, schedule)
        else:
            self._launches, sizes = _even_launches(call, schedule)
        part_rows, self._counters = sizes
        width = block_of(call.v.shape[-1])
        wanted = (
            (call.out_shape, dtype),
            (call.lse_shape, torch.float32),
            *(
                [((part_rows, width), torch.float32), ((part_rows,), torch.float32)]
                * (part_rows > 0)
            ),
        )
        self._allocations = [allocation(*one, self._device) for one in wanted]
        self._clear_slack = None
        if call.packed:  # slack rows belong to no program
            heads = call.num_heads, call.v.shape[-1]
            self._clear_slack = clearing(call.batch, call.seqlen_q, *heads)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *parts = (allocate() for allocate in self._allocations)
        if self._clear_slack is not None:
            self._clear_slack(out, lse, *others[_CU_SEQLENS_Q : _CU_SEQLENS_Q + 2])
        part = part_lse = arrived = None
        if parts:
            part, part_lse = parts
            arrived = arrival_counters(self._counters, self._device)
        if self._fp8:
            q, k, v = as_bytes(q), as_bytes(k), as_bytes(v)
        seqlens, cu_k, cu_new, table, batch_idx, leftpad, cu_q, used_q, *rest = others
        lengths = (table, seqlens, cu_k, cu_new, leftpad, batch_idx, cu_q, used_q)
        for launch in self._launches:
            launch(q, k, v, out, lse, part, part_lse, arrived, *lengths, *rest)
        return out, lse


def _even_launches(call: CacheCall, schedule: _Schedule) -> tuple[list[Launch], tuple[int, int]]:
    """The launches, and how many rows of parts and counters they need."""
    tile, splits = schedule.tile, schedule.splits
    split = splits > 1 or schedule.split_size > 0
    slots = call.slots(tile.block_m)
    at_once, rows = slots, 0
    if split:
        rows = splits * call.num_heads_kv * tile.block_m
        at_once = max(1, min(slots, PART_BYTES // (4 * rows * block_of(call.v.shape[-1]))))
    launches = []
    for first_slot in range(0, slots, at_once):
        count = min(at_once, slots - first_slot)
        numbers = {
            **call.numbers(_fp8_hardware(call.q.device)),
            "first_slot": first_slot,
            "slots": count,
            "splits": splits,
            "SPLIT": split,
            "SPLIT_SIZE": schedule.split_size,
            "ONE_PHASE": schedule.split_size > 0 or tile.block_m < 64,
            **_tile_numbers(call, schedule),
        }
        grid = check_grid(count * call.num_heads_kv * splits)
        options = {"num_warps": tile.num_warps}
        if tile.resident == 1:  # ptxas would rather spill than use what nobody else can
            options["maxnreg"] = 255
        launches.append(Launch(flashdig_decode, grid, numbers, **options))
    return launches, (at_once * rows, at_once * call.num_heads_kv)


def _tile_numbers(call: CacheCall, schedule: _Schedule) -> dict[str, int]:
    tile = schedule.tile
    rows = tile.block_m
    if schedule.split_size == 0:  # else the order of a sum depends on the number of tokens
        rows = min(rows, triton.next_power_of_2(call.seqlen_q * call.group_size))
    rows = min(rows, max(1, HELD.value // block_of(call.v.shape[-1])))
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "JOINED_ROWS": rows,
        "NUM_STAGES": tile.num_stages,
    }


def _may_be_ragged(call: CacheCall, tile: DecodeTile) -> bool:
    """Several sequences with lengths of their own, each in one tile of rows."""
    rows = call.seqlen_q * call.group_size
    several = 1 < call.batch <= MAX_RAGGED_BATCH
    return several and not call.packed and rows <= tile.block_m and call.cache_seqlens is not None


def _ragged_launches(call: CacheCall, schedule: _Schedule) -> tuple[list[Launch], tuple[int, int]]:
    """As `_even_launches`."""
    tile = schedule.tile
    pairs = call.batch * call.num_heads_kv
    resident = multiprocessors(call.q.device, INTERPRETED) * tile.resident
    wanted = PIECES * resident
    most = max(pairs * schedule.splits, wanted + pairs)
    numbers = {
        **call.numbers(_fp8_hardware(call.q.device)),
        "splits": schedule.splits,
        "wanted": wanted,
        "SPLIT": True,
        "BLOCK_B": max(128, triton.next_power_of_2(call.batch)),
        **_tile_numbers(call, schedule),
    }
    # all of the even case's pieces at once: programs beyond them would wait for room
    programs = check_grid(min(most, max(pairs * schedule.splits, resident)))
    options = {"num_warps": tile.num_warps, "maxnreg": registers_for(tile)}
    launch = Launch(flashdig_decode_ragged, programs, numbers, **options)
    return [launch], (most * tile.block_m, pairs)


def _without_keys(call: CacheCall, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that see nothing: out 0; lse -inf, or the sink's logit."""
    out = torch.zeros(call.out_shape, dtype=dtype, device=call.q.device)
    lse = torch.full(call.lse_shape, float("-inf"), device=call.q.device)
    if call.sinks is not None and not call.packed:
        lse = lse.copy_(call.sinks.float()[:, None])
    return out, lse


def _fp8_hardware(device: torch.device) -> bool:
    """Whether the chip converts e4m3 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
