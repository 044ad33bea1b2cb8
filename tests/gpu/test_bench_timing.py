"""The GPU clocks on a real GPU, and that a call which breaks a capture harms no other."""

import pytest
import torch

from flashdig.bench.gate import check, naive_rounded, poison
from flashdig.bench.timing import Timing, TimingFailure, measured_ceilings, time_rotated

pytestmark = pytest.mark.gpu


@pytest.fixture
def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.randn(n, n, device="cuda", dtype=torch.float16) for n in (256, 4096))


@pytest.mark.parametrize("clock", ["graph", "events", "host"])
@pytest.mark.parametrize("l2", ["warm", "cold"])
def test_clocks_give_times_in_the_right_order(matrices, clock, l2) -> None:
    if clock == "host" and l2 == "cold":
        with pytest.raises(ValueError, match="l2"):
            time_rotated({"a": lambda: None}, clock=clock, l2=l2)
        return
    small, large = matrices
    found = time_rotated(
        {"small": lambda: small @ small, "large": lambda: large @ large},
        rounds=6,
        clock=clock,
        l2=l2,
    )
    assert all(isinstance(t, Timing) for t in found.values()), found
    if clock != "host":  # the host enqueues both equally fast
        assert found["large"].ms > found["small"].ms
    assert found["large"].aa_spread < 0.2


def test_graph_time_is_the_kernels_alone(matrices) -> None:
    small, _ = matrices
    call = {"small": lambda: small @ small}
    graph = time_rotated(call, clock="graph")["small"]
    eager = time_rotated(call, clock="events")["small"]
    assert graph.repetitions > 10
    assert graph.ms <= 1.1 * eager.ms


def test_a_call_that_cannot_be_captured_or_held_fails_alone(matrices) -> None:
    small, _ = matrices

    def too_large() -> torch.Tensor:
        return torch.empty(10**15, dtype=torch.uint8, device="cuda")

    calls = {
        "first": lambda: small @ small,
        "synchronises": lambda: small.sum().item(),
        "second": lambda: small @ small,
        "too large": too_large,
        "third": lambda: small @ small,
    }
    for _ in range(2):
        found = time_rotated(calls, rounds=3)
        assert isinstance(found["synchronises"], TimingFailure)
        assert isinstance(found["too large"], TimingFailure)
        assert "OutOfMemory" in found["too large"].reason
        times = [found[name].ms for name in ("first", "second", "third")]
        assert max(times) < 1.5 * min(times)
        # current stream, random generator and allocator are usable again
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
        assert torch.isfinite(torch.randn(1000, device="cuda")).all()


def test_graphs_share_memory_and_give_it_back() -> None:
    x = torch.zeros(64_000_000, device="cuda")  # 256 MB; each call needs as much again
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    found = time_rotated({str(n): (lambda: x + 1.0) for n in range(6)}, rounds=2)
    assert all(isinstance(t, Timing) for t in found.values()), found
    assert torch.cuda.max_memory_reserved() - before < 4 * 256_000_000
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() - before < 64_000_000


def test_ceilings_are_plausible() -> None:
    found = measured_ceilings(rounds=3, matmul_size=4096)
    assert found.failures == {}
    assert set(found.matmul_tflops) >= {"float16", "tf32", "float32"}
    assert found.matmul_tflops["float16"] > found.matmul_tflops["float32"] > 1
    assert 0.1 < found.copy_tb_per_s < 20


@pytest.mark.parametrize("causal", [False, True])
def test_the_gate_judges_on_the_gpu(causal) -> None:
    q, k, v = (
        torch.randn(2, heads, 512, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2)
    )
    poison(q.nbytes, "cuda")
    out = naive_rounded(q, k, v, causal=causal)
    assert check(out, q, k, v, causal=causal).ok
    assert not check(out * 1.02, q, k, v, causal=causal).ok


def test_poison_reaches_the_next_allocation() -> None:
    torch.cuda.empty_cache()
    poison(64_000_000, "cuda")
    assert torch.isnan(torch.empty(16_000_000, device="cuda")).all()
