"""FLOP counts against public reports and brute force; the two conventions of MFU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashdig.costs.flops import (
    backward_flops,
    forward_flops,
    half_rule_flops,
    megatron_training_flops,
    model_flops_utilisation,
    varlen_flops,
    varlen_visible_pairs,
)
from flashdig.problem import AttentionProblem, Mask

FULL = AttentionProblem.dense(2, 16, 4096, 128, num_heads_kv=4)


def test_full_attention_of_the_public_report():
    assert forward_flops(FULL) == 274_877_906_944
    assert backward_flops(FULL) == 687_194_767_360
    assert half_rule_flops(FULL) == forward_flops(FULL)


def test_causal_attention_exactly_and_by_the_half_rule():
    causal = FULL.replace(mask=Mask.from_arguments(True))
    assert forward_flops(causal) == 137_472_507_904
    assert half_rule_flops(causal) == 137_438_953_472
    assert half_rule_flops(causal, "backward") == 343_597_383_680


def test_causal_attention_of_a_long_cache():
    problem = AttentionProblem.dense(2, 16, 1024, 128, causal=True, seqlen_k=4096)
    assert forward_flops(problem) == 60_137_930_752


def test_different_head_dim_of_values():
    problem = FULL.replace(head_dim=192, head_dim_v=128)
    assert forward_flops(problem) == 343_597_383_680
    assert backward_flops(problem) == 893_353_197_568


def test_the_number_of_kv_heads_changes_nothing():
    assert forward_flops(FULL) == forward_flops(FULL.replace(num_heads_kv=16))


def test_the_grid_of_the_flash_attention_2_paper_has_as_many_flops_for_any_head_dim():
    """16,384 tokens, hidden 2,048: heads x head_dim is fixed, so FLOP depend on seqlen alone."""
    for seqlen in (512, 4096, 16384):
        counts = {
            forward_flops(AttentionProblem.dense(16384 // seqlen, 2048 // dim, seqlen, dim))
            for dim in (64, 128)
        }
        assert counts == {4 * 16384 * seqlen * 2048}


def _count(lengths_q, lengths_k, mask):
    """Visible pairs one by one, from the rule of the mask."""
    pairs = 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        offset = 0 if mask.alignment == "top-left" else length_k - length_q
        for i in range(length_q):
            for j in range(length_k):
                left = mask.window_left is None or j >= i + offset - mask.window_left
                right = mask.window_right is None or j <= i + offset + mask.window_right
                pairs += left and right
    return pairs


def test_packed_sequences_use_their_own_lengths():
    lengths = [100, 3996]  # cu_seqlens [0, 100, 4096]
    window = Mask.from_arguments(True, (127, 0))
    expected = sum(min(i + 1, 128) for length in lengths for i in range(length))
    assert varlen_visible_pairs(lengths, mask=window) == expected
    assert varlen_flops(16, 128, lengths, mask=window) == 4 * 16 * 128 * expected
    assert varlen_flops(16, 128, lengths) == 4 * 16 * 128 * (100**2 + 3996**2)
    assert (
        varlen_flops(1, 192, [8], head_dim_v=128, direction="backward")
        == 2 * 64 * (3 * 192 + 2 * 128)
    )  # fmt: skip


def test_packed_sequences_must_match():
    with pytest.raises(ValueError, match="lengths_q has 1 sequences but lengths_k has 2"):
        varlen_visible_pairs([3], [3, 4])


@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3),
    left=st.none() | st.integers(0, 6),
    right=st.none() | st.integers(0, 6),
    alignment=st.sampled_from(["bottom-right", "top-left"]),
)
def test_pairs_equal_brute_force(lengths, left, right, alignment):
    mask = Mask(left, right, alignment)
    lengths_q, lengths_k = [q for q, _ in lengths], [k for _, k in lengths]
    assert varlen_visible_pairs(lengths_q, lengths_k, mask) == _count(lengths_q, lengths_k, mask)


def test_both_conventions_of_model_flops_utilisation():
    """FlashAttention-2, table 1: GPT 2.7B, 8k context, 225 TFLOP/s = 72 % of an A100.

    Its formula counts the hidden half of causal attention. Without that half the same run did
    188 TFLOP/s of visible work: 60 %.
    """
    assert model_flops_utilisation(225e12, 312e12) == pytest.approx(0.721, abs=0.001)
    shape = {"parameters": 2_700_000_000, "layers": 32, "hidden": 2560, "seqlen": 8192}
    counted = megatron_training_flops(**shape)
    visible = megatron_training_flops(**shape, halve_causal_attention=True)
    assert counted == 6 * 8192 * 2_700_000_000 + 12 * 32 * 2560 * 8192**2
    assert counted - visible == 6 * 32 * 2560 * 8192**2
    assert 225 * visible / counted == pytest.approx(187.6, abs=0.5)
    assert model_flops_utilisation(225e12 * visible / counted, 312e12) == pytest.approx(
        0.60, abs=0.005
    )
