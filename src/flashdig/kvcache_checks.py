"""What is checked before anything of a cache is touched; errors name the argument."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from flashdig import checks
from flashdig.checks import FP8_DTYPES, shape_of
from flashdig.packing import values_are_checked
from flashdig.problem import Causal, Mask
from flashdig.validate import _under_autocast, tf32_allowed

_TENSORS = (
    *("k", "v", "page_table", "cache_batch_idx", "cache_leftpad", "cu_seqlens_q"),
    *("cu_seqlens_k_new", "rotary_cos", "rotary_sin", "rotary_seqlens", "alibi_slopes", "sinks"),
    *("q_descale", "k_descale", "v_descale"),
)


@dataclass(frozen=True)
class CacheArguments:
    """The arguments of `flashdig.attention_with_kvcache`, as the caller gave them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor | int | None
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    rotary_interleaved: bool
    rotary_seqlens: torch.Tensor | None
    num_splits: int
    batch_invariant: bool
    causal: Causal
    window: tuple[int | None, int | None] | None
    softmax_scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    out_dtype: torch.dtype | None
    return_lse: bool


def cache_call(given: CacheArguments) -> dict[str, Any]:
    """The operator's arguments, but for the backend; raises ValueError or TypeError."""
    q, k_cache, v_cache = given.q, given.k_cache, given.v_cache
    packed = given.cu_seqlens_q is not None
    sizes_q = "total_q, num_heads, head_dim" if packed else "batch, seqlen_q, num_heads, head_dim"
    first = "batch_cache, seqlen_cache" if given.page_table is None else "num_pages, page_size"
    for name, x, sizes in (
        ("q", q, sizes_q),
        ("k_cache", k_cache, f"{first}, num_heads_kv, head_dim"),
        ("v_cache", v_cache, f"{first}, num_heads_kv, head_dim_v"),
    ):
        _check_tensor(name, x, sizes)
    tensors = {name: getattr(given, name) for name in ("k_cache", "v_cache", *_TENSORS)}
    for name in _TENSORS:
        x = getattr(given, name)
        if x is not None and not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a tensor or None, got {type(x).__name__}")
    if isinstance(given.cache_seqlens, torch.Tensor):
        tensors["cache_seqlens"] = given.cache_seqlens
    checks.check_devices(q, **tensors)
    q = _under_autocast(q)
    batch = _check_lengths(given, q, packed)
    num_heads, head_dim = q.shape[-2:]
    _check_caches(given, q, batch)
    num_heads_kv = k_cache.shape[2]
    k, v, cu_new = _check_new(given, q, batch, packed)
    _check_rotary(given, q, k, batch)
    lengths = given.cache_seqlens
    if lengths is None and k is not None:
        raise ValueError("cache_seqlens must say where k and v are appended, got None")
    capacity = k_cache.shape[1]
    if given.page_table is not None:
        capacity *= given.page_table.shape[1]
    if isinstance(lengths, int):
        if not 0 <= lengths <= capacity:
            raise ValueError(f"cache_seqlens must be between 0 and {capacity}, got {lengths}")
        lengths = torch.full((batch,), lengths, dtype=torch.int32, device=q.device)
    checks.check_numbers(given.softmax_scale, given.softcap, 0.0)
    checks.check_flags(
        return_lse=given.return_lse,
        batch_invariant=given.batch_invariant,
        rotary_interleaved=given.rotary_interleaved,
    )
    if isinstance(given.num_splits, bool) or not isinstance(given.num_splits, int):
        raise TypeError(f"num_splits must be an int, got {given.num_splits!r}")
    if given.num_splits < 0:
        raise ValueError(f"num_splits must be >= 0 (0 chooses), got {given.num_splits}")
    if given.batch_invariant and given.num_splits:
        raise ValueError(
            f"num_splits must be 0 with batch_invariant, which fixes the size of the parts, "
            f"got {given.num_splits}"
        )
    checks.check_alibi(given.alibi_slopes, batch, num_heads)
    checks.check_sinks(given.sinks, num_heads)
    for name in ("q_descale", "k_descale", "v_descale"):
        checks.check_descale(name, getattr(given, name), batch, num_heads_kv)
    checks.check_out_dtype(given.out_dtype)
    mask = Mask.from_arguments(given.causal, given.window)
    if values_are_checked(q.device.type):
        _check_values(given, lengths, q, k, cu_new, capacity)
    left, right = mask.sides
    return {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "k": k,
        "v": v,
        "cache_seqlens": lengths,
        "page_table": given.page_table,
        "cache_batch_idx": given.cache_batch_idx,
        "cache_leftpad": given.cache_leftpad,
        "cu_seqlens_q": given.cu_seqlens_q,
        "cu_seqlens_k_new": cu_new,
        "rotary_cos": given.rotary_cos,
        "rotary_sin": given.rotary_sin,
        "rotary_seqlens": given.rotary_seqlens,
        "alibi_slopes": given.alibi_slopes,
        "sinks": given.sinks,
        "q_descale": given.q_descale,
        "k_descale": given.k_descale,
        "v_descale": given.v_descale,
        "softmax_scale": float(
            head_dim**-0.5 if given.softmax_scale is None else given.softmax_scale
        ),
        "softcap": float(given.softcap),
        "window_left": left,
        "window_right": right,
        "top_left": mask.alignment == "top-left",
        "allow_tf32": q.dtype == torch.float32 and tf32_allowed(),
        "rotary_interleaved": given.rotary_interleaved,
        "num_splits": given.num_splits,
        "batch_invariant": given.batch_invariant,
        "out_dtype": given.out_dtype or (torch.bfloat16 if q.dtype in FP8_DTYPES else q.dtype),
    }


