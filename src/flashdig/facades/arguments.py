"""What the façades share: arguments of FlashAttention's packages in flashdig's terms.

Errors name the argument as the caller wrote it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from flashdig import checks

Pair = tuple[int | None, int | None]


def window_pair(window_size: Any) -> Pair:
    """(left, right) as integers or None, from a pair of anything that is an integer.

    Raises TypeError, naming `window_size`, for anything else.
    """
    if not isinstance(window_size, tuple | list | torch.Tensor) or len(window_size) != 2:
        raise TypeError(f"window_size must be a pair (left, right), got {window_size!r}")
    left, right = window_size
    return _window_side(left, window_size), _window_side(right, window_size)


def _window_side(side: Any, window_size: Any) -> int | None:
    if side is None or type(side) is int:
        return side
    try:
        if isinstance(side, bool):
            raise TypeError
        return operator.index(side)
    except TypeError:
        raise TypeError(f"window_size must hold integers or None, got {window_size!r}") from None


def unlimited_if_negative(window_size: Any) -> Pair:
    """The window of FlashAttention-2 and -3, where any negative side is unlimited."""
    left, right = window_pair(window_size)
    return (
        None if left is None or left < 0 else left,
        None if right is None or right < 0 else right,
    )


def known_length(max_seqlen: Any) -> Any:
    """`max_seqlen` for flashdig: a tensor is not read back, so it counts as unknown."""
    return None if isinstance(max_seqlen, torch.Tensor) else max_seqlen


def as_length(name: str, max_seqlen: Any) -> int:
    """`max_seqlen` as a number, a tensor's read back; raises TypeError, naming it, for others."""
    try:
        return operator.index(max_seqlen)
    except TypeError:
        raise TypeError(f"{name} must be an int here, got {max_seqlen!r}") from None


def unpacked(name: str, packed: Any, sizes: str, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    """The parts of a packed tensor as views along `dim`, which must have that many entries."""
    if not isinstance(packed, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(packed).__name__}")
    if packed.dim() != sizes.count(",") + 1 or packed.shape[dim] != parts:
        raise ValueError(f"{name} must be ({sizes}), got shape {checks.shape_of(packed)}")
    return packed.unbind(dim)


def sequence_and_position(
    cu_seqlens: torch.Tensor, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each row and its position there; rows of no sequence are left as they fall:
    position < 0, or sequence = batch."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, row - cu_seqlens.long()[sequence]


def refuse(reason: str, **arguments: Any) -> None:
    """Raise NotImplementedError for arguments that are not None, each with the same reason."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported: {reason}")


def check_hints(num_splits: Any, pack_gqa: Any) -> None:
    """Arguments that choose a schedule and no result: checked, and left to flashdig."""
    if isinstance(num_splits, bool) or not isinstance(num_splits, int):
        raise TypeError(f"num_splits must be an int, got {num_splits!r}")
    if num_splits < 0:
        raise ValueError(f"num_splits must be >= 0, got {num_splits}")
    if pack_gqa is not None and not isinstance(pack_gqa, bool):
        raise TypeError(f"pack_gqa must be True, False or None, got {pack_gqa!r}")


def with_second_query(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: Any, descales: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k whose product is q k^T + qv v^T: the parts side by side, which copies them.

    Raises ValueError or TypeError for a `qv` of another shape or dtype, NotImplementedError for
    fp8 and descale factors beside it.
    """
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q must be a tensor, got {type(q).__name__}")
    checks.check_devices(q, k=k, v=v, qv=qv)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            "v must have all sizes but the last as in k "
            f"{checks.shape_of(k)}, got {checks.shape_of(v)}"
        )
    shape = (*q.shape[:-1], v.shape[-1])
    if qv.shape != shape:
        raise ValueError(
            f"qv must have the shape of q with the head_dim of v, {shape}, "
            f"got {checks.shape_of(qv)}"
        )
    if qv.dtype != q.dtype:
        raise TypeError(f"qv must have the dtype of q, {q.dtype}, got {qv.dtype}")
    if q.dtype in checks.FP8_DTYPES:
        raise NotImplementedError("qv is not supported for fp8 inputs")
    refuse("qv has no descale factors", **descales)
    return torch.cat((q, qv), dim=-1), torch.cat((k, v), dim=-1)
