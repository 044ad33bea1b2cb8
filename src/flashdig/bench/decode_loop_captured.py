"""The decoding loop with its step captured as a CUDA graph: the host's work is gone, what is left
is kernels. `flashdig.bench.decode_loop --captured` runs it.

Ours and torch's attention with transformers' `StaticCache` are driven by the same
`DecodingGraph`. torch's attention with a `DynamicCache` cannot be captured, since its tensors grow:
its steps are eager. Nothing is compiled by torch.compile.

What is timed is every token but the first, which comes with the prompt: prompts run eagerly, apart.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from flashdig.bench.environment import clocks_now
from flashdig.bench.meters import Call, HostMeter
from flashdig.bench.results import timing_fields
from flashdig.bench.timing import Timing, TimingFailure, median_ratio, rotate

# name in transformers of torch's attention with the query heads of a KV head as its rows
PACKED = "sdpa_packed"


@dataclass(frozen=True)
class Competitor:
    """An attention with its cache.

    Attributes:
        attention: "flashdig", or a name that transformers knows.
        backend: that torch's attention is restricted to, by its name in
            `torch.nn.attention.SDPBackend`; None leaves the choice to torch.
        captured: the step is a CUDA graph, else it is eager.
    """

    name: str
    attention: str
    cache: str
    backend: str | None = None
    captured: bool = True


# the first is ours
COMPETITORS = (
    Competitor("flashdig", "flashdig", "InPlaceCache"),
    Competitor("sdpa", "sdpa", "StaticCache"),
    Competitor("sdpa-packed", PACKED, "StaticCache"),
    Competitor("sdpa-cudnn", PACKED, "StaticCache", "CUDNN_ATTENTION"),
    Competitor("sdpa-eager", "sdpa", "DynamicCache", captured=False),
)


class Loop(Protocol):
    """`flashdig.integrations.decoding_graph.DecodingGraph` or an `EagerLoop`."""

    def prefill(self, input_ids: Any) -> Any: ...
    def decode(self, count: int) -> Any: ...


class EagerLoop:
    """A model with a new `DynamicCache` for each prompt, without what `generate` does beside it."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache: Any = None
        self._token: Any = None

    def prefill(self, input_ids: Any) -> Any:
        """(batch, 1), each sequence's first new token."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        return self._run(input_ids)

    def decode(self, count: int) -> Any:
        """(batch, count) tokens behind those there are."""
        import torch

        return torch.cat([self._run(self._token) for _ in range(count)], -1)

    def _run(self, tokens: Any) -> Any:
        import torch

        from flashdig.integrations.decoding_graph import cache_argument

        with torch.no_grad():
            given = {cache_argument(self._model): self._cache, "logits_to_keep": 1}
            logits = self._model(input_ids=tokens, use_cache=True, **given).logits
            self._token = logits[:, -1].argmax(-1, keepdim=True)
        return self._token


def loop_of(model: Any, competitor: Competitor, room: int) -> Loop:
    """
    Args:
        room: keys of a sequence that a cache of fixed size has room for.
    """
    from transformers import StaticCache

    from flashdig.integrations.decoding_graph import DecodingGraph
    from flashdig.integrations.transformers import InPlaceCache

    if not competitor.captured:
        return EagerLoop(model)
    if competitor.cache == "InPlaceCache":
        return DecodingGraph(model, InPlaceCache(model.config, room))
    return DecodingGraph(model, StaticCache(config=model.config, max_cache_len=room))


def choose(model: Any, competitor: Competitor) -> None:
    """Give the model the competitor's attention."""
    from flashdig.integrations import transformers as integration

    integration.register()
    _register_packed()
    ours = competitor.attention == "flashdig"
    model.set_attn_implementation(integration.NAME if ours else competitor.attention)


def packed_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[Any, None]:
    """torch's attention, without the copy of keys for each query head that transformers 5.17 makes
    where there is a mask: for one token, the heads of a group are rows of one problem. Later
    releases do the same."""
    from torch.nn.functional import scaled_dot_product_attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, heads, tokens, head_dim = query.shape
    if tokens > 1 or attention_mask is None or attention_mask.shape[1] != 1:
        out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return out, None
    rows = query.reshape(batch, key.shape[1], heads // key.shape[1], head_dim)
    out = scaled_dot_product_attention(
        rows, key, value, attn_mask=attention_mask, scale=options.get("scaling")
    )
    return out.reshape(batch, 1, heads, value.shape[-1]), None


def _register_packed() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, sdpa_mask)