def _check_tensor(name: str, x: Any, sizes: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != sizes.count(",") + 1:
        raise ValueError(f"{name} must be ({sizes}), got shape {shape_of(x)}")


def _check_lengths(given: CacheArguments, q: torch.Tensor, packed: bool) -> int:
    """Shapes and dtypes of the lengths and indices; returns the batch size."""
    batch = q.shape[0]
    if packed:
        assert given.cu_seqlens_q is not None
        if given.cu_seqlens_q.dim() != 1 or given.cu_seqlens_q.shape[0] < 1:
            raise ValueError(
                "cu_seqlens_q must be (batch + 1,) offsets of the sequences, "
                f"got {shape_of(given.cu_seqlens_q)}"
            )
        batch = given.cu_seqlens_q.shape[0] - 1
        checks.check_integers("cu_seqlens_q", given.cu_seqlens_q, "(batch + 1,)", (batch + 1,))
    lengths = given.cache_seqlens
    is_length = isinstance(lengths, int) and not isinstance(lengths, bool)
    if not (lengths is None or is_length or isinstance(lengths, torch.Tensor)):
        raise TypeError(
            f"cache_seqlens must be a tensor, an int or None, got {type(lengths).__name__}"
        )
    if isinstance(lengths, torch.Tensor):
        checks.check_integers("cache_seqlens", lengths, "(batch,)", (batch,))
    for name in ("cache_batch_idx", "cache_leftpad", "rotary_seqlens"):
        checks.check_integers(name, getattr(given, name), "(batch,)", (batch,))
    table = given.page_table
    if table is not None:
        if table.dim() != 2:
            raise ValueError(f"page_table must be (batch, max_pages), got shape {shape_of(table)}")
        checks.check_integers("page_table", table, "(batch, max_pages)", (batch, table.shape[1]))
        if given.cache_batch_idx is not None:
            raise ValueError(
                "cache_batch_idx must be None with page_table, whose rows say where a sequence is"
            )
    return batch


def _check_caches(given: CacheArguments, q: torch.Tensor, batch: int) -> None:
    k_cache, v_cache = given.k_cache, given.v_cache
    num_heads, head_dim = q.shape[-2:]
    if q.dtype not in checks.DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in checks.DTYPES)
        raise TypeError(f"q must be one of {allowed}, got {q.dtype}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dtype != q.dtype and (cache.dtype not in FP8_DTYPES or q.dtype in FP8_DTYPES):
            raise TypeError(
                f"{name} must have the dtype of q, {q.dtype}, or float8, got {cache.dtype}"
            )
    if k_cache.dtype != v_cache.dtype:
        raise TypeError(
            f"v_cache must have the dtype of k_cache, {k_cache.dtype}, got {v_cache.dtype}"
        )
    if head_dim < 1:
        raise ValueError(f"q must have head_dim >= 1, got shape {shape_of(q)}")
    if k_cache.shape[-1] != head_dim:
        raise ValueError(
            f"k_cache must have head_dim {head_dim} as q does, got shape {shape_of(k_cache)}"
        )
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            "v_cache must have all sizes but the last as in k_cache "
            f"{shape_of(k_cache)}, got {shape_of(v_cache)}"
        )
    heads_kv = k_cache.shape[2]
    if (heads_kv == 0 and num_heads > 0) or (heads_kv and num_heads % heads_kv):
        raise ValueError(
            "k_cache and v_cache must have a number of heads that divides q's "
            f"{num_heads}, got {heads_kv}"
        )
    dense = given.page_table is None and given.cache_batch_idx is None
    if dense and k_cache.shape[0] != batch:
        raise ValueError(
            f"k_cache must have batch {batch} as q does, or come with cache_batch_idx, "
            f"got shape {shape_of(k_cache)}"
        )


