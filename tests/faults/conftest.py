"""Where the fault tests run: the CPU's own backends by default, CUDA with `pytest -m gpu`."""

import functools

import pytest

from flashdig import attention, attention_varlen
from tests.faults.targets import CPU, CUDA


@pytest.fixture(params=[CPU, CUDA])
def target(request):
    """(device, backend) of a test; one line of parameters for the whole folder."""
    return request.param


@pytest.fixture
def device(target):
    return target[0]


@pytest.fixture
def backend(target):
    return target[1]


@pytest.fixture
def attend(backend):
    """flashdig.attention on the backend under test."""
    return functools.partial(attention, backend=backend)


@pytest.fixture
def attend_packed(backend):
    """flashdig.attention_varlen on the backend under test."""
    return functools.partial(attention_varlen, backend=backend)
