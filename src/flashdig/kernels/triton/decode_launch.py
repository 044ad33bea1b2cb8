"""Launches of attention over a cache: the tile, the splits, the parts and their joining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from flashdig.kernels.launch import Launch, allocation, multiprocessors
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton.arguments import architecture_of, check_grid, row_contiguous
from flashdig.kernels.triton.combine import flashdig_combine
from flashdig.kernels.triton.decode import flashdig_decode
from flashdig.kernels.triton.decode_arguments import CacheCall, as_bytes
from flashdig.kernels.triton.decode_choose import (
    CROWD,
    INTERPRETED,
    INVARIANT_SPLIT,
    LISTED_ROWS,
    LONG_KEYS,
    MAX_SPLITS,
    PART_BYTES,
    DecodeTile,
    block_of,
    block_rows,
    choose_chunk_tile,
    choose_decode_tile,
    choose_splits,
)
from flashdig.kernels.triton.decode_ragged_launch import (
    Launches,
    fits_mixed,
    fits_short,
    listed_launches,
    may_be_ragged,
    may_hold_chunks,
    ragged_launches,
    shortest_listed,
)
from flashdig.kernels.triton.launch_order import ORDERED
from flashdig.kernels.triton.slack import clearing

if TYPE_CHECKING:  # Gluon is imported on Hopper alone
    from flashdig.kernels.hopper.cache_launch import ListedAttention, ListedTile
    from flashdig.kernels.hopper.decode_launch import PiecedAttention


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
    dtype = call.out_dtype(out_dtype)
    if call.empty:
        return _without_keys(call, dtype)
    schedule = schedule_of(call, num_splits, batch_invariant, tile, ragged, arch, dtype)
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
        ordered: launches start early and wait for one another, see `launch_order`.
        follows: an ordered launch comes ahead of the first one.
        chunks: the tile of sequences with many rows, which then are launched apart.
        listed: the tile of the Hopper forward, to which these then go.
        short: other sequences than these may be there.
        pieces: of each sequence's keys where lengths are about even, if the Hopper decoding kernel
            takes all, in one launch, or those that are not `listed`.
    """

    tile: DecodeTile
    splits: int
    split_size: int
    ragged: bool
    ordered: bool = False
    chunks: DecodeTile | None = None
    follows: bool = False
    listed: ListedTile | None = None
    short: bool = False
    pieces: int = 0


