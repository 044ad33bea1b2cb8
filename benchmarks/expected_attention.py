"""Which attention calls the models of `record_models.py` make in a step, derived by hand.

Every model runs two steps. Each stack has two layers, T5's decoder one. The sizes follow from the
configurations in `record_models.py`; the masks from what transformers 5.17 hands to the attention:

- SDPA gets no mask where a causal flag or nothing says the same, and then takes grouped heads as
  they are. A window shorter than the keys makes a mask tensor, and with one the heads are repeated.
- Eager decoders always add a mask tensor, also for one query. Bidirectional and cross attention add
  none, but T5 adds its position bias everywhere (zeros in cross attention).
- A sliding cache holds window - 1 keys, so that one new token sees exactly the window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from flashdig.readers.attribution import AttentionCall

STEPS = 2
TRAINING = ("forward", "backward")
DECODING = ("forward",)

EAGER = ("eager",)
# which of its backends PyTorch takes depends on chip and release
WITHOUT_MASK = ("flash", "efficient", "cudnn", "math")
WITH_MASK = ("efficient", "cudnn", "math")
ON_THE_CPU = ("flash", "math")


@dataclass(frozen=True)
class Calls:
    """Alike attention calls of a step: one a module, pass and key length.

    Attributes:
        modules: the attention modules, by their names in the model.
        passes: "forward", "backward".
        sizes: batch, query heads, KV heads as the attention reads them, seqlen_q, head_dim.
        seqlen_k: of each call of one module, in order.
        mask: "none", "causal" (a flag) or "tensor" (a mask or bias is read).
        backends: those allowed on a GPU.
        dropout: whether probabilities are dropped.
    """

    modules: tuple[str, ...]
    passes: tuple[str, ...]
    sizes: tuple[int, int, int, int, int]
    seqlen_k: tuple[int, ...]
    mask: str
    backends: tuple[str, ...]
    dropout: bool = False

    @property
    def count(self) -> int:
        """Calls in all steps."""
        return STEPS * len(self.modules) * len(self.passes) * len(self.seqlen_k)


@dataclass(frozen=True)
class Expected:
    """All attention of one recording: its dtype on a GPU, totals over both steps, and each call."""

    dtype: str
    forward: int
    backward: int
    calls: tuple[Calls, ...]

    def as_json(self) -> dict[str, object]:
        return {"steps": STEPS, **asdict(self)}


def _layers(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(layer) for layer in range(2))


VIT = _layers("vit.layers.{}.attention")
DECODER_ONLY = _layers("model.layers.{}.self_attn")
SLIDING, FULL = DECODER_ONLY[:1], DECODER_ONLY[1:]
WHISPER_ENCODER = _layers("model.encoder.layers.{}.self_attn")
WHISPER_SELF = _layers("model.decoder.layers.{}.self_attn")
WHISPER_CROSS = _layers("model.decoder.layers.{}.encoder_attn")
T5_ENCODER = _layers("encoder.block.{}.layer.0.SelfAttention")
T5_SELF = ("decoder.block.0.layer.0.SelfAttention",)
T5_CROSS = ("decoder.block.0.layer.1.EncDecAttention",)


def _vit(backends: tuple[str, ...]) -> tuple[Calls, ...]:
    # 224 / 16 = 14 patches a side and the class token: 197
    return (Calls(VIT, TRAINING, (4, 4, 4, 197, 64), (197,), "none", backends),)


def _whisper_training(backends: tuple[str, ...], self_mask: str) -> tuple[Calls, ...]:
    return (
        Calls(WHISPER_ENCODER, TRAINING, (2, 4, 4, 300, 64), (300,), "none", backends),
        Calls(WHISPER_SELF, TRAINING, (2, 4, 4, 32, 64), (32,), self_mask, backends),
        Calls(WHISPER_CROSS, TRAINING, (2, 4, 4, 32, 64), (300,), "none", backends),
    )


def _whisper_decoding(
    backends: tuple[str, ...], prompt_mask: str, token_mask: str
) -> tuple[Calls, ...]:
    # a prompt of 4 tokens, then 4 tokens one by one
    return (
        Calls(WHISPER_ENCODER, DECODING, (2, 4, 4, 300, 64), (300,), "none", backends),
        Calls(WHISPER_SELF, DECODING, (2, 4, 4, 4, 64), (4,), prompt_mask, backends),
        Calls(WHISPER_CROSS, DECODING, (2, 4, 4, 4, 64), (300,), "none", backends),
        Calls(WHISPER_SELF, DECODING, (2, 4, 4, 1, 64), (5, 6, 7, 8), token_mask, backends),
        Calls(WHISPER_CROSS, DECODING, (2, 4, 4, 1, 64), (300,) * 4, "none", backends),
    )


def _t5_training(backends: tuple[str, ...]) -> tuple[Calls, ...]:
    return (
        Calls(T5_ENCODER, TRAINING, (2, 4, 4, 160, 64), (160,), "tensor", backends, dropout=True),
        Calls(T5_SELF, TRAINING, (2, 4, 4, 48, 64), (48,), "tensor", backends, dropout=True),
        Calls(T5_CROSS, TRAINING, (2, 4, 4, 48, 64), (160,), "tensor", backends, dropout=True),
    )


def _t5_generating(backends: tuple[str, ...]) -> tuple[Calls, ...]:
    # the start token alone, then 5 more: 6 tokens made
    return (
        Calls(T5_ENCODER, DECODING, (2, 4, 4, 160, 64), (160,), "tensor", backends),
        Calls(T5_SELF, DECODING, (2, 4, 4, 1, 64), (1, 2, 3, 4, 5, 6), "tensor", backends),
        Calls(T5_CROSS, DECODING, (2, 4, 4, 1, 64), (160,) * 6, "tensor", backends),
    )


CACHE_64 = (65, 66, 67, 68, 69)
CACHE_160 = (161, 162)

EXPECTED = {
    "vit_eager_train": Expected("bfloat16", 4, 4, _vit(EAGER)),
    "vit_sdpa_train": Expected("bfloat16", 4, 4, _vit(WITHOUT_MASK)),
    "qwen3_sdpa_train": Expected(
        *("bfloat16", 4, 4),
        (Calls(DECODER_ONLY, TRAINING, (2, 8, 2, 320, 64), (320,), "causal", WITHOUT_MASK),),
    ),
    "qwen3_eager_train": Expected(
        *("bfloat16", 4, 4),
        (Calls(DECODER_ONLY, TRAINING, (2, 8, 2, 320, 64), (320,), "tensor", EAGER),),
    ),
    # 2 layers x 6 tokens x 2 steps
    "qwen3_sdpa_generate": Expected(
        *("bfloat16", 24, 0),
        (
            Calls(DECODER_ONLY, DECODING, (2, 8, 2, 64, 64), (64,), "causal", WITHOUT_MASK),
            Calls(DECODER_ONLY, DECODING, (2, 8, 2, 1, 64), CACHE_64, "none", WITHOUT_MASK),
        ),
    ),
    "gemma2_eager_train": Expected(
        *("bfloat16", 4, 4),
        (Calls(DECODER_ONLY, TRAINING, (2, 4, 2, 320, 256), (320,), "tensor", EAGER),),
    ),
    "gemma2_sdpa_train": Expected(
        *("bfloat16", 4, 4),
        (
            Calls(SLIDING, TRAINING, (2, 4, 4, 320, 256), (320,), "tensor", WITH_MASK),
            Calls(FULL, TRAINING, (2, 4, 2, 320, 256), (320,), "causal", WITHOUT_MASK),
        ),
    ),
    # 2 layers x 3 tokens x 2 steps
    "gemma2_eager_generate": Expected(
        *("bfloat16", 12, 0),
        (
            Calls(DECODER_ONLY, DECODING, (2, 4, 2, 160, 256), (160,), "tensor", EAGER),
            Calls(SLIDING, DECODING, (2, 4, 2, 1, 256), (128,) * 2, "tensor", EAGER),
            Calls(FULL, DECODING, (2, 4, 2, 1, 256), CACHE_160, "tensor", EAGER),
        ),
    ),
    "gemma2_sdpa_generate": Expected(
        *("bfloat16", 12, 0),
        (
            Calls(SLIDING, DECODING, (2, 4, 4, 160, 256), (160,), "tensor", WITH_MASK),
            Calls(FULL, DECODING, (2, 4, 2, 160, 256), (160,), "causal", WITHOUT_MASK),
            Calls(SLIDING, DECODING, (2, 4, 4, 1, 256), (128,) * 2, "tensor", WITH_MASK),
            Calls(FULL, DECODING, (2, 4, 2, 1, 256), CACHE_160, "none", WITHOUT_MASK),
        ),
    ),
    # 3 attentions x 2 layers x 2 steps
    "whisper_sdpa_train": Expected("bfloat16", 12, 12, _whisper_training(WITHOUT_MASK, "causal")),
    "whisper_eager_train": Expected("bfloat16", 12, 12, _whisper_training(EAGER, "tensor")),
    # 2 layers x (1 encoder + 5 decoder passes x 2 attentions) x 2 steps
    "whisper_sdpa_decode": Expected(
        "bfloat16", 44, 0, _whisper_decoding(WITHOUT_MASK, "causal", "none")
    ),
    "whisper_eager_decode": Expected(
        "bfloat16", 44, 0, _whisper_decoding(EAGER, "tensor", "tensor")
    ),
    # (2 encoder layers + 2 attentions of the decoder's layer) x 2 steps
    "t5_eager_train": Expected("float32", 8, 8, _t5_training(EAGER)),
    "t5_sdpa_train": Expected("bfloat16", 8, 8, _t5_training(WITH_MASK)),
    # (2 encoder layers + 6 decoder passes x 2 attentions) x 2 steps
    "t5_eager_generate": Expected("float32", 28, 0, _t5_generating(EAGER)),
}


def differences(
    calls: Iterable[AttentionCall], expected: Expected, *, on_cpu: bool = False
) -> list[str]:
    """What was found and not expected, or expected and not found; empty when all is right.

    Calls are told apart by their module (an annotation), pass, step, sizes, mask and dropout.

    Args:
        on_cpu: the recording was made on the CPU, in float32 and with the CPU's SDPA backends.
    """
    dtype = "float32" if on_cpu else expected.dtype
    wanted: Counter[tuple[object, ...]] = Counter()
    backends: dict[tuple[object, ...], tuple[str, ...]] = {}
    for row in expected.calls:
        batch, num_heads, num_heads_kv, seqlen_q, head_dim = row.sizes
        for module in row.modules:
            for pass_ in row.passes:
                for seqlen_k in row.seqlen_k:
                    sizes = (batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim)
                    key = (module, pass_, *sizes, dtype, row.mask, row.dropout)
                    wanted[key] += STEPS
                    backends[key] = ON_THE_CPU if on_cpu and row.backends != EAGER else row.backends
    found: Counter[tuple[object, ...]] = Counter()
    wrong: list[str] = []
    for call in calls:
        key = _key(call)
        found[key] += 1
        allowed = backends.get(key, (call.backend,))
        if call.backend not in allowed:
            wrong.append(f"{key}: backend {call.backend}, expected one of {', '.join(allowed)}")
    for key in {**wanted, **found}:
        if wanted[key] != found[key]:
            wrong.append(f"{key}: {found[key]} found, {wanted[key]} expected")
    totals = {"forward": expected.forward, "backward": expected.backward}
    for pass_, total in totals.items():
        count = sum(number for key, number in found.items() if key[1] == pass_)
        if count != total:
            wrong.append(f"{count} {pass_} calls found, {total} expected")
    return wrong


def _key(call: AttentionCall) -> tuple[object, ...]:
    s = call.sizes
    sizes = (s.batch, s.num_heads, s.num_heads_kv, s.seqlen_q, s.seqlen_k, s.head_dim)
    module = call.annotations[-1] if call.annotations else None
    return (module, call.pass_, *sizes, s.dtype, call.mask.kind, call.dropout)
