"""Rules that no committed recording shows, on recordings made by hand; each with its opposite."""

from flashdig.findings import find_in_trace
from flashdig.findings.elsewhere import low_clock
from flashdig.findings.finding import Finding
from flashdig.hardware.devices import find_device
from flashdig.readers.model import Trace
from tests.findings.made import GEMM, flash_call, flat, read
from tests.trace_files import host, kernel


def found(trace: Trace, rule: str) -> list[Finding]:
    return [finding for finding in find_in_trace(trace) if finding.rule == rule]


def test_small_grid(tmp_path) -> None:
    few = [flash_call(i, shape=(1, 4, 2048, 64), grid=(16, 1, 4), us=60) for i in range(3)]
    (finding,) = found(read(tmp_path, flat(few)), "small-grid")
    assert "64 blocks" in finding.claim
    assert finding.gain is not None
    assert abs(finding.gain.seconds - 3 * 60e-6 * (1 - 64 / 132)) < 1e-9
    many = [flash_call(i, shape=(4, 16, 2048, 64), grid=(16, 4, 16), us=60) for i in range(3)]
    assert found(read(tmp_path, flat(many)), "small-grid") == []
    # a kernel that is over at once has nothing to gain
    short = [flash_call(i, shape=(1, 4, 256, 64), grid=(2, 1, 4), us=4) for i in range(3)]
    assert found(read(tmp_path, flat(short)), "small-grid") == []


def test_tail_wave(tmp_path) -> None:
    """288 blocks on 132 SMs of two blocks are 1.09 waves; 256 fit into one."""
    tail = [flash_call(i, shape=(1, 18, 2048, 64), grid=(16, 1, 18), us=90) for i in range(3)]
    (finding,) = found(read(tmp_path, flat(tail)), "tail-wave")
    assert "288 blocks" in finding.claim
    assert "1.09 waves" in finding.claim
    even = [flash_call(i, shape=(1, 16, 2048, 64), grid=(16, 1, 16), us=90) for i in range(3)]
    assert found(read(tmp_path, flat(even)), "tail-wave") == []


def test_causal_imbalance(tmp_path) -> None:
    def calls(heads: int) -> list[dict[str, object]]:
        each = [
            flash_call(i, shape=(1, heads, 4096, 64), grid=(32, 1, heads), us=90, causal=True)
            for i in range(3)
        ]
        return flat(each)

    (finding,) = found(read(tmp_path, calls(9)), "causal-imbalance")
    assert "1 to 32 key tiles" in finding.claim
    assert finding.confidence == "possible"
    # many waves even it out; without a mask there is nothing to even out
    assert found(read(tmp_path, calls(128)), "causal-imbalance") == []
    full = [flash_call(i, shape=(1, 9, 4096, 64), grid=(32, 1, 9), us=90) for i in range(3)]
    assert found(read(tmp_path, flat(full)), "causal-imbalance") == []


def test_misaligned_rows(tmp_path) -> None:
    """Rows of 68 bfloat16 are 136 bytes apart; heads that interleave at 128 bytes are aligned."""
    odd = flash_call(
        1, shape=(2, 8, 512, 64), grid=(4, 2, 8), us=50, strides=(512 * 68 * 8, 68, 68 * 8 + 4, 1)
    )
    (finding,) = found(read(tmp_path, odd), "misaligned-rows")
    assert "136 bytes" in finding.claim
    assert "Input Strides" in str(finding.numbers[0].place)
    even = flash_call(
        1, shape=(2, 8, 512, 64), grid=(4, 2, 8), us=50, strides=(512 * 512, 64, 512, 1)
    )
    assert found(read(tmp_path, even), "misaligned-rows") == []


def test_slowing_down(tmp_path) -> None:
    def calls(grow: float) -> list[dict[str, object]]:
        each = [
            flash_call(i, shape=(4, 16, 2048, 64), grid=(16, 4, 16), us=150 + grow * i)
            for i in range(30)
        ]
        return flat(each)

    (finding,) = found(read(tmp_path, calls(1.0)), "slowing-down")
    assert finding.verdict == "check"
    assert found(read(tmp_path, calls(0.1)), "slowing-down") == []


def steps(compiling_us: float) -> list[dict[str, object]]:
    """Three steps of a millisecond; the later ones compile for some time."""
    events = []
    for number in range(3):
        start = 10_000.0 * number
        events.append(host("user_annotation", f"ProfilerStep#{number}", start, 9_000))
        if number and compiling_us:
            events.append(
                host("cpu_op", "_compile.compile_inner (dynamo_timed)", start + 10, compiling_us)
            )
        launch = 50 + number
        events.append(
            host("cuda_runtime", "cudaLaunchKernel", start + 8_000, 5, correlation=launch)
        )
        events.append(kernel(GEMM, start + 8_100, 100, device=0, correlation=launch))
    return events


def test_compiled_in_loop(tmp_path) -> None:
    (finding,) = found(read(tmp_path, steps(5_000)), "compiled-in-loop")
    assert "2 of 2 later ones" in finding.claim
    assert finding.gain is not None
    assert finding.gain.seconds == 0.01
    assert found(read(tmp_path, steps(0)), "compiled-in-loop") == []
    # a look-up of what is compiled already takes microseconds
    assert found(read(tmp_path, steps(40)), "compiled-in-loop") == []


def test_low_clock() -> None:
    device = find_device("h200")
    (finding,) = low_clock(device, 1410.0, 690.0, 700.0)
    assert "power holds it down" in finding.claim
    (finding,) = low_clock(device, 1410.0, 300.0, 700.0)
    assert "not power" in finding.claim
    (finding,) = low_clock(device, 1410.0)
    assert "was not read" in finding.claim
    assert low_clock(device, 1935.0, 690.0, 700.0) == []
    assert low_clock(device, None) == []
