"""Plans of the operators over a cache: what is appended, the rotation of queries, attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashdig.kernels.launch import Launch, allocation
from flashdig.kernels.replay import Steps
from flashdig.kernels.triton.append_kv import append_launch
from flashdig.kernels.triton.decode_arguments import as_bytes
from flashdig.kernels.triton.decode_launch import CachePlan, prepared, schedule_of

Tensors = tuple[torch.Tensor | None, ...]


class _Given(NamedTuple):
    """The tensors of `flashdig::cache_attention`, in its order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    k: torch.Tensor | None
    v: torch.Tensor | None
    cache_seqlens: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    page_table: torch.Tensor | None
    cache_batch_idx: torch.Tensor | None
    cache_leftpad: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    seqused_q: torch.Tensor | None
    cu_seqlens_k_new: torch.Tensor | None
    rotary_cos: torch.Tensor | None
    rotary_sin: torch.Tensor | None
    rotary_seqlens: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None

    def appended(self) -> Tensors:
        """What `flashdig_append_kv` takes to append keys and values."""
        where = (self.cache_seqlens, self.page_table, self.cache_batch_idx, self.cu_seqlens_k_new)
        turned = (self.rotary_cos, self.rotary_sin, self.rotary_seqlens)
        scales = (
            _scale(self.k, self.k_cache, self.k_descale),
            _scale(self.v, self.v_cache, self.v_descale),
        )
        return (self.k, self.k_cache, *where, *turned, scales[0], self.v, self.v_cache, scales[1])

    def rotated(self, out: torch.Tensor) -> Tensors:
        """What it takes to write rotated queries to `out`."""
        turned = (self.rotary_cos, self.rotary_sin, self.rotary_seqlens)
        return (
            self.q,
            out,
            self.cache_seqlens,
            None,
            None,
            self.cu_seqlens_q,
            *turned,
            *(None,) * 4,
        )

    def attended(self, q: torch.Tensor) -> Tensors:
        """What `cache_attention` takes, with these queries."""
        lengths = (self.cache_seqlens, self.cu_seqlens_k, self.cu_seqlens_k_new, self.page_table)
        rows = (self.cache_batch_idx, self.cache_leftpad, self.cu_seqlens_q, self.seqused_q)
        terms = (self.alibi_slopes, self.sinks, self.q_descale, self.k_descale, self.v_descale)
        return (q, self.k_cache, self.v_cache, *lengths, *rows, *terms)


def _scale(
    new: torch.Tensor | None, cache: torch.Tensor, descale: torch.Tensor | None
) -> torch.Tensor | None:
    """The factor that new rows are divided by: those of an fp8 cache that are not fp8 yet."""
    wider = new is not None and new.element_size() > 1 and cache.element_size() == 1
    return descale if wider else None


class CacheOperatorPlan:
    """The launches of one kind of call; see `flashdig.kernels.replay`.

    Attributes:
        met: whether calls of this kind came more than once.
    """

    __slots__ = ("_append", "_attention", "_rotate", "counts", "makes", "met")

    def __init__(
        self, attention: CachePlan, append: Launch | None, rotate: Launch | None, q: Any
    ) -> None:
        self._attention = attention
        self._append = append
        self._rotate = rotate
        self.met = False
        self.counts = attention.counts
        self.makes = attention.makes
        if rotate is not None:
            self.makes = (*self.makes, allocation(q.shape, q.dtype, q.device))

    def __call__(self, *tensors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        made = [make() for make in self.makes]
        for launch, arguments in self.launches(tensors, made):
            launch(*arguments)
        return made[0], made[1]

    def launches(self, tensors: Tensors, made: Sequence[torch.Tensor]) -> Steps:
        given: Any = _Given(*tensors)  # type: ignore[arg-type]
        q = given.q
        steps: Steps = []
        if self._append is not None:
            steps.append((self._append, _bytes(given.appended())))
        if self._rotate is not None:
            *made, q = made
            steps.append((self._rotate, _bytes(given.rotated(q))))
        return steps + self._attention.launches(given.attended(q), made)


def _bytes(moved: Tensors) -> Tensors:
    """Sources and targets as the kernel takes fp8."""
    at = (0, 1, 10, 11)
    return tuple(as_bytes(x) if n in at and x is not None else x for n, x in enumerate(moved))


def plan_cache_operator(
    tensors: Tensors,
    *,
    rotary_interleaved: bool,
    num_splits: int,
    batch_invariant: bool,
    out_dtype: torch.dtype | None,
    **numbers: Any,
) -> CacheOperatorPlan | None:
    """The plan of an operator's arguments; None where a tensor must be copied, or no key is there.

    Args:
        tensors: of the operator; numbers: softmax_scale to allow_tf32, by name.
    """
    given: Any = _Given(*tensors)  # type: ignore[arg-type]
    turned = (given.rotary_cos, given.rotary_sin)
    if any(x is not None and x.stride(1) != 1 for x in turned) or not (
        given.rotary_seqlens is None or given.rotary_seqlens.is_contiguous()
    ):
        return None
    q, k = given.q, given.k
    if given.rotary_cos is not None:
        q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    attended = given.attended(q)
    call = prepared(attended, seqlen_new=0 if k is None else k.shape[-3], **numbers)
    if call.empty or call.copies(attended):
        return None
    append = rotate = None
    dtype = call.out_dtype(out_dtype)
    schedule = schedule_of(call, num_splits, batch_invariant, out_dtype=dtype)
    if k is not None:
        settings = {"capacity": call.capacity, "interleaved": rotary_interleaved}
        follows = schedule.ordered and not call.packed  # packed: rows are cleared first
        if follows:
            schedule = replace(schedule, follows=True)
            settings["order"] = "waits"
        append = append_launch(given.appended(), **settings, into_cache=True, advances=True)
        if given.rotary_cos is not None:
            advances = call.window_left >= 0 or call.window_right >= 0
            rotated = given.rotated(q)
            rotate = append_launch(
                rotated, **settings, into_cache=False, advances=advances, early=follows
            )
        if append is None or (given.rotary_cos is not None and rotate is None):
            return None
    attention = CachePlan(call, dtype, schedule)
    return CacheOperatorPlan(attention, append, rotate, q)
