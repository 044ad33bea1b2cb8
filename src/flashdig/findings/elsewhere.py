"""What is not attention's fault: time spent elsewhere, and kernels that slow down over time."""

from __future__ import annotations

from statistics import median

from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Finding, Number
from flashdig.findings.recording import Recording, main_kernel, place
from flashdig.hardware.devices import Device
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Kernel

_SMALL_SHARE = 0.2
_DRIFT = 0.08
_LEAST_RUNS = 24
_LOW_CLOCK = 0.9
_AT_POWER_LIMIT = 0.95
_WORDS = {
    "matmul": "matrix products",
    "elementwise": "elementwise kernels",
    "norm": "norms",
    "convolution": "convolutions",
    "reduction": "reductions",
    "copy": "copies",
    "sort": "sorts",
    "softmax": "softmax outside of attention",
    "communication": "communication",
    "other": "other kernels",
    "unknown": "kernels of unknown purpose",
}


def attention_not_the_bottleneck(recording: Recording) -> list[Finding]:
    """Attention is a small part of the busy time; the largest part is named."""
    if not recording.busy_ns or not recording.calls:
        return []
    attention = recording.summary.class_ns("attention_forward", "attention_backward")
    share = attention / recording.busy_ns
    others = {name: recording.summary.class_ns(name) for name in _WORDS}
    largest = max(others, key=lambda name: others[name])
    if share >= _SMALL_SHARE or others[largest] <= attention:
        return []
    idle = recording.elapsed_ns - recording.busy_ns
    waits = ""
    if idle > recording.busy_ns:
        waits = (
            f" And the device idles for {percent(idle / recording.elapsed_ns)} of the recording."
        )
    return [
        Finding(
            rule="attention-not-the-bottleneck",
            verdict="elsewhere",
            claim=(
                f"Attention takes {percent(share)} of the busy time, so a better one cannot save "
                f"more. {_WORDS[largest].capitalize()} take "
                f"{percent(others[largest] / recording.busy_ns)}.{waits}"
            ),
            where=recording.summary.source.rsplit("/", 1)[-1],
            numbers=(
                Number("busy time", recording.busy_ns, "ns"),
                Number("attention", attention, "ns"),
                Number(_WORDS[largest], others[largest], "ns"),
            ),
        )
    ]


def slowing_down(recording: Recording) -> list[Finding]:
    """The same kernel, launched alike, takes longer at the end than at the start."""
    found = []
    for kernels in _alike(recording).values():
        if len(kernels) < _LEAST_RUNS:
            continue
        third = len(kernels) // 3
        early = median(kernel.duration_ns for kernel in kernels[1 : third + 1])
        late = median(kernel.duration_ns for kernel in kernels[-third:])
        middle = median(kernel.duration_ns for kernel in kernels[third:-third])
        total = sum(kernel.duration_ns for kernel in kernels)
        if late < (1 + _DRIFT) * early or not early <= middle <= late or early < 50_000:
            continue
        if (recording.share(total) or 0) < 0.1:
            continue
        found.append(
            Finding(
                rule="slowing-down",
                backend=decode(kernels[0].name).backend,
                verdict="check",
                claim=(
                    f"The same kernel with the same launch goes from {seconds(early / 1e9)} to "
                    f"{seconds(late / 1e9)} in the course of the recording, as it does when power "
                    "or heat pull the clock down. Times from its start and end do not compare."
                ),
                where=kernels[0].name[:80],
                numbers=(
                    Number("median of the first third", early, "ns", place(kernels[1])),
                    Number("median of the last third", late, "ns", place(kernels[-1])),
                ),
                confidence="possible",
            )
        )
    return found


def _alike(recording: Recording) -> dict[tuple[str, object, object], list[Kernel]]:
    """Main attention kernels of one problem, by name, launch and sizes."""
    found: dict[tuple[str, object, object], list[Kernel]] = {}
    for call in recording.calls:
        main = main_kernel(call)
        if main is not None:
            kernel = main[0]
            key = (kernel.name, kernel.configuration, call.sizes)
            found.setdefault(key, []).append(kernel)
    return found


def low_clock(
    device: Device,
    sm_clock_mhz: float | None,
    power_w: float | None = None,
    power_limit_w: float | None = None,
) -> list[Finding]:
    """The SM clock, as a sensor read it while a kernel ran, lies well below the chip's highest.

    Not a rule of traces, which hold no clocks: for measurements that come with sensor readings.
    """
    highest = device.highest_clock_hz / 1e6
    if sm_clock_mhz is None or sm_clock_mhz >= _LOW_CLOCK * highest:
        return []
    cause = "; whether power or heat holds it down was not read"
    numbers = [Number("SM clock", sm_clock_mhz * 1e6, "Hz", "sensor, while the kernel ran")]
    if power_w is not None and power_limit_w:
        at_limit = power_w >= _AT_POWER_LIMIT * power_limit_w
        cause = f" at {power_w:.0f} W of {power_limit_w:.0f} W allowed: " + (
            "power holds it down" if at_limit else "heat or a clock limit holds it down, not power"
        )
    return [
        Finding(
            rule="low-clock",
            verdict="check",
            claim=(
                f"The SM clock was {sm_clock_mhz:,.0f} MHz, "
                f"{percent(sm_clock_mhz / highest)} of the chip's highest{cause}. Compare times "
                "only with others at that clock."
            ),
            where=device.name,
            numbers=tuple(numbers),
            confidence="likely",
        )
    ]