def _check_new(
    given: CacheArguments, q: torch.Tensor, batch: int, packed: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """New keys and values, and the offsets of packed ones."""
    k, v = given.k, given.v
    if k is None or v is None:
        if (k is None) != (v is None):
            raise ValueError("k and v must be given together")
        if given.cu_seqlens_k_new is not None:
            raise ValueError("cu_seqlens_k_new must be None without k and v")
        return None, None, None
    k, v = _under_autocast(k), _under_autocast(v)
    cu_new = given.cu_seqlens_k_new
    if cu_new is None and packed and k.dim() == 3:
        cu_new = given.cu_seqlens_q
    if cu_new is not None:
        checks.check_integers("cu_seqlens_k_new", cu_new, "(batch + 1,)", (batch + 1,))
    sizes = "total_new" if cu_new is not None else "batch, seqlen_new"
    for name, x, cache in (("k", k, given.k_cache), ("v", v, given.v_cache)):
        _check_tensor(name, x, f"{sizes}, num_heads_kv, head_dim")
        if x.shape[-2:] != cache.shape[-2:]:
            raise ValueError(
                f"{name} must have the heads and head_dim of {name}_cache, "
                f"{shape_of(cache)[-2:]}, got {shape_of(x)}"
            )
        if x.dtype not in (q.dtype, cache.dtype):
            raise TypeError(
                f"{name} must have the dtype of q, {q.dtype}, or of {name}_cache, got {x.dtype}"
            )
    if v.shape[:-2] != k.shape[:-2]:
        raise ValueError(f"v must have as many rows as k {shape_of(k)}, got {shape_of(v)}")
    if cu_new is None and k.shape[0] != batch:
        raise ValueError(f"k must have batch {batch}, got {shape_of(k)}")
    return k, v, cu_new


def _check_rotary(
    given: CacheArguments, q: torch.Tensor, k: torch.Tensor | None, batch: int
) -> None:
    cos, sin = given.rotary_cos, given.rotary_sin
    if (cos is None) != (sin is None):
        raise ValueError("rotary_cos and rotary_sin must be given together")
    if cos is None or sin is None:
        if given.rotary_seqlens is not None:
            raise ValueError("rotary_seqlens must be None without rotary_cos and rotary_sin")
        return
    if k is None:
        raise ValueError("rotary_cos and rotary_sin need k and v: rotation comes with appending")
    head_dim = q.shape[-1]
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        checks.check_floating(name, x)
        if x.dim() != 2 or x.shape[0] < 1 or not 1 <= x.shape[1] <= head_dim // 2:
            raise ValueError(
                f"{name} must be (positions, rotary_dim / 2) with at least one position and "
                f"rotary_dim between 2 and head_dim {head_dim}, got shape {shape_of(x)}"
            )
    if sin.shape != cos.shape or sin.dtype != cos.dtype:
        raise ValueError(
            f"rotary_sin must have shape and dtype of rotary_cos, {shape_of(cos)} {cos.dtype}, "
            f"got {shape_of(sin)} {sin.dtype}"
        )


def _check_values(
    given: CacheArguments,
    lengths: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor | None,
    cu_new: torch.Tensor | None,
    capacity: int,
) -> None:
    """Values of lengths and indices, which are read back: on a GPU with FLASHDIG_CHECK=1 only."""
    new = 0 if k is None else k.shape[-3]
    added = None
    for name, offsets, total in (
        ("cu_seqlens_q", given.cu_seqlens_q, q.shape[0]),
        ("cu_seqlens_k_new", cu_new, new),
    ):
        if offsets is None:
            continue
        values = offsets.tolist()
        steps = [b - a for a, b in itertools.pairwise(values)]
        if values[0] < 0 or values[-1] > total or min(steps, default=0) < 0:
            raise ValueError(f"{name} must rise from 0 to at most {total}, got {values}")
        if name == "cu_seqlens_k_new":
            added = steps
    used: list[int] = []
    if lengths is not None:
        used = lengths.tolist()
        for b, length in enumerate(used):
            total = length + (new if added is None else added[b])
            if length < 0 or total > capacity:
                raise ValueError(
                    f"cache_seqlens must leave every sequence between 0 and {capacity} keys, but "
                    f"sequence {b} has {length}"
                    + (f", and {total} with k" if total > length else "")
                )
            used[b] = total
    if given.cache_leftpad is not None:
        for b, pad in enumerate(given.cache_leftpad.tolist()):
            most = used[b] if used else capacity
            if not 0 <= pad <= most:
                raise ValueError(
                    f"cache_leftpad must be between 0 and the {most} keys of its sequence, "
                    f"got {pad} for sequence {b}"
                )
    rows = given.k_cache.shape[0]
    if given.cache_batch_idx is not None:
        for row in given.cache_batch_idx.tolist():
            if not 0 <= row < rows:
                raise ValueError(f"cache_batch_idx must be between 0 and {rows - 1}, got {row}")
    if given.page_table is not None and given.k_cache.shape[1]:
        size = given.k_cache.shape[1]
        for b, pages in enumerate(given.page_table.tolist()):
            length = used[b] if used else capacity
            for page in pages[: -(-length // size)]:
                if not 0 <= page < rows:
                    raise ValueError(
                        f"page_table must hold page numbers between 0 and {rows - 1}, "
                        f"got {page} for sequence {b}"
                    )
