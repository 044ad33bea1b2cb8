"""flashdig as the attention of models of `transformers`, and a cache that it appends to in place.

    from flashdig.integrations.transformers import InPlaceCache, register

    register()
    model.set_attn_implementation("dig")
    model.generate(**inputs, past_key_values=InPlaceCache(model.config, max_cache_len=4096))

With any other cache of transformers the keys of each step are whatever that cache returns.
`flashdig.integrations.decoding_graph` captures the step as a CUDA graph. Needs transformers 5
(https://huggingface.co/docs/transformers/attention_interface describes the interface).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import flash_attention_mask, sdpa_mask

from flashdig.api import attention, attention_with_kvcache

NAME = "dig"  # transformers takes a name with "flash" in it for FlashAttention
_LAYER = "_flashdig_layer"  # attribute of new keys: the layer that they are to be appended to


def register(name: str = NAME) -> None:
    """Let models be given `attn_implementation=name`.

    Raises ValueError for a name with "flash" in it, which transformers takes for FlashAttention.
    """
    if "flash" in name:
        raise ValueError(f"name must not have 'flash' in it, got {name!r}")
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask_for)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer.

    Args:
        query, key, value: (batch, heads, seqlen, head_dim); with an `InPlaceCache` key and value
            are the new ones.
        attention_mask: None, (batch, seqlen_k) bool, False where a key is padding, or (batch or 1,
            heads or 1, seqlen_q, seqlen_k) with everything in it, bool or added to the scores.
        s_aux: (heads,) logits of sinks.

    Raises ValueError where an `InPlaceCache` cannot hold the keys, or meets a mask that it cannot
    serve.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0, "sinks": s_aux}
    whole = attention_mask is not None and attention_mask.dim() == 4
    if not whole:
        options["causal"] = causal
        if sliding_window is not None:  # the query's own key is one of the window's
            options["window"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    layer = getattr(key, _LAYER, None)
    if layer is not None:
        if whole or dropout:
            raise ValueError(
                "InPlaceCache serves causal and windowed attention with padding on the left, "
                f"got {'a whole attention_mask' if whole else f'dropout {dropout}'}"
            )
        return layer.attend(q, k, v, attention_mask, options), None
    bias = attention_mask
    if attention_mask is not None and not whole:
        bias = attention_mask[:, None, None, :].bool()
    out = attention(q, k, v, bias=bias, dropout_p=dropout, **options)
    assert isinstance(out, torch.Tensor)
    return out, None


def attention_mask_for(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask that transformers hands to `attention_forward`: None, or which keys are padding; a
    whole one where the model masks in a way of its own."""
    if kwargs.get("allow_is_causal_skip", True):
        mask: torch.Tensor | None = flash_attention_mask(*args, **kwargs)
        return mask
    whole: torch.Tensor | None = sdpa_mask(*args, **kwargs)
    return whole


