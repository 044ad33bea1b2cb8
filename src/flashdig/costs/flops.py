"""Floating-point operations of attention, and the conventions behind published TFLOP/s.

The rule: two operations for each multiply-add of a matrix product, for each (query, key) pair that
is visible, for each query head. Softmax is not counted. The number of KV heads changes nothing.
Forward: Q K^T over head_dim and P V over head_dim_v. Backward: five products (S again, dP, dV, dQ,
dK), three over head_dim and two over head_dim_v, so 2.5 times the forward where both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashdig.problem import AttentionProblem, Mask

RULE = (
    "2 for each multiply-add of the products (2 forward, 5 backward) over the visible pairs; "
    "softmax not counted"
)


def forward_flops(problem: AttentionProblem) -> int:
    """FLOP of the forward over the visible pairs, exactly."""
    return 2 * problem.visible_pairs * (problem.head_dim + problem.head_dim_v)


def backward_flops(problem: AttentionProblem) -> int:
    """FLOP of the backward over the visible pairs, the recomputed scores included."""
    return 2 * problem.visible_pairs * (3 * problem.head_dim + 2 * problem.head_dim_v)


def half_rule_flops(problem: AttentionProblem, direction: str = "forward") -> int:
    """FLOP by the rule of published tables: all pairs, halved when causal.

    It differs from the exact count by the diagonal: half of seqlen_q pairs a head.
    """
    full = problem.replace(mask=Mask())
    flops = forward_flops(full) if direction == "forward" else backward_flops(full)
    return flops // 2 if problem.causal else flops


def varlen_visible_pairs(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    mask: Mask | None = None,
) -> int:
    """Visible pairs of packed sequences for one head; masks use each sequence's own lengths.

    Args:
        lengths_q, lengths_k: one length a sequence; `lengths_k` defaults to `lengths_q`.

    Raises ValueError when the two have different numbers of sequences.
    """
    lengths_k = lengths_q if lengths_k is None else lengths_k
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"lengths_q has {len(lengths_q)} sequences but lengths_k has {len(lengths_k)}"
        )
    mask = mask or Mask()
    return sum(mask.visible_pairs(q, k) for q, k in zip(lengths_q, lengths_k, strict=True))


def varlen_flops(
    num_heads: int,
    head_dim: int,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int] | None = None,
    *,
    head_dim_v: int | None = None,
    mask: Mask | None = None,
    direction: str = "forward",
) -> int:
    """FLOP of packed attention: no padding is counted."""
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    pairs = num_heads * varlen_visible_pairs(lengths_q, lengths_k, mask)
    if direction == "forward":
        return 2 * pairs * (head_dim + head_dim_v)
    return 2 * pairs * (3 * head_dim + 2 * head_dim_v)


def direction_flops(problem: AttentionProblem, direction: str) -> int:
    """FLOP of "forward", "backward" or "decode" (a forward with few queries)."""
    return backward_flops(problem) if direction == "backward" else forward_flops(problem)


def exp2_count(problem: AttentionProblem) -> int:
    """Exponentials that a forward or a backward cannot avoid: one for each visible pair."""
    return problem.visible_pairs


def megatron_training_flops(
    parameters: int,
    layers: int,
    hidden: int,
    seqlen: int,
    *,
    halve_causal_attention: bool = False,
) -> int:
    """FLOP of training a decoder on one sequence, forward and backward.

    6 x seqlen x parameters + 12 x layers x hidden x seqlen^2, as in section 4.2 of the
    FlashAttention-2 paper after Megatron-LM: the attention term counts masked pairs in full.
    `halve_causal_attention` halves that term, since half of the pairs are never computed.
    """
    attention = 12 * layers * hidden * seqlen**2
    return 6 * seqlen * parameters + (attention // 2 if halve_causal_attention else attention)


def model_flops_utilisation(flop_per_s: float, peak_flop_per_s: float) -> float:
    """MFU: achieved model FLOP/s over the dense peak."""
    return flop_per_s / peak_flop_per_s
