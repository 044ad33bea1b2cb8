"""What is checked before anything is launched, and the errors.

Every error is a ValueError or TypeError that names the argument and says what is allowed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flashdig.problem import AttentionProblem, Causal, Mask

HALF_DTYPES = (torch.float16, torch.bfloat16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*HALF_DTYPES, torch.float32, torch.float64, *FP8_DTYPES)


@dataclass(frozen=True)
class DenseCall:
    """The checked arguments of one dense call: tensors, and the problem that they make."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    problem: AttentionProblem
    softmax_scale: float
    dropout_p: float
    bias: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out_dtype: torch.dtype
    return_lse: bool


def dense_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: Causal,
    window: tuple[int | None, int | None] | None,
    softmax_scale: float | None,
    softcap: float,
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    dropout_p: float,
    q_descale: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    deterministic: bool,
    return_lse: bool,
) -> DenseCall:
    """Check the arguments of `flashdig.attention`; raises ValueError or TypeError."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, seqlen, num_heads, head_dim), got shape {tuple(x.shape)}"
            )
    _check_devices(
        q,
        k=k,
        v=v,
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    q, k, v = (_under_autocast(x) for x in (q, k, v))
    _check_dtypes(q, k, v)
    batch, seqlen_q, num_heads, head_dim = q.shape
    _check_kv_shapes(q, k, v)
    # comparisons: math.isfinite cannot be traced where torch.compile keeps a number open
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap must be a finite number >= 0 (0 is off), got {softcap}")
    if softmax_scale is not None and not -math.inf < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be a finite number or None, got {softmax_scale}")
    if not 0.0 <= dropout_p <= 1.0:
        raise ValueError(f"dropout_p must be between 0 and 1, got {dropout_p}")
    _check_bias(bias, (batch, num_heads, seqlen_q, k.shape[1]))
    _check_alibi(alibi_slopes, batch, num_heads)
    if sinks is not None:
        _check_floating("sinks", sinks)
        if sinks.shape != (num_heads,):
            raise ValueError(f"sinks must be (num_heads,) = ({num_heads},), got {_shape(sinks)}")
    for name, descale in (("q", q_descale), ("k", k_descale), ("v", v_descale)):
        _check_descale(f"{name}_descale", descale, batch, k.shape[2])
    if out_dtype is not None and (out_dtype in FP8_DTYPES or out_dtype not in DTYPES):
        raise ValueError(
            "out_dtype must be float16, bfloat16, float32 or float64, "
            f"got {out_dtype if isinstance(out_dtype, torch.dtype) else repr(out_dtype)}"
        )
    if q.dtype in FP8_DTYPES and torch.is_grad_enabled():
        inputs = {"q": q, "k": k, "v": v, "bias": bias, "sinks": sinks}
        for name, tensor in inputs.items():
            if tensor is not None and tensor.requires_grad:
                raise ValueError(f"{name} requires a gradient, and fp8 attention has no backward")
    problem = AttentionProblem(
        batch=batch,
        num_heads=num_heads,
        num_heads_kv=k.shape[2],
        seqlen_q=seqlen_q,
        seqlen_k=k.shape[1],
        head_dim=head_dim,
        head_dim_v=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        mask=Mask.from_arguments(causal, window),
        softcap=float(softcap),
        dropout=dropout_p > 0.0,
        alibi="none" if alibi_slopes is None else ("heads", "batch_heads")[alibi_slopes.dim() - 1],
        bias="none" if bias is None else ("bool" if bias.dtype == torch.bool else "float"),
        sinks=sinks is not None,
        deterministic=deterministic or torch.are_deterministic_algorithms_enabled(),
        allow_tf32=q.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32,
    )
    return DenseCall(
        q=q,
        k=k,
        v=v,
        problem=problem,
        softmax_scale=problem.softmax_scale if softmax_scale is None else float(softmax_scale),
        dropout_p=float(dropout_p),
        bias=bias,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        out_dtype=out_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype),
        return_lse=return_lse,
    )


def _shape(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _under_autocast(x: torch.Tensor) -> torch.Tensor:
    """As autocast treats a matmul: float16, bfloat16 and float32 are cast, others are kept."""
    device_type = x.device.type
    if x.dtype in (*HALF_DTYPES, torch.float32) and torch.is_autocast_enabled(device_type):
        return x.to(torch.get_autocast_dtype(device_type))
    return x


def _check_dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(
            f"q, k and v must have one dtype, got q {q.dtype}, k {k.dtype} and v {v.dtype}"
        )
    if q.dtype not in DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        raise TypeError(f"q, k and v must be one of {allowed}, got {q.dtype}")


def _check_devices(q: torch.Tensor, **others: torch.Tensor | None) -> None:
    for name, x in others.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_kv_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    batch, _, num_heads, head_dim = q.shape
    if head_dim < 1:
        raise ValueError(f"q must have head_dim >= 1, got shape {_shape(q)}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"k must be (batch, seqlen_k, num_heads_kv, head_dim) with batch {batch} and "
            f"head_dim {head_dim} as in q, got {_shape(k)}"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v must be (batch, seqlen_k, num_heads_kv, head_dim_v) with the first three sizes of "
            f"k {_shape(k)[:3]}, got {_shape(v)}"
        )
    num_heads_kv = k.shape[2]
    if (num_heads_kv == 0 and num_heads > 0) or (num_heads_kv and num_heads % num_heads_kv):
        raise ValueError(
            f"k and v must have a number of heads that divides q's {num_heads}, got {num_heads_kv}"
        )


def _check_floating(name: str, x: torch.Tensor) -> None:
    if x.dtype not in (*HALF_DTYPES, torch.float32, torch.float64):
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}")


def _check_bias(bias: torch.Tensor | None, full_shape: tuple[int, int, int, int]) -> None:
    if bias is None:
        return
    if bias.dtype != torch.bool:
        _check_floating("bias", bias)
    if bias.dim() != 4 or any(
        size not in (1, full) for size, full in zip(bias.shape, full_shape, strict=True)
    ):
        raise ValueError(
            "bias must be (1 or batch, 1 or num_heads, 1 or seqlen_q, 1 or seqlen_k) for "
            f"{full_shape}, got {_shape(bias)}"
        )


def _check_alibi(slopes: torch.Tensor | None, batch: int, num_heads: int) -> None:
    if slopes is None:
        return
    if slopes.dtype != torch.float32:
        raise TypeError(f"alibi_slopes must be float32, got {slopes.dtype}")
    if _shape(slopes) not in ((num_heads,), (batch, num_heads)):
        raise ValueError(
            f"alibi_slopes must be (num_heads,) = ({num_heads},) or (batch, num_heads) = "
            f"({batch}, {num_heads}), got {_shape(slopes)}"
        )
    if slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires a gradient, and attention has none for it")


def _check_descale(name: str, descale: torch.Tensor | None, batch: int, num_heads_kv: int) -> None:
    if descale is None:
        return
    if descale.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, got {descale.dtype}")
    if descale.shape != (batch, num_heads_kv):
        raise ValueError(
            f"{name} must be (batch, num_heads_kv) = ({batch}, {num_heads_kv}), "
            f"got {_shape(descale)}"
        )
