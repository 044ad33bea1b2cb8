"""A decoding loop: a small Llama of `transformers` with random weights generates tokens greedily.

    python -m flashdig.bench.decode_loop --output benchmarks/results/nvidia-h200/decode-loop.json

First in float32: flashdig must give the tokens of eager attention. Then in bfloat16, timed beside
torch's attention: whole generations, the host's work included; with --captured the steps alone,
each the replay of a CUDA graph (`flashdig.bench.decode_loop_captured`). Needs transformers.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.bench import decode_loop_captured as captured
from flashdig.bench.decode_loop_entries import COMPETITORS as CAPTURED
from flashdig.bench.decode_loop_entries import Competitor
from flashdig.bench.environment import collect, revision
from flashdig.bench.results import append_run, new_run, timing_fields
from flashdig.bench.timing import Timing, median_ratio, time_rotated

SUITE = "decode-loop"
SEED = 2026
VOCABULARY = 32000
TOKENS = 256
Keep = Callable[[list[dict[str, Any]]], None]
# of a captured generation beside an eager one, in the dtype and at the size that is timed
GATED_TOKENS = 32


@dataclass(frozen=True)
class LoopCell:
    """How much a model generates after how much: `prompt` tokens of each sequence are given."""

    batch: int
    prompt: int

    @property
    def name(self) -> str:
        return f"{self.batch}x{self.prompt}"


@dataclass(frozen=True)
class ModelSize:
    """Of a Llama."""

    layers: int = 8
    hidden: int = 1024
    num_heads: int = 16
    num_heads_kv: int = 8
    vocabulary: int = VOCABULARY


CELLS = (LoopCell(1, 128), LoopCell(8, 4096), LoopCell(64, 4096))
CHECKED = LoopCell(2, 64)
# (attention, cache); the first is ours
COMPETITORS = (
    ("flashdig", "InPlaceCache"),
    ("sdpa", "DynamicCache"),
    ("sdpa", "StaticCache"),
)


def make_model(size: ModelSize, dtype: str, device: str) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_heads_kv,
        max_position_embeddings=16384,
    )
    torch.manual_seed(SEED)
    with torch.device(device):  # weights are drawn there: the host takes seconds
        model = LlamaForCausalLM(config)
    return model.eval().to(getattr(torch, dtype))


def make_prompt(cell: LoopCell, size: ModelSize, device: str) -> Any:
    """(batch, prompt) random tokens."""
    import torch

    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.randint(3, size.vocabulary, (cell.batch, cell.prompt), generator=generator)
    return drawn.to(device)


def generate(model: Any, prompt: Any, attention: str, cache: str, tokens: int) -> Any:
    """(batch, prompt + tokens) of the model with this attention and this cache.

    Args:
        attention: "flashdig", or a name that transformers knows.
        cache: "InPlaceCache", "DynamicCache" or "StaticCache".
    """
    import torch
    from transformers import DynamicCache, StaticCache

    from flashdig.integrations import transformers as integration

    integration.register()
    model.set_attn_implementation(integration.NAME if attention == "flashdig" else attention)
    room = prompt.shape[1] + tokens
    kept: Any
    if cache == "InPlaceCache":
        kept = integration.InPlaceCache(model.config, room)
    elif cache == "StaticCache":
        kept = StaticCache(config=model.config, max_cache_len=room)
    else:
        kept = DynamicCache(config=model.config)
    with torch.inference_mode():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            past_key_values=kept,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            disable_compile=True,
        )


def check(size: ModelSize, cell: LoopCell, tokens: int, device: str) -> list[str]:
    """What differs from eager attention in float32; empty when every token agrees."""
    model, prompt = make_model(size, "float32", device), make_prompt(cell, size, device)
    expected = generate(model, prompt, "eager", "DynamicCache", tokens)
    failures = []
    for cache in ("InPlaceCache", "DynamicCache"):
        found = generate(model, prompt, "flashdig", cache, tokens)
        different = (found != expected).any(0)
        if different.any():
            first = int(different.int().argmax()) - prompt.shape[1]
            failures.append(f"{cache}: token {first} differs from that of eager attention")
    return failures


def measure(
    cell: LoopCell,
    size: ModelSize,
    tokens: int,
    gate: str,
    rounds: int,
    competitors: Sequence[tuple[str, str]] = COMPETITORS,
) -> list[dict[str, Any]]:
    """A row for each competitor."""
    model, prompt = make_model(size, "bfloat16", "cuda"), make_prompt(cell, size, "cuda")

    def call(attention: str, cache: str) -> Callable[[], Any]:
        return lambda: generate(model, prompt, attention, cache, tokens)

    calls = {" ".join(one): call(*one) for one in competitors}
    timings = time_rotated(calls, rounds=rounds, target_ms=1.0, clock="host")
    rows = []
    for (attention, cache), timing in zip(competitors, timings.values(), strict=True):
        row = common_fields(cell, size, tokens)
        row["features"]["cache"] = cache
        row |= {"backend": attention, "gate": gate if attention == "flashdig" else "ok"}
        if isinstance(timing, Timing) and row["gate"] == "ok":
            row |= {n: x for n, x in timing_fields(timing).items() if x is not None}
            row["tokens_per_s"] = 1e3 * cell.batch * tokens / timing.ms
        elif not isinstance(timing, Timing):
            row["notes"] = f"no time: {timing.reason}"
        rows.append(row)
    return rows


def common_fields(cell: LoopCell, size: ModelSize, tokens: int) -> dict[str, Any]:
    """What the rows of all competitors say about a cell."""
    head_dim = size.hidden // size.num_heads
    return {
        "kind": "speed",
        "pass": "decode",
        "name": "decode loop",
        "batch": cell.batch,
        "num_heads": size.num_heads,
        "num_heads_kv": size.num_heads_kv,
        "seqlen_q": 1,
        "seqlen_k": cell.prompt + tokens,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "dtype": "bfloat16",
        "causal": True,
        "model": {"class": "LlamaForCausalLM", **vars(size)},
        "features": {"cell": cell.name, "prompt": cell.prompt},
    }


def check_captured(
    size: ModelSize, tokens: int, competitors: Sequence[Competitor]
) -> dict[str, str]:
    """`failures_of` beside eager attention in float32."""
    competitors = [one for one in competitors if one.captured]
    model, prompt = make_model(size, "float32", "cuda"), make_prompt(CHECKED, size, "cuda")
    expected = generate(model, prompt, "eager", "DynamicCache", tokens)
    return captured.failures_of(model, prompt, expected, tokens, competitors)


def measure_captured(
    cell: LoopCell,
    size: ModelSize,
    tokens: int,
    failures: dict[str, str],
    rounds: int,
    competitors: Sequence[Competitor],
) -> list[dict[str, Any]]:
    """A row for each competitor."""
    import transformers

    model, prompt = make_model(size, "bfloat16", "cuda"), make_prompt(cell, size, "cuda")
    gate = captured.gate_of(model, prompt, min(tokens, GATED_TOKENS))
    failures = {competitors[0].name: gate, **failures} if gate != "ok" else failures
    measured = captured.measure_steps(model, prompt, tokens, rounds, competitors)
    common = common_fields(cell, size, tokens)
    common["model"]["transformers"] = transformers.__version__
    return captured.rows_of(common, tokens, competitors, measured, failures)


def line_of(rows: Sequence[dict[str, Any]]) -> str:
    words = []
    for row in rows:
        name = f"{row['backend']}, {row['features']['cache']}"
        took = f"{row['ms']:.0f} ms, {row['tokens_per_s']:.0f} tokens/s" if "ms" in row else "-"
        words.append(f"{name} {took}")
    line = f"{rows[0]['features']['cell']}: {'; '.join(words)}"
    timed = [row for row in rows[1:] if "ms" in row]
    if "ms" in rows[0] and timed:
        best = min(timed, key=lambda row: row["ms"])
        ratio = median_ratio(best["ms_all"], rows[0]["ms_all"])
        cache = best["features"]["cache"]
        line += f"; {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] of sdpa with {cache}"
    return line


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then time; 0 when every token agreed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.decode_loop")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="at least 3")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cells", nargs="*", help="names such as 1x128; default: all")
    caches = [cache for _, cache in COMPETITORS[1:]]
    parser.add_argument(
        "--sdpa-caches", nargs="+", default=caches, choices=caches, help="without --captured"
    )
    parser.add_argument("--captured", action="store_true", help="steps that are CUDA graphs")
    peers = [one.name for one in CAPTURED[1:]]
    parser.add_argument("--peers", nargs="+", default=peers, choices=peers, help="with --captured")
    given = parser.parse_args(arguments)
    names = [cell.name for cell in CELLS]
    if unknown := sorted(set(given.cells or ()) - set(names)):
        parser.error(f"--cells must be of {', '.join(names)}, got {unknown[0]}")
    if given.tokens < 3:
        parser.error(f"--tokens must be >= 3, got {given.tokens}")
    cells = [cell for cell in CELLS if not given.cells or cell.name in given.cells]
    command = shlex.join(["python", "-m", "flashdig.bench.decode_loop", *sys.argv[1:]])

    def keep(rows: list[dict[str, Any]]) -> None:
        """As soon as they are there: a cell takes half a minute."""
        if given.output is not None:
            append_run(given.output, SUITE, new_run(command, collect(), revision()), rows)

    if given.captured:
        return _run_captured(given, cells, keep)
    return _run_eager(given, cells, keep)


def _run_eager(given: argparse.Namespace, cells: Sequence[LoopCell], keep: Keep) -> int:
    size = ModelSize()
    competitors = [
        one for one in COMPETITORS if one[0] == "flashdig" or one[1] in given.sdpa_caches
    ]
    failures = check(size, CHECKED, given.tokens, "cuda")
    keep([_tested("flashdig", "", given.tokens, 2, failures)])
    gate = failures[0] if failures else "ok"
    for cell in cells:
        found = measure(cell, size, given.tokens, gate, given.rounds, competitors)
        print(line_of(found), flush=True)
        keep(found)
    return 1 if failures else 0


def _run_captured(given: argparse.Namespace, cells: Sequence[LoopCell], keep: Keep) -> int:
    size = ModelSize()
    competitors = [
        one for one in CAPTURED if one.attention == "flashdig" or one.name in given.peers
    ]
    failures = check_captured(size, given.tokens, competitors)
    keep(
        [
            _tested(one.name, ", captured step", given.tokens, 1, _listed(failures.get(one.name)))
            for one in competitors
            if one.captured
        ]
    )
    sound = competitors[0].name not in failures
    for cell in cells:
        found = measure_captured(cell, size, given.tokens, failures, given.rounds, competitors)
        print(captured.line_of(found, competitors), flush=True)
        keep(found)
        sound = sound and found[0]["gate"] == "ok"
    return 0 if sound else 1


def _listed(failure: str | None) -> list[str]:
    return [] if failure is None else [failure]


def _tested(
    backend: str, what: str, tokens: int, cases: int, failures: list[str]
) -> dict[str, Any]:
    for failure in failures:
        print(f"FAILED {failure}", flush=True)
    return {
        "kind": "test",
        "name": f"tokens of eager attention in float32, {CHECKED.name} + {tokens}{what}",
        "backend": backend,
        "cases": cases,
        "passed": cases - len(failures),
        "failed": len(failures),
        "skipped": 0,
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
