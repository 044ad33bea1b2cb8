"""The Hopper forward over a cache: pairs of features, against float64 over the keys."""

import random

import pytest
import torch

from flashdig import attention_with_kvcache
from flashdig.bench.gate import float64_reference
from flashdig.bench.kvcache_cases import make_case
from flashdig.bench.kvcache_conformance import judge
from flashdig.bench.pairwise import covering_array
from flashdig.bench.timing import float32_precision
from flashdig.kernels.hopper import cache_launch
from flashdig.kernels.triton import decode_launch, decode_ragged_launch

pytestmark = pytest.mark.gpu
DOMAINS = {
    "dtype": ("bfloat16", "float16"),
    "head_dims": ((128, 128), (64, 64), (80, 80), (96, 48), (256, 256), (192, 128)),
    "cache": ("dense", "page 8", "page 16", "page 48", "page 128"),
    "heads": ((8, 2), (4, 4), (16, 1), (14, 2)),
    "mask": ("full", "causal", "window", "causal window"),
    "tokens": ("many", "packed"),
    "append": ("none", "new", "rotary"),
    "terms": ("none", "softcap and sinks", "ALiBi", "leftpad"),
}


def is_served(chosen) -> bool:
    return chosen.get("terms") != "leftpad" or chosen.get("cache", "dense") == "dense"


CASES = covering_array(DOMAINS, is_served)


@pytest.fixture
def chosen(monkeypatch):
    """Every call that the kernel can serve goes to it, however few its rows; the tiles that were
    chosen."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    monkeypatch.setattr(cache_launch, "LEAST_FILL", dict.fromkeys(cache_launch.LEAST_FILL, 0.0))
    monkeypatch.setattr(decode_ragged_launch, "CHUNK_ROWS", 0)
    monkeypatch.setattr(decode_launch, "LISTED_ROWS", 0)
    found = []
    choose = cache_launch.choose_tile

    def noting(*arguments, **keywords):
        found.append(choose(*arguments, **keywords))
        return found[-1]

    monkeypatch.setattr(cache_launch, "choose_tile", noting)
    return found


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_pair_of_features(number, chosen) -> None:
    features = {**CASES[number], "schedule": "auto", "fp8": False}
    for n in range(3):
        draw, kind = random.Random(f"{number} {n}"), random.Random(f"kind {number} {n}")
        with float32_precision("ieee"):
            problem = judge(make_case(features, draw, kind, "cuda"))
        assert problem is None, (features, n, problem)
    assert any(tile is not None for tile in chosen)


def _randn(*shape):
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


@pytest.mark.parametrize("tile", range(3))
@pytest.mark.parametrize("page", [0, 16, 64, 256])
def test_every_tile_attends_to_long_caches(page, tile, chosen, monkeypatch) -> None:
    """Chunks in the middle of their prompts, sequences that decode, one without queries."""
    tiles = cache_launch.tiles_for(128, 128, causal=True, softcap=False, alibi=False)
    monkeypatch.setattr(cache_launch, "tiles_for", lambda *_, **__: [tiles[tile % len(tiles)]])
    queries, lengths = [300, 1, 0, 129, 1, 700], [4000, 2000, 37, 129, 1, 3071]
    if page:
        pages = 6 * 4096 // page
        table = torch.randperm(pages, device="cuda").to(torch.int32).view(6, -1)
        k, v = _randn(pages, page, 8, 128), _randn(pages, page, 8, 128)
        gathered = [x[table.long()].flatten(1, 2) for x in (k, v)]
    else:
        k, v, table = _randn(6, 4096, 8, 128), _randn(6, 4096, 8, 128), None
        gathered = [k, v]
    offsets = torch.tensor([0, *queries], device="cuda").cumsum(0).to(torch.int32)
    q = _randn(sum(queries), 32, 128)
    out = attention_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths, device="cuda", dtype=torch.int32),
        page_table=table, cu_seqlens_q=offsets, causal=True,
    )  # fmt: skip
    assert chosen[-1].tile == tiles[tile % len(tiles)]
    begin = 0
    for b, (count, length) in enumerate(zip(queries, lengths, strict=True)):
        if count:
            keys, values = (x[b, :length].transpose(0, 1)[None] for x in gathered)
            rows = q[begin : begin + count].transpose(0, 1)[None]
            verdict = float64_reference(rows, keys, values, causal=True).check(
                out[begin : begin + count].transpose(0, 1)[None]
            )
            assert verdict.ok, (b, verdict)
        begin += count


def test_pages_outside_a_window_are_never_touched(chosen) -> None:
    """Their entries are no page numbers, and pages that they are clamped to hold NaN."""
    length, window, page = 2000, 100, 16
    k, v = _randn(300, page, 2, 64), _randn(300, page, 2, 64)
    k[0], v[0], k[299], v[299] = (float("nan"),) * 4
    table = (torch.randperm(298, device="cuda")[:128] + 1).to(torch.int32)[None]
    q = _randn(1, 200, 8, 64)
    options = {"cache_seqlens": torch.tensor([length], dtype=torch.int32, device="cuda")}
    options |= {"causal": True, "window": (window, 0)}
    expected = attention_with_kvcache(q, k, v, page_table=table, **options)
    unseen = (length - 200 - window) // page
    damaged = table.clone()
    damaged[:, :unseen] = 2**30
    damaged[:, : unseen // 2] = -5
    damaged[:, -(-length // page) :] = 2**30
    out = attention_with_kvcache(q, k, v, page_table=damaged, **options)
    assert chosen[-1] is not None
    assert torch.equal(out, expected)
    assert out.isfinite().all()
