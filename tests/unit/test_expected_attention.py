"""The table of what recorded models should show: its sums, and that a difference is found."""

from dataclasses import replace

import pytest

from benchmarks.expected_attention import EXPECTED, STEPS, Expected, differences
from flashdig.readers.attribution import AttentionCall, MaskUse, Sizes

MASKS = {kind.kind: kind for kind in (MaskUse("none"), MaskUse("causal"), MaskUse("tensor"))}


def calls_of(expected: Expected) -> list[AttentionCall]:
    """The calls of a recording in which everything is as expected."""
    calls = []
    for row in expected.calls:
        batch, heads, heads_kv, seqlen_q, head_dim = row.sizes
        for module in row.modules:
            for pass_ in row.passes:
                for seqlen_k in row.seqlen_k:
                    sizes = Sizes(
                        *(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim),
                        dtype=expected.dtype,
                    )
                    call = AttentionCall(
                        row.backends[0],
                        "forward" if pass_ == "forward" else "backward",
                        sizes,
                        MASKS[row.mask],
                        (),
                        dropout=row.dropout,
                        annotations=("ProfilerStep#0", module),
                    )
                    calls.extend([call] * STEPS)
    return calls


@pytest.mark.parametrize("name", EXPECTED)
def test_totals_are_the_sums_of_the_rows(name: str) -> None:
    expected = EXPECTED[name]
    assert sum(row.count for row in expected.calls) == expected.forward + expected.backward
    training = name.endswith("_train")
    assert expected.backward == (expected.forward if training else 0)


@pytest.mark.parametrize("name", EXPECTED)
def test_every_kind_of_difference_is_found(name: str) -> None:
    expected = EXPECTED[name]
    calls = calls_of(expected)
    assert differences(calls, expected) == []
    assert differences(calls[1:], expected)
    assert differences([*calls, calls[0]], expected)
    first = calls[0]
    for wrong in (
        replace(first, backend="unknown"),
        replace(first, sizes=replace(first.sizes, num_heads_kv=1)),
        replace(first, sizes=replace(first.sizes, dtype="float16")),
        replace(first, mask=MaskUse("block")),
        replace(first, dropout=None),
        replace(first, annotations=()),
        replace(first, pass_="backward" if first.pass_ == "forward" else "forward"),
    ):
        assert differences([wrong, *calls[1:]], expected)
