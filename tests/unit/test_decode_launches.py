"""Which kernels a call over a cache launches, and in which order they may start; nothing runs."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flashdig.kernels.hopper import cache_launch, decode_launch, decode_tiles
from flashdig.kernels.triton.decode_launch import CachePlan, prepared, schedule_of

I32 = torch.int32
ROOT = Path(__file__).parents[2]


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def prepared_call(queries, page=16, lengths=True, dtype=torch.bfloat16, head_dim=128):
    """A call for sequences of `queries` tokens, packed, or of one token each (an int)."""
    packed = isinstance(queries, list)
    batch = len(queries) if packed else queries
    shape = (sum(queries),) if packed else (batch, 1)
    cache = (batch * 64, page) if page else (batch, 16384)
    k, v = (meta(*cache, 8, head_dim, dtype=dtype) for _ in range(2))
    tensors = (
        meta(*shape, 32, head_dim, dtype=dtype), k, v,
        meta(batch, dtype=I32) if lengths else None, None, None,
        meta(batch, 1024, dtype=I32) if page else None, None, None,
        meta(batch + 1, dtype=I32) if packed else None, *(None,) * 6,
    )  # fmt: skip
    return prepared(
        tensors, softmax_scale=0.1, softcap=0.0, window_left=-1, window_right=0, top_left=False,
        allow_tf32=False, seqlen_new=0,
    )  # fmt: skip


def launches_of(call, arch="sm_90", **options):
    """(kind, order, whether it may start early, programs) of each launch."""
    schedule = schedule_of(call, options.pop("num_splits", 0), False, arch=arch)
    plan = CachePlan(call, torch.bfloat16, schedule)
    found = []
    for kind, launch in plan._launches:
        names = list(launch._kernel.arg_names)
        order = launch._rest[names.index("ORDER") - len(names)]
        found.append((kind, order, "launch_pdl" in launch._options))
    return found


def test_chunks_go_to_the_hopper_forward() -> None:
    chunks = [("list", "waits", False), ("listed", "waits", True)]
    assert launches_of(prepared_call([1] * 32 + [512])) == [*chunks, ("pieces", "beside", True)]
    with_slopes = replace(
        prepared_call([1] * 32 + [512]), alibi_slopes=meta(32, dtype=torch.float32)
    )
    (listing, listed), kinds = chunks, ("plan", "ragged", "join ragged")
    plan, ragged, join = zip(kinds, ("overlaps", "overlaps", "last"), (True,) * 3, strict=True)
    assert launches_of(with_slopes) == [listing, plan, listed, ragged, join]
    prompt = [("list", "waits", False), ("listed", "last", True)]
    for splits in (0, 1):
        assert launches_of(prepared_call([512]), num_splits=splits) == prompt
    assert launches_of(prepared_call([512]), num_splits=2)[0][0] == "even"
    assert launches_of(prepared_call([1] * 32 + [512]), num_splits=1)[0][0] == "even"


def test_decoding_beside_a_chunk_is_launched_apart() -> None:
    """Pages that TMA does not take in whole pieces."""
    assert launches_of(prepared_call([1] * 32 + [512], page=4)) == [
        ("plan chunks", "waits", False),
        ("plan", "overlaps", True),
        ("chunks", "waits", True),
        ("ragged", "overlaps", True),
        ("join chunks", "waits", True),
        ("join ragged", "last", True),
    ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_89"])
def test_older_chips_run_one_launch_after_another(arch) -> None:
    for call in (prepared_call([1] * 32 + [512]), prepared_call(8), prepared_call(1)):
        assert all(one[1:] == ("none", False) for one in launches_of(call, arch))


@pytest.mark.parametrize(
    ("queries", "options"),
    [
        ([1] * 33, {}),  # no chunk
        ([1] * 32 + [45], {}),  # a short one
        ([512], {}),  # nothing that decodes
        ([1] * 32 + [512], {"lengths": False}),  # the device knows none
        ([1] * 32 + [512], {"dtype": torch.float32}),  # no tile of 64 rows
        ([1] * 600 + [512], {}),  # too many for a plan
    ],
)
def test_other_packed_calls_have_one_kind_of_tile(queries, options) -> None:
    for page in (4, 16):
        call = prepared_call(queries, page=page, **options)
        kinds = {kind for kind, _, _ in launches_of(call)}
        assert not kinds & {"chunks", "plan chunks"}
        assert "listed" not in kinds or (page == 16 and queries == [512])


def test_what_follows_in_the_stream_sees_everything_written() -> None:
    """The first launch starts as any other would, every later one waits for the one ahead, and the
    last one lets nobody start early."""
    mixed = [1] * 32 + [512]
    for queries, page, splits in ((1, 16, 2), (8, 4, 0), (mixed, 4, 0), (mixed, 16, 0)):
        call = prepared_call(queries, page=page)
        (_, first, early), *rest = launches_of(call, num_splits=splits)
        assert rest
        assert not early
        assert first == "waits"
        assert all(early and order != "none" for _, order, early in rest)
        assert rest[-1][1] == ("beside" if queries == mixed and page == 16 else "last")


def test_a_call_without_parts_is_one_launch() -> None:
    assert launches_of(prepared_call(8), num_splits=1) == [("even", "none", False)]


def test_decoding_on_hopper_is_one_launch() -> None:
    for page in (0, 8, 16, 48):
        call = prepared_call(8, page=page)
        assert launches_of(call) == [("pieces", "none", False)]
        after_append = replace(schedule_of(call, 0, False, arch="sm_90"), follows=True)
        plan = CachePlan(call, torch.bfloat16, after_append)
        assert plan.counts
        ((_, launch),) = plan._launches
        assert launch._options["launch_pdl"]
        assert launch._rest[-1] == "last"
    for arch in ("sm_80", "sm_100"):
        assert launches_of(prepared_call(8), arch)[0][0] == "plan"
    for options in ({"num_splits": 1}, {"num_splits": 3}):
        assert launches_of(prepared_call(8), **options)[0][0] == "even"


def test_packed_queries_of_few_tokens_are_one_launch() -> None:
    """Also where several tiles hold a sequence's; parts are as high as a tile."""
    for queries, rows in (([1] * 8, 16), ([4] * 8, 64), ([1, 1, 64], 64)):
        call = prepared_call(queries)
        assert launches_of(call) == [("pieces", "none", False)]
        assert decode_launch.tile_rows(call) == rows
    assert decode_launch.tile_rows(prepared_call(8)) == 0


