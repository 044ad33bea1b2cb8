"""Decoding speed: one query token a sequence over a cache, beside the peers, in one run.

    python -m flashdig.bench.decode --output benchmarks/results/nvidia-h200/decode.json

Every output is compared with float64 before its time counts. Kernel time is that of CUDA-graph
replays with a cold L2 cache: between two tokens a model reads its weights. With `--clock eager` it
is that of calls back to back, their host work included, until the GPU has finished.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.bench.decode_goal import READ, goal_table
from flashdig.bench.environment import clocks_now, collect, revision
from flashdig.bench.host import HostCall, SurroundedMeter
from flashdig.bench.results import append_run, new_run, timing_fields
from flashdig.bench.timing import Timing, TimingFailure, median_ratio, rotate, time_rotated

SUITE = "decode"
NUM_HEADS, NUM_HEADS_KV, HEAD_DIM = 32, 8, 128
# READ is no attention but the time to read as many bytes, see `flashdig.kernels.triton.read_bytes`
PEERS = ("fa3", "sdpa_cudnn", "sdpa_flash", "fa4", READ)
# schedules of ours: the one that a call gets, and others
VARIANTS = ("chosen", "even parts")
# in dense caches of one length every key counts, as for torch's attention, which knows no lengths;
# elsewhere lengths lie on the device
CACHES = ("dense", "dense, lengths", "page 16", "page 64")
SEED = 2026


@dataclass(frozen=True)
class DecodeCell:
    """A batch of sequences of one length, or (mixed) of lengths drawn from a log-normal law.

    Attributes:
        capacity: keys that the cache has room for; the length where it is not mixed.
    """

    batch: int
    capacity: int
    mixed: bool = False

    @property
    def name(self) -> str:
        length = f"{self.capacity // 1024}k"
        return f"{self.batch}x{'up to ' if self.mixed else ''}{length}"

    def lengths(self) -> list[int]:
        """Median 5.4k keys, a quarter beyond 9.3k, for a capacity of 32k."""
        if not self.mixed:
            return [self.capacity] * self.batch
        import torch

        generator = torch.Generator().manual_seed(SEED)
        drawn = (torch.randn(self.batch, generator=generator) * 0.8 + 8.6).exp()
        return [int(n) for n in drawn.clamp(64, self.capacity)]


CELLS = (
    DecodeCell(1, 8 * 1024),
    DecodeCell(1, 64 * 1024),
    DecodeCell(1, 512 * 1024),
    DecodeCell(16, 8 * 1024),
    DecodeCell(64, 8 * 1024),
    DecodeCell(128, 2 * 1024),
    DecodeCell(64, 32 * 1024, mixed=True),
)

Call = Callable[[], Any]


@dataclass(frozen=True)
class Inputs:
    """Tensors of one cell and kind of cache; without seqlens every key counts."""

    q: Any
    k: Any
    v: Any
    seqlens: Any
    page_table: Any
    lengths: tuple[int, ...]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the keys and values that must be read."""
        return 2 * sum(self.lengths) * NUM_HEADS_KV * HEAD_DIM * 2

    def keys_of(self, b: int, head: int) -> tuple[Any, Any]:
        """k and v (1, length, 1, head_dim) of one sequence and KV head."""
        length = self.lengths[b]
        if self.page_table is None:
            rows = (self.k[b, :length], self.v[b, :length])
        else:
            pages = self.page_table[b].long()
            rows = tuple(
                x[pages, :, head : head + 1].flatten(0, 1)[:length] for x in (self.k, self.v)
            )
            return rows[0][None], rows[1][None]
        return tuple(x[None, :, head : head + 1] for x in rows)


