"""From the arguments of a call over a cache to those of its kernels: strides, constants, names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import triton

from flashdig.kernels.triton.arguments import LOG2_E, strides, unit_of
from flashdig.kernels.triton.decode_choose import block_of, split_dim

# a new length compiles nothing
UNSPECIALIZED = [
    *(f"stride_{x}{d}" for x, dims in (("q", "bmh"), ("k", "bnh"), ("v", "bnh")) for d in dims),
    "stride_table",
    "stride_slopes_b",
    "batch",
    "num_heads_kv",
    "seqlen_q",
    "seqlen_new",
    "capacity",
    "cache_rows",
    "first_slot",
    "slots",
    "splits",
    "wanted",
    "left",
    "right",
    "score_factor",
    "softcap_units",
]
TENSORS = 16  # of a call: q to v_descale
FP8_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


@dataclass(frozen=True)
class CacheCall:
    """The checked tensors and numbers of one call; shapes as in `flashdig.attention_with_kvcache`.

    The last dimension of q, k and v is contiguous. `cu_seqlens_k` holds the lengths of a packed
    call over pages; `cache_seqlens` those before `seqlen_new` keys (or those of `cu_seqlens_new`)
    were appended.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cache_seqlens: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    cu_seqlens_new: torch.Tensor | None
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    seqused_q: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    softmax_scale: float
    softcap: float
    window_left: int
    window_right: int
    top_left: bool
    allow_tf32: bool
    seqlen_new: int

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
    def num_heads(self) -> int:
        return self.q.shape[-2]

    @property
    def num_heads_kv(self) -> int:
        return self.k.shape[-2]

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_heads_kv

    @property
    def page_size(self) -> int:
        return 0 if self.page_table is None else self.k.shape[1]

    @property
    def capacity(self) -> int:
        """Keys that a sequence has room for."""
        if self.page_table is None:
            return self.k.shape[1]
        return self.page_table.shape[1] * self.k.shape[1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.v.shape[-1])

    def out_dtype(self, wanted: torch.dtype | None) -> torch.dtype:
        """Of the result: that of q where none is wanted, bfloat16 for fp8."""
        return wanted or (torch.bfloat16 if self.q.element_size() == 1 else self.q.dtype)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        if self.packed:
            return (self.num_heads, self.seqlen_q)
        return (self.batch, self.num_heads, self.seqlen_q)

    @property
    def empty(self) -> bool:
        """No query, no head or no key: no kernel runs."""
        return 0 in (self.q.numel(), self.k.numel(), self.v.numel(), self.batch, self.capacity)

    @property
    def natural(self) -> bool:
        """Scores are kept in natural units; see `score_terms`."""
        return self.q.dtype == torch.float32

    def slots(self, block_m: int) -> int:
        """Tiles of rows of one KV head, over all sequences."""
        rows = self.seqlen_q * self.group_size
        if self.packed:
            return rows // block_m + self.batch
        return triton.cdiv(rows, block_m) * self.batch

    def fp8(self, x: torch.Tensor, hardware: bool) -> str:
        """How the kernel reads x: "none", or its fp8 format; see `paged.from_fp8`."""
        kind = FP8_KINDS.get(x.dtype, "none")
        return "e4m3_bits" if kind == "e4m3" and not hardware else kind

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """In the order of `cache_attention`."""
        return tuple(getattr(self, field.name) for field in fields(self)[:TENSORS])

    def copies(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether any of these had to be copied for the kernels."""
        return any(x is not y for x, y in zip(tensors, self.tensors, strict=True))

    def numbers(self, fp8_hardware: bool) -> dict[str, Any]:
        """What `flashdig_decode` takes for its problem, besides tensors, tile and splits."""
        q, k, v = (as_bytes(x) for x in (self.q, self.k, self.v))
        unit = unit_of(q, k, v)
        slopes, table = self.alibi_slopes, self.page_table
        units = 1.0 if self.natural else LOG2_E
        scale = self.softmax_scale
        head_dim, head_dim_v = self.q.shape[-1], self.v.shape[-1]
        block_d, tail_d = split_dim(head_dim)
        return {
            **strides(unit, q=q, k=k, v=v),
            "stride_table": 0 if table is None else table.stride(0),
            "stride_slopes_b": slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            "batch": self.batch,
            "num_heads_kv": self.num_heads_kv,
            "seqlen_q": self.seqlen_q,
            "seqlen_new": self.seqlen_new,
            "capacity": self.capacity,
            "cache_rows": k.shape[0],
            "left": max(self.window_left, 0),
            "right": max(self.window_right, 0),
            "score_factor": scale / self.softcap if self.softcap > 0.0 else scale * units,
            "softcap_units": self.softcap * units,
            "HEAD_DIM": head_dim,
            "HEAD_DIM_V": head_dim_v,
            "BLOCK_D": block_d,
            "TAIL_D": tail_d,
            "BLOCK_DV": block_of(head_dim_v),
            "GROUP": self.group_size,
            "UNIT": unit,
            # the strides of rows and pages: one product serves both
            "ALIKE": k.stride()[:2] == v.stride()[:2],
            "PACKED": self.packed,
            "PAGE_SIZE": self.page_size,
            "FP8": self.fp8(self.k, fp8_hardware),
            "Q_FP8": self.fp8(self.q, fp8_hardware),
            "TOP_LEFT": self.top_left,
            "LEFT": self.window_left >= 0,
            "RIGHT": self.window_right >= 0,
            "SOFTCAP": self.softcap > 0.0,
            "ALIBI": slopes is not None,
            "NATURAL": self.natural,
            "SINKS": self.sinks is not None,
            "INPUT_PRECISION": "tf32" if self.allow_tf32 and self.natural else "ieee",
        }


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """fp8 as the kernels take it."""
    return x.view(torch.uint8) if x.dtype in FP8_KINDS else x


def decode_name(prefix: str) -> Any:
    """A name that says what a kernel was compiled for, for profilers and people."""

    def name(specialization: Any) -> str:
        c = specialization.constants
        dtype = specialization.signature["q_ptr"].removeprefix("*")
        if c["INPUT_PRECISION"] == "tf32":
            dtype = "tf32"
        if c["Q_FP8"] != "none":
            dtype = "fp8"
        head_dim = f"d{c['HEAD_DIM']}"
        if c["HEAD_DIM_V"] != c["HEAD_DIM"]:
            head_dim += f"v{c['HEAD_DIM_V']}"
        parts = [prefix, dtype, head_dim, f"m{c['BLOCK_M']}n{c['BLOCK_N']}"]
        if c["LEFT"]:
            parts.append("window")
        elif c["RIGHT"]:
            parts.append("causal")
        for said, word in (
            (c["PACKED"], "varlen"),
            (c["PAGE_SIZE"] > 0, "paged"),
            (c["SPLIT"], "split"),
            (c["FP8"] != "none", "fp8cache"),
            (c["SOFTCAP"], "softcap"),
            (c["ALIBI"], "alibi"),
            (c["SINKS"], "sinks"),
        ):
            if said:
                parts.append(word)
        return "_".join(parts)

    return name


def combine_name(specialization: Any) -> str:
    dtype = specialization.signature["out_ptr"].removeprefix("*")
    return f"flashdig_combine_{dtype}_v{specialization.constants['HEAD_DIM_V']}"