def test_a_chunk_is_listed_from_some_rows_on() -> None:
    """However many multiprocessors stay idle: tiles of 64 rows would read all keys again."""
    assert [kind for kind, _, _ in launches_of(prepared_call([1, 90]))] == ["pieces"]
    assert launches_of(prepared_call([1, 150]))[-2:] == [
        ("listed", "waits", True),
        ("pieces", "beside", True),
    ]


def in_pieces(queries=8, **changes):
    """Pieces of each sequence's keys; 0 where another kernel takes the call."""
    call = replace(prepared_call(queries, **changes.pop("made", {})), **changes)
    return decode_launch.pieces_of(call, call.q.dtype)


def test_what_decoding_on_hopper_does_not_serve() -> None:
    assert in_pieces() > 0
    assert in_pieces([1] * 8) == in_pieces()  # packed
    assert in_pieces([70, 0, 1], made={"lengths": False}) > 0
    assert in_pieces([1] * 600) == in_pieces(600) == 0
    assert in_pieces(made={"page": 4}) == 0
    assert in_pieces(made={"dtype": torch.float32}) == 0
    assert in_pieces(made={"head_dim": 256}) == 0
    assert in_pieces(made={"head_dim": 72}) > 0
    assert in_pieces(cache_leftpad=meta(8, dtype=I32)) == 0
    assert in_pieces(cache_leftpad=meta(8, dtype=I32), made={"page": 0}) > 0
    assert in_pieces(alibi_slopes=meta(32, dtype=torch.float32)) == 0
    assert in_pieces(softmax_scale=-1.0) == 0
    assert in_pieces(q=meta(8, 17, 32, 128)) == 0  # 68 rows
    assert in_pieces(q=meta(8, 1, 56, 128)) == 0  # seven heads share a key
    assert in_pieces(v=meta(8 * 64, 16, 8, 64)) == 0  # narrower than the keys
    assert in_pieces(k=meta(8 * 64, 16, 8, 128, dtype=torch.float8_e4m3fn)) == 0
    # all keys count: many short sequences are the portable kernel's
    short = {"k": meta(128, 2048, 8, 128), "v": meta(128, 2048, 8, 128)}
    dense = {"made": {"page": 0, "lengths": False}}
    assert in_pieces(128, **short, **dense) == 0
    assert in_pieces(128, **short, made={"page": 0}) == 1
    assert in_pieces(16, **dense) == 1


def test_one_sequence_is_cut_for_all_multiprocessors() -> None:
    """Where joining does not take longer than a second launch."""
    dense = {"page": 0, "lengths": False}
    for keys, pieces in {512: 8, 8192: 16, 2**19: 16}.items():
        cache = {"k": meta(1, keys, 8, 128), "v": meta(1, keys, 8, 128)}
        assert in_pieces(1, made=dense, **cache) == pieces, keys
    assert in_pieces(1) == 16  # in pages
    assert in_pieces([1]) == 16  # packed
    assert in_pieces(1, q=meta(1, 2, 32, 128)) == in_pieces([8]) == 0  # many rows to join
    assert in_pieces(2, q=meta(2, 16, 32, 128), made=dense) == 0
    assert in_pieces(2, q=meta(2, 16, 32, 128)) > 0  # a plan comes first on the portable way


