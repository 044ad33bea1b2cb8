"""Occupancy told right: low by design, not measured, or a grid too small; the reader's `judge`
says which, and the launch API plays no part in it."""

from __future__ import annotations

from flashdig.costs.units import percent
from flashdig.findings.finding import Finding, Number
from flashdig.findings.recording import Recording, main_kernel, place
from flashdig.hardware.arch import architecture
from flashdig.hardware.occupancy import Occupancy, occupancy
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import DeviceProperties, Kernel
from flashdig.readers.occupancy import judge

_LOW = 50.0
_LEAST_SHARE = 0.01
_DEFAULT_SHARED_MEMORY = 48 * 1024


def occupancy_by_design(recording: Recording) -> list[Finding]:
    """An attention kernel with few resident warps, and why that is no fault."""
    found = []
    for kernel in _attention_kernels(recording):
        device = recording.properties(kernel)
        judged, fit = judge(kernel, device), _fit(kernel, device)
        if judged.percent is None or judged.percent >= _LOW or judged.limit == "grid":
            continue
        if fit is None or fit.matters("tiles"):
            continue
        threads = kernel.configuration.threads_per_block or 0
        registers = kernel.registers_per_thread or 0
        found.append(
            Finding(
                rule="occupancy-by-design",
                calls=_calls_of(recording, kernel),
                backend=decode(kernel.name).backend,
                verdict="fine",
                claim=(
                    f"Occupancy is {percent(fit.fraction)}, by design: {threads} threads x "
                    f"{registers} registers{_shared_words(kernel)} let {fit.blocks_per_sm} "
                    f"block{'s' if fit.blocks_per_sm > 1 else ''} onto an SM, {fit.active_warps} "
                    f"of {fit.max_warps} warps, limited by {fit.limiter}. Each of the "
                    f"{fit.schedulers} schedulers still has "
                    f"{fit.active_warps / fit.schedulers:.3g} warps, and the tile lives in those "
                    "registers: the advice of 'over 50 %' does not hold here."
                ),
                where=decode(kernel.name).words,
                numbers=(
                    Number("registers a thread", registers, "count", place(kernel)),
                    Number("threads a block", threads, "count", place(kernel)),
                    Number(
                        "shared memory a block",
                        kernel.shared_memory_bytes or 0,
                        "bytes",
                        place(kernel),
                    ),
                    Number("occupancy", 100 * fit.fraction, "percent"),
                ),
            )
        )
    return found


def occupancy_not_measured(recording: Recording) -> list[Finding]:
    """The recorder's 0 for kernels with more than 48 KB of shared memory."""
    kernels = [
        kernel
        for kernel in _attention_kernels(recording)
        if kernel.occupancy_percent == 0
        and (kernel.shared_memory_bytes or 0) > _DEFAULT_SHARED_MEMORY
    ]
    if not kernels:
        return []
    kernel = kernels[0]
    judged = judge(kernel, recording.properties(kernel))
    computed = "" if judged.percent is None else f"; worked out it is {judged.percent:.4g} %"
    api = "" if kernel.launch is None else f", launched by {kernel.launch.name}"
    return [
        Finding(
            rule="occupancy-not-measured",
            calls=tuple(c for one in kernels for c in _calls_of(recording, one)),
            backend=decode(kernel.name).backend,
            verdict="not measured",
            claim=(
                f"The recorded occupancy of 0 % is no measurement: the recorder does not work it "
                f"out for kernels with more than 48 KB of shared memory (this one has "
                f"{(kernel.shared_memory_bytes or 0) / 1024:.4g} KB{api}){computed}. How the "
                "kernel was launched plays no part."
            ),
            where="; ".join(decode(one.name).words for one in kernels[:3]),
            numbers=(
                Number("occupancy as recorded", 0, "percent", place(kernel)),
                Number(
                    "shared memory a block", kernel.shared_memory_bytes or 0, "bytes", place(kernel)
                ),
            ),
        )
    ]


def occupancy_of_small_grid(recording: Recording) -> list[Finding]:
    """The recorder's 0 for kernels with little shared memory: a grid of a few blocks."""
    found = []
    for kernel in _attention_kernels(recording):
        device = recording.properties(kernel)
        small = (kernel.shared_memory_bytes or 0) <= _DEFAULT_SHARED_MEMORY
        if kernel.occupancy_percent != 0 or not small or device is None:
            continue
        blocks, sms = kernel.configuration.num_blocks, device.num_sms
        if not blocks or not sms or blocks >= sms:
            continue
        found.append(
            Finding(
                rule="occupancy-of-small-grid",
                calls=_calls_of(recording, kernel),
                backend=decode(kernel.name).backend,
                verdict="fine",
                claim=(
                    f"The recorded occupancy of 0 % is a grid of {blocks} blocks for {sms} SMs, "
                    f"rounded: {percent(blocks / sms)} of the SMs hold a block. The kernel itself "
                    "is not at fault."
                ),
                where=decode(kernel.name).words,
                numbers=(
                    Number("occupancy as recorded", 0, "percent", place(kernel)),
                    Number("blocks", blocks, "count", place(kernel)),
                ),
            )
        )
    return found[:3]


def _attention_kernels(recording: Recording) -> list[Kernel]:
    """The main kernel of each kind of fused call that takes part of the busy time, one a name."""
    found: dict[str, Kernel] = {}
    for group in recording.groups:
        if (recording.share(group.device_ns or 0) or 0) < _LEAST_SHARE:
            continue
        main = main_kernel(group.first)
        if main is not None:
            found.setdefault(main[0].name, main[0])
    return list(found.values())


def _fit(kernel: Kernel, device: DeviceProperties | None) -> Occupancy | None:
    threads = kernel.configuration.threads_per_block
    if device is None or device.compute_capability is None or not threads:
        return None
    major, minor = device.compute_capability
    try:
        fit = occupancy(
            architecture(f"sm_{major}{minor}"),
            threads_per_block=threads,
            registers_per_thread=kernel.registers_per_thread or 0,
            shared_bytes_per_block=kernel.shared_memory_bytes or 0,
        )
    except ValueError:
        return None
    return fit if fit.blocks_per_sm else None


def _shared_words(kernel: Kernel) -> str:
    size = kernel.shared_memory_bytes or 0
    return f" and {size / 1024:.3g} KB of shared memory" if size else ""


def _calls_of(recording: Recording, kernel: Kernel) -> tuple[AttentionCall, ...]:
    """The calls that this kernel, launched alike, does the work of."""
    return tuple(
        call
        for call in recording.calls
        if (main := main_kernel(call)) is not None and main[0].name == kernel.name
    )
