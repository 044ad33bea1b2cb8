"""A captured decoding step, on the CPU: a trace by make_fx stands for the CUDA graph. Like one it
repeats operations on the same tensors, with every number of the host as it was at the capture."""

import contextlib

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import StaticCache

from flashdig.bench import decode_loop
from flashdig.integrations import decoding_graph, transformers
from flashdig.integrations.decoding_graph import DecodingGraph
from flashdig.integrations.transformers import InPlaceCache, register

SMALL = decode_loop.ModelSize(layers=2, hidden=64, num_heads=4, num_heads_kv=2, vocabulary=200)
ROOM = 32


@pytest.fixture(scope="module")
def model():
    register()
    return decode_loop.make_model(SMALL, "float32", "cpu")


@pytest.fixture
def captures(monkeypatch):
    """The traces that were made."""
    made = []

    def captured(step):
        def traced():
            step()
            return torch.zeros(())

        # a trace runs the step, which a capture does not: the first replay is done
        replay, replays = make_fx(traced)(), []
        made.append(replay)
        return lambda: replays.append(replay() if replays else None)

    monkeypatch.setattr(decoding_graph, "_check_device", lambda device: None)
    monkeypatch.setattr(decoding_graph, "_captured", captured)
    return made


def prompt_of(batch, length):
    return decode_loop.make_prompt(decode_loop.LoopCell(batch, length), SMALL, "cpu")


def eager_tokens(model, prompt, tokens, mask=None):
    model.set_attn_implementation("eager")
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt) if mask is None else mask,
        max_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )


@pytest.mark.parametrize("kind", ["InPlaceCache", "StaticCache"])
def test_one_step_serves_all_prompts(kind, model, captures) -> None:
    prompts = [prompt_of(2, length) for length in (9, 4)]
    expected = [eager_tokens(model, prompt, 12) for prompt in prompts]
    if kind == "InPlaceCache":
        model.set_attn_implementation("dig")
        graph = DecodingGraph(model, InPlaceCache(model.config, ROOM))
    else:
        model.set_attn_implementation("sdpa")
        graph = DecodingGraph(model, StaticCache(config=model.config, max_cache_len=ROOM))
    assert [len(captures), torch.equal(graph.generate(prompts[0], 12), expected[0])] == [0, True]
    assert torch.equal(graph.generate(prompts[1], 1), expected[1][:, :5])
    assert torch.equal(graph.decode(7), expected[1][:, 5:12])
    assert torch.equal(graph.decode(4), expected[1][:, 12:])
    assert len(captures) == 1


def test_a_length_of_the_hosts_would_be_seen(model, captures, monkeypatch) -> None:
    prompt = prompt_of(2, 9)
    expected = eager_tokens(model, prompt, 12)
    model.set_attn_implementation("dig")
    monkeypatch.setattr(InPlaceCache, "step_on_device", contextlib.nullcontext)
    found = DecodingGraph(model, InPlaceCache(model.config, ROOM)).generate(prompt, 12)
    assert not torch.equal(found, expected)


def test_padding_on_the_left_has_a_graph_of_its_own(model, captures) -> None:
    prompt = prompt_of(2, 9)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    expected = [eager_tokens(model, prompt, 12, mask), eager_tokens(model, prompt, 12)]
    model.set_attn_implementation("dig")
    graph = DecodingGraph(model, InPlaceCache(model.config, ROOM))
    for _ in range(2):
        assert torch.equal(graph.generate(prompt, 12, mask), expected[0])
        assert torch.equal(graph.generate(prompt, 12, torch.ones_like(mask)), expected[1])
    assert len(captures) == 2
    with pytest.raises(ValueError, match="attention_mask must have its padding on the left"):
        graph.generate(prompt, 12, mask.flip(1))
    with pytest.raises(ValueError, match=r"attention_mask must be \(2, 9\) as input_ids"):
        graph.generate(prompt, 12, mask[:, 1:])
    model.set_attn_implementation("sdpa")
    static = DecodingGraph(model, StaticCache(config=model.config, max_cache_len=ROOM))
    with pytest.raises(ValueError, match="attention_mask must be 1 everywhere except with"):
        static.generate(prompt, 12, mask)


