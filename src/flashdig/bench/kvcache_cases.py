"""Cases of attention over a cache, drawn from combinations of features."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

FEATURES: dict[str, tuple[Any, ...]] = {
    "dtype": ("bfloat16", "float16", "float32"),
    "head_dims": ((128, 128), (64, 64), (80, 80), (96, 48), (256, 256), (576, 512)),
    "cache": ("dense", "page 1", "page 16", "page 19", "page 64"),
    "heads": ((8, 2), (4, 4), (16, 1)),
    "mask": ("full", "causal", "window", "causal window"),
    "tokens": ("one", "few", "many", "packed"),
    "schedule": ("auto", "splits", "invariant"),
    "append": ("none", "new", "rotary", "rotary halves"),
    "terms": ("none", "softcap and sinks", "ALiBi", "leftpad"),
    "fp8": (False, True),
}
SMALL_FEATURES = {
    **FEATURES,
    "dtype": ("float16", "float32"),
    "head_dims": ((16, 16), (40, 24)),
    "cache": ("dense", "page 1", "page 5"),
    "heads": ((4, 2), (2, 2)),
}


def may_meet(chosen: Mapping[str, Any]) -> bool:
    """Whether features may stand together."""
    wide = max(chosen.get("head_dims", (0,))) > 256
    if wide and (chosen.get("dtype") == "float32" or chosen.get("heads") not in (None, (16, 1))):
        return False
    return not (chosen.get("fp8") and chosen.get("dtype") == "float32")


def make_case(
    features: Mapping[str, Any], draw: random.Random, kind: random.Random, device: str
) -> dict[str, Any]:
    """Keywords of `flashdig.attention_with_kvcache`; what kernels are compiled for is of `kind`."""
    import torch

    small = device == "cpu"
    dtype = getattr(torch, features["dtype"])
    head_dim, head_dim_v = features["head_dims"]
    heads, heads_kv = features["heads"]
    generator = torch.Generator().manual_seed(draw.getrandbits(40))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    def integers(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(values), dtype=torch.int32, device=device)

    several = kind.random() < 0.7
    batch = draw.choice((2, 3) if small else (2, 3, 5)) if several else 1
    most = {"one": 1, "few": 6, "many": 9 if small else 70, "packed": 5 if small else 40}
    tokens = most[features["tokens"]]
    capacity = draw.choice((24, 40) if small else (40, 200, 700))
    given: dict[str, Any] = {}
    lengths_q = [tokens] * batch
    if features["tokens"] == "packed":
        lengths_q = [draw.randint(0, tokens) for _ in range(batch)]
        given["cu_seqlens_q"] = integers([sum(lengths_q[:b]) for b in range(batch + 1)])
    rows = (sum(lengths_q) + 2,) if features["tokens"] == "packed" else (batch, tokens)
    given["q"] = randn(*rows, heads, head_dim)

    lengths_new = [0] * batch
    if features["append"] != "none":
        lengths_new = lengths_q
        given["k"], given["v"] = (
            randn(*rows, heads_kv, head_dim),
            randn(*rows, heads_kv, head_dim_v),
        )
    capacity = max(capacity, max(lengths_new, default=0))
    lengths = [
        draw.choice((0, 1, capacity - n, draw.randint(0, capacity - n))) for n in lengths_new
    ]
    lengths = [min(length, capacity - n) for length, n in zip(lengths, lengths_new, strict=True)]
    given["cache_seqlens"] = integers(lengths)
    if "rotary" in features["append"]:
        turned = kind.choice((2, head_dim // 4 * 2, head_dim // 2 * 2))
        angles = torch.rand(capacity + 1, turned // 2, generator=generator) * 6.3
        given["rotary_cos"], given["rotary_sin"] = (
            f(angles).to(device, dtype) for f in (torch.cos, torch.sin)
        )
        given["rotary_interleaved"] = features["append"] == "rotary"
        if kind.random() < 0.3:
            given["rotary_seqlens"] = integers([draw.randint(0, capacity) for _ in range(batch)])

    given |= _cache(features, draw, kind, given, lengths, capacity, randn)
    if features["terms"] == "softcap and sinks":
        given["softcap"], given["sinks"] = 5.0, randn(heads).float()
    elif features["terms"] == "ALiBi":
        shape = (heads,) if kind.random() < 0.5 else (batch, heads)
        given["alibi_slopes"] = torch.rand(*shape, generator=generator).to(device) * 0.3
    elif features["terms"] == "leftpad":
        given["cache_leftpad"] = integers([draw.randint(0, length) for length in lengths])
    if features["mask"] != "full":
        given["causal"] = features["mask"].startswith("causal")
    if "window" in features["mask"]:
        right = kind.choice((0, 5, None))
        given["window"] = (draw.choice((0, 7, 33)), right)
    if features["schedule"] == "splits":
        given["num_splits"] = draw.choice((2, 3, 7))
    given["batch_invariant"] = features["schedule"] == "invariant"
    return given


def _cache(
    features: Mapping[str, Any],
    draw: random.Random,
    kind: random.Random,
    given: Mapping[str, Any],
    lengths: Sequence[int],
    capacity: int,
    randn: Any,
) -> dict[str, Any]:
    """Caches with NaN wherever no key is, and the table or the index that leads to them."""
    import torch

    batch, device = len(lengths), given["q"].device
    head_dim, head_dim_v = features["head_dims"]
    heads_kv = features["heads"][1]
    found: dict[str, Any] = {}
    if features["cache"] == "dense":
        rows, size = batch, capacity
        if kind.random() < 0.4:
            rows = batch + 2
            index = draw.sample(range(rows), batch)
            found["cache_batch_idx"] = torch.tensor(index, dtype=torch.int32, device=device)
    else:
        size = int(features["cache"].split()[1])
        pages = -(-capacity // size) + draw.choice((0, 2))
        rows = batch * pages + 1
        table = torch.tensor(draw.sample(range(rows), batch * pages), dtype=torch.int32)
        table = table.view(batch, pages)
        whole = min(lengths) // size  # a prefix that all share
        if whole and draw.random() < 0.5:
            table[:, :whole] = table[:1, :whole]
        found["page_table"] = table.to(device)
    k_cache = randn(rows, size, heads_kv, head_dim)
    v_cache = randn(rows, size, heads_kv, head_dim_v)
    hidden = torch.ones(rows, size, dtype=torch.bool, device=device)
    from flashdig.kernels.cache_plain import CacheSlots

    slots = CacheSlots(k_cache, found.get("page_table"), found.get("cache_batch_idx"))
    for b, length in enumerate(lengths):
        hidden[slots.of(b, 0, length)] = False
    for cache in (k_cache, v_cache):
        cache[hidden] = float("nan")
    if features["fp8"]:
        k_cache, v_cache = (x.to(torch.float8_e4m3fn) for x in (k_cache, v_cache))
        for name in ("k_descale", "v_descale"):
            found[name] = randn(batch, heads_kv).float().abs() + 0.5
    return {**found, "k_cache": k_cache, "v_cache": v_cache}
