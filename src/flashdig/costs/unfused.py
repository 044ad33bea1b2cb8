"""Attention that writes its scores to memory: the kernels it launches and the bytes of each.

The lists follow what profilers record for PyTorch's eager operators (bfloat16, causal: five kernels
and a device copy out of place, five in place, twenty for the math backend of
`scaled_dot_product_attention`). Library kernels re-read tiles in ways that are not ours to count,
so these bytes are each kernel's compulsory ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from flashdig.costs.compiled_loops import ROW_WARPS, row_instructions
from flashdig.costs.l2 import miss_fraction
from flashdig.costs.traffic import FLOAT32_BYTES, Traffic, tensor_bytes
from flashdig.problem import AttentionProblem

Kind = Literal["matmul", "elementwise", "broadcast", "softmax", "copy"]


@dataclass(frozen=True)
class Kernel:
    """One kernel (or device copy) of an unfused attention.

    Attributes:
        kind: what holds it back beside memory; "copy" is a memcpy, not a kernel.
        load_bytes, store_bytes: of distinct data.
        from_previous_bytes: part of load_bytes that the kernel before has just written.
        reload_bytes: data of load_bytes that this kernel loads a second time, still in cache.
        matmul_flops: of the product, masked scores included; matmul_dtype: its input type.
        scores: elements of the score matrix that it works on; row_length: of a row of them.
        warp_instructions: of all its warps together; 0 where they are not known.
    """

    name: str
    kind: Kind
    load_bytes: int
    store_bytes: int
    from_previous_bytes: int = 0
    reload_bytes: int = 0
    matmul_flops: int = 0
    matmul_dtype: str = ""
    scores: int = 0
    row_length: int = 0
    warp_instructions: float = 0.0

    @property
    def exponentials(self) -> int:
        """One for each score that a softmax works on."""
        return self.scores if "softmax" in self.name else 0

    @property
    def issued(self) -> Traffic:
        return Traffic(self.load_bytes + self.reload_bytes, self.store_bytes)

    def expected(self, cache_bytes: float) -> Traffic:
        """Bytes at memory: what the kernel before left in the cache is not read again."""
        hit = 1.0 - miss_fraction(self.from_previous_bytes + self.store_bytes, cache_bytes)
        return Traffic(self.load_bytes - int(self.from_previous_bytes * hit), self.store_bytes)


def eager_kernels(problem: AttentionProblem, *, in_place: bool = False) -> list[Kernel]:
    """matmul, scale, mask if causal (a copy first unless `in_place`), softmax, matmul.

    Grouped heads: K and V are copied for each query head first.
    """
    kernels, problem = _expand_groups(problem)
    scores, score_bytes, mask_bytes = _scores(problem, problem.element_bytes)
    kernels += [
        _first_product(problem, problem.element_bytes, problem.dtype),
        _pass("scale", "elementwise", score_bytes, score_bytes),
    ]
    if problem.causal:
        if not in_place:
            kernels.append(_pass("copy of the scores", "copy", score_bytes, score_bytes))
        kernels.append(
            Kernel(
                "masked_fill",
                "broadcast",
                load_bytes=score_bytes + mask_bytes,
                store_bytes=score_bytes,
                from_previous_bytes=score_bytes,
                scores=scores,
            )
        )
    kernels.append(
        _softmax(problem, score_bytes),
    )
    return [*kernels, _second_product(problem, problem.element_bytes, problem.dtype)]


def online_softmax_kernels(problem: AttentionProblem) -> list[Kernel]:
    """Scores by a matmul, one kernel for scale, mask and softmax in two passes, a matmul.

    Online normalisation (Milakov and Gimelshein, 1805.02867) finds maximum and sum in one pass over
    the visible scores, so a row is read twice in all instead of three times. The probabilities
    overwrite the scores; hidden ones are written as 0.
    """
    kernels, problem = _expand_groups(problem)
    scores, score_bytes, _ = _scores(problem, problem.element_bytes)
    seen_bytes = problem.visible_pairs * problem.element_bytes
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    seen_a_row = problem.visible_pairs / rows if rows else 0.0
    a_row = row_instructions(problem.seqlen_k, seen_a_row, problem.causal)
    softmax = Kernel(
        "online softmax",
        "elementwise",
        load_bytes=seen_bytes,
        store_bytes=score_bytes + tensor_bytes(problem).lse,
        from_previous_bytes=seen_bytes,
        reload_bytes=seen_bytes,
        scores=scores,
        row_length=problem.seqlen_k,
        warp_instructions=ROW_WARPS * rows * a_row,
    )
    return [
        *kernels,
        _first_product(problem, problem.element_bytes, problem.dtype),
        softmax,
        _second_product(problem, problem.element_bytes, problem.dtype),
    ]


def sdpa_math_kernels(problem: AttentionProblem) -> list[Kernel]:
    """The math backend: everything in float32 (16-bit input is cast), a mask built at each call."""
    kernels, problem = _expand_groups(problem)
    scores, score_bytes, mask_bytes = _scores(problem, FLOAT32_BYTES)
    element = problem.element_bytes
    casts = element < FLOAT32_BYTES
    wide = problem.replace(dtype="float32") if casts else problem
    size, size_wide = tensor_bytes(problem), tensor_bytes(wide)
    bias_bytes = mask_bytes * FLOAT32_BYTES
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    scalar = Kernel("fill a scalar", "elementwise", 0, FLOAT32_BYTES)

    if casts:
        for name in ("q", "k", "v"):
            load, store = getattr(size, name), getattr(size_wide, name)
            kernels.append(Kernel(f"cast {name}", "elementwise", load, store))
    kernels.append(Kernel("scale q", "elementwise", size_wide.q, size_wide.q))
    if problem.causal:
        kernels += [
            Kernel("ones", "elementwise", 0, mask_bytes),
            Kernel("tril", "elementwise", mask_bytes, mask_bytes),
            scalar,
            scalar,
            Kernel("where (mask to bias)", "elementwise", mask_bytes, bias_bytes),
        ]
    kernels.append(Kernel("scale k", "elementwise", size_wide.k, size_wide.k))
    kernels.append(_first_product(wide, FLOAT32_BYTES, "float32"))
    if problem.causal:
        kernels.append(
            Kernel(
                "add the bias",
                "broadcast",
                load_bytes=score_bytes + bias_bytes,
                store_bytes=score_bytes,
                from_previous_bytes=score_bytes,
                scores=scores,
            )
        )
    kernels += [
        _softmax(problem, score_bytes),
        _pass("isneginf", "elementwise", score_bytes, scores),
        _pass("any row hidden", "elementwise", scores, rows),
        scalar,
        Kernel(
            "where (hidden rows to 0)",
            "broadcast",
            load_bytes=score_bytes + rows,
            store_bytes=score_bytes,
            scores=scores,
        ),
    ]
    if casts:
        kernels.append(_pass("cast the weights", "elementwise", score_bytes, scores * element))
    kernels.append(_second_product(wide, FLOAT32_BYTES, "float32"))
    if casts:
        kernels.append(Kernel("cast o", "elementwise", size_wide.o, size.o, size_wide.o))
    return kernels


def issued(kernels: list[Kernel]) -> Traffic:
    """All kernels' bytes."""
    total = Traffic(0, 0)
    for kernel in kernels:
        total += kernel.issued
    return total


