"""Attribution on recordings made here: the ways in which models write their attention.

Each function has the structure of a well-known family's eager code; it runs on the CPU under
torch's profiler, so the operators and shapes are what today's PyTorch records.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint

from flashdig.readers.attribution import AttentionCall, attention_calls
from flashdig.readers.trace import read_kineto

BATCH, HEADS, HEADS_KV, LENGTH, HEAD_DIM = 2, 8, 2, 12, 16
SCALE = HEAD_DIM**-0.5


@pytest.fixture(scope="module", autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def query() -> Tensor:
    return torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, requires_grad=True)


@pytest.fixture
def key() -> Tensor:
    return torch.randn(BATCH, HEADS_KV, LENGTH, HEAD_DIM, requires_grad=True)


CAUSAL = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]


def record(
    tmp_path: Path, run: Callable[[], object], *, shapes: bool = True, **options: bool
) -> list[AttentionCall]:
    run()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=shapes, **options) as profiler:
        run()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    return attention_calls(read_kineto(str(path)))


def repeat_heads(x: Tensor) -> Tensor:
    batch, heads, length, dim = x.shape
    repeats = HEADS // heads
    return (
        x[:, :, None].expand(batch, heads, repeats, length, dim).reshape(batch, HEADS, length, dim)
    )


def llama(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    keys, values = repeat_heads(key), repeat_heads(key)
    scores = torch.matmul(query, keys.transpose(2, 3)) * SCALE
    if mask is not None:
        scores = scores + mask
    probs = F.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    probs = F.dropout(probs, p=0.0, training=False)
    return torch.matmul(probs, values).transpose(1, 2).contiguous()


def gemma(query: Tensor, key: Tensor) -> Tensor:
    scores = torch.matmul(query, repeat_heads(key).transpose(2, 3)) * SCALE
    scores = torch.tanh(scores / 50.0) * 50.0
    probs = F.softmax(scores + CAUSAL, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(probs, repeat_heads(key))


def whisper(query: Tensor) -> Tensor:
    query = query * SCALE
    probs = F.softmax(torch.matmul(query, query.transpose(2, 3)), dim=-1)
    return torch.matmul(F.dropout(probs, p=0.1, training=True), query)


def t5(query: Tensor, table: nn.Embedding) -> Tensor:
    scores = torch.matmul(query, query.transpose(3, 2))
    place = torch.arange(LENGTH)
    buckets = (place[None, :] - place[:, None]).abs().clamp(max=3)
    bias = table(buckets).permute(2, 0, 1).unsqueeze(0)
    probs = F.softmax((scores + bias).float(), dim=-1).type_as(scores)
    return torch.matmul(probs, query)


def opt(flat: Tensor) -> Tensor:
    scores = torch.bmm(flat, flat.transpose(1, 2)).view(BATCH, HEADS, LENGTH, LENGTH) + CAUSAL
    probs = F.softmax(scores.view(BATCH * HEADS, LENGTH, LENGTH), dim=-1)
    return torch.bmm(probs, flat)


def bloom(flat: Tensor, alibi: Tensor) -> Tensor:
    scores = alibi.baddbmm(flat, flat.transpose(1, 2), beta=1.0, alpha=SCALE)
    probs = F.softmax(scores.view(BATCH, HEADS, LENGTH, LENGTH), dim=-1)
    return torch.bmm(probs.view(BATCH * HEADS, LENGTH, LENGTH), flat)


def einsum(x: Tensor) -> Tensor:
    probs = (torch.einsum("bqhd,bkhd->bhqk", x, x) * SCALE).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", probs, x)


def with_sinks(query: Tensor, key: Tensor, sinks: Tensor) -> Tensor:
    scores = torch.matmul(query, repeat_heads(key).transpose(2, 3)) * SCALE + CAUSAL
    column = sinks.reshape(1, -1, 1, 1).expand(BATCH, -1, LENGTH, -1)
    scores = torch.cat([scores, column], dim=-1)
    probs = F.softmax(scores - scores.max(-1, keepdim=True).values, dim=-1)[..., :-1]
    return torch.matmul(probs, repeat_heads(key))


def sizes(call: AttentionCall) -> tuple[int | None, ...]:
    s = call.sizes
    assert s.dtype == "float32"
    return (s.batch, s.num_heads, s.num_heads_kv, s.seqlen_q, s.seqlen_k, s.head_dim, s.head_dim_v)


GROUPED = (BATCH, HEADS, HEADS_KV, LENGTH, LENGTH, HEAD_DIM, HEAD_DIM)
PLAIN = (BATCH, HEADS, HEADS, LENGTH, LENGTH, HEAD_DIM, HEAD_DIM)


def test_llama_forward_and_backward(tmp_path: Path, query: Tensor, key: Tensor) -> None:
    calls = record(tmp_path, lambda: llama(query, key, CAUSAL).sum().backward())
    assert [(c.backend, c.pass_) for c in calls] == [("eager", "forward"), ("eager", "backward")]
    forward, backward = calls
    assert backward.forward is forward
    for call in calls:
        assert sizes(call) == GROUPED
        assert call.mask.kind == "tensor"
        assert call.mask.causal is None
        assert call.dropout is False
        assert call.events == ()
        assert call.device_ns is None
        assert call.host_ns


def test_without_a_mask_it_is_certain_that_there_is_none(
    tmp_path: Path, query: Tensor, key: Tensor
) -> None:
    (call,) = record(tmp_path, lambda: llama(query, key, None))
    assert call.mask.causal is False


def test_decoding_one_token_against_a_cache(tmp_path: Path, query: Tensor) -> None:
    cache = torch.randn(BATCH, HEADS_KV, 40, HEAD_DIM)
    (call,) = record(tmp_path, lambda: llama(query[:, :, :1], cache, None))
    assert sizes(call) == (BATCH, HEADS, HEADS_KV, 1, 40, HEAD_DIM, HEAD_DIM)
    assert call.is_decoding


def test_softcap_window_bias_alibi_einsum_and_sinks(
    tmp_path: Path, query: Tensor, key: Tensor
) -> None:
    flat = torch.randn(BATCH * HEADS, LENGTH, HEAD_DIM)
    table = nn.Embedding(4, HEADS)
    runs: dict[str, tuple[Callable[[], object], tuple[int, ...], str]] = {
        "gemma": (lambda: gemma(query, key), GROUPED, "tensor"),
        "whisper": (lambda: whisper(query), PLAIN, "none"),
        "t5": (lambda: t5(query, table), PLAIN, "tensor"),
        "opt": (lambda: opt(flat), PLAIN, "tensor"),
        "bloom": (lambda: bloom(flat, torch.randn(BATCH * HEADS, 1, LENGTH)), PLAIN, "tensor"),
        "einsum": (lambda: einsum(query.transpose(1, 2)), PLAIN, "none"),
        "sinks": (lambda: with_sinks(query, key, torch.randn(HEADS)), GROUPED, "tensor"),
    }
    for name, (run, expected, mask) in runs.items():
        calls = record(tmp_path, run)
        assert [c.backend for c in calls] == ["eager"], name
        assert sizes(calls[0]) == expected, name
        assert calls[0].mask.kind == mask, name
    assert record(tmp_path, runs["whisper"][0])[0].dropout is True


def test_a_stack_of_layers_is_a_call_a_layer(tmp_path: Path, query: Tensor, key: Tensor) -> None:
    def three_layers() -> None:
        x = query
        for _ in range(3):
            x = llama(x, key, CAUSAL).transpose(1, 2)
        x.sum().backward()

    calls = record(tmp_path, three_layers)
    assert [c.pass_ for c in calls] == ["forward"] * 3 + ["backward"] * 3
    # the backward of the last layer comes first
    assert [c.forward for c in calls[3:]] == calls[2::-1]


def test_without_shapes_the_order_decides(tmp_path: Path, query: Tensor, key: Tensor) -> None:
    calls = record(tmp_path, lambda: llama(query, key, CAUSAL).sum().backward(), shapes=False)
    assert [(c.backend, c.pass_) for c in calls] == [("eager", "forward"), ("eager", "backward")]
    assert calls[0].sizes.num_heads is None
    assert calls[0].mask.kind == "unknown"
    assert calls[0].dropout is None
    assert calls[0].problem() is None


def test_what_is_no_attention(tmp_path: Path) -> None:
    hidden, router = torch.randn(24, 32), torch.randn(4, 32)
    experts = torch.randn(4, 32, 32)

    def mixture_of_experts() -> Tensor:
        weights, _ = F.softmax(F.linear(hidden, router), dim=-1).topk(2)
        outputs = torch.bmm(hidden.expand(4, 24, 32), experts)
        return outputs.sum() * weights.sum()

    def linear_attention() -> Tensor:
        x = torch.randn(2, 4, 8, 8)
        context = torch.matmul(x.transpose(2, 3), F.softmax(torch.matmul(x, x), dim=-2))
        return torch.matmul(x, context)

    def sampling() -> Tensor:
        return torch.multinomial(F.softmax(F.linear(hidden, router), dim=-1), 1)

    def loss() -> Tensor:
        return F.cross_entropy(F.linear(hidden, router), torch.zeros(24, dtype=torch.long))

    for run in (mixture_of_experts, linear_attention, sampling, loss):
        assert record(tmp_path, run) == []


def test_sdpa_with_each_mask(tmp_path: Path, query: Tensor) -> None:
    attention = F.scaled_dot_product_attention
    forward, backward = record(
        tmp_path, lambda: attention(query, query, query, is_causal=True).sum().backward()
    )
    assert (forward.backend, backward.backend) == ("flash", "flash")
    assert backward.forward is forward
    assert forward.mask.causal is True
    assert forward.mask.alignment == "top-left"
    assert sizes(forward) == PLAIN
    (call,) = record(tmp_path, lambda: attention(query, query, query, attn_mask=CAUSAL))
    assert call.mask.kind == "tensor"
    (call,) = record(tmp_path, lambda: attention(query, query, query, dropout_p=0.5))
    assert call.dropout is True
    assert call.backend == "math"
    assert call.mask.causal is False


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_shows_as_a_second_forward(
    tmp_path: Path, query: Tensor, reentrant: bool
) -> None:
    layer = nn.Linear(HEAD_DIM, HEAD_DIM)

    def block(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(layer(x), x, x)

    calls = record(
        tmp_path, lambda: checkpoint(block, query, use_reentrant=reentrant).sum().backward()
    )
    assert sorted((c.pass_, c.recomputed) for c in calls) == [
        ("backward", False),
        ("forward", False),
        ("forward", True),
    ]


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x)


def test_modules_and_annotations_around_a_call(tmp_path: Path, query: Tensor) -> None:
    model = nn.Sequential(Layer(), Layer())

    def step() -> None:
        with record_function("step"):
            model(query).sum().backward()

    calls = record(tmp_path, step, with_stack=True)
    assert [c.pass_ for c in calls] == ["forward", "forward", "backward", "backward"]
    assert [c.module_path for c in calls[:2]] == [
        ("Sequential_0", "Layer_0", "Attention_0"),
        ("Sequential_0", "Layer_1", "Attention_1"),
    ]
    assert [c.module_path for c in calls[2:]] == [c.module_path for c in calls[1::-1]]
    assert all("step" in c.annotations for c in calls)


def test_inside_of_operators_that_wrap_a_whole_layer(tmp_path: Path) -> None:
    x = torch.randn(BATCH, LENGTH, 32)
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    with torch.no_grad():
        (call,) = record(tmp_path, lambda: layer(x))
    assert call.sizes.head_dim == 8
    attention = nn.MultiheadAttention(32, 4, batch_first=True)
    (call,) = record(tmp_path, lambda: attention(x, x, x, need_weights=True))
    assert call.backend == "eager"
    assert call.sizes.batch_times_heads == BATCH * 4
