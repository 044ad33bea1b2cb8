"""From the arguments of a call to those of a kernel: strides, constants, names.

Lengths, strides and windows are not specialised, so that a new length compiles nothing. What a
kernel needs to know of strides is one constexpr: UNIT, the number of elements that all of them are
multiples of (16 bytes' worth, so that rows can be loaded in whole vectors, else 1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashdig.kernels.choose import TileConfig, known_arch

LOG2_E = 1.4426950408889634
UNSPECIALIZED = [
    *(f"stride_{x}{d}" for x, dims in (("q", "bmh"), ("k", "bnh"), ("v", "bnh")) for d in dims),
    *(f"stride_{x}{d}" for x in ("o", "do", "dq") for d in "bmh"),
    *(f"stride_{x}{d}" for x in ("dk", "dv") for d in "bnh"),
    *(f"stride_bias_{d}" for d in "bhmn"),
    "stride_slopes_b",
    "batch",
    "num_heads",
    "group_size",
    "seqlen_q",
    "seqlen_k",
    "left",
    "right",
    "score_factor",
    "softcap_units",
    "softmax_scale",
    "dropout_threshold",
    "dropout_scale",
]

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Call:
    """The checked tensors and numbers of one call, dense or packed, as the kernels take them.

    Dense: q (batch, seqlen_q, num_heads, head_dim) and so on. Packed: q (total_q, num_heads,
    head_dim) with `cu_seqlens`; then seqlen_q and seqlen_k are the totals. The last dimension of
    q, k and v is contiguous.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout_seed: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    softmax_scale: float
    softcap: float
    dropout_p: float
    window_left: int
    window_right: int
    top_left: bool
    allow_tf32: bool

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    @property
    def batch(self) -> int:
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.shape[0] - 1
        return self.q.shape[0]

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[-3]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[-3]

    @property
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.head_dim_v)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return (self.num_heads, self.seqlen_q)
        return (self.batch, self.num_heads, self.seqlen_q)

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the operators' order."""
        return (
            self.q,
            self.k,
            self.v,
            self.bias,
            self.alibi_slopes,
            self.sinks,
            self.dropout_seed,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqused_q,
            self.seqused_k,
        )

    def copies(self, given: Sequence[torch.Tensor | None]) -> bool:
        """Whether any of its tensors is not the one given, in the operators' order."""
        return any(x is not y for x, y in zip(self.tensors, given, strict=True))

    @property
    def empty(self) -> bool:
        """No query or no head, or no key: no kernel runs."""
        return 0 in (self.q.numel(), self.k.numel(), self.v.numel(), self.batch)

    def row_slots(self, block_m: int) -> int:
        """Row tiles of one head: of one sequence, or of a packed tensor."""
        return self._slots(self.seqlen_q, block_m)

    def key_slots(self, block_n: int) -> int:
        return self._slots(self.seqlen_k, block_n)

    def _slots(self, seqlen: int, block: int) -> int:
        return seqlen // block + self.batch if self.packed else -(-seqlen // block)

    def sequences_in_grid(self) -> int:
        """Factor of the grid for sequences: packed slots already cover them."""
        return 1 if self.packed else self.batch

    @property
    def natural(self) -> bool:
        """Scores are kept in natural units; see `score_terms`."""
        return self.q.dtype == torch.float32

    def dtype_name(self) -> str:
        """The tile table's name for the dtype."""
        if self.input_precision() == "tf32":
            return "tf32"
        return str(self.q.dtype).removeprefix("torch.")

    def input_precision(self) -> str:
        return "tf32" if self.allow_tf32 and self.q.dtype == torch.float32 else "ieee"

    def score_numbers(self) -> dict[str, float | int]:
        """Window, score factors and dropout as numbers for the kernel."""
        units = 1.0 if self.natural else LOG2_E
        if self.softcap > 0.0:
            score_factor = self.softmax_scale / self.softcap
        else:
            score_factor = self.softmax_scale * units
        threshold = min(round(self.dropout_p * 2**32), 2**32 - 1)
        return {
            "left": max(self.window_left, 0),
            "right": max(self.window_right, 0),
            "score_factor": score_factor,
            "softcap_units": self.softcap * units,
            # the kernel takes the bits as unsigned
            "dropout_threshold": threshold - 2**32 if threshold >= 2**31 else threshold,
            "dropout_scale": 0.0 if self.dropout_p == 1.0 else 1.0 / (1.0 - self.dropout_p),
        }

    def sizes(self) -> dict[str, int]:
        return {
            "batch": self.batch,
            "num_heads": self.num_heads,
            "group_size": self.num_heads // self.num_heads_kv,
            "seqlen_q": self.seqlen_q,
            "seqlen_k": self.seqlen_k,
        }

    def bias_strides(self) -> dict[str, int]:
        strides = (0, 0, 0, 0)
        if self.bias is not None:
            shape, stride = self.bias.shape, self.bias.stride()
            strides = tuple(s if n > 1 else 0 for n, s in zip(shape, stride, strict=True))
        slopes = self.alibi_slopes
        names = ("stride_bias_b", "stride_bias_h", "stride_bias_m", "stride_bias_n")
        return {
            **dict(zip(names, strides, strict=True)),
            "stride_slopes_b": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
        }

    def score_constants(self) -> dict[str, Any]:
        bias = "none"
        if self.bias is not None:
            bias = "bool" if self.bias.dtype == torch.bool else "float"
        return {
            "HEAD_DIM": self.head_dim,
            "HEAD_DIM_V": self.head_dim_v,
            "BLOCK_D": block_of(self.head_dim),
            "BLOCK_DV": block_of(self.head_dim_v),
            "PACKED": self.packed,
            "TOP_LEFT": self.top_left,
            "LEFT": self.window_left >= 0,
            "RIGHT": self.window_right >= 0,
            "SOFTCAP": self.softcap > 0.0,
            "ALIBI": self.alibi_slopes is not None,
            "BIAS": bias,
            "NATURAL": self.natural,
            "DROPOUT": self.dropout_p > 0.0,
            "INPUT_PRECISION": self.input_precision(),
        }


