"""A decoding loop of transformers on the GPU."""

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

from flashdig.bench import decode_loop

pytestmark = pytest.mark.gpu
SIZE = decode_loop.ModelSize(layers=4, hidden=512, num_heads=8, num_heads_kv=4, vocabulary=4000)


def test_a_loop_gives_the_tokens_of_eager_attention() -> None:
    assert decode_loop.check(SIZE, decode_loop.LoopCell(3, 40), 256, "cuda") == []


def test_every_step_but_the_first_is_a_call_made_before() -> None:
    from flashdig import kept_cache_calls
    from flashdig.integrations import transformers as integration

    kept_cache_calls.forget()
    model = decode_loop.make_model(SIZE, "bfloat16", "cuda")
    prompt = decode_loop.make_prompt(decode_loop.LoopCell(2, 40), SIZE, "cuda")
    again, served = kept_cache_calls.again, []

    def counted(*arguments):
        served.append(again(*arguments))
        return served[-1]

    kept_cache_calls.again = counted
    try:
        decode_loop.generate(model, prompt, "flashdig", "InPlaceCache", 20)
    finally:
        kept_cache_calls.again = again
    assert len(served) == 19 * SIZE.layers
    assert sum(out is None for out in served) <= 2
    torch.cuda.synchronize()
    assert model.config._attn_implementation == integration.NAME
