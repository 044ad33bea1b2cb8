"""MiniLM in plain torch, held against torch's own encoder layers and against what texts mean."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashdig.generations import minilm
from flashdig.generations.inputs import MissingExtraError
from flashdig.generations.minilm import TextError, encode, load_minilm, minilm_qkv, tokenize

TEXT = "Attention weighs every word of a sentence against every other one."


def sentence_embedding(text: str) -> torch.Tensor:
    """Mean of the final hidden states, as the model was trained to be used."""
    return F.normalize(encode(text).hidden.mean(0), dim=0)


def torch_layer(layer: int) -> torch.nn.TransformerEncoderLayer:
    """The same layer as torch implements it, with the model's weights."""
    model = load_minilm()
    module = torch.nn.TransformerEncoderLayer(
        model.hidden_size,
        model.num_heads,
        dim_feedforward=1536,
        dropout=0.0,
        activation="gelu",
        layer_norm_eps=model.layer_norm_eps,
        batch_first=True,
        norm_first=False,
    ).eval()
    own = {
        name.removeprefix(f"encoder.layer.{layer}."): weight
        for name, weight in model.weights.items()
        if name.startswith(f"encoder.layer.{layer}.")
    }
    parts = ("query", "key", "value")
    state = {
        f"self_attn.in_proj_{kind}": torch.cat([own[f"attention.self.{p}.{kind}"] for p in parts])
        for kind in ("weight", "bias")
    }
    for theirs, ours in {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }.items():
        state |= {f"{theirs}.{kind}": own[f"{ours}.{kind}"] for kind in ("weight", "bias")}
    module.load_state_dict(state)
    return module


def test_forward_equals_torch_encoder_layers() -> None:
    model = load_minilm()
    ids = torch.tensor(tokenize(TEXT).ids)
    hidden = F.embedding(ids, model.weights["embeddings.word_embeddings.weight"])
    hidden = hidden + model.weights["embeddings.position_embeddings.weight"][: len(ids)]
    hidden = hidden + model.weights["embeddings.token_type_embeddings.weight"][0]
    hidden = model.layer_norm("embeddings.LayerNorm", hidden)[None]
    with torch.no_grad():
        for layer in range(model.num_layers):
            hidden = torch_layer(layer)(hidden)
    torch.testing.assert_close(encode(TEXT).hidden, hidden[0], rtol=1e-4, atol=2e-5)


def test_any_attention_function_runs_the_model() -> None:
    fused = encode(TEXT, attention=F.scaled_dot_product_attention).hidden
    torch.testing.assert_close(fused, encode(TEXT).hidden, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_qkv_are_those_that_the_model_feeds_its_attention(layer: int) -> None:
    calls = []

    def record(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        calls.append((q, k, v))
        return minilm.eager_attention(q, k, v)

    encode(TEXT, attention=record)
    x = minilm_qkv(TEXT, layer)
    for own, fed in zip((x.q, x.k, x.v), calls[layer], strict=True):
        torch.testing.assert_close(own, fed)
    torch.testing.assert_close(
        minilm.eager_attention(x.q, x.k, x.v),
        F.scaled_dot_product_attention(x.q, x.k, x.v),
        rtol=1e-4,
        atol=1e-5,
    )


def test_paraphrases_are_nearer_than_unrelated_sentences() -> None:
    pairs = [
        ("A man is playing a guitar on stage.", "Someone performs music with a guitar."),
        ("The stock market fell sharply today.", "Share prices dropped a lot this afternoon."),
        ("She is boiling pasta for dinner.", "A woman cooks noodles for the evening meal."),
    ]
    embedded = [[sentence_embedding(text) for text in pair] for pair in pairs]
    near = [float(a @ b) for a, b in embedded]
    far = [
        float(a @ b) for one, two in itertools.combinations(embedded, 2) for a in one for b in two
    ]
    assert min(near) > 0.5
    assert max(far) < 0.3


def test_shape_tokens_and_source() -> None:
    x = minilm_qkv("Flash attention kernels", layer=2, dtype="float16")
    assert x.tokens == ("[CLS]", "flash", "attention", "kernel", "##s", "[SEP]")
    problem = x.problem()
    assert (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim) == (1, 12, 6, 32)
    assert problem.dtype == "float16"
    assert x.source == "all-MiniLM-L6-v2 layer 2, 6 tokens"


def test_activations_are_not_gaussian() -> None:
    # what the random inputs cannot stand in for: scores with a spread and keys with a common mean
    x = minilm_qkv(TEXT, 3)
    mean_key = x.k.mean(dim=2, keepdim=True)
    assert float(mean_key.norm() / (x.k - mean_key).norm(dim=-1).mean()) > 1


def test_word_changes_reach_the_keys_of_other_words() -> None:
    one, other = minilm_qkv("the bank of the river", 3), minilm_qkv("the bank of the city", 3)
    assert one.tokens[2] == other.tokens[2] == "bank"
    assert not torch.allclose(one.k[:, :, 2], other.k[:, :, 2], atol=1e-2)


def test_layer_zero_depends_on_its_own_token_only() -> None:
    one, other = minilm_qkv("the bank of the river", 0), minilm_qkv("the bank of the city", 0)
    torch.testing.assert_close(one.k[:, :, 2], other.k[:, :, 2])


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_empty_text(text: str) -> None:
    with pytest.raises(TextError, match="text must hold at least one word"):
        minilm_qkv(text)


@pytest.mark.parametrize("layer", [-1, 6, 2.0, True])
def test_layer_out_of_range(layer: Any) -> None:
    with pytest.raises(TextError, match="layer must be 0 to 5, got"):
        minilm_qkv(TEXT, layer)


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="dtype must be one of"):
        minilm_qkv(TEXT, dtype="int8")


def test_long_text_is_cut_to_512_and_says_so() -> None:
    x = minilm_qkv("word " * 600, layer=1)
    assert x.q.shape == (1, 12, 512, 32)
    assert (x.tokens[0], x.tokens[-1], len(x.tokens)) == ("[CLS]", "[SEP]", 512)
    assert x.source.endswith("512 tokens, cut from 602 to 512 tokens")
    whole = minilm_qkv("word " * 510, layer=1)
    assert "cut" not in whole.source
    torch.testing.assert_close(x.q, whole.q)


@pytest.fixture
def forgotten_model() -> Iterator[None]:
    load_minilm.cache_clear()
    yield
    load_minilm.cache_clear()


@pytest.mark.usefixtures("forgotten_model")
@pytest.mark.parametrize("package", ["safetensors", "tokenizers", minilm.MODEL_PACKAGE])
def test_without_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=package)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    if package == minilm.MODEL_PACKAGE:
        monkeypatch.setattr(minilm, "MODEL_PACKAGE", "package_that_is_not_installed")
    with pytest.raises(MissingExtraError, match=r"pip install flashdig\[real\]"):
        minilm_qkv(TEXT)