def block_of(head_dim: int) -> int:
    """A tile's width: the power of two that holds head_dim, at least 16 (a matrix product)."""
    return max(16, 1 << max(head_dim - 1, 0).bit_length())


def as_pointer(bias: torch.Tensor) -> torch.Tensor:
    """A bias as kernels read it: bool as bytes."""
    return bias.view(torch.uint8) if bias.dtype == torch.bool else bias


def rows_are_contiguous(x: torch.Tensor) -> bool:
    """Kernels load rows as vectors."""
    return x.stride(-1) == 1 or x.shape[-1] == 1


def row_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dimension."""
    return x if rows_are_contiguous(x) else x.contiguous()


def strides(unit: int, **tensors: torch.Tensor) -> dict[str, int]:
    """Named strides of (batch, rows, heads), in units; a packed tensor's batch stride is 0."""
    named = {}
    for name, x in tensors.items():
        row = "n" if name in ("k", "v", "dk", "dv") else "m"
        batch = x.stride(0) if x.dim() == 4 else 0
        for dim, stride in (("b", batch), (row, x.stride(-3)), ("h", x.stride(-2))):
            named[f"stride_{name}{dim}"] = stride // unit
    return named


def unit_of(*tensors: torch.Tensor) -> int:
    """Elements that every stride of every tensor is a multiple of: 16 bytes' worth, or 1."""
    unit = 16 // min(x.element_size() for x in tensors)
    whole = all(s % unit == 0 for x in tensors for s in x.stride()[:-1])
    return unit if whole else 1


def is_wide(block: int, *tensors: torch.Tensor) -> bool:
    """Whether a row's offset may pass 32 bits: the last tile's `block` rows may reach further."""
    return any(x.stride(-3) * (x.shape[-3] + block) >= 2**31 for x in tensors)


