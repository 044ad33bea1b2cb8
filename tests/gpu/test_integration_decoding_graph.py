"""A decoding loop of transformers whose step is a CUDA graph."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from flashdig.bench import decode_loop
from flashdig.integrations.decoding_graph import DecodingGraph, cache_argument
from flashdig.integrations.transformers import InPlaceCache, register

pytestmark = pytest.mark.gpu
SIZE = decode_loop.ModelSize(layers=4, hidden=512, num_heads=8, num_heads_kv=4, vocabulary=4000)
TOKENS = 256


@pytest.fixture(scope="module")
def model():
    register()
    return decode_loop.make_model(SIZE, "float32", "cuda")


def prompt_of(batch, length):
    return decode_loop.make_prompt(decode_loop.LoopCell(batch, length), SIZE, "cuda")


def eager_tokens(model, prompt, mask):
    model.set_attn_implementation("eager")
    return model.generate(
        prompt,
        attention_mask=mask,
        max_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        disable_compile=True,
    )


def test_replays_give_the_tokens_of_eager_attention(model) -> None:
    prompts = [prompt_of(3, length) for length in (40, 71)]
    masks = [torch.ones_like(prompt) for prompt in prompts]
    masks[1][1, :9] = 0
    expected = list(map(eager_tokens, [model] * 2, prompts, masks))
    model.set_attn_implementation("dig")
    graph = DecodingGraph(model, InPlaceCache(model.config, 400))
    for _ in range(2):  # in the second turn every step is a replay
        for prompt, mask, tokens in zip(prompts, masks, expected, strict=True):
            assert torch.equal(graph.generate(prompt, TOKENS, mask), tokens)
    with pytest.raises(ValueError, match=r"must hold every key, got 400 for 327 \+ 74 keys"):
        graph.generate(prompt_of(3, 327), 75)


def test_a_step_that_counts_on_the_host_is_not_captured(model) -> None:
    model.set_attn_implementation("dig")
    cache = InPlaceCache(model.config, 64)
    given = {cache_argument(model): cache, "use_cache": True}
    with torch.inference_mode():
        model(input_ids=prompt_of(1, 8), **given)
        token, place = prompt_of(1, 1), torch.full((1, 1), 8, device="cuda")
        with (
            pytest.raises(RuntimeError, match="captured within its step_on_device"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            model(input_ids=token, position_ids=place, **given)
    torch.cuda.synchronize()
