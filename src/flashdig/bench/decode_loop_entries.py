"""Who takes part in the captured decoding loop: attentions, their caches and their loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

# name in transformers of torch's attention with the query heads of a KV head as its rows
PACKED = "sdpa_packed"


@dataclass(frozen=True)
class Competitor:
    """An attention with its cache.

    Attributes:
        attention: "flashdig", or a name that transformers knows.
        backend: that torch's attention is restricted to in steps, by its name in
            `torch.nn.attention.SDPBackend`; None leaves the choice to torch.
        captured: the step is a CUDA graph, else it is eager.
        most: tokens that are timed at most: an eager step takes the host as long as ten replays.
    """

    name: str
    attention: str
    cache: str
    backend: str | None = None
    captured: bool = True
    most: int | None = None

    def steps(self, tokens: int) -> int:
        """That are timed of a generation of `tokens`."""
        return min(tokens, self.most or tokens) - 1


# the first is ours
COMPETITORS = (
    Competitor("flashdig", "flashdig", "InPlaceCache"),
    Competitor("sdpa", "sdpa", "StaticCache"),
    Competitor("sdpa-packed", PACKED, "StaticCache"),
    Competitor("sdpa-efficient", PACKED, "StaticCache", "EFFICIENT_ATTENTION"),
    Competitor("sdpa-eager", "sdpa", "DynamicCache", captured=False, most=33),
)


class Loop(Protocol):
    """`flashdig.integrations.decoding_graph.DecodingGraph` or an `EagerLoop`."""

    def prefill(self, input_ids: Any) -> Any: ...
    def decode(self, count: int) -> Any: ...


class EagerLoop:
    """A model with a new cache for each prompt, without what `generate` does beside it."""

    def __init__(self, model: Any, make_cache: Callable[[], Any]) -> None:
        self._model, self._make_cache = model, make_cache
        self._cache: Any = None
        self._token: Any = None

    def prefill(self, input_ids: Any) -> Any:
        """(batch, 1), each sequence's first new token."""
        self._cache = self._make_cache()
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
    from transformers import DynamicCache, StaticCache

    from flashdig.integrations.decoding_graph import DecodingGraph
    from flashdig.integrations.transformers import InPlaceCache

    if not competitor.captured:
        return EagerLoop(model, lambda: DynamicCache(config=model.config))
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