def test_pieces_fill_the_chip_and_no_more() -> None:
    """As measured on an H200: 132 multiprocessors, 8 KV heads of 4 query heads."""
    for sequences, keys, pieces in (
        (1, 8192, 16), (2, 512, 8), (2, 2048, 8), (2, 32768, 8), (3, 8192, 5), (4, 8192, 4),
        (5, 8192, 3), (6, 1024, 2), (6, 8192, 5), (8, 1024, 2), (8, 8192, 2), (10, 1024, 1),
        (10, 8192, 3), (13, 2048, 1), (16, 8192, 1), (17, 8192, 3), (20, 1024, 1), (24, 8192, 2),
        (32, 4096, 1), (64, 8192, 1), (128, 2048, 1),
    ):  # fmt: skip
        found = decode_tiles.choose_pieces(sequences, 8, 4, keys, 132, False)
        assert found == pieces, (sequences, keys)
    for batch in range(2, 600, 7):
        for keys in (1, 100, 129, 5000, 2**20):
            for rows in (1, 64):
                pieces = decode_tiles.choose_pieces(batch, 1, rows, keys, 132, False)
                assert 1 <= pieces <= -(-keys // 64)
                assert pieces == 1 or batch * (pieces - 1) < 4 * 132


def test_tiles_of_few_bytes_are_for_blocks_with_one_piece() -> None:
    def tile(pieces=1, one_round=True, paged=False, all_count=False):
        found = decode_tiles.choose_tile(
            128, pieces=pieces, one_round=one_round, paged=paged, all_count=all_count
        )
        return found.block_n, found.stages

    assert tile() == tile(16) == tile(one_round=False, all_count=True) == (64, 2)
    assert tile(paged=True) == tile(16, paged=True) == (64, 3)
    assert tile(one_round=False) == tile(one_round=False, paged=True) == (128, 2)
    assert tile(3, one_round=False) == (64, 4)


def test_no_more_keys_are_copied_at_once_than_a_tile_has() -> None:
    assert decode_tiles.WalkTile(32, 3).copied == 32
    assert decode_tiles.WalkTile(128, 2).copied == 64
    assert decode_tiles.WalkTile(128, 2, most_copied=128).copied == 128


def served(**changes):
    """The tile of a chunk of 512 tokens in pages of 16; None where another kernel takes it."""
    call = replace(prepared_call([1] * 32 + [512], **changes.pop("made", {})), **changes)
    dtype = call.q.dtype
    return cache_launch.choose_tile(call, dtype, 512, 1, beside=True)


def test_what_the_hopper_forward_does_not_serve_over_a_cache() -> None:
    assert served().group == 1  # 192 rows hold 48 tokens of four heads: hardly fewer tiles
    assert served(made={"page": 8}) is not None
    assert served(made={"page": 0}) is not None
    assert served(made={"page": 4}) is None
    assert served(made={"page": 19}) is None
    assert served(made={"dtype": torch.float32}) is None
    assert served(made={"head_dim": 20}) is None  # rows of 40 bytes
    assert served(cache_leftpad=meta(33, dtype=I32)) is None
    assert served(cache_leftpad=meta(33, dtype=I32), made={"page": 0}) is not None
    assert served(softmax_scale=-1.0) is None
    assert served(k=meta(33 * 64, 16, 8, 128, dtype=torch.float8_e4m3fn)) is None
    apart = meta(33 * 64, 17, 8, 128)[:, :16]  # from page to page 17 keys
    assert served(k=apart, v=apart) is not None
    assert served(k=apart) is None  # keys and values lie differently
    odd = torch.empty_strided(
        (2112, 16, 8, 128), (16 * 1024 + 8, 1024, 128, 1), dtype=torch.bfloat16, device="meta"
    )
    assert served(k=odd, v=odd) is None
    call = prepared_call([1] * 32 + [512])
    assert cache_launch.choose_tile(call, torch.float32, 512, 1, beside=True) is None
    assert cache_launch.choose_tile(call, torch.bfloat16, 200, 1, beside=False) is None  # too few
    wide = prepared_call([1] * 32 + [512], head_dim=256)
    assert cache_launch.choose_tile(wide, torch.bfloat16, 200, 1, beside=False) is not None


def test_tiles_of_listed_sequences_fill_whole_rounds() -> None:
    """Of an H200's 132 multiprocessors: 128 tiles of 128 rows are one round, 88 of 192 rows as
    well; of 8192 tokens the taller tile needs fewer."""
    call = prepared_call([1] * 32 + [8192])

    def consumers(tokens, beside=False):
        return cache_launch.choose_tile(
            call, torch.bfloat16, tokens, 1, beside=beside
        ).tile.consumers

    assert [consumers(n) for n in (512, 2048, 8192)] == [2, 2, 3]
    assert consumers(512, beside=True) == 3  # the others decode meanwhile
    call = prepared_call([1] * 8 + [8192])
    assert consumers(128, beside=True) == 2  # what decodes is done before


def test_few_tokens_share_tiles_with_all_heads_of_their_keys() -> None:
    call = prepared_call([40] * 16)
    chosen = cache_launch.choose_tile(call, torch.bfloat16, 40, 16, beside=False)
    assert chosen.group == 4
    assert cache_launch.slots(call, chosen) == 640 * 4 // chosen.block_m + 16
    assert cache_launch.choose_tile(call, torch.bfloat16, 40, 2, beside=False) is None


def test_the_list_has_every_tile_of_long_sequences_once() -> None:
    """Under Triton's interpreter, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.interpreted_tile_list"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