def backend_of(competitor: Competitor) -> contextlib.AbstractContextManager[Any]:
    """In it torch's attention takes the competitor's backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if competitor.backend is None:
        return contextlib.nullcontext()
    backend: Any = getattr(SDPBackend, competitor.backend)
    return cast("contextlib.AbstractContextManager[Any]", sdpa_kernel(backend))


def failures_of(
    model: Any, prompt: Any, expected: Any, tokens: int, competitors: Sequence[Competitor]
) -> dict[str, str]:
    """Which competitor's tokens are not the expected ones, and the first that differs: of a
    generation in which the step is captured, and of the next, which is replays alone."""
    import torch

    found = {}
    for competitor in competitors:
        choose(model, competitor)
        with backend_of(competitor):
            loop = loop_of(model, competitor, prompt.shape[1] + tokens)
            for which in ("first", "second"):
                given = torch.cat([loop.prefill(prompt), loop.decode(tokens - 1)], -1)
                different = given != expected[:, prompt.shape[1] :]
                if different.any():
                    place = int(different.any(0).int().argmax())
                    found[competitor.name] = (
                        f"{competitor.name}, {which} generation: token {place} differs from that "
                        "of eager attention"
                    )
                    break
    return found


class StepsMeter(HostMeter):
    """Times what a call returns: the steps that follow a prompt, which the call itself runs. The
    GPU is waited for before and after the steps."""

    def milliseconds(self, call: Call, repetitions: int) -> float:
        """Of the steps alone, the mean of `repetitions`."""
        total = 0.0
        for _ in range(repetitions):
            steps = cast(Callable[[], object], call())
            self._synchronize()
            start = self._now()
            steps()
            self._synchronize()
            total += self._now() - start
        return total * 1e3 / repetitions


def measure_steps(
    model: Any,
    prompt: Any,
    tokens: int,
    rounds: int,
    competitors: Sequence[Competitor],
) -> list[tuple[Timing | TimingFailure, float | None]]:
    """Of each competitor: the time of all tokens but the first, and milliseconds of a prompt."""
    import torch

    wait: Callable[[], None] = torch.cuda.synchronize if prompt.is_cuda else lambda: None
    prefills: dict[str, list[float]] = {one.name: [] for one in competitors}

    def call_of(competitor: Competitor) -> Call:
        loop = loop_of(model, competitor, prompt.shape[1] + tokens)

        def steps() -> None:
            with backend_of(competitor):
                loop.decode(tokens - 1)

        def call() -> Call:
            choose(model, competitor)
            with backend_of(competitor):
                wait()
                start = time.perf_counter()
                loop.prefill(prompt)
                wait()
            prefills[competitor.name].append((time.perf_counter() - start) * 1e3)
            return steps

        return call

    timings = rotate(
        {one.name: call_of(one) for one in competitors},
        StepsMeter(1.0, synchronize=wait),
        rounds=rounds,
        sample=clocks_now,
        progress=lambda _: None,
    )
    return [
        (timing, statistics.median(prefills[name]) if prefills[name] else None)
        for name, timing in timings.items()
    ]


def rows_of(
    common: dict[str, Any],
    tokens: int,
    competitors: Sequence[Competitor],
    measured: Sequence[tuple[Timing | TimingFailure, float | None]],
    failures: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for each competitor.

    Args:
        common: fields of all of them.
        failures: as `failures_of` gives them.
    """
    rows = []
    for competitor, (timing, prefill) in zip(competitors, measured, strict=True):
        features = common["features"] | {
            "cache": competitor.cache,
            "competitor": competitor.name,
            "step": "captured" if competitor.captured else "eager",
            "timed": f"{tokens - 1} steps, without the prompt",
        }
        if competitor.backend is not None:
            features["sdpa_backend"] = competitor.backend
        row = common | {
            "name": "decode loop, steps",
            "features": features,
            "backend": competitor.name.split("-")[0],
            "gate": failures.get(competitor.name, "ok"),
        }
        if isinstance(timing, TimingFailure):
            row["notes"] = f"no time: {timing.reason}"
        elif row["gate"] == "ok":
            row |= {n: x for n, x in timing_fields(timing).items() if x is not None}
            row["tokens_per_s"] = 1e3 * common["batch"] * (tokens - 1) / timing.ms
            features["step_ms"] = timing.ms / (tokens - 1)
            features["prompt_ms"] = prefill
        rows.append(row)
    return rows


def line_of(rows: Sequence[dict[str, Any]], competitors: Sequence[Competitor]) -> str:
    """A cell's times, and ours in times as fast as each of the others."""
    ours, words = rows[0], []
    for row, competitor in zip(rows, competitors, strict=True):
        word = f"{competitor.name} -"
        if "ms" in row:
            features = row["features"]
            word = (
                f"{competitor.name} {features['step_ms']:.3f} ms a step, "
                f"{row['tokens_per_s']:.0f} tokens/s (prompt {features['prompt_ms']:.0f} ms)"
            )
            if row is not ours and "ms" in ours:
                ratio = median_ratio(row["ms_all"], ours["ms_all"])
                word += f": {ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        elif "notes" in row:
            word += f" ({row['notes']})"
        words.append(word)
    return f"{ours['features']['cell']}, steps: {'; '.join(words)}"
