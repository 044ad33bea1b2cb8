"""`flash_attn_combine` of FlashAttention-3 and -4: attention over parts of the keys, merged."""

from __future__ import annotations

import torch

from flashdig import checks
from flashdig.kernels.reference import merge_partials


def combine(
    out_partial: torch.Tensor,
    lse_partial: torch.Tensor,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse over all keys, from their values over disjoint parts of them.

    Args:
        out_partial: (num_splits, batch, seqlen, num_heads, head_dim_v) or (num_splits, total_q,
            num_heads, head_dim_v).
        lse_partial: (num_splits, batch, seqlen, num_heads) or (num_splits, total_q, num_heads),
            natural logarithm; heads come last, as nowhere else.
        out: tensor to write the result to.
        out_dtype: default that of `out`, else of `out_partial`.

    Returns: out (batch, seqlen, num_heads, head_dim_v) or (total_q, num_heads, head_dim_v), and lse
        (batch, seqlen, num_heads) or (total_q, num_heads).

    Raises: ValueError or TypeError, naming the argument, for other shapes and dtypes.
    """
    for name, x in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        checks.check_floating(name, x)
    if out_partial.dim() not in (4, 5) or out_partial.shape[0] < 1:
        raise ValueError(
            "out_partial must be (num_splits, batch, seqlen, num_heads, head_dim_v) or "
            "(num_splits, total_q, num_heads, head_dim_v) with num_splits >= 1, "
            f"got {checks.shape_of(out_partial)}"
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            "lse_partial must have the shape of out_partial without head_dim_v, "
            f"{checks.shape_of(out_partial)[:-1]}, got {checks.shape_of(lse_partial)}"
        )
    if out is not None and not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a tensor or None, got {type(out).__name__}")
    checks.check_out_dtype(out_dtype)
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        raise ValueError(
            f"out must be {checks.shape_of(out_partial)[1:]} of {dtype}, "
            f"got {checks.shape_of(out)} of {out.dtype}"
        )
    # float32 parts are rounded once, after the merge
    merged, lse = merge_partials(out_partial.to(_at_least_float32(out_partial)), lse_partial.mT)
    if out is None:
        return merged.to(dtype), lse.mT
    return out.copy_(merged), lse.mT


def _at_least_float32(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
