"""What the dig runs on: q, k, v from a seed, from a file, or made to be difficult."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashdig.problem import AttentionProblem, Causal, Mask

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
NAMES = ("q", "k", "v")
LAYOUT = "(batch, heads, seqlen, head_dim) or (heads, seqlen, head_dim)"


class InputError(ValueError):
    """A file cannot serve as q, k, v; the message names file, tensor and what is allowed."""


class MissingExtraError(ImportError):
    """A package of the extra `real` is not installed; the message says how to install it."""

    def __init__(self, package: str) -> None:
        super().__init__(f"{package} is not installed: pip install flashdig[real]", name=package)


@dataclass(frozen=True, eq=False)
class QKV:
    """One set of attention inputs, contiguous, on one device and of one dtype.

    Attributes:
        q: (batch, num_heads, seqlen_q, head_dim).
        k: (batch, num_heads_kv, seqlen_k, head_dim).
        v: (batch, num_heads_kv, seqlen_k, head_dim_v).
        source: where they come from, for people.
        tokens: the text's token at each position, where there is a text; else empty.

    Raises ValueError when the shapes, dtypes or devices do not fit together.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    source: str
    tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fault = _fault(self.q, self.k, self.v)
        if fault:
            raise ValueError(fault)
        for name in NAMES:
            object.__setattr__(self, name, getattr(self, name).contiguous())

    def problem(self, causal: Causal = False) -> AttentionProblem:
        """The attention problem of these shapes."""
        return AttentionProblem(
            batch=self.q.shape[0],
            num_heads=self.q.shape[1],
            num_heads_kv=self.k.shape[1],
            seqlen_q=self.q.shape[2],
            seqlen_k=self.k.shape[2],
            head_dim=self.q.shape[3],
            head_dim_v=self.v.shape[3],
            dtype=dtype_name(self.q.dtype),
            mask=Mask.from_arguments(causal),
        )

    def to(self, *, device: torch.device | str | None = None, dtype: str | None = None) -> QKV:
        """The same inputs on another device or in another dtype."""
        wanted = self.q.dtype if dtype is None else torch_dtype(dtype)
        place = self.q.device if device is None else device
        q, k, v = (x.to(device=place, dtype=wanted) for x in (self.q, self.k, self.v))
        return QKV(q, k, v, self.source, self.tokens)


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name; ValueError for names outside DTYPES."""
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """The name, as AttentionProblem has it, of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def random_qkv(problem: AttentionProblem, device: torch.device | str = "cpu", seed: int = 0) -> QKV:
    """Standard normal q, k, v. The same seed gives the same numbers on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = (
        torch.randn(shape, generator=generator, device=device).to(torch_dtype(problem.dtype))
        for shape in _shapes(problem)
    )
    return QKV(q, k, v, f"random normal, seed {seed}")


def constant(problem: AttentionProblem, device: torch.device | str = "cpu") -> QKV:
    """Every element 0.5: all keys weigh the same, the output is 0.5, and no maximum ever moves."""
    q, k, v = (
        torch.full(shape, 0.5, dtype=torch_dtype(problem.dtype), device=device)
        for shape in _shapes(problem)
    )
    return QKV(q, k, v, "constant 0.5")


def rising(problem: AttentionProblem, device: torch.device | str = "cpu") -> QKV:
    """Scores that rise from 0 to 20 along the keys, values from -1 to 1: every tile brings a new
    maximum and rescales all before it."""
    q_shape, k_shape, v_shape = _shapes(problem)
    ramp = torch.linspace(0, 1, problem.seqlen_k, dtype=torch.float64, device=device)[:, None]
    dtype = torch_dtype(problem.dtype)
    q = torch.ones(q_shape, dtype=dtype, device=device)
    # each of head_dim ones in q adds key * head_dim**-0.5
    k = (20 * problem.head_dim**-0.5 * ramp).to(dtype).expand(k_shape)
    v = (2 * ramp - 1).to(dtype).expand(v_shape)
    return QKV(q, k, v, "scores rising from 0 to 20 along the keys")


def one_huge_key(
    problem: AttentionProblem, device: torch.device | str = "cpu", seed: int = 0
) -> QKV:
    """Random inputs whose middle key is 50 times as long: it takes some rows whole and falls out of
    the others."""
    inputs = random_qkv(problem, device, seed)
    middle = problem.seqlen_k // 2
    inputs.k[:, :, middle : middle + 1] *= 50
    return QKV(inputs.q, inputs.k, inputs.v, f"one key 50 times as long, seed {seed}")


PATHOLOGICAL: dict[str, Callable[[AttentionProblem, torch.device | str], QKV]] = {
    "constant": constant,
    "rising": rising,
    "one_huge_key": one_huge_key,
}


def from_safetensors(
    path: str | Path, dtype: str | None = None, device: torch.device | str = "cpu"
) -> QKV:
    """Inputs saved as tensors q, k and v in a safetensors file.

    Args:
        path: file whose q, k, v are (batch, heads, seqlen, head_dim) or, for batch 1, (heads,
            seqlen, head_dim), all finite, float16, bfloat16, float32 or float64.
        dtype: name of the dtype to convert to; None keeps the file's.

    Raises InputError for files that do not hold that, ValueError for an unknown `dtype`, and
    MissingExtraError without the package safetensors.
    """
    wanted = None if dtype is None else torch_dtype(dtype)
    path = Path(path)
    tensors = _read_tensors(path)
    for name, tensor in tensors.items():
        _check_tensor(path, name, tensor)
    if len({tensor.dim() for tensor in tensors.values()}) > 1:
        raise InputError(
            f"{path}: q, k and v must have the same number of dimensions, got {_listed(tensors)}"
        )
    if wanted is not None:
        tensors = {name: _convert(path, name, tensor, wanted) for name, tensor in tensors.items()}
    q, k, v = (tensor if tensor.dim() == 4 else tensor[None] for tensor in tensors.values())
    fault = _fault(q, k, v)
    if fault:
        raise InputError(f"{path}: {fault}")
    return QKV(q, k, v, str(path)).to(device=device)


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError as error:
        raise MissingExtraError("safetensors") from error
    if not path.exists():
        raise InputError(f"{path}: no such file")
    if not path.is_file():
        raise InputError(f"{path}: not a file")
    try:
        with safe_open(path, framework="pt") as file:
            present = sorted(file.keys())
            absent = [name for name in NAMES if name not in present]
            if absent:
                raise InputError(
                    f"{path}: no tensor named {', '.join(absent)}; it must hold q, k and v, "
                    f"and holds {_shortened(present)}"
                )
            return {name: file.get_tensor(name) for name in NAMES}
    except SafetensorError as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error})") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error})") from error


def _shortened(names: list[str], most: int = 12) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _check_tensor(path: Path, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() not in (3, 4):
        raise InputError(f"{path}: {name} must be {LAYOUT}, got shape {tuple(tensor.shape)}")
    if dtype_name(tensor.dtype) not in DTYPES:
        raise InputError(
            f"{path}: {name} is {dtype_name(tensor.dtype)}; allowed are {', '.join(DTYPES)}"
        )
    if tensor.numel() == 0:
        raise InputError(
            f"{path}: {name} has a dimension of size 0, shape {tuple(tensor.shape)}; "
            "every size must be at least 1"
        )
    unfit = int((~torch.isfinite(tensor)).sum())
    if unfit:
        raise InputError(
            f"{path}: {name} holds {unfit} values of {tensor.numel()} that are NaN or infinite; "
            "all must be finite"
        )


def _convert(path: Path, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    converted = tensor.to(dtype)
    unfit = int((~torch.isfinite(converted)).sum())
    if unfit:
        raise InputError(
            f"{path}: {name} holds {unfit} values of {tensor.numel()} beyond the range of "
            f"{dtype_name(dtype)} (largest {float(tensor.abs().max()):.4g}); choose a wider dtype"
        )
    return converted


def _fault(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> str:
    """Why q, k, v do not make one attention problem, or an empty string."""
    tensors: dict[str, Any] = dict(zip(NAMES, (q, k, v), strict=True))
    shapes = _listed(tensors)
    if any(tensor.dim() != 4 for tensor in tensors.values()):
        return f"q, k and v must be (batch, heads, seqlen, head_dim), got {shapes}"
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        dtypes = ", ".join(f"{name} {dtype_name(x.dtype)}" for name, x in tensors.items())
        return f"q, k and v must have one dtype, got {dtypes}"
    if dtype_name(q.dtype) not in DTYPES:
        return f"dtype must be one of {', '.join(DTYPES)}, got {dtype_name(q.dtype)}"
    if len({tensor.device for tensor in tensors.values()}) > 1:
        devices = ", ".join(f"{name} {x.device}" for name, x in tensors.items())
        return f"q, k and v must be on one device, got {devices}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return f"q, k and v must have the same batch, got {shapes}"
    if k.shape[1:3] != v.shape[1:3]:
        return f"k and v must have the same heads and seqlen, got {shapes}"
    if q.shape[3] != k.shape[3]:
        return f"q and k must have the same head_dim, got {shapes}"
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        return f"the heads of q must be a multiple of those of k and v, got {shapes}"
    return ""


def _listed(tensors: dict[str, torch.Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def _shapes(
    problem: AttentionProblem,
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    heads_kv, seqlen_k = problem.num_heads_kv, problem.seqlen_k
    return (
        (problem.batch, problem.num_heads, problem.seqlen_q, problem.head_dim),
        (problem.batch, heads_kv, seqlen_k, problem.head_dim),
        (problem.batch, heads_kv, seqlen_k, problem.head_dim_v),
    )
