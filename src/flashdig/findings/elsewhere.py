"""What is not attention's fault: time spent elsewhere, and kernels that slow down over time."""

from __future__ import annotations

from statistics import median

from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Finding, Number
from flashdig.findings.recording import Recording, main_kernel, place
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import Kernel

_SMALL_SHARE = 0.2
_DRIFT = 0.08
_LEAST_RUNS = 24
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
