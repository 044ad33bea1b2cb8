"""A sample of the conformance suite on the GPU; the whole is `flashdig.bench.conformance`."""

import pytest

from flashdig.bench.conformance import make_plan, run

pytestmark = pytest.mark.gpu


def test_every_case_of_a_sample_is_right() -> None:
    plan = make_plan(count=12, inputs=12)
    tally = run(plan)
    assert tally.failures == []
    assert (tally.passed, tally.skipped) == (144, 0)
