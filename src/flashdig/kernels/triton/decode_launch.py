"""Launches of attention over a cache: the tile, the splits, the parts and their joining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from flashdig.kernels.launch import Launch, allocation, multiprocessors
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton.arguments import architecture_of, check_grid, row_contiguous
from flashdig.kernels.triton.combine import flashdig_combine
from flashdig.kernels.triton.decode import flashdig_decode
from flashdig.kernels.triton.decode_arguments import CacheCall, as_bytes
from flashdig.kernels.triton.decode_choose import (
    CROWD,
    INVARIANT_SPLIT,
    JOINED_ROWS,
    LONG_KEYS,
    MAX_PLANNED_SLOTS,
    MAX_SPLITS,
    PART_BYTES,
    PIECES,
    TAPER,
    DecodeTile,
    block_of,
    block_rows,
    choose_decode_tile,
    choose_splits,
)
from flashdig.kernels.triton.decode_plan import COUNTERS, SLOT_FIELDS, flashdig_plan_pieces
from flashdig.kernels.triton.decode_ragged import flashdig_combine_ragged, flashdig_decode_ragged
from flashdig.kernels.triton.slack import clearing

# multiprocessors in the interpreter, and for tensors without memory
INTERPRETED = 4
# (which tensors it takes, the launch), in turn
Launches = list[tuple[str, Launch]]


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
    call = prepared(
        (q, k, v, *lengths, *more, q_descale, k_descale, v_descale),
        softmax_scale=softmax_scale,
        softcap=softcap,
        window_left=window_left,
        window_right=window_right,
        top_left=top_left,
        allow_tf32=allow_tf32,
        seqlen_new=seqlen_new,
    )
    dtype = out_dtype or (torch.bfloat16 if q.element_size() == 1 else q.dtype)
    if call.empty:
        return _without_keys(call, dtype)
    schedule = schedule_of(call, num_splits, batch_invariant, tile, ragged, arch)
    plan = CachePlan(call, dtype, schedule)
    out, lse, *parts = (make() for make in plan.makes)
    for launch, tensors in plan.launches(call.tensors, (out, lse, *parts)):
        launch(*tensors)
    return out, lse


def prepared(tensors: Sequence[torch.Tensor | None], **numbers: Any) -> CacheCall:
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


@dataclass(frozen=True)
class Schedule:
    """How the rows and keys of a call are shared out.

    Attributes:
        splits: parts of each sequence's keys; `ragged`: where their lengths are about equal.
        split_size: keys of a part, 0: by their number.
    """

    tile: DecodeTile
    splits: int
    split_size: int
    ragged: bool


def schedule_of(
    call: CacheCall,
    num_splits: int,
    batch_invariant: bool,
    tile: DecodeTile | None = None,
    ragged: bool | None = None,
    arch: str | None = None,
) -> Schedule:
    """The schedule of `cache_attention`'s arguments."""
    if tile is None:
        tile = _tile(call, arch or architecture_of(call.q.device), batch_invariant)
    splits = _splits(call, tile, num_splits, batch_invariant)
    if ragged is None:
        ragged = num_splits == 0 and not batch_invariant and _may_be_ragged(call, tile, splits)
    return Schedule(tile, splits, INVARIANT_SPLIT if batch_invariant else 0, ragged)


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
    return choose_decode_tile(
        arch,
        element_bytes,
        call.k.element_size(),
        *head_dims,
        *sizes,
        paged=call.page_table is not None,
        crowded=tiles >= CROWD * multiprocessors(call.q.device, INTERPRETED),
        long=call.capacity >= LONG_KEYS,
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


class CachePlan:
    """The launches of one kind of call, and what they write: see `flashdig.kernels.replay`. Called
    with the tensors of `cache_attention`, in its order."""

    __slots__ = ("_clear_slack", "_fp8", "_launches", "makes")

    def __init__(self, call: CacheCall, dtype: torch.dtype, schedule: Schedule) -> None:
        self._fp8 = call.q.element_size() == 1 or call.k.element_size() == 1
        launches = _ragged_launches if schedule.ragged else _even_launches
        self._launches, part_rows, planned = launches(call, schedule)
        made = [(call.out_shape, dtype), (call.lse_shape, torch.float32)]
        if part_rows > 0:
            width = block_of(call.v.shape[-1])
            made += [((part_rows, width), torch.float32), ((part_rows,), torch.float32)]
        if planned > 0:
            made.append(((planned,), torch.int32))
        self.makes = tuple(allocation(*one, call.q.device) for one in made)
        self._clear_slack = None
        if call.packed:  # slack rows belong to no program
            heads = call.num_heads, call.v.shape[-1]
            self._clear_slack = clearing(call.batch, call.seqlen_q, *heads)

    def launches(
        self, tensors: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> Steps:
        q, k, v, seqlens, cu_k, cu_new, table, batch_idx, leftpad, cu_q, used_q, *rest = tensors
        out, lse, part, part_lse, plan = (*made, None, None, None)[:5]
        if self._fp8:
            q, k, v = (x if x is None else as_bytes(x) for x in (q, k, v))
        lengths = (seqlens, cu_k, cu_new, leftpad)
        read = (table, *lengths, batch_idx, cu_q, used_q, *rest)
        sinks = rest[1]
        arguments = {
            "plan": (plan, *lengths, cu_q, used_q),
            "even": (q, k, v, out, lse, part, part_lse, *read),
            "ragged": (q, k, v, out, lse, part, part_lse, plan, *read),
            "join": (part, part_lse, out, lse, sinks, cu_q, used_q),
            "join ragged": (part, part_lse, out, lse, sinks, plan, cu_q, used_q),
        }
        steps: Steps = []
        if self._clear_slack is not None:
            steps.append((self._clear_slack, (out, lse, cu_q, used_q)))
        return steps + [(launch, arguments[kind]) for kind, launch in self._launches]


def _even_launches(call: CacheCall, schedule: Schedule) -> tuple[Launches, int, int]:
    """The launches, how many rows of parts they need, and how many numbers of a plan."""
    tile, splits = schedule.tile, schedule.splits
    split = splits > 1 or schedule.split_size > 0
    slots = call.slots(tile.block_m)
    at_once, rows = slots, 0
    if split:
        rows = splits * call.num_heads_kv * tile.block_m
        at_once = max(1, min(slots, PART_BYTES // (4 * rows * block_of(call.v.shape[-1]))))
    numbers = call.numbers(_fp8_hardware(call.q.device))
    rows_of_tile = tile.block_m
    if not call.packed:
        rows_of_tile = min(rows_of_tile, call.seqlen_q * call.group_size)
    launches: Launches = []
    for first_slot in range(0, slots, at_once):
        count = min(at_once, slots - first_slot)
        grid = {"first_slot": first_slot, "slots": count, "splits": splits}
        attend = Launch(
            flashdig_decode,
            check_grid(count * call.num_heads_kv * splits),
            {
                **numbers,
                **grid,
                "SPLIT": split,
                "SPLIT_SIZE": schedule.split_size,
                "ONE_PHASE": schedule.split_size > 0 or tile.block_m < 64,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "NUM_STAGES": tile.num_stages,
            },
            num_warps=tile.num_warps,
        )
        launches.append(("even", attend))
        if split:
            sizes = ("batch", "num_heads_kv", "seqlen_q")
            constants = ("HEAD_DIM_V", "BLOCK_DV", "GROUP", "PACKED", "SINKS")
            join = Launch(
                flashdig_combine,
                check_grid(count * call.num_heads_kv * rows_of_tile),
                {
                    **{name: numbers[name] for name in (*sizes, *constants)},
                    **grid,
                    "BLOCK_M": tile.block_m,
                },
                num_warps=4,
            )
            launches.append(("join", join))
    return launches, at_once * rows, 0


def _may_be_ragged(call: CacheCall, tile: DecodeTile, splits: int) -> bool:
    """Several sequences whose lengths the device knows, not too many for a plan and its parts."""
    several = call.batch > 1 and call.slots(tile.block_m) <= MAX_PLANNED_SLOTS
    known = call.cache_seqlens is not None or call.cu_seqlens_k is not None
    rows = _most_pieces(call, tile, splits) * call.num_heads_kv * tile.block_m
    return several and known and 4 * rows * block_of(call.v.shape[-1]) <= PART_BYTES


def _most_pieces(call: CacheCall, tile: DecodeTile, splits: int) -> int:
    """How many pieces a plan may have for each KV head: the last of the keys may be cut four times
    as fine as the others, see `flashdig_plan_pieces`."""
    slots = call.slots(tile.block_m)
    return max(slots * splits, 2 * _wanted(call) // call.num_heads_kv + 2 * slots)


def _wanted(call: CacheCall) -> int:
    return PIECES * multiprocessors(call.q.device, INTERPRETED)


def _ragged_launches(call: CacheCall, schedule: Schedule) -> tuple[Launches, int, int]:
    """As `_even_launches`."""
    tile = schedule.tile
    heads, slots = call.num_heads_kv, call.slots(tile.block_m)
    pieces = _most_pieces(call, tile, schedule.splits)
    programs = check_grid(pieces * heads)
    # where a program holds much of a multiprocessor, those without a piece would cost time; wider
    # heads leave no registers for it
    loop = tile.resident <= 2 and max(call.q.shape[-1], call.v.shape[-1]) <= 256
    if loop:
        held = tile.resident * multiprocessors(call.q.device, INTERPRETED)
        programs = min(programs, held)
    numbers = call.numbers(_fp8_hardware(call.q.device))

    def of_problem(*names: str) -> dict[str, Any]:
        return {name: numbers[name] for name in names}

    sizes = ("batch", "num_heads_kv", "seqlen_q", "seqlen_new", "capacity", "left", "right")
    plan = Launch(
        flashdig_plan_pieces,
        slots,
        {
            **of_problem(*sizes, "GROUP", "PACKED", "TOP_LEFT", "LEFT", "RIGHT"),
            "slots": slots,
            "splits": schedule.splits,
            "wanted": _wanted(call),
            "TAPER": TAPER,
            "BLOCK_S": max(128, triton.next_power_of_2(slots)),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        num_warps=4,
    )
    attend = Launch(
        flashdig_decode_ragged,
        programs,
        {
            **numbers,
            "slots": slots,
            "SPLIT": True,
            "ONE_PHASE": tile.block_m < 64,
            "LOOP": loop,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "NUM_STAGES": tile.num_stages,
        },
        num_warps=tile.num_warps,
        # left alone, ptxas takes more than several blocks can have
        **({"maxnreg": tile.registers} if tile.resident > 2 else {}),
    )
    rows = tile.block_m
    if not call.packed:
        rows = min(rows, triton.next_power_of_2(call.seqlen_q * call.group_size))
    at_once = min(rows, JOINED_ROWS, max(1, 1024 // numbers["BLOCK_DV"]))
    constants = ("HEAD_DIM_V", "BLOCK_DV", "GROUP", "PACKED", "SINKS")
    join = Launch(
        flashdig_combine_ragged,
        check_grid(slots * heads * rows // at_once),
        {
            **of_problem("num_heads_kv", "seqlen_q", *constants),
            "ROWS": at_once,
            "TILE_ROWS": rows,
            "BLOCK_M": tile.block_m,
        },
        num_warps=4,
    )
    launches: Launches = [("plan", plan), ("ragged", attend), ("join ragged", join)]
    return (
        launches,
        pieces * heads * tile.block_m,
        SLOT_FIELDS.value * slots + COUNTERS.value + pieces,
    )


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
