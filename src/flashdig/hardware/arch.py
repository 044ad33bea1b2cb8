"""Architectures: what one streaming multiprocessor holds and does in a clock, per capability.

Limits (registers, shared memory, warps, blocks): CUDA C++ Programming Guide, "Compute
Capabilities", table of technical specifications; the same figures stand as code in NVIDIA's CCCL,
`libcudacxx/include/cuda/__device/arch_traits.h`. Register allocation units: Nsight Compute's
occupancy calculator (256 registers a warp since capability 5.0). exp2, FMA: the guide's table
"Throughput of Native Arithmetic Instructions". Shared memory: 32 banks of 4 bytes a clock, the
same guide. Tensor rates: the vendors' whitepapers, as named in `mma_source`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from flashdig.hardware.names import nearest

FULL_RATE = 1.0


class UnknownArchitectureError(ValueError):
    """No facts about this compute capability; the message lists what is known."""


@dataclass(frozen=True)
class Architecture:
    """One compute capability. Sizes are bytes, rates are per clock and SM; None is unknown.

    Attributes:
        key: compute capability ("9.0") or AMD target ("gfx942").
        registers: 32-bit registers of an SM; a warp gets them in steps of register_unit.
        schedulers: warp schedulers, each with its quarter of the registers and warps.
        shared_bytes: shared memory of an SM; shared_bytes_per_block: the most one block may ask for
            (opt-in); shared_bytes_reserved: taken by the system for every block.
        matmul_instruction: the fastest matrix instruction.
        mma_shapes: dtype -> the shape of that instruction.
        mma_flop_per_clock: dtype -> dense FLOP of the tensor cores, float32 accumulation. GeForce
            chips of the same capability do half of it for 8 and 16 bits: `Device` has their peaks.
        mma_sync_fraction: part of that rate which the older `mma.sync` reaches.
        exp2_per_clock: results of the special function units.
        fma_per_clock: float32 fused multiply-adds.
        shared_bytes_per_clock: shared-memory bandwidth.
        mma_rows: rows of A that one instruction multiplies with the same B from shared memory; None
            where operands come from registers.
    """

    key: str
    name: str
    registers: int
    max_registers_per_thread: int
    register_unit: int
    schedulers: int
    shared_bytes: int
    shared_bytes_per_block: int
    shared_bytes_reserved: int
    shared_unit: int
    max_warps: int
    max_blocks: int | None
    matmul_instruction: str
    mma_shapes: Mapping[str, str]
    mma_flop_per_clock: Mapping[str, int]
    mma_source: str
    exp2_per_clock: int | None
    fma_per_clock: int
    shared_bytes_per_clock: int
    mma_rows: int | None = None
    mma_sync_fraction: float | None = FULL_RATE
    warp_size: int = 32
    issue_per_clock: int = 4

    @property
    def max_threads(self) -> int:
        return self.max_warps * self.warp_size

    def registers_per_warp(self, registers_per_thread: int) -> int:
        """What a warp of threads with that many registers occupies, in whole allocation units."""
        needed = registers_per_thread * self.warp_size
        return math.ceil(needed / self.register_unit) * self.register_unit


def architecture(key: str) -> Architecture:
    """Facts about the compute capability `key`, as "9.0", "sm_90", "sm_90a" or "gfx942".

    Raises UnknownArchitectureError with the nearest known ones.
    """
    wanted = key.lower().removeprefix("sm_").rstrip("a")
    if wanted.isdigit():
        wanted = f"{wanted[:-1]}.{wanted[-1]}"
    if wanted not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"no facts about compute capability {key!r}; nearest: "
            f"{', '.join(nearest(wanted, ARCHITECTURES))} (all: {', '.join(ARCHITECTURES)})"
        )
    return ARCHITECTURES[wanted]


def _nvidia(
    key: str,
    name: str,
    *,
    shared_kib: int,
    max_warps: int,
    max_blocks: int,
    matmul_instruction: str,
    mma_shapes: Mapping[str, str],
    mma_flop_per_clock: Mapping[str, int],
    mma_source: str,
    fma_per_clock: int,
    exp2_per_clock: int = 16,
    mma_rows: int | None = None,
    mma_sync_fraction: float | None = FULL_RATE,
) -> Architecture:
    reserved = 0 if key == "7.5" else 1024
    return Architecture(
        key=key,
        name=name,
        registers=65536,
        max_registers_per_thread=255,
        register_unit=256,
        schedulers=4,
        shared_bytes=shared_kib * 1024,
        shared_bytes_per_block=shared_kib * 1024 - reserved,
        shared_bytes_reserved=reserved,
        shared_unit=256 if key == "7.5" else 128,
        max_warps=max_warps,
        max_blocks=max_blocks,
        matmul_instruction=matmul_instruction,
        mma_shapes=mma_shapes,
        mma_flop_per_clock=mma_flop_per_clock,
        mma_source=mma_source,
        exp2_per_clock=exp2_per_clock,
        fma_per_clock=fma_per_clock,
        shared_bytes_per_clock=128,
        mma_rows=mma_rows,
        mma_sync_fraction=mma_sync_fraction,
    )


def _both(value: int, *, tf32: int, float8: int | None = None) -> dict[str, int]:
    rates = {"tfloat32": tf32, "float16": value, "bfloat16": value}
    if float8 is not None:
        rates |= {"float8_e4m3fn": float8, "float8_e5m2": float8}
    return rates


_SYNC_SHAPES = {
    "tfloat32": "m16n8k8",
    "float16": "m16n8k16",
    "bfloat16": "m16n8k16",
}
_SYNC_SHAPES_FLOAT8 = {
    **_SYNC_SHAPES,
    "float8_e4m3fn": "m16n8k32",
    "float8_e5m2": "m16n8k32",
}
_WGMMA_SHAPES = {
    "tfloat32": "m64nNk8",
    "float16": "m64nNk16",
    "bfloat16": "m64nNk16",
    "float8_e4m3fn": "m64nNk32",
    "float8_e5m2": "m64nNk32",
}
_TCGEN05_SHAPES = {
    "tfloat32": "m128nNk8",
    "float16": "m128nNk16",
    "bfloat16": "m128nNk16",
    "float8_e4m3fn": "m128nNk32",
    "float8_e5m2": "m128nNk32",
}

# "feeds and speeds" of the FlashAttention-4 paper, arXiv 2603.05451: 8192 FLOP of 16-bit products,
# 16 exponentials and 128 bytes of shared memory a clock on B200; twice the exponentials on sm_103.
_BLACKWELL_SOURCE = "arXiv 2603.05451, analysis of the B200; 2.25 PFLOP/s over 148 SMs"

ARCHITECTURES: Mapping[str, Architecture] = {
    arch.key: arch
    for arch in (
        _nvidia(
            "7.5",
            "Turing",
            shared_kib=64,
            max_warps=32,
            max_blocks=16,
            matmul_instruction="mma.sync",
            mma_shapes={"float16": "m16n8k8"},
            mma_flop_per_clock={"float16": 1024},
            mma_source="Turing whitepaper WP-09183-001: 8 tensor cores of 64 FMA",
            fma_per_clock=64,
        ),
        _nvidia(
            "8.0",
            "Ampere",
            shared_kib=164,
            max_warps=64,
            max_blocks=32,
            matmul_instruction="mma.sync",
            mma_shapes=_SYNC_SHAPES,
            mma_flop_per_clock=_both(2048, tf32=1024),
            mma_source="A100 whitepaper v1.0: 4 tensor cores of 256 FMA",
            fma_per_clock=64,
        ),
        _nvidia(
            "8.6",
            "Ampere",
            shared_kib=100,
            max_warps=48,
            max_blocks=16,
            matmul_instruction="mma.sync",
            mma_shapes=_SYNC_SHAPES,
            mma_flop_per_clock=_both(1024, tf32=512),
            mma_source="GA102 whitepaper v2: 4 tensor cores of 128 FMA",
            fma_per_clock=128,
        ),
        _nvidia(
            "8.7",
            "Ampere (Orin)",
            shared_kib=164,
            max_warps=48,
            max_blocks=16,
            matmul_instruction="mma.sync",
            mma_shapes=_SYNC_SHAPES,
            mma_flop_per_clock=_both(2048, tf32=1024),
            mma_source="Jetson AGX Orin technical brief: 4 tensor cores of 256 FMA",
            fma_per_clock=128,
        ),
        _nvidia(
            "8.9",
            "Ada",
            shared_kib=100,
            max_warps=48,
            max_blocks=24,
            matmul_instruction="mma.sync",
            mma_shapes=_SYNC_SHAPES_FLOAT8,
            mma_flop_per_clock=_both(1024, tf32=512, float8=2048),
            mma_source="Ada whitepaper v2: 4 tensor cores of 128 FMA",
            fma_per_clock=128,
        ),
        _nvidia(
            "9.0",
            "Hopper",
            shared_kib=228,
            max_warps=64,
            max_blocks=32,
            matmul_instruction="wgmma",
            mma_shapes=_WGMMA_SHAPES,
            mma_flop_per_clock=_both(4096, tf32=2048, float8=8192),
            mma_source="H100 whitepaper v1.04: 4 tensor cores of 512 FMA",
            fma_per_clock=128,
            mma_rows=64,
            # Luo et al., arXiv 2402.13499, tensor cores: mma reaches 62.9 % of the peak on average
            mma_sync_fraction=0.629,
        ),
        _nvidia(
            "10.0",
            "Blackwell",
            shared_kib=228,
            max_warps=64,
            max_blocks=32,
            matmul_instruction="tcgen05.mma",
            mma_shapes=_TCGEN05_SHAPES,
            mma_flop_per_clock=_both(8192, tf32=4096, float8=16384),
            mma_source=_BLACKWELL_SOURCE,
            fma_per_clock=128,
            mma_rows=128,
            mma_sync_fraction=None,
        ),
        _nvidia(
            "10.3",
            "Blackwell Ultra",
            shared_kib=228,
            max_warps=64,
            max_blocks=32,
            matmul_instruction="tcgen05.mma",
            mma_shapes=_TCGEN05_SHAPES,
            mma_flop_per_clock=_both(8192, tf32=4096, float8=16384),
            mma_source=_BLACKWELL_SOURCE,
            fma_per_clock=128,
            exp2_per_clock=32,
            mma_rows=128,
            mma_sync_fraction=None,
        ),
        _nvidia(
            "12.0",
            "Blackwell (GeForce)",
            shared_kib=100,
            max_warps=48,
            max_blocks=24,
            matmul_instruction="mma.sync",
            mma_shapes=_SYNC_SHAPES_FLOAT8,
            mma_flop_per_clock=_both(1024, tf32=512, float8=2048),
            mma_source="RTX Blackwell whitepaper v1.1: 4 tensor cores of 128 FMA",
            fma_per_clock=128,
        ),
        Architecture(
            # CDNA 3 ISA reference guide and whitepaper: 4 SIMDs of 512 registers x 64 lanes, given
            # to a wave in steps of 8 a lane; 64 KB of local data share; a rate of its
            # transcendental unit is in neither
            key="gfx942",
            name="CDNA 3",
            registers=131072,
            max_registers_per_thread=512,
            register_unit=512,
            schedulers=4,
            shared_bytes=64 * 1024,
            shared_bytes_per_block=64 * 1024,
            shared_bytes_reserved=0,
            shared_unit=512,
            max_warps=32,
            max_blocks=None,
            matmul_instruction="v_mfma",
            mma_shapes={
                "tfloat32": "32x32x4",
                "float16": "32x32x8",
                "bfloat16": "32x32x8",
                "float8_e4m3fn": "32x32x16",
                "float8_e5m2": "32x32x16",
            },
            mma_flop_per_clock=_both(2048, tf32=1024, float8=4096),
            mma_source="CDNA 3 whitepaper: FLOP a clock and compute unit",
            exp2_per_clock=None,
            fma_per_clock=128,
            shared_bytes_per_clock=128,
            warp_size=64,
        ),
    )
}
