"""Counted: one kernel's counters and what is known beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdig.costs.prediction import Prediction
from flashdig.findings.finding import Gain
from flashdig.hardware.devices import Device
from flashdig.readers.ncu_model import NcuKernel

# kernels that take less of a file's time say nothing
_LEAST_SHARE = 0.03


@dataclass(frozen=True)
class Counted:
    """One profiled kernel and what is known beside its counters.

    Attributes:
        share: of the time of all kernels in the file, 0 to 1.
        device: the chip; None where neither the file nor the caller says.
        guess: what was predicted for this kernel; None where its problem is not known.
        subject: what it is, in words.
    """

    kernel: NcuKernel
    share: float
    device: Device | None
    guess: Prediction | None
    subject: str

    def place(self, metric: str) -> str:
        return f"kernel {self.kernel.number}, {metric}"

    def gain(self, saved_s: float, basis: str) -> Gain | None:
        duration = (self.kernel.duration_ns or 0) / 1e9
        if saved_s <= 0 or not duration:
            return None
        return Gain(saved_s, self.share * saved_s / duration, "device", basis)


def counted_kernels(
    kernels: Sequence[NcuKernel],
    device: Device | None = None,
    guesses: Sequence[Prediction | None] = (),
    subjects: Sequence[str] = (),
) -> list[Counted]:
    """The kernels of a file that take part of its time, ready for the rules.

    Args:
        guesses, subjects: one a kernel, or none at all.
    """
    total = sum(kernel.duration_ns or 0 for kernel in kernels)
    found = []
    for at, kernel in enumerate(kernels):
        share = (kernel.duration_ns or 0) / total if total else 0.0
        if share < _LEAST_SHARE and total:
            continue
        found.append(
            Counted(
                kernel=kernel,
                share=share,
                device=device,
                guess=guesses[at] if at < len(guesses) else None,
                subject=(
                    subjects[at]
                    if at < len(subjects)
                    else f"kernel {kernel.number}: {kernel.decoded.words}"
                ),
            )
        )
    return found
