"""Record small transformers models with random weights: traces that the readers are checked on.

    python benchmarks/record_models.py FOLDER [--only NAME ...]

Models are built from configurations, so that nothing is fetched. Each variant warms up, then
records two steps into FOLDER/NAME.json.gz, in bfloat16 (T5's eager variants: float32) on the GPU,
or in float32 on the CPU. Annotations carry the name of each attention module. What was recorded is
read back at once and compared with `expected_attention.EXPECTED`; FOLDER/manifest.json says what
should be found. Exit code 1: something differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from expected_attention import EXPECTED, STEPS, differences
from torch import Tensor, nn
from torch.profiler import record_function

from flashdig.evidence.capture import record
from flashdig.readers.attribution import attention_calls
from flashdig.readers.trace import read_kineto

VOCABULARY = 1000
WARMUP = 2

Step = Callable[[], object]


@dataclass(frozen=True)
class Setting:
    """Where and how one variant runs."""

    attention: str
    device: str
    dtype: torch.dtype

    def build(self, model: type, config: Any) -> Any:
        """A model of random weights."""
        config._attn_implementation = self.attention
        return model(config).to(self.device, self.dtype)

    def tokens(self, length: int, batch: int = 2) -> Tensor:
        # the first ten numbers are left to padding, start and end
        return torch.randint(10, VOCABULARY, (batch, length), device=self.device)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def training(model: Any, **inputs: Tensor) -> tuple[nn.Module, Step]:
    """One step: forward with a loss, backward, gradients dropped."""
    model.train()

    def step() -> None:
        model(**inputs).loss.backward()
        model.zero_grad(set_to_none=True)

    return model, step


def generating(model: Any, prompt: Tensor, count: int) -> tuple[nn.Module, Step]:
    """One step: `count` tokens by `generate`, greedy, never ended early."""
    model.eval()
    model.generation_config.eos_token_id = None

    def step() -> None:
        model.generate(prompt, max_new_tokens=count, do_sample=False, disable_compile=True)

    return model, step


def vit(setting: Setting) -> tuple[nn.Module, Step]:
    config = transformers.ViTConfig(
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=512,
        image_size=224,
        patch_size=16,
        num_labels=10,
    )
    model = setting.build(transformers.ViTForImageClassification, config)
    labels = torch.arange(4, device=setting.device)
    return training(model, pixel_values=setting.noise(4, 3, 224, 224), labels=labels)


def qwen3(setting: Setting) -> Any:
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return setting.build(transformers.Qwen3ForCausalLM, config)


def qwen3_training(setting: Setting) -> tuple[nn.Module, Step]:
    ids = setting.tokens(320)
    return training(qwen3(setting), input_ids=ids, labels=ids)


def qwen3_generating(setting: Setting) -> tuple[nn.Module, Step]:
    return generating(qwen3(setting), setting.tokens(64), 6)


def gemma2(setting: Setting) -> Any:
    # layers alternate: a window, then all keys
    config = transformers.Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        sliding_window=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return setting.build(transformers.Gemma2ForCausalLM, config)


def gemma2_training(setting: Setting) -> tuple[nn.Module, Step]:
    ids = setting.tokens(320)
    return training(gemma2(setting), input_ids=ids, labels=ids)


def gemma2_generating(setting: Setting) -> tuple[nn.Module, Step]:
    return generating(gemma2(setting), setting.tokens(160), 3)


def whisper(setting: Setting) -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=80,
        d_model=256,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_source_positions=300,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return setting.build(transformers.WhisperForConditionalGeneration, config)


def whisper_training(setting: Setting) -> tuple[nn.Module, Step]:
    # the second convolution halves 600 frames to 300
    features, labels = setting.noise(2, 80, 600), setting.tokens(32)
    return training(whisper(setting), input_features=features, labels=labels)


def whisper_decoding(setting: Setting) -> tuple[nn.Module, Step]:
    """The encoder, a prompt of four tokens, and four tokens one by one."""
    model = whisper(setting).eval()
    features, prompt = setting.noise(2, 80, 600), setting.tokens(4)

    def step() -> None:
        with torch.no_grad():
            encoded = model.model.encoder(features)
            ids, cache = prompt, None
            for _ in range(5):
                output = model(
                    encoder_outputs=encoded,
                    decoder_input_ids=ids,
                    past_key_values=cache,
                    use_cache=True,
                )
                ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values

    return model, step


def t5(setting: Setting) -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=256,
        d_kv=64,
        d_ff=512,
        num_layers=2,
        num_decoder_layers=1,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return setting.build(transformers.T5ForConditionalGeneration, config)


def t5_training(setting: Setting) -> tuple[nn.Module, Step]:
    return training(t5(setting), input_ids=setting.tokens(160), labels=setting.tokens(48))


def t5_generating(setting: Setting) -> tuple[nn.Module, Step]:
    return generating(t5(setting), setting.tokens(160), 6)


# name -> how it is built, its attention, the class of its attention modules, Python stacks or not
VARIANTS: dict[str, tuple[Callable[[Setting], tuple[nn.Module, Step]], str, str, bool]] = {
    "vit_eager_train": (vit, "eager", "ViTAttention", True),
    "vit_sdpa_train": (vit, "sdpa", "ViTAttention", False),
    "qwen3_sdpa_train": (qwen3_training, "sdpa", "Qwen3Attention", False),
    "qwen3_eager_train": (qwen3_training, "eager", "Qwen3Attention", False),
    "qwen3_sdpa_generate": (qwen3_generating, "sdpa", "Qwen3Attention", False),
    "gemma2_eager_train": (gemma2_training, "eager", "Gemma2Attention", False),
    "gemma2_sdpa_train": (gemma2_training, "sdpa", "Gemma2Attention", False),
    "gemma2_eager_generate": (gemma2_generating, "eager", "Gemma2Attention", False),
    "gemma2_sdpa_generate": (gemma2_generating, "sdpa", "Gemma2Attention", False),
    "whisper_sdpa_train": (whisper_training, "sdpa", "WhisperAttention", False),
    "whisper_eager_train": (whisper_training, "eager", "WhisperAttention", False),
    "whisper_sdpa_decode": (whisper_decoding, "sdpa", "WhisperAttention", False),
    "whisper_eager_decode": (whisper_decoding, "eager", "WhisperAttention", False),
    "t5_eager_train": (t5_training, "eager", "T5Attention", False),
    "t5_sdpa_train": (t5_training, "sdpa", "T5Attention", False),
    "t5_eager_generate": (t5_generating, "eager", "T5Attention", False),
}


def annotate(model: nn.Module, class_name: str) -> None:
    """A range of the module's name around the forward of every attention module."""
    open_ranges: list[AbstractContextManager[object]] = []

    def enter(name: str) -> None:
        open_ranges.append(record_function(name))
        open_ranges[-1].__enter__()

    for name, module in model.named_modules():
        if type(module).__name__ == class_name:
            module.register_forward_pre_hook(lambda *_, name=name: enter(name))
            module.register_forward_hook(lambda *_: open_ranges.pop().__exit__(None, None, None))


