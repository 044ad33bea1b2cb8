"""Rules over counters: on Nsight Compute's files of an H200, and on kernels made by hand."""

import functools
from pathlib import Path

import pytest

from flashdig.costs.predict import predict
from flashdig.findings import find_in_counters
from flashdig.findings.counted import counted_kernels
from flashdig.findings.counted_rows import counted_rows
from flashdig.findings.counters import COUNTER_RULES
from flashdig.findings.guess import guess
from flashdig.hardware.devices import find_device
from flashdig.problem import AttentionProblem
from flashdig.readers.ncu import read_ncu
from flashdig.readers.ncu_metrics import kernel_from_metrics
from flashdig.readers.ncu_model import NcuKernel

DATA = Path(__file__).parents[1] / "data" / "ncu"
H200 = find_device("h200")
DUG = AttentionProblem.dense(10, 64, 1024, 64, "float32")
FLASH = "flash_fwd_v2_fp32_d64_m32n32_full"
TIME = {"gpu__time_duration.sum": 1e-3, "gpc__cycles_elapsed.max": 1.9e6}
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"


def made(name: str = FLASH, **metrics: float) -> NcuKernel:
    return kernel_from_metrics(
        number=1, name=name, source="made", block=(128, 1, 1), metrics={**TIME, **metrics}
    )


@functools.lru_cache(maxsize=2)
def counted(name: str) -> tuple[NcuKernel, ...]:
    return tuple(read_ncu(str(DATA / name)))


def rules(kernel: NcuKernel, guessed: object = None) -> dict[str, str]:
    """rule -> verdict."""
    found = find_in_counters([kernel], H200, [guessed])  # type: ignore[list-item]
    return {finding.rule: finding.verdict for finding in found}


def dug(name: str) -> NcuKernel:
    return next(kernel for kernel in counted("archaeology_h200.csv.gz") if name in kernel.name)


def test_bank_conflicts_of_the_exhibits() -> None:
    """v2 reads K along the wrong dimension, as the archaeology article found; transposed it is
    free of conflicts."""
    assert rules(dug("v2_fp32"))["bank-conflicts"] == "slow"
    assert "bank-conflicts" not in rules(dug("v2_ktransposed"))
    (finding,) = [f for f in find_in_counters([dug("v2_fp32")], H200) if f.rule == "bank-conflicts"]
    assert "64 %" in finding.claim
    assert "most of them in loads" in finding.claim
    # what the transposed exhibit takes less is about what was promised
    assert finding.gain is not None
    gained = (dug("v2_fp32").duration_ns or 0) - (dug("v2_ktransposed").duration_ns or 0)
    assert finding.gain.seconds == pytest.approx(gained / 1e9, rel=0.3)


def test_few_conflicts_of_an_idle_stage_are_fine() -> None:
    used = {f"{WAVEFRONTS}.sum": 1e6, f"{CONFLICTS}.sum": 5e5}
    assert rules(made(**used))["bank-conflicts"] == "fine"
    assert "bank-conflicts" not in rules(made(**{**used, f"{CONFLICTS}.sum": 5e4}))


def test_conflicts_that_arbitration_adds_are_none() -> None:
    """The hardware counts them; counted per instruction there are none."""
    kernel = made(
        **{
            f"{WAVEFRONTS}.sum": 2e8,
            f"{CONFLICTS}.sum": 4e7,
            "memory_l1_wavefronts_shared": 1.6e8,
            "memory_l1_wavefronts_shared_ideal": 1.6e8,
        }
    )
    assert "bank-conflicts" not in rules(kernel)


def test_register_spills() -> None:
    assert rules(dug("v1_fp32"))["register-spills"] == "slow"
    few = {"derived__local_spilling_requests": 1e4, "smsp__inst_executed.sum": 1e8}
    assert rules(made(**few))["register-spills"] == "fine"
    none = {"derived__local_spilling_requests": 0.0, "smsp__inst_executed.sum": 1e8}
    assert "register-spills" not in rules(made(**none))
    assert "register-spills" not in rules(dug("v2_fp32"))


