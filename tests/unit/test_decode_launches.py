"""Which kernels a call over a cache launches, and in which order they may start; nothing runs."""

import pytest
import torch

from flashdig.kernels.triton.decode_launch import CachePlan, prepared, schedule_of

I32 = torch.int32


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


def test_decoding_beside_a_chunk_is_launched_apart() -> None:
    assert launches_of(prepared_call([1] * 32 + [512])) == [
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
        ([1] * 32 + [200], {}),  # a short one
        ([512], {}),  # nothing that decodes
        ([1] * 32 + [512], {"lengths": False}),  # the device knows none
        ([1] * 32 + [512], {"dtype": torch.float32}),  # no tile of 64 rows
        ([1] * 400 + [512], {}),  # too many for a plan
    ],
)
def test_other_packed_calls_have_one_kind_of_tile(queries, options) -> None:
    kinds = [kind for kind, _, _ in launches_of(prepared_call(queries, **options))]
    assert "chunks" not in kinds


def test_what_follows_in_the_stream_sees_everything_written() -> None:
    """The first launch starts as any other would, every later one waits for the one ahead, and the
    last one lets nobody start early."""
    for queries, splits in ((1, 2), (8, 0), ([1] * 32 + [512], 0)):
        (_, first, early), *rest = launches_of(prepared_call(queries), num_splits=splits)
        assert rest
        assert not early
        assert first == "waits"
        assert all(early and order != "none" for _, order, early in rest)
        assert rest[-1][1] == "last"


def test_a_call_without_parts_is_one_launch() -> None:
    assert launches_of(prepared_call(8), num_splits=1) == [("even", "none", False)]
