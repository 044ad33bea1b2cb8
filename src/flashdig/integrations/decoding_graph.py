"""Greedy generation whose step is captured once as a CUDA graph and replayed for each token.

    from flashdig.integrations.decoding_graph import DecodingGraph
    from flashdig.integrations.transformers import InPlaceCache, register

    register()
    model.set_attn_implementation("dig")
    graph = DecodingGraph(model, InPlaceCache(model.config, max_cache_len=4096))
    tokens = graph.generate(input_ids, max_new_tokens=256)

An eager step of a model of `transformers` takes the host about a millisecond a layer, whatever the
GPU does; a replay is one launch.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flashdig.integrations.transformers import InPlaceCache

# before a capture: kernels are compiled and tuned, libraries make their workspaces
_EAGER_STEPS = 3


def cache_argument(model: Any) -> str:
    """The name under which a model's forward takes its cache: newer releases of transformers say
    cache, older ones past_key_values."""
    accepted = inspect.signature(model.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


@dataclass
class _Step:
    """Of prompts with padding, or without.

    Attributes:
        eager: how many steps were run eagerly.
        replay: runs the captured one.
    """

    eager: int = 0
    replay: Callable[[], None] | None = None


class DecodingGraph:
    """Generates greedily with one CUDA graph for a cache, that is for one batch and one room.

    A prompt runs eagerly, and so do the first three steps; then a step is captured: the model's
    forward with one token of each sequence, the choice of the next, and what moves on with it.

    Args:
        model: a causal language model of transformers on a CUDA device, in evaluation mode.
        cache: an `InPlaceCache`, with flashdig as the model's attention; or transformers'
            `StaticCache` with an attention that takes it, then without padding. It is emptied by
            each prompt. All prompts have the batch of the first.
    """

    def __init__(self, model: Any, cache: Any) -> None:
        self._model, self._cache = model, cache
        self._options = {cache_argument(model): cache}
        # a prompt's other logits would be the largest tensor of all
        accepted = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._steps = {False: _Step(), True: _Step()}
        self._padded = False
        self._length = 0
        self._tokens: torch.Tensor | None = None

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(batch, prompt + max_new_tokens) tokens, of which the prompt's come first.

        There is no end token: exactly `max_new_tokens` are generated, and what follows an end is
        the caller's to cut off.

        Args:
            input_ids: (batch, prompt) int64.
            max_new_tokens: at least 1.
            attention_mask: (batch, prompt), 0 where a token is padding on the left.

        Raises ValueError where an argument is none of these, or max_cache_len of the cache cannot
        hold the prompt and every new token but the last.
        """
        _check_count("max_new_tokens", max_new_tokens, 1)
        self._check_prompt(input_ids, max_new_tokens - 1)
        self.prefill(input_ids, attention_mask)
        self.decode(max_new_tokens - 1)
        assert self._tokens is not None
        return self._tokens[:, : self._length + 1].clone()

    @torch.no_grad()
    def prefill(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Empty the cache, run the prompt eagerly; (batch, 1), each sequence's first new token."""
        self._check_prompt(input_ids, 0)
        batch, length = input_ids.shape
        positions, self._padded = None, False
        if attention_mask is not None:
            positions = self._positions_of(input_ids, attention_mask)
        self._length = 0
        self._cache.reset()
        self._allocate(batch, input_ids.device)
        assert self._tokens is not None
        logits = self._model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            use_cache=True,
            **self._options,
            **self._last_only,
        ).logits
        self._length = length
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._tokens[:, :length] = input_ids
        self._tokens[:, length : length + 1] = self._token
        self._place.fill_(length)
        if positions is None:
            self._positions.fill_(length)
        else:
            self._positions.copy_(positions[:, -1:] + 1)
        return self._token.clone()

    @torch.no_grad()
    def decode(self, count: int) -> torch.Tensor:
        """(batch, count) tokens behind those there are. Raises ValueError before `prefill`, or
        where the cache has no room for the key of each of these steps."""
        _check_count("count", count, 0)
        if self._tokens is None or self._length == 0:
            raise ValueError("decode needs the prompt that prefill runs")
        self._check_room(self._length, count)
        if isinstance(self._cache, InPlaceCache):
            self._cache.advance(count)
        step = self._steps[self._padded]
        with torch.cuda.device(self._token.get_device()):
            for _ in range(count):
                if step.eager < _EAGER_STEPS:
                    self._step()
                    step.eager += 1
                    continue
                if step.replay is None:
                    step.replay = _captured(self._step)
                step.replay()
        self._length += count
        return self._tokens[:, self._length + 1 - count : self._length + 1].clone()

    def _step(self) -> None:
        """Everything in here is on the device and at the same address in each step."""
        assert self._tokens is not None
        ours = isinstance(self._cache, InPlaceCache)
        with self._cache.step_on_device() if ours else contextlib.nullcontext():
            logits = self._model(
                input_ids=self._token,
                position_ids=self._positions,
                use_cache=True,
                **self._options,
            ).logits
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._positions.add_(1)
        self._place.add_(1)
        self._tokens.index_copy_(1, self._place, self._token)

    def _allocate(self, batch: int, device: torch.device) -> None:
        if self._tokens is not None:
            if self._tokens.shape[0] != batch:
                raise ValueError(
                    f"input_ids must have the batch of the first prompt, {self._tokens.shape[0]}, "
                    f"got {batch}"
                )
            return
        room = self._cache.get_max_length()
        self._token, self._positions = (
            torch.zeros(batch, 1, dtype=torch.int64, device=device) for _ in range(2)
        )
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(batch, room + 1, dtype=torch.int64, device=device)

    def _positions_of(self, input_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor | None:
        """(batch, prompt) positions of tokens behind padding; None without any."""
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must be {tuple(input_ids.shape)} as input_ids, "
                f"got {tuple(mask.shape)}"
            )
        visible = mask.bool()
        if visible.all():
            return None
        if not isinstance(self._cache, InPlaceCache):
            raise ValueError("attention_mask must be 1 everywhere except with an InPlaceCache")
        if not visible[:, -1].all():
            raise ValueError("attention_mask must have its padding on the left")
        self._padded = True
        return (visible.long().cumsum(-1) - 1).clamp_min(0)

    def _check_prompt(self, input_ids: torch.Tensor, count: int) -> None:
        """And the room for `count` steps after it."""
        if input_ids.dim() != 2 or min(input_ids.shape) < 1:
            raise ValueError(f"input_ids must be (batch, prompt), got {tuple(input_ids.shape)}")
        _check_device(input_ids.device)
        self._check_room(input_ids.shape[1], count)

    def _check_room(self, length: int, count: int) -> None:
        """Of the cache: a replay writes where the device says, and the device raises nothing."""
        room = self._cache.get_max_length()
        if length + count > room:
            raise ValueError(
                f"max_cache_len must hold every key, got {room} for {length} + {count} keys"
            )


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be an int >= {least}, got {value!r}")


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise ValueError(f"input_ids must be on a CUDA device, got {device}")


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
