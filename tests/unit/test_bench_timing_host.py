"""Rotation, failures, pairing and the arithmetic of the clocks, with fake clocks and devices."""

import gc
import math
import random
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashdig.bench import timing as timing_module
from flashdig.bench.environment import Clocks
from flashdig.bench.meters import EventTimed, HostMeter, repetitions_for
from flashdig.bench.timing import (
    Timing,
    TimingFailure,
    ceilings_from,
    median_ratio,
    paired_ratio,
    rotate,
    time_rotated,
)
from flashdig.generations.base import input_precision


class FakeTime:
    """Seconds that only calls move."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def now(self) -> float:
        return self.seconds

    def call(self, milliseconds: float):
        def run() -> None:
            self.seconds += milliseconds / 1e3

        return run


@dataclass
class FakeMeter:
    """Hands out the pairs that were planned for each call; the call itself returns its name."""

    plan: dict[str, list]
    clock: str = "graph"
    l2: str = "cold"
    log: list[str] = field(default_factory=list)
    recovers: bool = True
    recovered: int = 0

    def prepare(self, call):
        return FakePrepared(self, call())

    def recover(self) -> None:
        self.recovered += 1
        if not self.recovers:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore")


@dataclass
class FakePrepared:
    meter: FakeMeter
    name: str
    repetitions: int = 7
    enqueued: int = 20

    def enqueue(self) -> None:
        self.meter.log.append(self.name)

    def read(self) -> tuple[float, float]:
        pair = self.meter.plan[self.name].pop(0)
        if isinstance(pair, Exception):
            raise pair
        return pair


def rotated(meter: FakeMeter, rounds: int, calls=None, sample=None, progress=None, **options):
    calls = {name: (lambda n=name: n) for name in meter.plan} if calls is None else calls
    return rotate(
        calls,
        meter,
        rounds=rounds,
        sample=sample or (lambda: Clocks(None, None)),
        progress=progress or (lambda _: None),
        **options,
    )


def test_each_round_starts_one_call_later() -> None:
    meter = FakeMeter({name: [(1.0, 1.0)] * 4 for name in "abc"})
    rotated(meter, 4)
    assert "".join(meter.log) == "abc" + "bca" + "cab" + "abc"


def test_a_timing_holds_medians_over_the_rounds_and_how_it_was_measured() -> None:
    meter = FakeMeter({"a": [(2.0, 2.0), (1.0, 3.0), (10.0, 8.0)]})
    readings = iter([Clocks(1980, 300.0), Clocks(None, 500.0), Clocks(1900, 700.0)])
    timing = rotated(meter, 3, sample=lambda: next(readings))["a"]
    assert timing.ms_all == (2.0, 2.0, 9.0)
    assert timing.ms == 2.0
    assert timing.aa_spread == pytest.approx(0.25)  # of 0, 2/3, 1/4
    assert timing.sm_clock_mhz == 1940
    assert timing.power_w == 500.0
    assert (timing.clock, timing.l2, timing.repetitions) == ("graph", "cold", 7)


def test_a_steady_load_has_its_energy_of_all_enqueued_calls() -> None:
    meter = FakeMeter({"a": [(2.0, 2.0), (2.0, 2.0), (2.0, 2.0)]})
    joules = iter([100.0, 0.0, 120.0, 200.0, 0.0, 210.0, 300.0, 0.0, 340.0])
    timing = rotated(
        meter, 3, sample=lambda: Clocks(1500.0, 700.0, next(joules)), sustained_ms=0.1
    )["a"]
    assert timing.joules == 1.0
    short = rotated(FakeMeter({"a": [(1.0, 1.0)]}), 1, sample=lambda: Clocks(1.0, 1.0, 5.0))
    assert short["a"].joules is None
    unknown = rotated(FakeMeter({"a": [(1.0, 1.0)]}), 1, sustained_ms=0.1)
    assert unknown["a"].joules is None


def test_without_sensors_clock_and_power_are_unknown() -> None:
    timing = rotated(FakeMeter({"a": [(1.0, 1.0)]}), 1)["a"]
    assert timing.sm_clock_mhz is None
    assert timing.power_w is None


def test_progress_names_calls_and_rounds() -> None:
    told: list[str] = []
    rotated(FakeMeter({"a": [(1.0, 1.0)] * 2}), 2, progress=told.append)
    assert told == ["preparing a", "round 1 of 2", "round 2 of 2"]


def test_a_call_that_cannot_be_prepared_fails_alone() -> None:
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8 GiB.\nDetails follow")

    meter = FakeMeter({"good": [(1.0, 1.0)] * 3})
    found = rotated(meter, 3, {"bad": too_large, "good": lambda: "good"})
    assert list(found) == ["bad", "good"]
    assert found["bad"] == TimingFailure(
        "preparing: OutOfMemoryError: CUDA out of memory. Tried to allocate 8 GiB."
    )
    assert found["good"].ms == 1.0
    assert meter.recovered == 1


def test_a_call_that_fails_in_a_round_has_no_time_and_the_others_go_on() -> None:
    meter = FakeMeter({"bad": [(1.0, 1.0), ValueError()], "good": [(2.0, 2.0)] * 4})
    found = rotated(meter, 4)
    assert found["bad"] == TimingFailure("round 2: ValueError")
    assert len(found["good"].ms_all) == 4
    assert meter.log.count("bad") == 2


def test_a_clock_that_stands_still_is_a_failure() -> None:
    found = rotated(FakeMeter({"a": [(0.0, 1.0)]}), 1)
    assert "no time pass" in found["a"].reason


def test_a_lost_device_ends_the_run_and_names_the_call_that_lost_it() -> None:
    meter = FakeMeter({"a": [(1.0, 1.0)], "b": [RuntimeError("boom")], "c": []}, recovers=False)
    found = rotated(meter, 5)
    assert found["b"].reason == "round 1: RuntimeError: boom"
    for name in "ac":
        assert "the device was lost after 'b'" in found[name].reason
        assert "illegal memory access" in found[name].reason
    assert meter.log == ["a", "b"]


def test_a_device_lost_while_preparing_prepares_no_other_call() -> None:
    def breaks():
        raise RuntimeError("boom")

    prepared: list[str] = []
    meter = FakeMeter({}, recovers=False)
    found = rotated(meter, 2, {"a": breaks, "b": lambda: prepared.append("b")})
    assert prepared == []
    assert "lost after 'a'" in found["b"].reason


def test_a_failed_call_is_not_kept_alive() -> None:
    class Large:
        pass

    references: list[weakref.ref] = []
    alive_at_recovery: list[bool] = []

    def fails() -> None:
        large = Large()
        references.append(weakref.ref(large))
        raise RuntimeError("after allocating")

    class Meter(FakeMeter):
        def recover(self) -> None:
            gc.collect()
            alive_at_recovery.append(references[0]() is not None)

    rotated(Meter({}), 1, {"a": fails})
    assert alive_at_recovery == [False]


def test_interruption_is_not_a_timing_failure() -> None:
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rotated(FakeMeter({}), 1, {"a": interrupted})


def test_host_clock_measures_each_call_exactly(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    fake = FakeTime()
    found = time_rotated(
        {"slow": fake.call(0.5), "fast": fake.call(0.125), "huge": fake.call(9.0)},
        rounds=6,
        target_ms=2.0,
        clock="host",
        now=fake.now,
    )
    assert {name: round(t.ms, 9) for name, t in found.items()} == {
        "slow": 0.5,
        "fast": 0.125,
        "huge": 9.0,
    }
    assert {name: t.repetitions for name, t in found.items()} == {"slow": 4, "fast": 16, "huge": 1}
    assert all(t.aa_spread < 1e-9 and t.clock == "host" and t.l2 == "warm" for t in found.values())


def test_host_clock_leaves_waiting_for_the_device_out() -> None:
    fake = FakeTime()
    meter = HostMeter(1.0, now=fake.now, synchronize=fake.call(50.0), most=5)
    prepared = meter.prepare(fake.call(0.1))
    prepared.enqueue()
    assert prepared.repetitions == 5
    assert prepared.read() == pytest.approx((0.1, 0.1))


def test_a_longer_call_takes_longer_on_the_real_clock(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    small, large = torch.randn(16, 16), torch.randn(512, 512)
    found = time_rotated(
        {"small": lambda: small @ small, "large": lambda: large @ large},
        rounds=6,
        target_ms=0.5,
        clock="host",
    )
    ratio = paired_ratio(found["large"], found["small"])
    assert ratio.low > 1
    assert not ratio.behind
    assert paired_ratio(found["small"], found["large"]).behind


class FakeGpu:
    """A queue whose work takes time only on the device."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self.log: list[str] = []

    def work(self, name: str, milliseconds: float):
        def launch() -> None:
            self.log.append(name)
            self.milliseconds += milliseconds

        return launch

    def record(self) -> float:
        self.log.append("|")
        return self.milliseconds

    def elapsed(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        self.log.append(".")


def test_warm_measurements_follow_one_launch_ahead_without_a_pause() -> None:
    gpu = FakeGpu()
    timed = EventTimed(gpu, gpu.work("c", 6.0), calls_per_launch=3, launches=2)
    timed.enqueue()
    assert timed.read() == (2.0, 2.0)
    assert timed.repetitions == 6
    assert timed.enqueued == 15
    assert "".join(gpu.log) == "c|cc|cc|."


def test_cold_measurements_leave_the_flush_out() -> None:
    gpu = FakeGpu()
    timed = EventTimed(gpu, gpu.work("c", 0.5), launches=2, flush=gpu.work("f", 100.0))
    for _ in range(2):  # measured again, nothing of the first time is left
        gpu.log.clear()
        timed.enqueue()
        assert timed.read() == (0.5, 0.5)
        assert "".join(gpu.log) == "f|c|" * 4 + "."


@pytest.mark.parametrize(
    ("target_ms", "call_ms", "most", "expected"),
    [(2.0, 0.5, 50, 4), (2.0, 100.0, 50, 1), (2.0, 1e-4, 50, 50), (2.0, 0.0, 1000, 1000)],
)
def test_repetitions_fill_the_target_within_limits(target_ms, call_ms, most, expected) -> None:
    assert repetitions_for(target_ms, call_ms, most) == expected


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"calls": {}}, "calls"),
        ({"rounds": 0}, "rounds"),
        ({"target_ms": 0.0}, "target_ms"),
        ({"target_ms": math.inf}, "target_ms"),
        ({"clock": "sundial"}, "clock"),
        ({"l2": "tepid"}, "l2"),
        ({"clock": "host", "l2": "cold"}, "l2='cold' needs"),
        ({"clock": "graph"}, "needs an NVIDIA GPU"),
        ({"clock": "events"}, "needs an NVIDIA GPU"),
    ],
)
def test_bad_arguments_are_refused_by_name(monkeypatch, change, names) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = {"calls": {"a": lambda: None}, "clock": "host", **change}
    with pytest.raises(ValueError, match=names):
        time_rotated(arguments.pop("calls"), **arguments)


