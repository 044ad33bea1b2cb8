"""KernelName: what the name of a device kernel says, as plain values and one plain sentence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal[
    "attention_forward",
    "attention_backward",
    "attention_part",
    "matmul",
    "convolution",
    "norm",
    "softmax",
    "elementwise",
    "reduction",
    "sort",
    "copy",
    "communication",
    "other",
    "unknown",
]
Pass = Literal["forward", "backward"]

ATTENTION_ROLES: frozenset[Role] = frozenset(
    ("attention_forward", "attention_backward", "attention_part")
)


@dataclass(frozen=True)
class KernelName:
    """A decoded kernel name. None always means that the name does not say it.

    `family` is who made the kernel (aten, cublas, flash_attention_2, ...), `backend` what a user
    would choose to get it (flash, efficient, cudnn, flash_attention_3, ... for attention).
    `dtype` is torch's name of the operands' type. `tile` holds the block sizes in the name's own
    order. `head_dim` is the one the kernel is built for: smaller ones are padded to it.
    `tensor_cores` is False where the arithmetic certainly runs on the CUDA cores.
    `words` is one sentence for people.
    """

    name: str
    family: str
    role: Role
    words: str
    backend: str | None = None
    pass_: Pass | None = None
    dtype: str | None = None
    tile: tuple[int, ...] | None = None
    head_dim: int | None = None
    arch: str | None = None
    tensor_cores: bool | None = None
    pipeline: str | None = None
    causal: bool | None = None

    @property
    def is_attention(self) -> bool:
        """True for fused attention and for the small kernels that belong to it."""
        return self.role in ATTENTION_ROLES


# spellings of element types in kernel names -> torch's names
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "bfloat16_t": "bfloat16",
    "c10::BFloat16": "bfloat16",
    "cutlass::bfloat16_t": "bfloat16",
    "__nv_bfloat16": "bfloat16",
    "__hip_bfloat16": "bfloat16",
    "fp16": "float16",
    "f16": "float16",
    "half": "float16",
    "half_t": "float16",
    "__half": "float16",
    "c10::Half": "float16",
    "cutlass::half_t": "float16",
    "fp32": "float32",
    "f32": "float32",
    "float": "float32",
    "tf32": "tf32",
    "f64": "float64",
    "fp64": "float64",
    "double": "float64",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "fp8": "float8_e4m3fn",
    "cutlass::float_e4m3_t": "float8_e4m3fn",
    "cutlass::float_e5m2_t": "float8_e5m2",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "__nv_fp8_e4m3": "float8_e4m3fn",
    "i8": "int8",
    "s8": "int8",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "short": "int16",
    "unsigned char": "uint8",
    "signed char": "int8",
    "char": "int8",
    "bool": "bool",
}

_READABLE = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "tf32": "tf32",
    "float8_e4m3fn": "fp8 (e4m3)",
    "float8_e5m2": "fp8 (e5m2)",
}


def dtype_words(dtype: str | None) -> str:
    """The short spelling of a dtype for a sentence; '' for None."""
    return "" if dtype is None else _READABLE.get(dtype, dtype)


def sentence(*parts: str | None) -> str:
    """The parts that say something, joined by commas and closed with a full stop."""
    return ", ".join(part for part in parts if part) + "."


def tile_words(tile: tuple[int, ...] | None) -> str:
    """'tile 64x128' or ''."""
    return "" if tile is None else "tile " + "x".join(map(str, tile))


def tensor_core_words(tensor_cores: bool | None) -> str:
    """'on tensor cores', 'on CUDA cores (no tensor cores)' or ''."""
    if tensor_cores is None:
        return ""
    return "on tensor cores" if tensor_cores else "on CUDA cores (no tensor cores)"


def arch_words(arch: str | None) -> str:
    """'built for sm_80' or ''."""
    return "" if arch is None else "built for sm_" + arch.removeprefix("sm")
