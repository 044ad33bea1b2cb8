"""Steps of a server: sequences that decode beside one that is still being read, packed in one call;
or either alone.

    python -m flashdig.bench.decode_mixed --output benchmarks/results/nvidia-h200/decode-mixed.json

Every step has other lengths, so what counts is the time of most of them (p50) and of the slowest
(p99). The call is captured once in a CUDA graph; lengths change between replays, as a server does
it, and each replay starts with a cold L2 cache. Outputs of the first step are compared with float64
before any time counts.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.bench.decode import HEAD_DIM, NUM_HEADS, NUM_HEADS_KV, SEED, Call
from flashdig.bench.environment import collect, revision
from flashdig.bench.results import append_run, new_run

SUITE = "decode-mixed"
PAGE_SIZE = 16
CAPACITY = 16 * 1024
STEPS = 100
# each step is measured so often, and its median counts
REPETITIONS = 3


@dataclass(frozen=True)
class MixedCell:
    """`decoding` sequences with one query token each, and one with a chunk of its prompt, unless
    that is 0."""

    decoding: int
    chunk: int

    @property
    def name(self) -> str:
        return f"{self.decoding} + {self.chunk}"

    @property
    def queries(self) -> list[int]:
        """Query tokens of each sequence."""
        return [1] * self.decoding + [self.chunk] * (self.chunk > 0)

    def lengths(self, step: int) -> list[int]:
        """Keys of each sequence in a step, its queries' own among them: log-normal with median
        5.4k for those that decode, any multiple of the chunk up to 8k for the other."""
        import torch

        generator = torch.Generator().manual_seed(SEED + step)
        drawn = (torch.randn(self.decoding, generator=generator) * 0.8 + 8.6).exp()
        decoded = [int(n) for n in drawn.clamp(64, CAPACITY)]
        if self.chunk == 0:
            return decoded
        chunks = 8 * 1024 // self.chunk
        return [*decoded, int(torch.randint(1, chunks + 1, (), generator=generator)) * self.chunk]


CELLS = (
    *(MixedCell(32, 0), MixedCell(128, 0)),
    *(MixedCell(32, 512), MixedCell(128, 512), MixedCell(32, 2048)),
    *(MixedCell(0, 512), MixedCell(0, 2048), MixedCell(0, 8192)),
)
PEERS = ("fa3", "fa4")


class Step:
    """The tensors of a cell's calls; `set_lengths` makes another step of them."""

    def __init__(self, cell: MixedCell, device: str = "cuda") -> None:
        import torch

        self.cell = cell
        torch.manual_seed(SEED)
        self.batch = len(cell.queries)
        pages = self.batch * CAPACITY // PAGE_SIZE

        def randn(*shape: int) -> Any:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self.q = randn(sum(cell.queries), NUM_HEADS, HEAD_DIM)
        self.k, self.v = (randn(pages, PAGE_SIZE, NUM_HEADS_KV, HEAD_DIM) for _ in range(2))
        order = torch.randperm(pages, device=device).to(torch.int32)
        self.page_table = order.view(self.batch, -1)
        offsets = torch.tensor([0, *cell.queries], dtype=torch.int32, device=device)
        self.cu_seqlens_q = offsets.cumsum(0).to(torch.int32)
        self.seqlens = torch.zeros(self.batch, dtype=torch.int32, device=device)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        import torch

        self.seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))

    def check(self, out: Any, lengths: Sequence[int]) -> str:
        """ "ok", or what is wrong with the first sequences and the last, which is the prompt."""
        from flashdig.bench.gate import float64_reference

        offsets = self.cu_seqlens_q.tolist()
        for b in sorted({0, min(1, self.batch - 1), self.batch - 1}):
            rows = slice(offsets[b], offsets[b + 1])
            pages = self.page_table[b].long()
            k, v = (x[pages].flatten(0, 1)[: lengths[b]].transpose(0, 1) for x in (self.k, self.v))
            q = self.q[rows].transpose(0, 1)
            reference = float64_reference(q[None], k[None], v[None], causal=True)
            verdict = reference.check(out[rows].transpose(0, 1)[None])
            if not verdict.ok:
                return f"sequence {b}: {verdict.reason}"
        return "ok"


def call_of(name: str, step: Step) -> Call | str:
    """A competitor's call, or why there is none."""
    if name == "flashdig":
        from flashdig import attention_with_kvcache

        return lambda: attention_with_kvcache(
            step.q,
            step.k,
            step.v,
            cache_seqlens=step.seqlens,
            page_table=step.page_table,
            cu_seqlens_q=step.cu_seqlens_q,
            causal=True,
        )
    try:
        return _fa3(step) if name == "fa3" else _fa4(step)
    except ImportError as error:
        return f"cannot be imported: {error}"


