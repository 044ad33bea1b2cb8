"""Kernels of attention that writes its scores, against what profilers recorded."""

from __future__ import annotations

from flashdig.costs import l2, unfused
from flashdig.costs.predict_unfused import unfused_kernels
from flashdig.costs.traffic import Traffic, tensor_bytes
from flashdig.problem import AttentionProblem

# the recorded calls: batch 4, 16 heads, seqlen 2048, head_dim 64, bfloat16
RECORDED = AttentionProblem.dense(4, 16, 2048, 64, causal=True)
SCORES = 4 * 16 * 2048 * 2048


def _count(kernels):
    return sum(kernel.kind != "copy" for kernel in kernels)


def test_naive_has_five_kernels_and_a_copy_of_537_mb():
    kernels = unfused.eager_kernels(RECORDED)
    assert [kernel.name for kernel in kernels] == [
        "matmul QK^T", "scale", "copy of the scores", "masked_fill", "softmax", "matmul PV",
    ]  # fmt: skip
    assert _count(kernels) == 5
    assert kernels[2].issued == Traffic(536_870_912, 536_870_912)


def test_in_place_has_five_kernels_and_no_copy():
    kernels = unfused.eager_kernels(RECORDED, in_place=True)
    assert len(kernels) == _count(kernels) == 5


def test_the_math_backend_has_twenty_kernels():
    assert _count(unfused.sdpa_math_kernels(RECORDED)) == 20


def test_the_math_backend_without_mask_or_casts_has_fewer():
    full = AttentionProblem.dense(4, 16, 2048, 64)
    assert _count(unfused.sdpa_math_kernels(full)) == 14
    assert _count(unfused.sdpa_math_kernels(full.replace(dtype="float32"))) == 9


def test_eager_bytes_by_hand():
    problem = AttentionProblem.dense(2, 4, 64, 32, causal=True)
    tensor, scores, mask = 2 * 4 * 64 * 32 * 2, 2 * 4 * 64 * 64 * 2, 64 * 64
    loads = 2 * tensor + scores + scores + (scores + mask) + scores + (scores + tensor)
    stores = scores + scores + scores + scores + scores + tensor
    assert unfused.issued(unfused.eager_kernels(problem)) == Traffic(loads, stores)
    in_place = unfused.issued(unfused.eager_kernels(problem, in_place=True))
    assert in_place == Traffic(loads - scores, stores - scores)


def test_grouped_heads_are_copied_for_each_query_head_first():
    plain = AttentionProblem.dense(2, 4, 64, 32)
    grouped = AttentionProblem.dense(2, 4, 64, 32, num_heads_kv=2)
    size, expanded = tensor_bytes(grouped), tensor_bytes(plain)
    copies = Traffic(size.k + size.v, expanded.k + expanded.v)
    for generation in ("naive", "online_softmax", "sdpa_math"):
        without = unfused.issued(unfused_kernels(generation, plain))
        assert unfused.issued(unfused_kernels(generation, grouped)) == without + copies


def test_online_softmax_reads_the_visible_scores_twice():
    kernels = unfused.online_softmax_kernels(RECORDED)
    softmax = kernels[1]
    seen = RECORDED.visible_pairs * 2
    assert softmax.issued == Traffic(2 * seen, SCORES * 2 + tensor_bytes(RECORDED).lse)
    # the second pass finds the row in the cache
    assert softmax.expected(cache_bytes=1e6).load_bytes == seen


def test_scores_that_fit_the_cache_are_not_read_again():
    small = AttentionProblem.dense(1, 2, 64, 32)
    kernels = unfused.eager_kernels(small)
    left = unfused.expected(kernels, cache_bytes=1e9)
    size = tensor_bytes(small)
    assert left.load_bytes == size.q + size.k + size.v
    assert unfused.expected(kernels, cache_bytes=1).load_bytes == unfused.issued(kernels).load_bytes


def test_the_rule_of_the_cache():
    assert [l2.miss_fraction(size, 100) for size in (50, 100, 150, 200, 900)] == [0, 0, 0.5, 1, 1]
    assert [l2.least_miss_fraction(size, 100) for size in (50, 100, 200, 400)] == [0, 0, 0.5, 0.75]