def test_twelve_rounds_give_the_interval_from_the_third_to_the_tenth() -> None:
    ratio = median_ratio([float(i) for i in range(12, 0, -1)], [1.0] * 12)
    assert (ratio.median, ratio.low, ratio.high) == (6.5, 3.0, 10.0)
    assert ratio.confidence == pytest.approx(1 - 2 * 79 / 4096)


@given(st.integers(1, 60))
def test_interval_is_the_narrowest_with_the_confidence(count: int) -> None:
    def coverage(k: int) -> float:
        return 1 - 2 * sum(math.comb(count, i) for i in range(k)) / 2**count

    ratio = median_ratio([float(i) for i in range(1, count + 1)], [1.0] * count)
    rank = int(ratio.low)
    assert ratio.high == count + 1 - rank
    assert ratio.confidence == pytest.approx(coverage(rank))
    if count >= 6:
        assert coverage(rank) >= 0.95
    else:
        assert rank == 1
    assert 2 * (rank + 1) > count + 1 or coverage(rank + 1) < 0.95


def test_interval_covers_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    trials = 4000
    covered = 0
    for _ in range(trials):
        # a skewed distribution, with a median of 1
        ratio = median_ratio([2 * draw.random() ** 0.5 / 2**0.5 for _ in range(12)], [1.0] * 12)
        covered += ratio.low <= 1.0 <= ratio.high
    assert covered / trials == pytest.approx(0.9614, abs=0.01)


