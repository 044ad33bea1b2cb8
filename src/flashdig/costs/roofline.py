"""A roofline with three roofs: memory bandwidth, matrix products, exponentials.

The classical two roofs miss what limits attention on new chips: Hopper does 4,096 FLOP of 16-bit
products but 16 exponentials in a clock and SM, so at head_dim 64 both take the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdig.hardware.devices import Device

MEMORY = "memory bandwidth"
MATMUL = "matrix products"
EXP2 = "exponentials"


@dataclass(frozen=True)
class Roofs:
    """Seconds that each roof alone asks for; exp2_s is None where the rate is unknown."""

    memory_s: float
    matmul_s: float
    exp2_s: float | None

    @property
    def by_name(self) -> dict[str, float]:
        roofs = {MEMORY: self.memory_s, MATMUL: self.matmul_s}
        if self.exp2_s is not None:
            roofs[EXP2] = self.exp2_s
        return roofs

    @property
    def floor_s(self) -> float:
        """No faster than the slowest roof."""
        return max(self.by_name.values())

    @property
    def limiter(self) -> str:
        return max(self.by_name, key=self.by_name.__getitem__)

    def __add__(self, other: Roofs) -> Roofs:
        exp2_s = None
        if self.exp2_s is not None and other.exp2_s is not None:
            exp2_s = self.exp2_s + other.exp2_s
        return Roofs(self.memory_s + other.memory_s, self.matmul_s + other.matmul_s, exp2_s)


def roofs(
    device: Device,
    *,
    memory_bytes: float,
    flops: float,
    dtype: str,
    exp2: float = 0.0,
    clock_hz: float | None = None,
    busy_fraction: float = 1.0,
) -> Roofs:
    """The three roofs of some work on a device, from its specified peaks.

    Args:
        dtype: of the products, "tfloat32" included.
        clock_hz: of the SMs; the highest known one if not given.
        busy_fraction: part of the SMs that has work.

    Raises ValueError when the device has no known peak for `dtype`.
    """
    clock_hz = clock_hz or device.highest_clock_hz
    peak = device.flop_per_s(dtype, clock_hz)
    if peak is None:
        raise ValueError(
            f"{device.name} has no known peak for {dtype}; known: "
            f"{', '.join(device.peak_flop_per_s)}"
        )
    exp2_rate = device.exp2_per_s(clock_hz)
    return Roofs(
        memory_s=memory_bytes / device.memory_bytes_per_s,
        matmul_s=flops / (peak * busy_fraction),
        exp2_s=None if exp2_rate is None else exp2 / (exp2_rate * busy_fraction),
    )


def arithmetic_intensity(flops: float, memory_bytes: float) -> float:
    """FLOP for each byte moved."""
    return flops / memory_bytes


def ridge_point(device: Device, dtype: str) -> float:
    """FLOP/byte from which on products and not memory are the roof, at the specified peaks."""
    peak = device.flop_per_s(dtype)
    if peak is None:
        raise ValueError(f"{device.name} has no known peak for {dtype}")
    return peak / device.memory_bytes_per_s