def test_room_is_checked_before_a_step(model, captures) -> None:
    model.set_attn_implementation("dig")
    cache = InPlaceCache(model.config, 10)
    graph = DecodingGraph(model, cache)
    with pytest.raises(ValueError, match="decode needs the prompt that prefill runs"):
        graph.decode(1)
    with pytest.raises(ValueError, match=r"must hold every key, got 10 for 9 \+ 2 keys"):
        graph.generate(prompt_of(1, 9), 3)
    assert graph.generate(prompt_of(1, 9), 2).shape == (1, 11)
    with pytest.raises(ValueError, match=r"must hold every key, got 10 for 10 \+ 1 keys"):
        graph.decode(1)
    assert cache.get_seq_length() == 10
    with pytest.raises(ValueError, match="input_ids must have the batch of the first prompt, 1"):
        graph.prefill(prompt_of(2, 4))
    with pytest.raises(ValueError, match="max_new_tokens must be an int >= 1, got 0"):
        graph.generate(prompt_of(1, 4), 0)
    with pytest.raises(ValueError, match=r"input_ids must be \(batch, prompt\), got \(4,\)"):
        graph.prefill(prompt_of(1, 4)[0])


def test_a_cpu_captures_nothing(model) -> None:
    model.set_attn_implementation("dig")
    with pytest.raises(ValueError, match="input_ids must be on a CUDA device, got cpu"):
        DecodingGraph(model, InPlaceCache(model.config, ROOM)).prefill(prompt_of(1, 4))


def test_the_hosts_lengths_and_the_devices_take_turns(model, captures) -> None:
    """Steps that any loop of a user's makes."""
    prompt = prompt_of(2, 5)
    model.set_attn_implementation("dig")
    name = decoding_graph.cache_argument(model)
    counted, found = InPlaceCache(model.config, ROOM), InPlaceCache(model.config, ROOM)

    def step(cache, tokens, place):
        positions = torch.arange(place, place + tokens.shape[1])[None]
        given = {"input_ids": tokens, "position_ids": positions, "use_cache": True, name: cache}
        return model(**given).logits

    with torch.inference_mode():
        for place in range(0, 30, 5):
            tokens = prompt.roll(place, 1)
            expected = step(counted, tokens, place)
            if place % 10:
                found.advance(5)
                with found.step_on_device():
                    torch.testing.assert_close(step(found, tokens, place), expected)
            else:
                torch.testing.assert_close(step(found, tokens, place), expected)
            assert found.get_seq_length() == place + 5
    with pytest.raises(ValueError, match=r"must hold every key, got 32 for 30 \+ 3 keys"):
        found.advance(3)
    with pytest.raises(ValueError, match="tokens must be an int >= 0, got -1"):
        found.advance(-1)
    with pytest.raises(ValueError, match="advance needs the keys of a prompt"):
        InPlaceCache(model.config, ROOM).advance(1)


def test_what_would_go_wrong_in_silence_is_refused(model, captures, monkeypatch) -> None:
    cache = InPlaceCache(model.config, ROOM)
    model.set_attn_implementation("sdpa")  # does not append
    graph = DecodingGraph(model, cache)
    graph.prefill(prompt_of(1, 4))
    with pytest.raises(ValueError, match="advance needs the keys of a prompt"):
        graph.decode(1)
    with pytest.raises(ValueError, match="another attention left keys that it had to append"):
        cache.update(*torch.zeros(2, 1, 2, 1, 16), 0)
    model.set_attn_implementation("dig")
    graph.prefill(prompt_of(1, 4))
    with pytest.raises(ValueError, match="InPlaceCache holds 1 sequences, got keys of 3"):
        cache.update(*torch.zeros(2, 3, 2, 1, 16), 0)
    cache.reset()
    found = {"input_ids": prompt_of(1, 2), decoding_graph.cache_argument(model): cache}
    with cache.step_on_device():
        model(**found)
        with pytest.raises(ValueError, match="must hold one step of the model, got two"):
            model(**found)
    cache.reset()
    with pytest.raises(ValueError, match="attention_mask must be None"), cache.step_on_device():
        model(attention_mask=torch.tensor([[0, 1]]), **found)
    cache.reset()
    with (
        pytest.raises(ValueError, match="must not be entered within itself"),
        cache.step_on_device(),
        cache.step_on_device(),
    ):
        pass
    monkeypatch.setattr(transformers, "_is_captured", lambda keys: True)
    with pytest.raises(RuntimeError, match="is captured within its step_on_device"):
        cache.update(*torch.zeros(2, 1, 2, 1, 16), 0)
