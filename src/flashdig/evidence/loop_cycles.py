"""Cycles that the instructions of an inner loop keep each pipe of an SM busy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashdig.costs.banks import WAVEFRONT_BYTES, BankConflicts
from flashdig.costs.shared_memory import forward_operands
from flashdig.evidence.sass import FAMILIES, MATRIX_FAMILIES, Instruction, families
from flashdig.hardware.arch import Architecture

# modifiers of accesses -> bytes a lane
WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_MATRICES = re.compile(r"\.MT?88(?:\.(\d))?")
_FMA = ("FFMA", "FADD", "FMUL")
_MATRIX_OPCODES = {name for family in MATRIX_FAMILIES for name in FAMILIES[family]}
# what wgmma multiplies in one instruction is 32 bytes deep, in every type
_WGMMA_DEPTH_BYTES = 32


@dataclass(frozen=True)
class TileShape:
    """Tile and head_dim of one iteration, in elements, as the name of our kernels tells them."""

    tile_m: int
    tile_n: int
    head_dim: int


def matrices(instruction: Instruction) -> int | None:
    """8 x 8 matrices that LDSM or STSM moves; None for a shape that is not known."""
    found = _MATRICES.search(instruction.opcode)
    return int(found[1] or 1) if found else None


def loop_cycles(
    arch: Architecture,
    loop: Sequence[Instruction],
    threads: int,
    shape: TileShape | None,
    conflicts: Mapping[int, BankConflicts | None] | None = None,
) -> dict[str, float | None]:
    """Pipe -> cycles of an SM for one iteration of a block in which every warp runs `loop`.

    Shared memory is counted by wavefronts where `conflicts` (of an address, in all warps) has them;
    elsewhere without bank conflicts and as if no two lanes read the same word. The shape of
    tcgen05's products is not in the code, so they are those of `shape`; None without it, and for
    tensor cores whose rate for this instruction is not known.
    """
    warps = -(-threads // arch.warp_size)
    running = [i for i in loop if i.runs]
    counts: dict[str, int] = {}
    for instruction in running:
        counts[instruction.base] = counts.get(instruction.base, 0) + 1
    fma = sum(counts.get(name, 0) + 2 * counts.get(f"{name}2", 0) for name in _FMA)
    cycles: dict[str, float | None] = {}
    if any(family in families(loop) for family in MATRIX_FAMILIES):
        cycles["tensor cores"] = _tensor_cycles(arch, running, warps, shape)
    cycles["exp2"] = None
    if arch.exp2_per_clock is not None:
        cycles["exp2"] = counts.get("MUFU", 0) * threads / arch.exp2_per_clock
    cycles["FMA units"] = fma * threads / arch.fma_per_clock
    cycles["shared memory"] = _shared_cycles(arch, running, warps, shape, conflicts or {})
    cycles["issue"] = len(loop) * warps / arch.issue_per_clock
    return cycles


def _tensor_cycles(
    arch: Architecture, loop: Sequence[Instruction], warps: int, shape: TileShape | None
) -> float | None:
    cycles = 0.0
    tcgen05 = False
    for instruction in loop:
        base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
        if base == "UTCHMMA":
            tcgen05 = True
            continue
        if base not in ("HMMA", "HGMMA"):
            if base in _MATRIX_OPCODES:
                return None
            continue
        rate = arch.mma_flop_per_clock.get("tfloat32" if "TF32" in modifiers else "float16")
        size = product_size(base, modifiers)
        if size is None or rate is None:
            return None
        if base == "HMMA":
            if arch.mma_sync_fraction is None:
                return None
            cycles += 2 * size * warps / (rate * arch.mma_sync_fraction)
        else:
            cycles += 2 * size * warps / 4 / rate  # of a group of four warps
    if tcgen05:
        if shape is None:
            return None
        flop = 4 * shape.tile_m * shape.tile_n * shape.head_dim
        cycles += flop / arch.mma_flop_per_clock["float16"]
    return cycles


def product_size(base: str, modifiers: Sequence[str]) -> int | None:
    """Multiply-adds of one HMMA ("16816" is 16 x 8 x 16) or HGMMA ("64x128x16")."""
    first = modifiers[0] if modifiers else ""
    if base == "HGMMA" and re.fullmatch(r"\d+x\d+x\d+", first):
        m, n, k = (int(part) for part in first.split("x"))
        return m * n * k
    if base == "HMMA" and re.fullmatch(r"168(4|8|16|32)", first):
        return 16 * 8 * int(first[3:])
    return None


def _shared_cycles(
    arch: Architecture,
    loop: Sequence[Instruction],
    warps: int,
    shape: TileShape | None,
    conflicts: Mapping[int, BankConflicts | None],
) -> float | None:
    """Accesses of warps, and what wgmma and tcgen05 read of their operands themselves."""
    total = 0.0
    tcgen05 = False
    for instruction in loop:
        base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
        if (known := conflicts.get(instruction.address)) is not None:
            total += WAVEFRONT_BYTES * known.wavefronts
        elif base in ("LDS", "STS", "LDGSTS"):
            width = next((WIDTHS[m] for m in modifiers if m in WIDTHS), 4)
            total += width * arch.warp_size * warps
        elif base in ("LDSM", "STSM"):
            total += 128 * (matrices(instruction) or 0) * warps
        elif base == "HGMMA":
            if product_size(base, modifiers) is None:
                return None  # of a sparse A
            m, n, _ = (int(part) for part in modifiers[0].split("x"))
            # "R24, gdesc[UR8], R24": A comes from shared memory too; "R24, R4, gdesc[UR8]": not
            from_shared = instruction.operands.split(",")[1].strip().startswith("gdesc")
            total += _WGMMA_DEPTH_BYTES * (n + m * from_shared) * warps / 4
        tcgen05 |= base == "UTCHMMA"
    if tcgen05:
        if shape is None:
            return None
        sizes = (shape.tile_m, shape.tile_n, shape.head_dim, shape.head_dim)
        total += 2 * forward_operands(arch, *sizes, warps, newest=True)
    return total / arch.shared_bytes_per_clock
