"""V^T of the fp8 forward: its order of keys against PTX's register fragments, and its kernel."""

import json
import os
import subprocess
import sys

import torch

from flashdig.kernels.hopper.fp8_values import (
    BESIDE,
    GROUP_KEYS,
    SECTIONS,
    counted,
    key_at,
    turning_of,
)
from flashdig.kernels.triton.arguments import Call, prepared

KEYS = 128


def accumulator(thread: int, columns: int) -> list[tuple[int, int]]:
    """(row, column) of each register of D of wgmma.m64nNk32, in order (PTX ISA, 9.7.15)."""
    warp, lane = divmod(thread, 32)
    return [
        (16 * warp + lane // 4 + 8 * (r // 2 % 2), 8 * (r // 4) + 2 * (lane % 4) + r % 2)
        for r in range(columns // 2)
    ]


def operand_a(thread: int, keys: int) -> list[tuple[int, int]]:
    """(row, k) of each byte of A in registers, 8-bit types, for keys / 32 instructions."""
    warp, lane = divmod(thread, 32)
    return [
        (
            16 * warp + lane // 4 + 8 * (i // 4 % 2),
            32 * (i // 16) + 16 * (i // 8 % 2) + 4 * (lane % 4) + i % 4,
        )
        for i in range(keys // 2)
    ]


def test_a_thread_holds_the_operand_that_it_needs() -> None:
    assert sorted(map(key_at, range(KEYS))) == list(range(KEYS))
    assert all(key_at(p) // GROUP_KEYS == p // GROUP_KEYS for p in range(KEYS))
    for thread in range(128):
        held = accumulator(thread, KEYS)
        needed = [(row, key_at(k)) for row, k in operand_a(thread, KEYS)]
        assert sorted(held) == sorted(needed), thread
        # and of each register of four bytes, two by two neighbours of the accumulator
        for word in range(0, len(needed), 4):
            at = [held.index(one) for one in needed[word : word + 4]]
            assert at[0] % 2 == 0, thread
            assert at == [at[0], at[0] + 1, at[0] + 4, at[0] + 5], thread


def test_every_fragment_is_a_whole_tile() -> None:
    for fragment in (accumulator, operand_a):
        elements = [one for thread in range(128) for one in fragment(thread, KEYS)]
        assert sorted(elements) == [(row, key) for row in range(64) for key in range(KEYS)]


def call_of(batch: int, seqlen: int, heads: int, head_dim: int, right: int = -1) -> Call:
    x = torch.empty(batch, seqlen, heads, head_dim, dtype=torch.float8_e4m3fn, device="meta")
    return prepared(
        *(x, x, x, *[None] * 8), softmax_scale=1.0, softcap=0.0, dropout_p=0.0, window_left=-1,
        window_right=right, top_left=False, allow_tf32=False,
    )  # fmt: skip


def test_sections_hold_all_heads() -> None:
    for batch, heads, head_dim in ((32, 32, 64), (1, 3, 128), (70, 5, 48), (33, 2, 256)):
        call = call_of(batch, 700, heads, head_dim)
        counts = counted(call, 128)
        assert counts["section_heads"] % counts["unit_heads"] == 0
        assert heads % counts["unit_heads"] == 0
        assert -(-batch * heads // counts["section_heads"]) <= SECTIONS.value
        assert counts["unit_items"] == 6


def test_v_is_turned_beside_attention_where_multiprocessors_are_left() -> None:
    # 1024 tiles are 8 rounds of 132 but for 32; 2752 are 21 but for 20
    assert turning_of(call_of(8, 2048, 8, 256), 1024, 132) == BESIDE
    assert turning_of(call_of(2, 8192, 32, 64), 2752, 132) != BESIDE
    assert turning_of(call_of(2, 8192, 32, 64, right=0), 2752, 132) == BESIDE
    assert turning_of(call_of(32, 512, 8, 256), 1024, 132) != BESIDE
    assert turning_of(call_of(1, 4096, 2, 256), 64, 132) != BESIDE


PROGRAM = """
import itertools, json, torch
from flashdig.kernels.hopper.fp8_values import Turning, by_column, by_column_shape, key_at
from flashdig.kernels.triton.arguments import prepared

BLOCK = 128

def bytes_of(*shape):
    return torch.randint(1, 120, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

def run(v, lengths_q, lengths_k, left, right, top_left):
    packed = v.dim() == 3
    cu = [None, None]
    if packed:
        cu = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32)
              for n in (lengths_q, lengths_k)]
    rows = (sum(lengths_q),) if packed else (len(lengths_q), lengths_q[0])
    q, k = bytes_of(*rows, v.shape[-2], 16), bytes_of(*v.shape[:-1], 16)
    call = prepared(q, k, v, None, None, None, None, *cu, None, None, softmax_scale=1.0,
                    softcap=0.0, dropout_p=0.0, window_left=left, window_right=right,
                    top_left=top_left, allow_tf32=False)
    found = torch.full(by_column_shape(call, BLOCK), 255, dtype=torch.uint8)
    by_column(call, Turning(BLOCK, 4, 7))(v, found.view(torch.float8_e4m3fn), *cu, None, None, None)
    v = v.view(torch.uint8)
    for b, (m, n) in enumerate(zip(lengths_q, lengths_k)):
        keys = v[sum(lengths_k[:b]):][:n] if packed else v[b]
        offset = 0 if top_left else n - m
        begin = max(offset - left, 0) if left >= 0 else 0
        end = min(n, m + offset + right) if right >= 0 else n
        seen = keys[begin:end]
        if packed:
            first = (sum(lengths_k[:b]) // BLOCK + b) * BLOCK
            room = (sum(lengths_k[:b + 1]) // BLOCK + b + 1) * BLOCK - first
            rows = found[0, :, :, first:first + room]
        else:
            room, rows = found.shape[3], found[b]
        whole = torch.zeros(room, *seen.shape[1:], dtype=torch.uint8)
        whole[:len(seen)] = seen
        order = [key_at(p) for p in range(room)]
        assert torch.equal(rows, whole[order].permute(1, 2, 0)), (lengths_q, lengths_k, b)

torch.manual_seed(0)
run(bytes_of(2, 200, 2, 64), [5, 5], [200, 200], -1, -1, False)
run(bytes_of(1, 200, 3, 48)[:, :, ::2], [5], [200], 50, 0, False)
run(bytes_of(1, 70, 1, 16), [90], [70], -1, 3, True)
run(bytes_of(391, 2, 32), [3, 0, 5, 4], [100, 1, 0, 290], 40, 0, False)
print(json.dumps("done"))
"""


def test_the_kernel_writes_every_key_in_its_place_and_zeros_elsewhere() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "done"
