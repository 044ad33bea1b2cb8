"""flashdig as the attention of models of `transformers`, and a cache that it appends to in place.

    from flashdig.integrations.transformers import InPlaceCache, register

    register()
    model.set_attn_implementation("dig")
    model.generate(**inputs, past_key_values=InPlaceCache(model.config, max_cache_len=4096))

With any other cache of transformers the keys of each step are whatever that cache returns. Needs
transformers 5 (https://huggingface.co/docs/transformers/attention_interface describes the
interface).
"""

from __future__ import annotations

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


class InPlaceLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, (batch, max_cache_len, heads, head_dim)."""

    is_sliding = False

    def __init__(self, shared: _Shared) -> None:
        super().__init__()
        self._shared = shared
        self._length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._k, self._v = (
            x.new_empty(x.shape[0], self._shared.capacity, x.shape[1], x.shape[3])
            for x in (key_states, value_states)
        )
        self.keys, self.values = self._k.transpose(1, 2), self._v.transpose(1, 2)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values themselves: `attention_forward` appends them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._length + key_states.shape[2] > self._shared.capacity:
            raise ValueError(
                f"max_cache_len must hold every key, got {self._shared.capacity} for "
                f"{self._length} + {key_states.shape[2]} keys"
            )
        setattr(key_states, _LAYER, self)
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
        before, self._length = self._length, self._length + k.shape[1]
        leftpad = None if mask is None else self._shared.leftpad(mask, before == 0)
        if before == 0 and leftpad is None:  # a prompt: the fastest attention there is
            for cache, new in ((self._k, k), (self._v, v)):
                cache[:, : new.shape[1]].copy_(new)
            out = attention(q, k, v, **options)
        else:
            out = attention_with_kvcache(
                q,
                self._k,
                self._v,
                k,
                v,
                cache_seqlens=self._shared.seqlens(before, q),
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

    def reset(self) -> None:
        self._length = 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        if self._length > 0:
            for cache in (self._k, self._v):
                cache.copy_(cache.index_select(0, beam_idx.to(cache.device)))


class _Shared:
    """What all layers of a cache have in common: a step's lengths are written once."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._known = -1
        self._seqlens: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._leftpad: torch.Tensor | None = None

    def seqlens(self, length: int, q: torch.Tensor) -> torch.Tensor:
        """(batch,) int32 keys before this step's."""
        if self._seqlens is None or self._seqlens.shape[0] != q.shape[0]:
            self._seqlens = torch.empty(q.shape[0], dtype=torch.int32, device=q.device)
            self._known = -1
        if length != self._known:
            self._seqlens.fill_(length)
            self._known = length
        return self._seqlens

    def leftpad(self, mask: torch.Tensor, first: bool) -> torch.Tensor:
        """(batch,) int32 keys at the start that are padding."""
        if mask is not self._mask:
            hidden = ~mask.bool()
            self._mask, self._leftpad = mask, hidden.sum(-1, dtype=torch.int32)
            if first and (hidden[:, 1:] & ~hidden[:, :-1]).any():
                raise ValueError("attention_mask must have its padding on the left")
        assert self._leftpad is not None
        return self._leftpad


class InPlaceCache(Cache):  # type: ignore[misc]
    """A cache of fixed size to which `attention_forward` appends keys and values in place.

    Each step writes its own keys and nothing else, and every step is the same call: in a
    `DynamicCache` torch.cat copies all keys of every layer in each step.

    Args:
        config: of the model, for the number of its layers.
        max_cache_len: keys of a sequence that there is room for.
    """

    def __init__(self, config: Any, max_cache_len: int) -> None:
        if isinstance(max_cache_len, bool) or not isinstance(max_cache_len, int):
            raise TypeError(f"max_cache_len must be an int, got {max_cache_len!r}")
        if max_cache_len < 1:
            raise ValueError(f"max_cache_len must be >= 1, got {max_cache_len}")
        shared = _Shared(max_cache_len)
        count = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[InPlaceLayer(shared) for _ in range(count)])
