"""The list of tiles against one made in Python; run by tests/unit/test_decode_launches.py."""

import random

import torch

from flashdig.kernels.triton.tile_list import LIST_HEAD, TILE_FIELDS, flashdig_list_tiles


def integers(values):
    return torch.tensor(values, dtype=torch.int32)


def check(draw: random.Random, packed: bool, paged: bool) -> None:
    batch, group, block_m = draw.randint(1, 9), draw.choice((1, 4)), draw.choice((16, 48))
    capacity, cache_rows, between, new = 300, 12, 320, draw.choice((0, 7))
    shortest = draw.choice((1, 5, 40))
    queries = [draw.choice((0, 1, 4, 5, 39, 40, 90)) if packed else 40 for _ in range(batch)]
    keys = [draw.randint(0, 300) for _ in range(batch)]
    padding = [0 if paged else draw.randint(-3, 90) for _ in range(batch)]
    index = [draw.randint(-2, 20) for _ in range(batch)]
    offsets = [sum(queries[:b]) for b in range(batch + 1)]
    total = sum(queries) + 3 if packed else 40
    rows = total * group
    slots = rows // block_m + batch if packed else -(-rows // block_m) * batch
    found = torch.full((LIST_HEAD.value + TILE_FIELDS.value * slots,), -9, dtype=torch.int32)
    flashdig_list_tiles[(1,)](
        found, integers(keys), None, None, None if paged else integers(padding),
        None if paged else integers(index),
        integers(offsets) if packed else None, None, batch, total, new, capacity, cache_rows, slots,
        shortest, between, GROUP=group, PACKED=packed, PAGED=paged, ORDER="none", BLOCK_S=128,
        BLOCK_M=block_m,
    )  # fmt: skip
    ends = [min(n + new, capacity) for n in keys]
    padding = [min(max(n, 0), end) for n, end in zip(padding, ends, strict=True)]
    rows_of = [0 if paged else min(max(n, 0), cache_rows - 1) * between for n in index]
    expected = [
        [b, start, offsets[b] if packed else 0, queries[b], ends[b] - padding[b],
         rows_of[b] + padding[b]]
        for b in range(batch)
        if queries[b] >= shortest
        for start in range(0, queries[b] * group, block_m)
    ]  # fmt: skip
    assert found[:3].tolist() == [0, 0, len(expected)]
    tiles = found[LIST_HEAD.value :].view(-1, TILE_FIELDS.value)[:, :6].tolist()
    assert tiles[: len(expected)] == expected[::-1]  # the last come first
    assert all(set(tile) == {-9} for tile in tiles[len(expected) :])


if __name__ == "__main__":
    for seed in range(12):
        check(random.Random(seed), packed=seed % 2 == 0, paged=seed % 3 == 0)
