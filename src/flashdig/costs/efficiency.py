"""How much of a specified peak is reached in practice: measured on the chip, or else assumed.

The assumed fractions are round numbers of the size that large matrix products and copies reach on
well-measured chips; they are assumptions, and every prediction that uses one names it.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdig.hardware.devices import Device

ASSUMED_MATMUL_FRACTION = 0.80
ASSUMED_COPY_FRACTION = 0.85
ASSUMED_READ_FRACTION = 0.90
ASSUMED_EXP2_FRACTION = 0.95
# The least that any kernel lasts: a fill of one number in profiler traces of an H200, 2026-11-29.
KERNEL_START_S = 0.8e-6


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the peaks, and where they come from.

    Attributes:
        matmul: of the product peak at the clock at hand; copy: of memory bandwidth for loads and
            stores mixed; read: for loads alone; exp2: of the special function units.
        read_start_s: time of a read besides its bytes.
        broadcast_scores_per_s, softmax_scores_per_s: limits of eager kernels; None is unknown.
        clock_hz: SM clock to reckon with when none was observed.
        notes: each fraction's origin, in words.
    """

    matmul: float
    copy: float
    read: float
    exp2: float
    read_start_s: float
    broadcast_scores_per_s: float | None
    softmax_scores_per_s: float | None
    clock_hz: float
    notes: tuple[str, ...]


def efficiency(device: Device, dtype: str) -> Efficiency:
    """What is known of `device` for products of `dtype`, filled up with the assumptions."""
    measured = device.measured
    notes = [f"assumed: exp2 at {ASSUMED_EXP2_FRACTION:.0%} of its peak"]
    if measured is None:
        notes.append(
            f"assumed, nothing was measured on {device.name}: products at "
            f"{ASSUMED_MATMUL_FRACTION:.0%} of their peak, memory at {ASSUMED_COPY_FRACTION:.0%} "
            f"(reads alone {ASSUMED_READ_FRACTION:.0%})"
        )
        return Efficiency(
            matmul=ASSUMED_MATMUL_FRACTION,
            copy=ASSUMED_COPY_FRACTION,
            read=ASSUMED_READ_FRACTION,
            exp2=ASSUMED_EXP2_FRACTION,
            read_start_s=0.0,
            broadcast_scores_per_s=None,
            softmax_scores_per_s=None,
            clock_hz=device.highest_clock_hz,
            notes=tuple(notes),
        )
    matmul = measured.matmul_fraction.get(dtype)
    if matmul is None:
        matmul = ASSUMED_MATMUL_FRACTION
        notes.append(f"assumed: {dtype} products at {matmul:.0%} of their peak")
    else:
        notes.append(f"measured {measured.date}: {dtype} products at {matmul:.0%} of their peak")
    copy = measured.copy_bytes_per_s / device.memory_bytes_per_s
    read = measured.read_bytes_per_s / device.memory_bytes_per_s
    notes.append(f"measured {measured.date}: copies at {copy:.0%} and reads at {read:.0%}")
    return Efficiency(
        matmul=matmul,
        copy=copy,
        read=read,
        exp2=ASSUMED_EXP2_FRACTION,
        read_start_s=measured.read_start_s,
        broadcast_scores_per_s=measured.broadcast_scores_per_s,
        softmax_scores_per_s=measured.softmax_scores_per_s,
        clock_hz=measured.load_clock_hz,
        notes=tuple(notes),
    )