def test_mio_pressure() -> None:
    assert rules(dug("v2_fp32"))["mio-pressure"] == "slow"
    waiting = {STALL.format("mio_throttle"): 0.1, STALL.format("long_scoreboard"): 5.0}
    assert "mio-pressure" not in rules(made(**waiting))


def test_exp2_pressure() -> None:
    xu = "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active"
    tensor = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
    assert rules(made(**{xu: 82.0, tensor: 41.0}))["exp2-pressure"] == "slow"
    assert "exp2-pressure" not in rules(made(**{xu: 62.0, tensor: 80.0}))
    assert "exp2-pressure" not in rules(made(**{xu: 46.5, tensor: 44.9}))


def test_traffic_above_the_model() -> None:
    guessed = predict(DUG, H200, "v2")
    expected = guessed.memory.total_bytes
    read = {"dram__bytes_read.sum": 2.0 * expected, "dram__bytes_write.sum": 0.0}
    busy = {"gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed": 90.0}
    assert rules(made(**read, **busy), guessed)["traffic-above-model"] == "slow"
    assert rules(made(**read), guessed)["traffic-above-model"] == "check"
    read["dram__bytes_read.sum"] = 1.1 * expected
    assert "traffic-above-model" not in rules(made(**read, **busy), guessed)
    assert "traffic-above-model" not in rules(dug("v2_fp32"), guessed)


def test_misaligned_accesses() -> None:
    ideal, real = (
        "memory_l2_theoretical_sectors_global_ideal",
        "memory_l2_theoretical_sectors_global",
    )
    assert rules(made(**{ideal: 1e6, real: 2e6}))["misaligned-accesses"] == "slow"
    assert "misaligned-accesses" not in rules(dug("v2_fp32"))


def test_products_on_the_fma_pipe() -> None:
    assert rules(dug("v2_ktransposed"))["without-tensor-cores"] == "slow"
    kernels = counted("ncu_raw_h200.csv.gz")
    found = find_in_counters(kernels, H200)
    assert "without-tensor-cores" not in {finding.rule for finding in found}


def test_occupancy_and_clock() -> None:
    kernels = counted("ncu_raw_h200.csv.gz")
    found = {finding.rule for finding in find_in_counters(kernels, H200)}
    assert "occupancy-by-design" in found
    assert "counted-at-low-clock" not in found
    slow = {"gpc__cycles_elapsed.avg.per_second": 1.1e9}
    assert rules(made(**slow))["counted-at-low-clock"] == "not measured"
    assert "occupancy-by-design" not in rules(
        made(**{"sm__maximum_warps_per_active_cycle_pct": 75.0})
    )


def test_every_rule_is_tried() -> None:
    text = Path(__file__).read_text()
    assert all(f'"{rule}"' in text for rule in COUNTER_RULES)


def test_short_kernels_say_nothing() -> None:
    long = made(**{f"{WAVEFRONTS}.sum": 1e6, f"{CONFLICTS}.sum": 5e5})
    short = kernel_from_metrics(
        number=2, name="short", source="made", metrics={"gpu__time_duration.sum": 1e-6}
    )
    assert [one.kernel.number for one in counted_kernels([long, short])] == [1]
    assert counted_kernels([]) == []


def test_predicted_against_counted() -> None:
    """The models hold: bytes at memory within 5 %, occupancy, and v2's conflicts as a surprise."""
    kernel = dug("v2_fp32")
    guessed = guess("v2", DUG, H200)
    rows = {
        row.what: row for row in counted_rows(kernel, guessed, find_in_counters([kernel], H200))
    }
    assert rows["bytes at memory"].ratio == pytest.approx(1.0, abs=0.05)
    assert not rows["occupancy"].surprise
    assert rows["bank conflicts"].rule == "bank-conflicts"
    first = dug("v1_fp32")
    guessed = guess("v1", DUG, H200)
    rows = {row.what: row for row in counted_rows(first, guessed, find_in_counters([first], H200))}
    assert rows["bytes at memory"].ratio == pytest.approx(1.0, abs=0.05)
    assert rows["bytes asked of the L2, at most"].rule == "register-spills"