def expected(kernels: list[Kernel], cache_bytes: float) -> Traffic:
    """All kernels' bytes at memory."""
    total = Traffic(0, 0)
    for kernel in kernels:
        total += kernel.expected(cache_bytes)
    return total


def _scores(problem: AttentionProblem, element_bytes: int) -> tuple[int, int, int]:
    """(score elements, their bytes, bytes of one boolean mask)."""
    pairs = problem.seqlen_q * problem.seqlen_k
    scores = problem.batch * problem.num_heads * pairs
    return scores, scores * element_bytes, pairs


def _expand_groups(problem: AttentionProblem) -> tuple[list[Kernel], AttentionProblem]:
    """Copies of K and V for each query head, and the problem without groups that they make."""
    if problem.group_size == 1:
        return [], problem
    expanded = problem.replace(num_heads_kv=problem.num_heads)
    size, size_expanded = tensor_bytes(problem), tensor_bytes(expanded)
    copies = [
        Kernel(f"repeat {name}", "elementwise", getattr(size, name), getattr(size_expanded, name))
        for name in ("k", "v")
    ]
    return copies, expanded


def _pass(name: str, kind: Kind, load_bytes: int, store_bytes: int) -> Kernel:
    """A kernel that reads what the one before wrote."""
    return Kernel(name, kind, load_bytes, store_bytes, from_previous_bytes=load_bytes)


def _softmax(problem: AttentionProblem, score_bytes: int) -> Kernel:
    scores, _, _ = _scores(problem, problem.element_bytes)
    kernel = _pass("softmax", "softmax", score_bytes, score_bytes)
    return replace(kernel, scores=scores, row_length=problem.seqlen_k)


def _first_product(problem: AttentionProblem, element_bytes: int, dtype: str) -> Kernel:
    size = tensor_bytes(problem)
    scores, score_bytes, _ = _scores(problem, element_bytes)
    return Kernel(
        "matmul QK^T",
        "matmul",
        load_bytes=size.q + size.k,
        store_bytes=score_bytes,
        matmul_flops=2 * scores * problem.head_dim,
        matmul_dtype=dtype,
        scores=scores,
    )


def _second_product(problem: AttentionProblem, element_bytes: int, dtype: str) -> Kernel:
    size = tensor_bytes(problem)
    scores, score_bytes, _ = _scores(problem, element_bytes)
    return Kernel(
        "matmul PV",
        "matmul",
        load_bytes=score_bytes + size.v,
        store_bytes=size.o,
        from_previous_bytes=score_bytes,
        matmul_flops=2 * scores * problem.head_dim_v,
        matmul_dtype=dtype,
        scores=scores,
    )
