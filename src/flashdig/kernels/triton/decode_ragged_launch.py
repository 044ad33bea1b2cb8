"""Launches for sequences of different lengths: the plan that the device makes, its pieces, the
joining of their parts.

Where packed queries may hold a chunk of a prompt beside tokens that decode, there are two plans.
Few rows are bound by reading keys and want a low tile, many by the tensor cores and want a tall
one. On chips that can, the second launch starts while the first one runs, on the multiprocessors
that chunks have left.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import triton

from flashdig.kernels.launch import Launch, multiprocessors
from flashdig.kernels.triton.arguments import check_grid
from flashdig.kernels.triton.combine import HELD
from flashdig.kernels.triton.decode_arguments import CacheCall
from flashdig.kernels.triton.decode_choose import (
    CHUNK_ROWS,
    INTERPRETED,
    JOINED_ROWS,
    MAX_PLANNED_SLOTS,
    PART_BYTES,
    PIECES,
    TAPER,
    DecodeTile,
    block_of,
)
from flashdig.kernels.triton.decode_plan import (
    CHUNK_TILES,
    COUNTERS,
    SLOT_FIELDS,
    flashdig_plan_pieces,
)
from flashdig.kernels.triton.decode_ragged import flashdig_combine_ragged, flashdig_decode_ragged

if TYPE_CHECKING:
    from flashdig.kernels.hopper.cache_launch import ListedAttention
    from flashdig.kernels.triton.decode_launch import Schedule

# `launch_order` of the plan, the attention and the joining; short sequences' come second
ORDERS = {
    "all": ("waits", "waits", "last"),
    "long": ("waits", "waits", "waits"),
    "short": ("overlaps", "overlaps", "last"),
}
# (which tensors it takes, the launch), in turn
Launches = list[tuple[str, Launch]]


def may_be_ragged(call: CacheCall, tile: DecodeTile, splits: int) -> bool:
    """Several sequences whose lengths the device knows, not too many for a plan and its parts."""
    return call.batch > 1 and _knows_lengths(call) and _fits(call, "all", tile, splits)


def may_hold_chunks(call: CacheCall) -> bool:
    """Whether packed queries may hold a chunk of a prompt beside tokens that decode."""
    if not call.packed or call.batch <= 1 or not _knows_lengths(call):
        return False
    return (call.seqlen_q - call.batch) * call.group_size >= CHUNK_ROWS


def fits_mixed(call: CacheCall, tile: DecodeTile, chunks: DecodeTile) -> bool:
    """Whether both plans and their parts have room."""
    return fits_short(call, tile) and _fits(call, "long", chunks, 1)


def fits_short(call: CacheCall, tile: DecodeTile) -> bool:
    """Whether the plan of short sequences and its parts have room."""
    return _fits(call, "short", tile, 1)


def _knows_lengths(call: CacheCall) -> bool:
    return call.cache_seqlens is not None or call.cu_seqlens_k is not None


def _fits(call: CacheCall, kind: str, tile: DecodeTile, splits: int) -> bool:
    slots = _slots(call, kind, tile)
    rows = _most_pieces(call, kind, slots, splits) * call.num_heads_kv * tile.block_m
    return slots <= MAX_PLANNED_SLOTS and 4 * rows * block_of(call.v.shape[-1]) <= PART_BYTES


def _slots(call: CacheCall, kind: str, tile: DecodeTile) -> int:
    return CHUNK_TILES.value * call.batch if kind == "short" else call.slots(tile.block_m)


def _most_pieces(call: CacheCall, kind: str, slots: int, splits: int) -> int:
    """How many pieces a plan may have for each KV head: the last of the keys may be cut four times
    as fine as the others, see `flashdig_plan_pieces`."""
    return max(slots * splits, 2 * _wanted(call, kind) // call.num_heads_kv + 2 * slots)


def _wanted(call: CacheCall, kind: str) -> int:
    processors = multiprocessors(call.q.device, INTERPRETED)
    # of chunks, only what is longer than a quarter more than an even share is cut
    return max(1, processors * 4 // 5) if kind == "long" else PIECES * processors


def ragged_launches(
    call: CacheCall, schedule: Schedule, numbers: Mapping[str, Any]
) -> tuple[Launches, list[tuple[int, int]]]:
    """The launches, and of each plan how many rows of parts and how many numbers it needs: of the
    sequences' plan, and then of the chunks'. Of a schedule with `listed` sequences the others'."""
    if schedule.chunks is None:
        kind = "short" if schedule.listed is not None else "all"
        launches, sizes = _launches(call, kind, schedule.tile, schedule, numbers)
        return list(zip(("plan", "ragged", "join ragged"), launches, strict=True)), [sizes]
    short, short_sizes = _launches(call, "short", schedule.tile, schedule, numbers)
    long, long_sizes = _launches(call, "long", schedule.chunks, schedule, numbers)
    names = ("plan chunks", "plan", "chunks", "ragged", "join chunks", "join ragged")
    both = (launch for pair in zip(long, short, strict=True) for launch in pair)
    return list(zip(names, both, strict=True)), [short_sizes, long_sizes]


