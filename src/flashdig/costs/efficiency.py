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
        memcpy, matmul_stream, tile_update: of memory bandwidth for copy nodes, for scores that a
            product writes or reads, and for tiles that are read and written back all the time.
        read_start_s: time of a read besides its bytes.
        mma_sync: of the product peak, for `mma.sync` beside a newer instruction; None is unknown.
        strided_elements_per_s, broadcast_scores_per_s: limits of torch's kernels; None is unknown.
        softmax_rates: (longest row, scores a second) of its softmax kernels; empty is unknown.
        clock_hz: SM clock to reckon with when none was observed.
        notes: each fraction's origin, in words.
    """

    matmul: float
    copy: float
    read: float
    exp2: float
    memcpy: float
    matmul_stream: float
    tile_update: float
    read_start_s: float
    mma_sync: float | None
    strided_elements_per_s: float | None
    broadcast_scores_per_s: float | None
    softmax_rates: tuple[tuple[float, float], ...]
    clock_hz: float
    notes: tuple[str, ...]

    def softmax_scores_per_s(self, row_length: int) -> float | None:
        """Of the kernel that torch takes for rows of this length; None is unknown."""
        return next((rate for longest, rate in self.softmax_rates if row_length <= longest), None)


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
            memcpy=ASSUMED_COPY_FRACTION,
            matmul_stream=ASSUMED_COPY_FRACTION,
            tile_update=ASSUMED_COPY_FRACTION,
            read_start_s=0.0,
            mma_sync=None,
            strided_elements_per_s=None,
            broadcast_scores_per_s=None,
            softmax_rates=(),
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
        memcpy=measured.memcpy_bytes_per_s / device.memory_bytes_per_s,
        matmul_stream=measured.matmul_stream_bytes_per_s / device.memory_bytes_per_s,
        tile_update=measured.tile_update_bytes_per_s / device.memory_bytes_per_s,
        read_start_s=measured.read_start_s,
        mma_sync=measured.mma_sync_fraction,
        strided_elements_per_s=measured.strided_elements_per_s,
        broadcast_scores_per_s=measured.broadcast_scores_per_s,
        softmax_rates=measured.softmax_scores_per_s,
        clock_hz=measured.load_clock_hz,
        notes=tuple(notes),
    )