def record_variant(name: str, folder: Path, device: str) -> list[str]:
    """Record one variant; what differs from the expected calls."""
    build, attention, class_name, stacks = VARIANTS[name]
    dtype = getattr(torch, EXPECTED[name].dtype) if device == "cuda" else torch.float32
    torch.manual_seed(0)
    model, step = build(Setting(attention, device, dtype))
    annotate(model, class_name)
    for _ in range(WARMUP):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    path = folder / f"{name}.json.gz"
    with record(path, memory=False, flops=False, stacks=stacks, steps=True) as profiler:
        for _ in range(STEPS):
            step()
            profiler.step()
    calls = attention_calls(read_kineto(str(path)))
    return differences(calls, EXPECTED[name], on_cpu=device == "cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the traces go; made if missing")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=list(VARIANTS), help="these variants only"
    )
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = arguments.only or list(VARIANTS)
    traces: dict[str, object] = {}
    failed = False
    for name in names:
        started = time.monotonic()
        wrong = record_variant(name, arguments.folder, device)
        size = (arguments.folder / f"{name}.json.gz").stat().st_size
        seconds = time.monotonic() - started
        print(f"{name}: {size / 1e3:.0f} kB, {seconds:.1f} s, {len(wrong)} differences", flush=True)
        for line in wrong:
            print(f"  {line}", flush=True)
        failed = failed or bool(wrong)
        traces[name] = {"bytes": size, "stacks": VARIANTS[name][3], **EXPECTED[name].as_json()}
    manifest = {
        "schema": 1,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "command": "python benchmarks/record_models.py " + " ".join(sys.argv[1:]),
        "traces": traces,
    }
    (arguments.folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
