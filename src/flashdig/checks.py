"""Checks of single arguments, each with an error that names the argument and what is allowed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

HALF_DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*HALF_DTYPES, torch.float32, torch.float64, *FP8_DTYPES)


@dataclass(frozen=True)
class Layout:
    """The dimensions of q, k and v by name."""

    q: str
    k: str
    v: str


DENSE = Layout(
    "batch, seqlen, num_heads, head_dim",
    "batch, seqlen_k, num_heads_kv, head_dim",
    "batch, seqlen_k, num_heads_kv, head_dim_v",
)
PACKED = Layout(
    "total_q, num_heads, head_dim",
    "total_k, num_heads_kv, head_dim",
    "total_k, num_heads_kv, head_dim_v",
)
PAGED = Layout(
    "total_q, num_heads, head_dim",
    "num_pages, page_size, num_heads_kv, head_dim",
    "num_pages, page_size, num_heads_kv, head_dim_v",
)


def shape_of(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_tensors(layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    for name, x, sizes in (("q", q, layout.q), ("k", k, layout.k), ("v", v, layout.v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != sizes.count(",") + 1:
            raise ValueError(f"{name} must be ({sizes}), got shape {shape_of(x)}")


def check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got q {q.dtype}, k {k.dtype} and v {v.dtype}"
        )
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"q, k and v must be one of {allowed}, got {q.dtype}")


def check_devices(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, x in others.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def check_sizes(layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """The sizes of q, k and v that must agree; each already has the layout's dimensions."""
    num_heads, head_dim = q.shape[-2:]
    if head_dim < 1:
        raise ValueError(f"q must have head_dim >= 1, got shape {shape_of(q)}")
    if k.shape[-1] != head_dim or (layout is DENSE and k.shape[0] != q.shape[0]):
        batch = f"batch {q.shape[0]} and " if layout is DENSE else ""
        raise ValueError(
            f"k must be ({layout.k}) with {batch}head_dim {head_dim} as in q, got {shape_of(k)}"
        )
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v must be ({layout.v}) with all sizes but the last as in k {shape_of(k)}, "
            f"got {shape_of(v)}"
        )
    num_heads_kv = k.shape[-2]
    if (num_heads_kv == 0 and num_heads > 0) or (num_heads_kv and num_heads % num_heads_kv):
        raise ValueError(
            f"k and v must have a number of heads that divides q's {num_heads}, got {num_heads_kv}"
        )


def check_numbers(softmax_scale: float | None, softcap: float, dropout_p: float) -> None:
    for name, number in (
        ("softmax_scale", 1.0 if softmax_scale is None else softmax_scale),
        ("softcap", softcap),
        ("dropout_p", dropout_p),
    ):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name} must be a number, got {type(number).__name__}")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite number >= 0 (0 is off), got {softcap}")
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be a finite number or None, got {softmax_scale}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")


def check_flags(**flags: bool) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, got {flag!r}")


def check_out_dtype(out_dtype: torch.dtype | None) -> None:
    if out_dtype is not None and (out_dtype in FP8_DTYPES or out_dtype not in DTYPES):
        raise ValueError(
            "out_dtype must be float16, bfloat16, float32 or float64, "
            f"got {out_dtype if isinstance(out_dtype, torch.dtype) else repr(out_dtype)}"
        )


def check_no_fp8_gradient(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    """fp8 attention has no backward, so nothing may ask for a gradient."""
    if q.dtype not in FP8_DTYPES or not torch.is_grad_enabled():
        return
    for name, tensor in {"q": q, **others}.items():
        if tensor is not None and tensor.requires_grad:
            raise ValueError(f"{name} requires a gradient, and fp8 attention has no backward")


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    if sinks is None:
        return
    check_floating("sinks", sinks)
    if sinks.shape != (num_heads,):
        raise ValueError(f"sinks must be (num_heads,) = ({num_heads},), got {shape_of(sinks)}")


def check_integers(name: str, x: torch.Tensor | None, names: str, shape: tuple[int, ...]) -> None:
    """An int32 tensor of a shape; `names` are the names of its sizes."""
    if x is None:
        return
    if x.dtype != torch.int32:
        raise TypeError(f"{name} must be int32, got {x.dtype}")
    if x.shape != shape:
        raise ValueError(f"{name} must be {names} = {shape}, got {shape_of(x)}")


def check_max_seqlen(name: str, length: int | None) -> None:
    if length is None:
        return
    if isinstance(length, bool) or not isinstance(length, int | torch.SymInt):
        raise TypeError(f"{name} must be an int or None, got {type(length).__name__}")
    if length < 0:
        raise ValueError(f"{name} must be >= 0 or None, got {length}")


def check_floating(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (*HALF_DTYPES, torch.float32, torch.float64):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def check_bias(bias: torch.Tensor | None, full_shape: tuple[int, int, int, int]) -> None:
    if bias is None:
        return
    if bias.dtype != torch.bool:
        check_floating("bias", bias)
    if bias.dim() != 4 or any(
        size not in (1, full) for size, full in zip(bias.shape, full_shape, strict=True)
    ):
        raise ValueError(
            "bias must be (1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k) for "
            f"{full_shape}, got {shape_of(bias)}"
        )


def check_alibi(slopes: torch.Tensor | None, batch: int, num_heads: int) -> None:
    if slopes is None:
        return
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {slopes.dtype}")
    if shape_of(slopes) not in ((num_heads,), (batch, num_heads)):
        raise ValueError(
            f"alibi_slopes must be (num_heads,) = ({num_heads},) or (batch, num_heads) = "
            f"({batch}, {num_heads}), got {shape_of(slopes)}"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, and attention has none for it")


def check_descale(name: str, descale: torch.Tensor | None, batch: int, num_heads_kv: int) -> None:
    if descale is None:
        return
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {descale.dtype}")
    if descale.shape != (batch, num_heads_kv):
        raise ValueError(
            f"{name} must be (batch, num_heads_kv) = ({batch}, {num_heads_kv}), "
            f"got {shape_of(descale)}"
        )
