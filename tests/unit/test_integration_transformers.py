"""flashdig as the attention of transformers' models, on the CPU."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from flashdig.bench import decode_loop
from flashdig.integrations.transformers import InPlaceCache, register

SMALL = decode_loop.ModelSize(layers=2, hidden=64, num_heads=4, num_heads_kv=2, vocabulary=200)


@pytest.fixture(scope="module")
def model():
    register()
    return decode_loop.make_model(SMALL, "float32", "cpu")


def tokens_of(model, attention, prompt, **options):
    model.set_attn_implementation(attention)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0} | options
    return model.generate(prompt, eos_token_id=None, **options)


def prompt_of(batch, length):
    return decode_loop.make_prompt(decode_loop.LoopCell(batch, length), SMALL, "cpu")


def test_a_loop_gives_the_tokens_of_eager_attention() -> None:
    assert decode_loop.check(SMALL, decode_loop.LoopCell(2, 9), 12, "cpu") == []


def test_padding_on_the_left(model) -> None:
    prompt = prompt_of(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    expected = tokens_of(model, "eager", prompt, attention_mask=mask)
    for cache in (None, InPlaceCache(model.config, 32)):
        found = tokens_of(model, "dig", prompt, attention_mask=mask, past_key_values=cache)
        assert torch.equal(found, expected)
    mask = mask.flip(1)
    with pytest.raises(ValueError, match="attention_mask must have its padding on the left"):
        tokens_of(
            model,
            "dig",
            prompt,
            attention_mask=mask,
            past_key_values=InPlaceCache(model.config, 32),
        )


def test_beams_move_rows_of_the_cache(model) -> None:
    prompt = prompt_of(2, 5)
    expected = tokens_of(model, "eager", prompt, num_beams=3)
    cache = InPlaceCache(model.config, 32)
    assert torch.equal(
        tokens_of(model, "dig", prompt, num_beams=3, past_key_values=cache), expected
    )


def test_a_window_of_keys() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads)).eval()
    prompt = prompt_of(1, 9)
    expected = tokens_of(model, "eager", prompt)
    for cache in (None, InPlaceCache(model.config, 32)):
        assert torch.equal(tokens_of(model, "dig", prompt, past_key_values=cache), expected)


def test_what_does_not_fit_is_refused(model) -> None:
    with pytest.raises(ValueError, match="max_cache_len must hold every key, got 10"):
        tokens_of(model, "dig", prompt_of(1, 9), past_key_values=InPlaceCache(model.config, 10))
    with pytest.raises(ValueError, match="max_cache_len must be >= 1"):
        InPlaceCache(model.config, 0)
    with pytest.raises(ValueError, match="name must not have 'flash' in it"):
        register("flashdig")