def listed_launches(call: CacheCall, schedule: Schedule) -> tuple[ListedAttention, Launches]:
    """The launches of sequences with many rows where the Hopper forward takes them, and what knows
    their arguments."""
    from flashdig.kernels.hopper.cache_launch import ListedAttention

    assert schedule.listed is not None
    orders = ("none", "none")
    if schedule.ordered:
        orders = ("waits", "waits" if schedule.short else "last")
    shortest = shortest_listed(call, schedule)
    listed = ListedAttention(call, schedule.listed, shortest, orders, schedule.follows)
    return listed, [("list", listed.listing), ("listed", listed.attending)]


def shortest_listed(call: CacheCall, schedule: Schedule) -> int:
    """Query tokens of a sequence from which on it is listed."""
    if not schedule.short:
        return 1
    return CHUNK_TILES.value * schedule.tile.block_m // call.group_size + 1


def _launches(
    call: CacheCall, kind: str, tile: DecodeTile, schedule: Schedule, numbers: Mapping[str, Any]
) -> tuple[list[Launch], tuple[int, int]]:
    """(plan, attention, joining) of one kind of sequences, rows of parts and numbers of the plan"""
    heads, slots = call.num_heads_kv, _slots(call, kind, tile)
    pieces = _most_pieces(call, kind, slots, schedule.splits)
    programs = check_grid(pieces * heads)
    planning, attending, joining = ORDERS[kind] if schedule.ordered else ("none",) * 3
    # where a program holds much of a multiprocessor, those without a piece would cost time; wider
    # heads leave no registers for it
    loop = tile.resident <= 2 and max(call.q.shape[-1], call.v.shape[-1]) <= 256
    loop = loop or (kind != "all" and schedule.ordered)
    if loop:
        held = tile.resident * multiprocessors(call.q.device, INTERPRETED)
        programs = min(programs, held)

    early: dict[str, Any] = {"launch_pdl": True} if schedule.ordered else {}

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
            "wanted": _wanted(call, kind),
            "TAPER": TAPER and kind != "long",
            "KIND": kind,
            "SHORT_ROWS": CHUNK_TILES.value * schedule.tile.block_m,
            "ORDER": planning,
            "BLOCK_S": max(128, triton.next_power_of_2(slots)),
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
        },
        num_warps=4,
        **(early if kind == "short" or schedule.follows else {}),
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
            "BACKWARDS": kind == "long",
            "ORDER": attending,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "NUM_STAGES": tile.num_stages,
        },
        num_warps=tile.num_warps,
        # left alone, ptxas takes more than several blocks can have; a chunk's program may take all
        **({"maxnreg": tile.registers} if tile.resident > 2 else {}),
        **early,
    )
    rows = tile.block_m
    if not call.packed:
        rows = min(rows, triton.next_power_of_2(call.seqlen_q * call.group_size))
    together, held_parts, shares = JOINED_ROWS, HELD.value, 0
    if kind != "all":
        # most rows of short sequences are none, and few of those of chunks have parts
        held_parts, shares = 2 * held_parts, 2 if kind == "long" else 1
        if kind == "short":
            together = triton.next_power_of_2(call.group_size)
    at_once = min(rows, together, max(1, 1024 // numbers["BLOCK_DV"]))
    shares = shares or rows // at_once
    constants = ("HEAD_DIM_V", "BLOCK_DV", "GROUP", "PACKED", "SINKS")
    join = Launch(
        flashdig_combine_ragged,
        check_grid(slots * heads * shares),
        {
            **of_problem("num_heads_kv", "seqlen_q", *constants),
            "ROWS": at_once,
            "TILE_ROWS": rows,
            "SHARES": shares,
            "HELD": held_parts,
            "ORDER": joining,
            "BLOCK_M": tile.block_m,
        },
        num_warps=4,
        **early,
    )
    planned = SLOT_FIELDS.value * slots + COUNTERS.value + pieces
    return [plan, attend, join], (pieces * heads * tile.block_m, planned)