def _is_captured(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class InPlaceLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (batch, max_cache_len, heads, head_dim)."""

    is_sliding = False

    def __init__(self, shared: _Shared) -> None:
        super().__init__()
        self._shared = shared
        self._length = 0
        self._device_step = 0
        self._waits = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._k, self._v = (
            x.new_empty(x.shape[0], self._shared.capacity, x.shape[1], x.shape[3])
            for x in (key_states, value_states)
        )
        self.keys, self.values = self._k.transpose(1, 2), self._v.transpose(1, 2)
        self._shared.allocate(key_states.shape[0], self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves: `attention_forward` appends them."""
        if self._waits:
            raise ValueError(
                "InPlaceCache needs set_attn_implementation with the name that was registered: "
                "another attention left keys that it had to append"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif key_states.shape[0] != self._k.shape[0]:
            raise ValueError(
                f"InPlaceCache holds {self._k.shape[0]} sequences, got keys of "
                f"{key_states.shape[0]}"
            )
        if not self._shared.on_device:
            self._shared.check_room(self._length, key_states.shape[2])
            if _is_captured(key_states):
                raise RuntimeError(
                    "a step of InPlaceCache is captured within its step_on_device(): the graph "
                    "would hold the host's length and append to the same place in each replay"
                )
        setattr(key_states, _LAYER, self)
        self._waits = True
        return key_states, value_states

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Append k and v (batch, seqlen, heads, head_dim), attend to all keys so far."""
        self._waits = False
        shared, before = self._shared, self._length
        if shared.on_device:
            if mask is not None:
                raise ValueError(
                    "attention_mask must be None within step_on_device(), which knows the "
                    "prompt's padding"
                )
            if self._device_step == shared.device_steps:
                raise ValueError("step_on_device() must hold one step of the model, got two")
            self._device_step = shared.device_steps
            shared.appended = k.shape[1]
            lengths, leftpad = shared.lengths, shared.leftpad if shared.padded else None
        else:
            self._length += k.shape[1]
            shared.pad(mask, before == 0)
            leftpad = shared.leftpad if shared.padded else None
            if before == 0 and leftpad is None:  # a prompt: the fastest attention there is
                for cache, new in ((self._k, k), (self._v, v)):
                    cache[:, : new.shape[1]].copy_(new)
                out = attention(q, k, v, **options)
                assert isinstance(out, torch.Tensor)
                return out
            lengths = shared.filled(before)
        out = attention_with_kvcache(
            q,
            self._k,
            self._v,
            k,
            v,
            cache_seqlens=lengths,
            cache_leftpad=leftpad,
            **options,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_seq_length(self) -> int:
        return self._length

    def get_max_length(self) -> int:
        return self._shared.capacity

    def advance(self, tokens: int) -> None:
        """Count keys that the device appends."""
        self._length += tokens

    def reset(self) -> None:
        self._length = 0
        self._waits = False

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self._length > 0:
            for cache in (self._k, self._v):
                cache.copy_(cache.index_select(0, beam_idx.to(cache.device)))


class _Shared:
    """What all layers of a cache have in common: a step's lengths are written once, and always to
    the same places, which a captured step reads.

    Attributes:
        lengths: (batch,) int32 keys before this step's.
        leftpad: (batch,) int32 keys at the start that are padding; counts where `padded`.
        on_device: a step reads and advances `lengths`, which the host does not know then.
        device_steps: how many of these there have been; appended: keys of the last.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.on_device = False
        self.device_steps = 0
        self.appended = 0
        self.padded = False
        self.lengths: torch.Tensor
        self.leftpad: torch.Tensor
        self._allocated = False
        self._known = -1
        self._mask: torch.Tensor | None = None

    def allocate(self, batch: int, device: torch.device) -> None:
        if not self._allocated:
            self.lengths, self.leftpad = (
                torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(2)
            )
            self._allocated = True

    def check_room(self, length: int, new: int) -> None:
        if length + new > self.capacity:
            raise ValueError(
                f"max_cache_len must hold every key, got {self.capacity} for {length} + {new} keys"
            )

    def filled(self, length: int) -> torch.Tensor:
        """`lengths`, all of them `length`."""
        if length != self._known:
            self.lengths.fill_(length)
            self._known = length
        return self.lengths

    @contextlib.contextmanager
    def device_step(self) -> Iterator[None]:
        if self.on_device:
            raise ValueError("step_on_device() must not be entered within itself")
        self.on_device, self.appended = True, 0
        self.device_steps += 1
        try:
            yield
            if self.appended:
                self.lengths.add_(self.appended)
        finally:
            self.on_device, self._known = False, -1

    def set(self, length: int) -> None:
        """`lengths`, all of them, for steps on the device."""
        self.lengths.fill_(length)
        self._known = -1

    def pad(self, mask: torch.Tensor | None, first: bool) -> None:
        """Take `leftpad` from (batch, keys) bool, False where a key is padding."""
        self.padded = mask is not None
        if mask is None or mask is self._mask:
            return
        hidden = ~mask.bool()
        if first and (hidden[:, 1:] & ~hidden[:, :-1]).any():
            raise ValueError("attention_mask must have its padding on the left")
        self.leftpad.copy_(hidden.sum(-1, dtype=torch.int32))
        self._mask = mask


class InPlaceCache(Cache):  # type: ignore[misc]
    """A cache of fixed size to which `attention_forward` appends keys and values in place.

    Each step writes its own keys and nothing else, and every step is the same call: in a
    `DynamicCache` torch.cat copies all keys of every layer in each step.

    Lengths are counted on the host. A step that is captured as a CUDA graph takes them from the
    device, where it advances them too: capture it within `step_on_device`, call `advance` before it
    is replayed. `flashdig.integrations.decoding_graph.DecodingGraph` does both.

    Args:
        config: of the model, for the number of its layers.
        max_cache_len: keys of a sequence that there is room for.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int):
            raise TypeError(f"max_cache_len must be an int, got {max_cache_len!r}")
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len must be >= 1, got {max_cache_len}")
        self._shared = _Shared(max_cache_len)
        count = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[InPlaceLayer(self._shared) for _ in range(count)])

    def step_on_device(self) -> contextlib.AbstractContextManager[None]:
        """A step in here finds on the device how many keys there are, and counts its own there.

        The host's lengths stand still, so `advance` comes first; without it keys that have no room
        are dropped and nobody is told. The prompt's padding goes on, so the attention_mask of a
        step is None. ValueError where it is not, or for a second step.
        """
        return self._shared.device_step()

    def advance(self, tokens: int) -> None:
        """Make the device's lengths the host's, and count on the host the `tokens` keys that steps
        on the device, eager ones or replays, are about to append.

        Raises ValueError where max_cache_len has no room for them, or before there is a prompt.
        """
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise ValueError(f"tokens must be an int >= 0, got {tokens!r}")
        length = self.layers[0].get_seq_length()
        if length == 0:
            raise ValueError("advance needs the keys of a prompt in the cache, which is empty")
        self._shared.check_room(length, tokens)
        self._shared.set(length)
        for layer in self.layers:
            layer.advance(tokens)