def test_behind_needs_the_whole_interval_below_one_and_enough_rounds() -> None:
    assert median_ratio([0.9] * 6, [1.0] * 6).behind
    assert not median_ratio([0.9] * 5, [1.0] * 5).behind
    assert not median_ratio([1.0] * 12, [1.0] * 12).behind
    # two of twelve rounds may lie above, three may not
    assert median_ratio([0.9] * 10 + [1.1] * 2, [1.0] * 12).behind
    assert not median_ratio([0.9] * 9 + [1.1] * 3, [1.0] * 12).behind


def test_ratio_is_taken_within_each_round() -> None:
    # drift of a factor ten between rounds, but always twice as slow
    drift = [1.0, 10.0, 3.0, 7.0, 2.0, 5.0]
    ratio = median_ratio([2 * x for x in drift], drift)
    assert (ratio.low, ratio.median, ratio.high) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("times", [([], []), ([1.0], [1.0, 2.0]), ([1.0], [0.0])])
def test_times_that_cannot_be_paired_are_refused(times) -> None:
    with pytest.raises(ValueError, match="paired times"):
        median_ratio(*times)


def test_timings_of_two_rotations_cannot_be_paired() -> None:
    first, second = (rotated(FakeMeter({"a": [(1.0, 1.0)] * 6}), 6)["a"] for _ in range(2))
    with pytest.raises(ValueError, match="same call of time_rotated"):
        paired_ratio(first, second)


