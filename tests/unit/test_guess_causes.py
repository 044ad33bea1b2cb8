"""Causes of surprising times: each rule where it knows one, and where it must keep silent."""

from __future__ import annotations

import dataclasses

import pytest

from flashdig.costs.predict import predict
from flashdig.evidence.kernels import LaunchedKernel
from flashdig.generations.guesses import UNEXPLAINED, TimeEvidence, cause_of_time
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem

H200 = find_device("h200")
TRITON = ("v1", "v2", "v2_transposed", "online_softmax")


def _cause(rung, problem, slower, *, ms=5.0, device=H200, kernels=()):
    seen = TimeEvidence(rung, rung in TRITON, ms, slower, kernels)
    return cause_of_time(problem, device, seen, predict(problem, device, rung))


def _kernel(registers: int | None) -> LaunchedKernel:
    return LaunchedKernel("flash_fwd_v1", 1, 100.0, registers=registers)


LARGE = AttentionProblem.dense(4, 32, 4096, 64, "float16")


@pytest.mark.parametrize(
    ("rung", "problem", "slower", "words"),
    [
        ("v1", AttentionProblem.dense(8, 16, 4096, 64, "float32"), 1.8, "may spill to memory"),
        ("v1", AttentionProblem.dense(32, 32, 512, 64, "float16"), 1.6, "less room in the cache"),
        ("v1", AttentionProblem.dense(8, 16, 2048, 128, "float16"), 1.4, "about equally long"),
        (
            "online_softmax",
            AttentionProblem.dense(1, 16, 16384, 128, "float16"),
            1.2,
            "2,112 rows in flight, each read and overwritten, are 138 MB",
        ),
    ],
)
def test_what_the_ladder_on_an_h200_showed(rung, problem, slower, words):
    assert words in _cause(rung, problem, slower)
    # being faster has none of these causes
    assert _cause(rung, problem, 0.7) == UNEXPLAINED


def test_short_launches():
    words = "a launch of a few microseconds does not fill the chip"
    assert words in _cause("v2", AttentionProblem.dense(1, 1, 64, 64), 2.0, ms=0.006)
    assert _cause("v2", LARGE, 2.0, ms=0.2) == UNEXPLAINED


def test_a_warm_cache_makes_only_what_memory_limits_faster():
    small = AttentionProblem.dense(1, 32, 256, 64)
    assert "which replays keep warm" in _cause("v2", small, 0.5, ms=0.004)
    assert predict(LARGE, H200, "v2").limiter != "memory bandwidth"
    assert _cause("v2", LARGE, 0.5) == UNEXPLAINED


def test_registers_seen_on_the_device_go_before_those_compiled_offline():
    problem = AttentionProblem.dense(8, 16, 4096, 64, "float32")
    assert "may spill" in _cause("v2", problem, 1.5, kernels=(_kernel(255),))
    assert _cause("v2", problem, 1.5, kernels=(_kernel(194),)) == UNEXPLAINED
    assert "may spill" not in _cause("v1", problem, 1.5, kernels=(_kernel(200),))
    assert "may spill" in _cause("v1", problem, 1.5, kernels=(_kernel(None),))


def test_a_library_kernel_with_all_registers_is_no_cause():
    assert _cause("sdpa_flash", LARGE, 1.5, kernels=(_kernel(255),)) == UNEXPLAINED


def test_short_rows_of_online_softmax_stay_in_the_cache():
    problem = AttentionProblem.dense(4, 32, 4096, 64, "float16")
    assert _cause("online_softmax", problem, 1.5) == UNEXPLAINED


def test_a_chip_on_which_nothing_was_measured_has_no_measured_limits():
    problem = AttentionProblem.dense(8, 16, 2048, 128, "float16")
    unmeasured = dataclasses.replace(H200, measured=None)
    assert _cause("v1", problem, 1.4, device=unmeasured) == UNEXPLAINED
