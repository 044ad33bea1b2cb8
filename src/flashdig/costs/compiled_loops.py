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
    """One exhibit at one precision and head_dim.

    Attributes:
        shared_bytes: of a block.
        registers: of a thread, without and with the causal mask.
        loop: instructions a warp, without and with the causal mask.
    """

    shared_bytes: int
    registers: tuple[int, int]
    loop: tuple[int, int]

    def instructions(self, causal: bool) -> int:
        return self.loop[causal]

    def blocks_per_sm(self, arch: Architecture, warps: int, causal: bool) -> int:
        """Resident blocks by registers and shared memory."""
        found = occupancy(
            arch,
            threads_per_block=warps * arch.warp_size,
            registers_per_thread=self.registers[causal],
            shared_bytes_per_block=self.shared_bytes,
        )
        return max(1, found.blocks_per_sm)


_LOOPS = {
    ("v1", "16 bits", 32): CompiledLoop(29184, (133, 142), (707, 774)),
    ("v1", "16 bits", 64): CompiledLoop(57856, (146, 203), (929, 1014)),
    ("v1", "16 bits", 128): CompiledLoop(115200, (226, 218), (1277, 1342)),
    ("v1", "16 bits", 256): CompiledLoop(197120, (255, 255), (1524, 1555)),
    ("v1", "float32", 32): CompiledLoop(20736, (121, 148), (1062, 1083)),
    ("v1", "float32", 64): CompiledLoop(41216, (255, 255), (1840, 1880)),
    ("v1", "tfloat32", 32): CompiledLoop(20736, (96, 111), (607, 655)),
    ("v1", "tfloat32", 64): CompiledLoop(37120, (210, 212), (655, 674)),
    ("v1", "tfloat32", 128): CompiledLoop(73984, (252, 254), (955, 976)),
    ("v2", "16 bits", 32): CompiledLoop(28672, (90, 90), (333, 407)),
    ("v2", "16 bits", 64): CompiledLoop(57344, (120, 120), (370, 445)),
    ("v2", "16 bits", 128): CompiledLoop(114688, (168, 168), (426, 501)),
    ("v2", "16 bits", 256): CompiledLoop(131072, (158, 160), (375, 414)),
    ("v2", "float32", 32): CompiledLoop(24576, (72, 80), (821, 838)),
    ("v2", "float32", 64): CompiledLoop(45184, (194, 202), (1416, 1434)),
    ("v2", "float32", 128): CompiledLoop(86016, (255, 255), (2953, 2994)),
    ("v2", "tfloat32", 32): CompiledLoop(20480, (95, 96), (405, 445)),
    ("v2", "tfloat32", 64): CompiledLoop(45056, (96, 96), (356, 371)),
    ("v2", "tfloat32", 128): CompiledLoop(86016, (128, 128), (503, 524)),
    ("v2_transposed", "16 bits", 32): CompiledLoop(28672, (92, 92), (343, 420)),
    ("v2_transposed", "16 bits", 64): CompiledLoop(57344, (113, 107), (391, 466)),
    ("v2_transposed", "16 bits", 128): CompiledLoop(114688, (154, 168), (464, 531)),
    ("v2_transposed", "16 bits", 256): CompiledLoop(131072, (161, 163), (412, 436)),
    ("v2_transposed", "float32", 32): CompiledLoop(24576, (68, 72), (849, 867)),
    ("v2_transposed", "float32", 64): CompiledLoop(45184, (187, 193), (1459, 1477)),
    ("v2_transposed", "float32", 128): CompiledLoop(86016, (255, 255), (3111, 3143)),
    ("v2_transposed", "tfloat32", 32): CompiledLoop(20480, (72, 80), (444, 486)),
    ("v2_transposed", "tfloat32", 64): CompiledLoop(45056, (95, 96), (383, 397)),
    ("v2_transposed", "tfloat32", 128): CompiledLoop(86016, (127, 143), (543, 560)),
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
