"""Compiles the cache's kernels without a GPU, by their own launchers.

`python -m tests.compile.cache_kernels` prints, as JSON, each architecture's kernels.
"""

import json
import sys
from typing import Any

import torch
import triton

from flashdig.evidence.offline_worker import driver_for
from flashdig.kernels.triton import decode_launch
from flashdig.kernels.triton.append_kv import append_rows
from flashdig.kernels.triton.decode_launch import cache_attention

BATCH, HEADS, HEADS_KV, SEQLEN = 2, 8, 2, 4096
# together they meet every schedule, cache and dtype; queries: packed, the tokens of each sequence
CALLS: dict[str, dict[str, Any]] = {
    "sm_80": {"cache": torch.float8_e4m3fn, "dim": 32},
    "sm_90": {"page": 16, "dim": 64, "append": True},
    "sm_90, mixed": {"page": 4, "dim": 64, "queries": [1, 300]},
    "sm_90, listed": {"page": 16, "dim": 64, "queries": [1, 2400]},
    "sm_90, pieces": {"page": 16, "dim": 128, "append": True, "free": True},
    "sm_90, packed pieces": {"dim": 96, "queries": [1, 20]},
    "sm_100": {"dim": 32, "tokens": 64, "invariant": True},
    "sm_120": {"dim": 32, "dtype": torch.float16, "page": 16, "ragged": True},
}


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch(name: str, arch: str) -> None:
    call = CALLS[name]
    dtype = call.get("dtype", torch.bfloat16)
    dim, tokens, page = call["dim"], call.get("tokens", 1), call.get("page", 0)
    shape = (64, page) if page else (BATCH, SEQLEN)
    k, v = (meta(*shape, HEADS_KV, dim, dtype=call.get("cache", dtype)) for _ in range(2))
    lengths = meta(BATCH, dtype=torch.int32)
    table = meta(BATCH, SEQLEN // page, dtype=torch.int32) if page else None
    if call.get("append"):
        angles = meta(SEQLEN, dim // 2, dtype=dtype)
        new = meta(BATCH, tokens, HEADS_KV, dim, dtype=dtype)
        turning = (angles, angles, None)
        append_rows(new, k, lengths, table, None, None, turning, None, interleaved=False)
    queries = call.get("queries")
    packed = queries is not None
    rows = (sum(queries),) if packed else (BATCH, tokens)
    offsets = meta(BATCH + 1, dtype=torch.int32) if packed else None
    cache_attention(
        meta(*rows, HEADS, dim, dtype=dtype), k, v, lengths, None, None, table, None, None,
        offsets, *(None,) * 6, softmax_scale=0.1, softcap=0.0, window_left=-1, window_right=0,
        top_left=False, allow_tf32=False, seqlen_new=tokens,
        num_splits=0 if call.get("invariant") or call.get("free") or packed else 2,
        batch_invariant=call.get("invariant", False), ragged=call.get("ragged"), arch=arch,
    )  # fmt: skip


def compiled(name: str) -> list[dict[str, Any]]:
    arch = name.partition(",")[0]
    driver = driver_for(arch)
    driver.launched.clear()
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.listener = driver.note_files
    decode_launch._fp8_hardware = lambda device: arch != "sm_80"
    launch(name, arch)
    fields = ("name", "registers", "stack_bytes", "shared_bytes", "opcodes")
    return [{field: kernel[field] for field in fields} for kernel in driver.launched]


if __name__ == "__main__":
    json.dump({name: compiled(name) for name in CALLS}, sys.stdout)