def make_inputs(cell: DecodeCell, cache: str) -> Inputs:
    """randn in bfloat16; pages lie in a shuffled order."""
    import torch

    torch.manual_seed(SEED)
    shape = (cell.batch, cell.capacity, NUM_HEADS_KV, HEAD_DIM)
    q = torch.randn(cell.batch, 1, NUM_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lengths = cell.lengths()
    table = None
    if cache.startswith("page"):
        size = int(cache.split()[1])
        k, v = (x.view(-1, size, NUM_HEADS_KV, HEAD_DIM) for x in (k, v))
        order = torch.randperm(k.shape[0], device="cuda")
        table = order.to(torch.int32).view(cell.batch, -1)
    seqlens = None
    if cell.mixed or cache != "dense":
        seqlens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Inputs(q, k, v, seqlens, table, tuple(lengths))


def _ours(x: Inputs) -> Call | str:
    from flashdig import attention_with_kvcache

    return lambda: attention_with_kvcache(
        x.q, x.k, x.v, cache_seqlens=x.seqlens, page_table=x.page_table, causal=True
    )


def _even_parts(x: Inputs) -> Call | str:
    """Ours by its launcher, every sequence split alike."""
    from flashdig.kernels.triton.decode_launch import cache_attention

    rest = (None,) * 9

    def call() -> Any:
        out, _ = cache_attention(
            x.q, x.k, x.v, x.seqlens, None, None, x.page_table, *rest,
            softmax_scale=HEAD_DIM**-0.5, softcap=0.0, window_left=-1, window_right=0,
            top_left=False, allow_tf32=False, seqlen_new=0, num_splits=0,
            batch_invariant=False, ragged=False,
        )  # fmt: skip
        return out

    return call


def _fa3(x: Inputs) -> Call | str:
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    return lambda: flash_attn_with_kvcache(
        x.q, x.k, x.v, cache_seqlens=x.seqlens, page_table=x.page_table, causal=True
    )


def _fa4(x: Inputs) -> Call | str:
    """On Hopper it takes lengths and pages of any size, but does not split the keys of a sequence
    (it refuses num_splits > 1 there)."""
    from flash_attn.cute import (  # type: ignore[import-not-found]
        flash_attn_func,
        flash_attn_varlen_func,
    )

    if x.seqlens is None:
        return lambda: flash_attn_func(x.q, x.k, x.v)[0]
    return lambda: flash_attn_varlen_func(
        x.q, x.k, x.v, seqused_k=x.seqlens, page_table=x.page_table, causal=True
    )[0]


def _read(x: Inputs) -> Call | str:
    from flashdig.kernels.triton.read_bytes import reader

    return reader(x.k, x.v, x.cache_bytes // 2)


def _sdpa(x: Inputs, backend: str) -> Call | str:
    if x.page_table is not None:
        return "no pages"
    if x.seqlens is not None:
        return "no lengths"
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {"sdpa_cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa_flash": SDPBackend.FLASH_ATTENTION}

    def call() -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            x.q.transpose(1, 2), x.k.transpose(1, 2), x.v.transpose(1, 2), enable_gqa=True
        )
        return out.transpose(1, 2)

    # a program that wants a backend chooses it once
    return HostCall(call, lambda: sdpa_kernel(chosen[backend]))


def call_of(name: str, inputs: Inputs) -> Call | str:
    """A competitor's call, or why there is none."""
    try:
        if name in VARIANTS:
            return _ours(inputs) if name == "chosen" else _even_parts(inputs)
        if name == "fa3":
            return _fa3(inputs)
        if name == "fa4":
            return _fa4(inputs)
        if name == READ:
            return _read(inputs)
        return _sdpa(inputs, name)
    except ImportError as error:
        return f"cannot be imported: {error}"


class Reference:
    """float64 attention, and what eager attention loses, of the first, the last and two random
    pairs of a sequence and a KV head."""

    def __init__(self, inputs: Inputs) -> None:
        from flashdig.bench.gate import float64_reference

        pairs = [(b, h) for b in range(len(inputs.lengths)) for h in range(NUM_HEADS_KV)]
        drawn = random.Random(SEED).sample(pairs, 2)
        self.parts = {}
        for pair in dict.fromkeys((pairs[0], *drawn, pairs[-1])):
            k, v = inputs.keys_of(*pair)
            q = self._rows(inputs.q, pair)
            self.parts[pair] = float64_reference(
                q, k.transpose(1, 2), v.transpose(1, 2), causal=False, pairs="all"
            )

    def check(self, out: Any) -> Any:
        """The verdict on the worst pair."""
        found = [part.check(self._rows(out, pair)) for pair, part in self.parts.items()]
        return max(found, key=lambda one: (not one.ok, one.error or 0.0))

    @staticmethod
    def _rows(x: Any, pair: tuple[int, int]) -> Any:
        """(1, heads of the group, 1, head_dim) of q or out."""
        b, h = pair
        group = NUM_HEADS // NUM_HEADS_KV
        return x[b : b + 1, :, h * group : (h + 1) * group].transpose(1, 2)


def measure(
    cell: DecodeCell, cache: str, names: Sequence[str], settings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """A row for each competitor; those that are wrong or raise have no time."""
    import torch

    inputs = make_inputs(cell, cache)
    reference = Reference(inputs)
    rows, calls = {}, {}
    for name in names:
        call = call_of(name, inputs)
        if isinstance(call, str):
            continue
        row = rows[name] = _row(cell, cache, inputs, name)
        if name == READ:
            row["gate"], calls[name] = "ok", call
            continue
        try:
            verdict = reference.check(call())
        except Exception as failure:  # a peer that cannot do it must not end the run
            row["gate"] = f"{type(failure).__name__}: {str(failure).strip()[:200]}"
            continue
        row["gate"] = verdict.reason
        if verdict.error is not None and math.isfinite(verdict.error):
            row["error"], row["allowed_error"] = verdict.error, verdict.budget
        if verdict.ok:
            calls[name] = call
    for name, timing in _timed(calls, settings).items():
        if isinstance(timing, Timing):
            rows[name] |= timing_fields(timing)
            rows[name]["tb_per_s"] = inputs.cache_bytes / timing.ms / 1e9
        else:
            rows[name]["notes"] = f"no time: {timing.reason}"
    del inputs, reference, calls
    torch.cuda.empty_cache()
    # unknown values are left out
    return [{n: x for n, x in row.items() if x is not None} for row in rows.values()]


def _timed(
    calls: Mapping[str, Call], settings: Mapping[str, Any]
) -> dict[str, Timing | TimingFailure]:
    if settings["clock"] != "eager" or not calls:
        return time_rotated(calls, **settings)
    import torch

    meter = EagerMeter(settings["target_ms"], synchronize=torch.cuda.synchronize)
    return rotate(
        calls, meter, rounds=settings["rounds"], sample=clocks_now, progress=lambda _: None
    )


class EagerMeter(SurroundedMeter):
    """Until the GPU has finished the last call."""

    def milliseconds(self, call: Call, repetitions: int) -> float:
        bare = call.call if isinstance(call, HostCall) else call
        with call.surroundings() if isinstance(call, HostCall) else contextlib.nullcontext():
            self._synchronize()
            start = self._now()
            for _ in range(repetitions):
                bare()
            self._synchronize()
            return (self._now() - start) * 1e3 / repetitions


def _row(cell: DecodeCell, cache: str, inputs: Inputs, name: str) -> dict[str, Any]:
    return {
        "kind": "speed",
        "pass": "decode",
        "batch": cell.batch,
        "num_heads": NUM_HEADS,
        "num_heads_kv": NUM_HEADS_KV,
        "seqlen_q": 1,
        "seqlen_k": max(inputs.lengths),
        "head_dim": HEAD_DIM,
        "head_dim_v": HEAD_DIM,
        "dtype": "bfloat16",
        "causal": True,
        "features": {
            "cell": cell.name,
            "cache": cache,
            "keys": sum(inputs.lengths),
            "cache_bytes": inputs.cache_bytes,
            **({"schedule": name} if name in VARIANTS else {}),
        },
        "backend": "triton" if name in VARIANTS else name,  # ours, whichever kernel it runs
        "gate": "not run",
    }


def line_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """One cell for people: times, bandwidths, and the ratio to the best peer."""
    words = []
    for row in rows:
        name = row["features"].get("schedule", row["backend"])
        if "ms" in row:
            words.append(f"{name} {1e3 * row['ms']:.1f} us {row['tb_per_s']:.2f} TB/s")
        else:
            words.append(f"{name}: {row.get('notes', row['gate'])[:60]}")
    ours, features = rows[0], rows[0]["features"]
    timed = [row for row in rows if "ms" in row and row["backend"] not in ("triton", READ)]
    line = f"{features['cell']:>10} {features['cache']:>8}: {'; '.join(words)}"
    if "ms" in ours and timed:
        best = min(timed, key=lambda row: row["ms"])
        ratio = median_ratio(best["ms_all"], ours["ms_all"])
        line += f"; {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of {best['backend']}"
    return line


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of one run as a table in Markdown: microseconds, TB/s in brackets; the fastest of a
    line is bold."""
    columns = {
        "flashdig": "triton",
        "cuDNN": "sdpa_cudnn",
        "FlashAttention-4": "fa4",
        "FlashAttention-3": "fa3",
        "FlashAttention-2": "sdpa_flash",
    }
    lines: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        features = row["features"]
        if "ms" in row and features.get("schedule", "chosen") == "chosen":
            lines.setdefault((features["cell"], features["cache"]), {})[row["backend"]] = row
    text = [
        f"| batch x keys, cache | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for (cell, cache), found in lines.items():
        best = min(row["ms"] for backend, row in found.items() if backend in columns.values())
        words = []
        for backend in columns.values():
            row = found.get(backend, {})
            word = f"{1e3 * row['ms']:.1f} ({row['tb_per_s']:.2f})" if row else ""
            words.append(f"**{word}**" if row and row["ms"] == best else word)
        text.append(f"| {cell}, {cache} | {' | '.join(words)} |")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; 0 when every output of ours is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.decode")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    parser.add_argument("--schedules", nargs="*", default=["chosen"], choices=VARIANTS)
    parser.add_argument("--caches", nargs="*", default=list(CACHES), choices=CACHES)
    parser.add_argument("--cells", nargs="*", help="names such as 1x8k; default: all")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--target-ms", type=float, default=0.5)
    parser.add_argument("--time-limit", type=float, help="no cell begins after so many seconds")
    parser.add_argument("--clock", choices=("graph", "host", "eager"), default="graph")
    given = parser.parse_args(arguments)
    names = [cell.name for cell in CELLS]
    if unknown := sorted(set(given.cells or ()) - set(names)):
        parser.error(f"--cells must be of {', '.join(names)}, got {unknown[0]}")
    command = shlex.join(["python", "-m", "flashdig.bench.decode", *sys.argv[1:]])
    started = new_run(command, collect(), revision())
    settings = {
        "rounds": given.rounds,
        "target_ms": given.target_ms,
        "clock": given.clock,
        "l2": "cold" if given.clock == "graph" else "warm",
    }
    rows: list[dict[str, Any]] = []
    begun, failed = time.monotonic(), False
    for cell in CELLS:
        for cache in given.caches:
            if cell.mixed and cache == "dense":  # lengths are what it is about
                continue
            late = given.time_limit is not None and time.monotonic() - begun > given.time_limit
            if late or (given.cells and cell.name not in given.cells):
                continue
            try:
                found = measure(cell, cache, (*given.schedules, *given.peers), settings)
            except Exception as error:  # what was measured so far is kept
                failed = True
                print(f"{cell.name} {cache}: {type(error).__name__}: {error}", flush=True)
                continue
            print(line_of(found), flush=True)
            rows += found
    if table := goal_table(rows):
        print(table, flush=True)
    if given.output is not None:
        append_run(given.output, SUITE, started, rows)
    right = all(row["gate"] == "ok" for row in rows if row["backend"] == "triton")
    return 0 if right and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
