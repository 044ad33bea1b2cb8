"""The Triton exhibits as compiled: registers, shared memory and instructions of their inner loops.

Compiled offline for compute capability 9.0 with Triton 3.6.0 and its ptxas, 2026-11-29; the loop is
counted in the listing of `cuobjdump`, from the target of the backward branch to the branch (of v1
the inner loop, over the queries). float16 and bfloat16 differ by a few instructions; float16 is
listed. `evidence.offline` compiles them again.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashdig.hardware.arch import Architecture
from flashdig.hardware.occupancy import occupancy

COMPILED_FOR = "9.0"


@dataclass(frozen=True)
class CompiledLoop:
    """One exhibit at one precision and head_dim; the last two numbers are instructions a warp."""

    registers: int
    shared_bytes: int
    full: int
    causal: int

    def instructions(self, causal: bool) -> int:
        return self.causal if causal else self.full

    def blocks_per_sm(self, arch: Architecture, warps: int) -> int:
        """Resident blocks by registers and shared memory."""
        found = occupancy(
            arch,
            threads_per_block=warps * arch.warp_size,
            registers_per_thread=self.registers,
            shared_bytes_per_block=self.shared_bytes,
        )
        return max(1, found.blocks_per_sm)


_LOOPS = {
    ("v1", "16 bits", 32): CompiledLoop(133, 29184, 707, 774),
    ("v1", "16 bits", 64): CompiledLoop(146, 57856, 929, 1014),
    ("v1", "16 bits", 128): CompiledLoop(226, 115200, 1277, 1342),
    ("v1", "16 bits", 256): CompiledLoop(255, 197120, 1524, 1555),
    ("v1", "float32", 32): CompiledLoop(121, 20736, 1062, 1083),
    ("v1", "float32", 64): CompiledLoop(255, 41216, 1840, 1880),
    ("v1", "tfloat32", 32): CompiledLoop(96, 20736, 607, 655),
    ("v1", "tfloat32", 64): CompiledLoop(210, 37120, 655, 674),
    ("v1", "tfloat32", 128): CompiledLoop(252, 73984, 955, 976),
    ("v2", "16 bits", 32): CompiledLoop(90, 28672, 333, 407),
    ("v2", "16 bits", 64): CompiledLoop(120, 57344, 370, 445),
    ("v2", "16 bits", 128): CompiledLoop(168, 114688, 426, 501),
    ("v2", "16 bits", 256): CompiledLoop(158, 131072, 375, 414),
    ("v2", "float32", 32): CompiledLoop(72, 24576, 821, 838),
    ("v2", "float32", 64): CompiledLoop(194, 45184, 1416, 1434),
    ("v2", "float32", 128): CompiledLoop(255, 86016, 2953, 2994),
    ("v2", "tfloat32", 32): CompiledLoop(95, 20480, 405, 445),
    ("v2", "tfloat32", 64): CompiledLoop(96, 45056, 356, 371),
    ("v2", "tfloat32", 128): CompiledLoop(128, 86016, 503, 524),
    ("v2_transposed", "16 bits", 32): CompiledLoop(92, 28672, 343, 420),
    ("v2_transposed", "16 bits", 64): CompiledLoop(113, 57344, 391, 466),
    ("v2_transposed", "16 bits", 128): CompiledLoop(154, 114688, 464, 531),
    ("v2_transposed", "16 bits", 256): CompiledLoop(161, 131072, 412, 436),
    ("v2_transposed", "float32", 32): CompiledLoop(68, 24576, 849, 867),
    ("v2_transposed", "float32", 64): CompiledLoop(187, 45184, 1459, 1477),
    ("v2_transposed", "float32", 128): CompiledLoop(255, 86016, 3111, 3143),
    ("v2_transposed", "tfloat32", 32): CompiledLoop(72, 20480, 444, 486),
    ("v2_transposed", "tfloat32", 64): CompiledLoop(95, 45056, 383, 397),
    ("v2_transposed", "tfloat32", 128): CompiledLoop(127, 86016, 543, 560),
}


def compiled_loop(arch: Architecture, name: str, dtype: str, head_dim: int) -> CompiledLoop | None:
    """What is known of an exhibit's loop; None for what was not compiled.

    Args:
        dtype: of the products: "float16", "bfloat16", "float32" or "tfloat32".
    """
    if arch.key != COMPILED_FOR:
        return None
    precision = dtype if dtype in ("float32", "tfloat32") else "16 bits"
    return _LOOPS.get((name, precision, head_dim))


@dataclass(frozen=True)
class RowKernel:
    """online_softmax: instructions a warp of its two loops for `block` scores by four warps."""

    block: int
    first: int
    second: int
    first_causal: int
    second_causal: int


# A program of online_softmax is one row by four warps.
ROW_WARPS = 4
# Instructions outside of the loops, a row.
ROW_INSTRUCTIONS = 90
_ROW_KERNELS = (
    RowKernel(256, 81, 41, 90, 51),
    RowKernel(512, 102, 67, 120, 85),
    RowKernel(1024, 145, 121, 174, 153),
)


def row_instructions(seqlen_k: int, seen_k: float, causal: bool) -> float:
    """Instructions of a warp of online_softmax for a row of which `seen_k` scores are visible."""
    kernel = next((k for k in _ROW_KERNELS if k.block >= seqlen_k), _ROW_KERNELS[-1])
    blocks, seen_blocks = max(1.0, seqlen_k / kernel.block), max(1.0, seen_k / kernel.block)
    if causal:
        loops = seen_blocks * kernel.first_causal + blocks * kernel.second_causal
    else:
        loops = seen_blocks * kernel.first + blocks * kernel.second
    return ROW_INSTRUCTIONS + loops