def tile_arguments(
    call: Call, block_m: int, block_n: int, **others: torch.Tensor
) -> dict[str, Any]:
    """What every kernel takes behind its tensors for its problem and tile.

    Args:
        others: tensors besides q, k and v whose strides the kernel takes, by its names ("o", "do",
            "dq", "dk", "dv").
    """
    tensors = {"q": call.q, "k": call.k, "v": call.v, **others}
    unit = unit_of(*tensors.values())
    return {
        **strides(unit, **tensors),
        **call.bias_strides(),
        **call.sizes(),
        **call.score_numbers(),
        **call.score_constants(),
        "UNIT": unit,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
    }


def walk_arguments(call: Call, config: TileConfig, **others: torch.Tensor) -> dict[str, Any]:
    """`tile_arguments` of a kernel that walks tiles in a pipelined loop."""
    block = max(config.block_m, config.block_n)
    return {
        **tile_arguments(call, config.block_m, config.block_n, **others),
        "WIDE": is_wide(block, call.q, call.k, call.v, *others.values()),
        "NUM_STAGES": config.num_stages,
    }


def kernel_name(prefix: str) -> Callable[[Any], str]:
    """A name that says what a kernel was compiled for, for profilers and people."""

    def name(specialization: Any) -> str:
        c = specialization.constants
        dtype = specialization.signature["q_ptr"].removeprefix("*")
        if c["INPUT_PRECISION"] == "tf32":
            dtype = "tf32"
        head_dim = f"d{c['HEAD_DIM']}"
        if c["HEAD_DIM_V"] != c["HEAD_DIM"]:
            head_dim += f"v{c['HEAD_DIM_V']}"
        made = prefix
        if not c.get("WANT_DV", True):
            made = prefix.replace("dkdv", "dk")
        elif not c.get("WANT_DK", True):
            made = prefix.replace("dkdv", "dv")
        parts = [made, dtype, head_dim, f"m{c['BLOCK_M']}n{c['BLOCK_N']}"]
        if c["LEFT"]:
            parts.append("window")
        elif c["RIGHT"]:
            parts.append("causal")
        for constant, word in (
            ("PACKED", "varlen"),
            ("SOFTCAP", "softcap"),
            ("ALIBI", "alibi"),
            ("SINKS", "sinks"),
            ("DROPOUT", "dropout"),
        ):
            if c.get(constant):
                parts.append(word)
        if c["BIAS"] != "none":
            parts.append("bias" if c["BIAS"] == "float" else "boolbias")
        return "_".join(parts)

    return name


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_seed: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    **numbers: Any,
) -> Call:
    """The call with every tensor in a form that the kernels can walk."""

    def vector(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x.contiguous()

    if alibi_slopes is not None and alibi_slopes.stride(-1) != 1:
        alibi_slopes = alibi_slopes.contiguous()
    return Call(
        row_contiguous(q),
        row_contiguous(k),
        row_contiguous(v),
        bias,
        alibi_slopes,
        vector(sinks),
        dropout_seed,
        vector(cu_seqlens_q),
        vector(cu_seqlens_k),
        vector(seqused_q),
        vector(seqused_k),
        **numbers,
    )


def check_grid(programs: int) -> int:
    """Programs of a launch; the first grid dimension holds 2**31 - 1.

    Raises ValueError when a problem needs more.
    """
    if programs >= 2**31:
        raise ValueError(
            f"this problem needs {programs} blocks, and a launch holds {2**31 - 1}: "
            "split it by batch or heads"
        )
    return programs


def architecture_of(device: torch.device) -> str:
    """The tile table's name for a device; the interpreter on the CPU takes the oldest one's."""
    return _known_architecture(device.type, device.index)


@functools.cache
def _known_architecture(device_type: str, index: int | None) -> str:
    if device_type != "cuda":
        return known_arch((8, 0))
    return known_arch(torch.cuda.get_device_capability(index))