def schedule_of(
    call: CacheCall,
    num_splits: int,
    batch_invariant: bool,
    tile: DecodeTile | None = None,
    ragged: bool | None = None,
    arch: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> Schedule:
    """The schedule of `cache_attention`'s arguments."""
    chosen = tile is None
    arch = arch or architecture_of(call.q.device)
    if tile is None:
        tile = _tile(call, arch, batch_invariant)
    splits = _splits(call, tile, num_splits, batch_invariant)
    free = num_splits == 0 and not batch_invariant
    ordered = _ordered(call, arch)
    pieces = 0
    if chosen and ragged is None and free:
        pieces = _pieces_on_hopper(call, arch, out_dtype)
    if chosen and num_splits < 2 and not batch_invariant and ragged is not False:
        apart = _listed_schedule(call, arch, tile, free, call.out_dtype(out_dtype), pieces)
        if apart is None and pieces == 0 and free and may_hold_chunks(call):
            apart = _mixed_schedule(call, arch)
        if apart is not None:
            return apart
    if pieces > 0:
        return Schedule(tile, 1, 0, False, ordered, pieces=pieces)
    if ragged is None:
        ragged = free and may_be_ragged(call, tile, splits)
    return Schedule(tile, splits, INVARIANT_SPLIT if batch_invariant else 0, ragged, ordered)


def _listed_schedule(
    call: CacheCall,
    arch: str,
    tile: DecodeTile,
    free: bool,
    out_dtype: torch.dtype,
    pieces: int,
) -> Schedule | None:
    """Sequences with many rows by the Hopper forward; None where it serves none of them.

    free: the keys of others may be cut into pieces.
    pieces: of the Schedule, if it takes the others.
    """
    short = call.packed and call.batch > 1
    if arch != "sm_90" or (short and not (free and may_hold_chunks(call))):
        return None
    from flashdig.kernels.hopper.cache_launch import choose_tile

    # packed, the host knows of one chunk, if of any
    tokens = call.seqlen_q - call.batch if short else call.seqlen_q
    sequences = 1 if call.packed else call.batch
    if tokens * call.group_size < LISTED_ROWS:
        return None
    ordered = _ordered(call, arch)
    pieces = pieces if short and ordered else 0
    in_pieces = pieces > 0
    listed = choose_tile(call, out_dtype, tokens, sequences, beside=short, in_pieces=in_pieces)
    if listed is None:
        return None
    if short:
        tile = _low_tile(call, arch)
        if pieces == 0 and not fits_short(call, tile):
            return None
    return Schedule(tile, 1, 0, True, ordered, listed=listed, short=short, pieces=pieces)


def _pieces_on_hopper(call: CacheCall, arch: str, out_dtype: torch.dtype | None) -> int:
    """Pieces of a sequence's keys if the Hopper decoding kernel takes the call, else 0."""
    if arch != "sm_90":
        return 0
    from flashdig.kernels.hopper.decode_launch import pieces_of

    return pieces_of(call, call.out_dtype(out_dtype))


def _mixed_schedule(call: CacheCall, arch: str) -> Schedule | None:
    """Sequences that decode and chunks of prompts apart; None where one tile serves both."""
    paged = call.page_table is not None
    chunks = choose_chunk_tile(arch, *_kinds(call), paged=paged)
    tile = _low_tile(call, arch)
    if chunks.block_m < 4 * tile.block_m or not fits_mixed(call, tile, chunks):
        return None
    ordered = _ordered(call, arch) and chunks.block_m == 128
    return Schedule(tile, 1, 0, True, ordered, chunks)


def _low_tile(call: CacheCall, arch: str) -> DecodeTile:
    """Of sequences that decode beside chunks of prompts."""
    sizes = (call.group_size, call.group_size)
    paged = call.page_table is not None
    return choose_decode_tile(arch, *_kinds(call), *sizes, paged=paged, crowded=True, long=True)


def _ordered(call: CacheCall, arch: str) -> bool:
    """The interpreter runs one launch after another."""
    return arch in ORDERED and call.q.device.type != "cpu"


def _kinds(call: CacheCall) -> tuple[int, int, int, int]:
    """Bytes of an element of q, where fp8 is read as float16, and of the cache; head dims."""
    dims = (call.q.shape[-1], call.v.shape[-1])
    return max(2, call.q.element_size()), call.k.element_size(), *dims


def _tile(call: CacheCall, arch: str, batch_invariant: bool) -> DecodeTile:
    tokens = -(-call.seqlen_q // call.batch) if call.packed else call.seqlen_q
    sizes = (tokens * call.group_size, call.group_size)
    block_m = block_rows(arch, *_kinds(call), *sizes, batch_invariant=batch_invariant)
    tiles = call.slots(block_m) * call.num_heads_kv
    return choose_decode_tile(
        arch,
        *_kinds(call),
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

    __slots__ = ("_clear_slack", "_fp8", "_launches", "_listed", "_pieced", "counts", "makes")

    def __init__(self, call: CacheCall, dtype: torch.dtype, schedule: Schedule) -> None:
        self._fp8 = call.q.element_size() == 1 or call.k.element_size() == 1
        made = [(call.out_shape, dtype), (call.lse_shape, torch.float32)]
        width = block_of(call.v.shape[-1])
        self._listed: ListedAttention | None = None
        self._pieced: PiecedAttention | None = None
        # whether a launch takes the counter of its stream
        self.counts = schedule.pieces > 0
        self._launches: Launches
        listed: Launches = []
        if schedule.listed is not None:
            self._listed, listed = listed_launches(call, schedule)
        if schedule.pieces > 0:
            from flashdig.kernels.hopper.decode_launch import PiecedAttention

            order, most_tokens = "last" if schedule.follows else "none", 0
            if schedule.listed is not None:
                order, most_tokens = "beside", shortest_listed(call, schedule) - 1
            self._pieced = PiecedAttention(call, schedule.pieces, order, most_tokens)
            self._launches = [*listed, ("pieces", self._pieced.launch)]
            rows = self._pieced.part_rows
            made += [((rows, call.v.shape[-1]), torch.float32), ((rows,), torch.float32)]
        elif schedule.ragged:
            numbers = call.numbers(_fp8_hardware(call.q.device))
            ragged: Launches = []
            sizes: list[tuple[int, int]] = []
            if schedule.listed is None or schedule.short:
                ragged, sizes = ragged_launches(call, schedule, numbers)
            # the list and the plan come ahead of what waits for either
            self._launches = [*listed[:1], *ragged[:1], *listed[1:], *ragged[1:]]
            for part_rows, planned in sizes:
                made += [((part_rows, width), torch.float32), ((part_rows,), torch.float32)]
                made.append(((planned,), torch.int32))
        else:
            self._launches, part_rows = _even_launches(call, schedule)
            if part_rows > 0:
                made += [((part_rows, width), torch.float32), ((part_rows,), torch.float32)]
        if self._listed is not None:
            made.append(((self._listed.count,), torch.int32))
        self.makes = tuple(allocation(*one, call.q.device) for one in made)
        self._clear_slack = None
        if call.packed and self._pieced is None:  # slack rows belong to no program
            heads = call.num_heads, call.v.shape[-1]
            self._clear_slack = clearing(call.batch, call.seqlen_q, *heads)

    def launches(
        self, tensors: Sequence[torch.Tensor | None], made: Sequence[torch.Tensor]
    ) -> Steps:
        if self._pieced is not None and self._listed is None:
            return [(self._pieced.launch, self._pieced.arguments(tensors, made))]
        q, k, v, seqlens, cu_k, cu_new, table, batch_idx, leftpad, cu_q, used_q, *rest = tensors
        out, lse, *planned = made
        listed = planned.pop() if self._listed is not None else None
        planned = [*planned, *(None,) * 6]
        part, part_lse, plan = planned[:3]
        chunk_part, chunk_part_lse, chunk_plan = planned[3:6]
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
            "plan chunks": (chunk_plan, *lengths, cu_q, used_q),
            "chunks": (q, k, v, out, lse, chunk_part, chunk_part_lse, chunk_plan, *read),
            "join chunks": (chunk_part, chunk_part_lse, out, lse, sinks, chunk_plan, cu_q, used_q),
        }
        if self._listed is not None:
            assert listed is not None
            arguments |= self._listed.arguments(tensors, out, lse, listed)
            if self._pieced is not None:
                arguments["pieces"] = self._pieced.arguments(tensors, made[:4])
        steps: Steps = []
        if self._clear_slack is not None:
            steps.append((self._clear_slack, (out, lse, cu_q, used_q)))
        return steps + [(launch, arguments[kind]) for kind, launch in self._launches]


def _even_launches(call: CacheCall, schedule: Schedule) -> tuple[Launches, int]:
    """The launches, and how many rows of parts they need."""
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
    # one sequence of 8k keys in a dense cache was 2 % slower with a join that starts early
    joined_early = split and schedule.ordered and call.page_table is not None
    order = "waits" if joined_early else ("last" if schedule.follows else "none")
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
                "ORDER": order,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "NUM_STAGES": tile.num_stages,
            },
            num_warps=tile.num_warps,
            **({"launch_pdl": True} if schedule.follows and first_slot == 0 else {}),
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
                    "ORDER": "last" if joined_early else "none",
                    "BLOCK_M": tile.block_m,
                },
                num_warps=4,
                **({"launch_pdl": True} if joined_early else {}),
            )
            launches.append(("join", join))
    return launches, at_once * rows


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
