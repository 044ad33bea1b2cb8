"""A sample of the conformance suite on the GPU; the whole is `flashdig.bench.conformance`."""

import pytest

from flashdig.bench.conformance import BACKEND_FEATURES, make_plan, run
from tests.gpu.backends import gpu_backends

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", BACKEND_FEATURES)
def test_every_case_of_a_sample_is_right(backend) -> None:
    if backend not in gpu_backends():
        pytest.skip(f"{backend} does not serve this GPU")
    plan = make_plan(count=12, inputs=12, backend=backend)
    tally = run(plan)
    assert tally.failures == []
    assert (tally.passed, tally.skipped) == (144, 0)