def timing_of(ms: float, clock_mhz: float | None = None) -> Timing:
    return Timing(ms, (ms,), 0.0, clock_mhz, None, "graph", "warm", 1, 0)


def test_ceilings_are_rates_of_the_measured_times() -> None:
    found = ceilings_from(
        {
            "copy": timing_of(0.5, 1700.0),
            "float16": timing_of(2 * 8192**3 / 700e12 * 1e3, 1500.0),
            "tf32": TimingFailure("preparing: OutOfMemoryError"),
        },
        {"float16": 2 * 8192**3, "tf32": 2 * 4096**3},
        2_000_000_000,
    )
    assert found.matmul_tflops == {"float16": pytest.approx(700.0)}
    assert found.copy_tb_per_s == pytest.approx(4.0)
    assert found.sm_clock_mhz == {"copy": 1700.0, "float16": 1500.0}
    assert found.failures == {"tf32": "preparing: OutOfMemoryError"}


def test_a_failed_copy_leaves_its_rate_unknown() -> None:
    found = ceilings_from({"copy": TimingFailure("why")}, {}, 1)
    assert found.copy_tb_per_s is None
    assert found.failures == {"copy": "why"}


def test_matmul_precision_is_set_back_even_after_an_error() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision

    def fails_under_tf32() -> None:
        with timing_module.float32_precision("tf32"):
            assert settings.fp32_precision == "tf32"
            assert input_precision(torch.float32) == "tf32"
            assert input_precision(torch.float16) == "ieee"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails_under_tf32()
    assert settings.fp32_precision == before
    assert input_precision(torch.float32) == "ieee"