def _fa3(step: Step) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache  # type: ignore[import-not-found]

    return lambda: flash_attn_with_kvcache(
        step.q,
        step.k,
        step.v,
        cache_seqlens=step.seqlens,
        page_table=step.page_table,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=max(step.cell.queries),
        causal=True,
    )


def _fa4(step: Step) -> Call:
    """On Hopper it does not split the keys of a sequence."""
    from flash_attn.cute import flash_attn_varlen_func  # type: ignore[import-not-found]

    return lambda: flash_attn_varlen_func(
        step.q,
        step.k,
        step.v,
        cu_seqlens_q=step.cu_seqlens_q,
        max_seqlen_q=max(step.cell.queries),
        seqused_k=step.seqlens,
        page_table=step.page_table,
        causal=True,
    )[0]


def measure(cell: MixedCell, names: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """A row for each competitor; those that are wrong or raise have no time."""
    import torch

    from flashdig.bench.meters import FlushL2

    step = Step(cell)
    rows, graphs = {}, {}
    lengths = [cell.lengths(n) for n in range(steps)]
    step.set_lengths(lengths[0])
    for name in names:
        call = call_of(name, step)
        if isinstance(call, str):
            print(f"{name}: not run: {call}", flush=True)
            continue
        row = rows[name] = _row(cell, name)
        try:
            row["gate"] = step.check(call(), lengths[0])
            if row["gate"] != "ok":
                continue
            graphs[name] = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graphs[name]):
                call()
        except Exception as failure:  # a peer that cannot do it must not end the run
            row["gate"] = f"{type(failure).__name__}: {str(failure).strip()[:200]}"
            graphs.pop(name, None)
    flush = FlushL2()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: dict[str, list[list[float]]] = {name: [] for name in graphs}
    for graph in graphs.values():
        graph.replay()
    for one in lengths:
        step.set_lengths(one)
        taken: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPETITIONS):
            for name, graph in graphs.items():
                flush()
                events[0].record()
                graph.replay()
                events[1].record()
                events[1].synchronize()
                taken[name].append(events[0].elapsed_time(events[1]))
        for name, ms in taken.items():
            times[name].append(ms)
    for name, repeated in times.items():
        rows[name] |= figures(repeated)
    return list(rows.values())


def figures(times: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Fields of a row from the repeated times of every step, milliseconds."""
    middle = [statistics.median(ms) for ms in times]
    ranked = sorted(middle)
    features = {
        "steps": len(middle),
        "p50_us": 1e3 * statistics.median(middle),
        "p99_us": 1e3 * ranked[min(len(ranked) - 1, round(0.99 * (len(ranked) - 1)))],
    }
    return {
        "ms": statistics.median(middle),
        "ms_all": middle,
        "aa_spread": statistics.median(abs(ms[0] / ms[-1] - 1) for ms in times),
        "clock": "events",
        "l2": "cold",
        "features": features,
    }


def _row(cell: MixedCell, name: str) -> dict[str, Any]:
    return {
        "kind": "speed",
        "pass": "decode",
        "name": f"mixed {cell.name}, page {PAGE_SIZE}",
        "batch": len(cell.queries),
        "num_heads": NUM_HEADS,
        "num_heads_kv": NUM_HEADS_KV,
        "seqlen_q": max(cell.queries),
        "seqlen_k": CAPACITY,
        "head_dim": HEAD_DIM,
        "head_dim_v": HEAD_DIM,
        "dtype": "bfloat16",
        "causal": True,
        "backend": name,
        "gate": "not run",
    }


def line_of(rows: Sequence[dict[str, Any]]) -> str:
    words = []
    for row in rows:
        f = row.get("features", {})
        timed = f"p50 {f['p50_us']:.1f} us, p99 {f['p99_us']:.1f} us" if f else row["gate"][:80]
        words.append(f"{row['backend']} {timed}")
    return f"{rows[0]['name']}: {'; '.join(words)}"


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of one run as a table in Markdown, microseconds."""
    text = ["| step | backend | p50 | p99 |", "| --- | --- | --- | --- |"]
    for row in rows:
        figures = row.get("features", {})
        if figures:
            p50, p99 = figures["p50_us"], figures["p99_us"]
            text.append(f"| {row['name']} | {row['backend']} | {p50:.1f} | {p99:.1f} |")
    return "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells; 0 when every output of ours is right, else 1."""
    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.decode_mixed")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS)
    given = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "flashdig.bench.decode_mixed", *sys.argv[1:]])
    started = new_run(command, collect(), revision())
    rows: list[dict[str, Any]] = []
    for cell in CELLS:
        found = measure(cell, ("flashdig", *given.peers), given.steps)
        print(line_of(found), flush=True)
        rows += found
    if given.output is not None:
        append_run(given.output, SUITE, started, rows)
    return 0 if all(row["gate"] == "ok" for row in rows if row["backend"] == "flashdig") else 1


if __name__ == "__main__":
    sys.exit(main())
