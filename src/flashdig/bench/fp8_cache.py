"""What a key-value cache in 8 bits costs in accuracy: python -m flashdig.bench.fp8_cache

Keys and values are stored in bfloat16, or in 8 bits with a factor for each (sequence, KV head), or
with none, and bfloat16 queries attend to them. Errors are against float64 attention on activations
that no cache has rounded. Activations are MiniLM's of a text, layer by layer, and synthetic ones
with what makes 8 bits hard: outlying channels, a key that all queries attend to, heavy tails, and
values far from 1.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashdig.bench.environment import collect, revision
from flashdig.bench.fp8 import quantised
from flashdig.bench.results import append_run, new_run

if TYPE_CHECKING:
    import torch

SUITE = "fp8-cache"
# name -> (dtype, whether there are factors)
CACHES = {
    "bfloat16": ("bfloat16", False),
    "e4m3": ("float8_e4m3fn", True),
    "e4m3, no factors": ("float8_e4m3fn", False),
    "e5m2": ("float8_e5m2", True),
}
SEED = 0
# (batch, queries, keys, heads, KV heads, head_dim) of synthetic activations
SIZES = (2, 16, 2048, 8, 2, 128)
SINK = 8.0  # by how much its score is above the mean of the others
OUTLIER = 20.0  # times the other channels


@dataclass(frozen=True)
class Activations:
    """float32 q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads, head_dim)."""

    name: str
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def synthetic(device: torch.device | str) -> Iterator[Activations]:
    """Activations by name, of one seed each."""
    import torch

    batch, queries, keys, heads, heads_kv, head_dim = SIZES

    def made(name: str) -> Activations:
        generator = torch.Generator().manual_seed(SEED)
        shapes = ((queries, heads), (keys, heads_kv), (keys, heads_kv))
        q, k, v = (
            torch.randn(batch, *shape, head_dim, generator=generator).to(device) for shape in shapes
        )
        if name == "outlying channels":
            k[..., :2] *= OUTLIER
            v[..., :2] *= OUTLIER
        elif name == "one key for all":
            q[..., 0] = 4.0
            k[..., 0] = 0.0
            k[:, 0] = 0.0
            k[:, 0, :, 0] = SINK * math.sqrt(head_dim) / 4.0
        elif name == "heavy tails":
            # Student's t of 3 degrees of freedom
            squares = torch.randn(2, 3, *k.shape, generator=generator).square().mean(1).to(device)
            k /= squares[0].sqrt()
            v /= squares[1].sqrt()
        elif name == "values times 1000":
            v *= 1000.0
        elif name == "values over 1000":
            v /= 1000.0
        return Activations(name, q, k, v)

    for name in ("normal", "outlying channels", "one key for all", "heavy tails",
                 "values times 1000", "values over 1000"):  # fmt: skip
        yield made(name)


def of_minilm(text: str, device: torch.device | str) -> Iterator[Activations]:
    """MiniLM's activations of a text, of each layer."""
    from flashdig.generations.minilm import MODEL_NAME, load_minilm, minilm_qkv

    for layer in range(load_minilm().num_layers):
        made = minilm_qkv(text, layer, device=device)
        q, k, v = (x.transpose(1, 2).contiguous() for x in (made.q, made.k, made.v))
        yield Activations(f"{MODEL_NAME} layer {layer}", q, k, v)


def measure(activations: Activations, cache: str) -> dict[str, Any]:
    """One row: errors of attention over a cache of one kind."""
    import torch

    from flashdig import attention_with_kvcache
    from flashdig.kernels.reference import reference_attention

    dtype_name, with_factors = CACHES[cache]
    dtype = getattr(torch, dtype_name)
    q, k, v = activations.q, activations.k, activations.v
    exact, _ = reference_attention(q.double(), k.double(), v.double())
    heads_kv = k.shape[2]
    factors: dict[str, Any] = {}
    if with_factors:
        (k, factors["k_descale"]), (v, factors["v_descale"]) = (
            quantised(x, heads_kv, dtype) for x in (k, v)
        )
    else:
        end = torch.finfo(dtype).max
        k, v = (x.clamp(-end, end).to(dtype) for x in (k, v))
    out = attention_with_kvcache(q.bfloat16(), k, v, cache_seqlens=None, **factors)
    assert isinstance(out, torch.Tensor)
    error = out.double() - exact
    size = float(exact.square().mean().sqrt())
    finite = bool(torch.isfinite(error).all())
    row: dict[str, Any] = {
        "kind": "speed",
        "pass": "decode",
        "name": activations.name,
        "batch": q.shape[0],
        "num_heads": q.shape[2],
        "num_heads_kv": heads_kv,
        "seqlen_q": q.shape[1],
        "seqlen_k": k.shape[1],
        "head_dim": q.shape[3],
        "head_dim_v": v.shape[3],
        "dtype": "bfloat16",
        "causal": False,
        "features": {"cache": cache, "cache_dtype": dtype_name, "factors": with_factors},
        "backend": "auto",
        "gate": "ok" if finite else "out has values that are NaN or infinite",
        "notes": "accuracy alone was measured, against float64 on activations that are not rounded",
    }
    if finite:
        row["error"] = float(error.abs().max())
        row["rms_error"] = float(error.square().mean().sqrt())
        row["features"]["rms_of_out"] = size
    return row


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: activations down, caches across, rms errors over the output's rms."""
    lines = [f"| activations | {' | '.join(CACHES)} |", "| --- |" + " --- |" * len(CACHES)]
    for name in dict.fromkeys(row["name"] for row in rows):
        of_it = {row["features"]["cache"]: row for row in rows if row["name"] == name}
        words = [
            f"{100 * row['rms_error'] / row['features']['rms_of_out']:.2g} %"
            if "rms_error" in row
            else row["gate"]
            for row in (of_it[cache] for cache in CACHES)
        ]
        lines.append(f"| {name} | {' | '.join(words)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0 when every output is finite, else 1."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.fp8_cache")
    parser.add_argument("--text", type=Path, help="also MiniLM's activations of this file's text")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    given = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    command = shlex.join(["python", "-m", "flashdig.bench.fp8_cache", *sys.argv[1:]])
    started = new_run(command, collect(), revision())
    found = [] if given.text is None else list(of_minilm(given.text.read_text("utf-8"), device))
    rows = [measure(one, cache) for one in (*found, *synthetic(device)) for cache in CACHES]
    print(table_of(rows))
    if given.output is not None:
        append_run(given.output, SUITE, started, rows)
    return 0 if all(row["gate"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
