"""A card of a compiled kernel: what it holds, its inner loop, the cycles of it on each pipe.

Cycles are of one iteration of one block, as if each pipe worked alone and never waited.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flashdig.costs.shared_memory import forward_operands
from flashdig.evidence.offline import Compiled, OfflineError, read_cubin
from flashdig.evidence.sass import (
    FAMILIES,
    MATRIX_FAMILIES,
    Instruction,
    families,
    function_names,
    inner_loop,
    parse_sass,
)
from flashdig.hardware.arch import Architecture, architecture
from flashdig.hardware.occupancy import Occupancy, occupancy

_TILE = re.compile(r"_(?P<type>fp16|bf16|fp32)_d(?P<d>\d+)_m(?P<m>\d+)n(?P<n>\d+)_")
_ARCH = re.compile(r"\.target\s+sm_(\d+)|EF_CUDA_SM(\d+)")
_WIDTHS = {"128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
_MATRICES = re.compile(r"\.MT?88(?:\.(\d))?")
_FMA = ("FFMA", "FADD", "FMUL")
_MATRIX_OPCODES = {name for family in MATRIX_FAMILIES for name in FAMILIES[family]}
# more than a softmax has and fewer than the products of the smallest head_dim have
_FFMA_OF_A_SCORE = 8
# what wgmma multiplies in one instruction is 32 bytes deep, in every type
_WGMMA_DEPTH_BYTES = 32


class UnreadableCubinError(ValueError):
    """The file is not a cubin with one kernel; the message names it."""


@dataclass(frozen=True)
class TileShape:
    """Tile and head_dim of one iteration, in elements, as the name of our kernels tells them."""

    tile_m: int
    tile_n: int
    head_dim: int


@dataclass(frozen=True)
class SassCard:
    """One kernel on one chip.

    Attributes:
        subject: exhibit or file; arch: as "sm_90"; kernel: as profilers show it.
        threads: of a block; None for a cubin without Triton's metadata beside it, and then
            `occupancy` is None and `cycles` empty.
        shared_bytes: of a block; None like `threads`.
        whole, loop: family -> instructions of the code and of the inner loop.
        instructions, loop_instructions: all of them; 0 where no loop holds products.
        exp2_expected: scores of a tile for each thread; None where the tile is unknown.
        cycles: pipe -> cycles of one iteration of one block; None where it cannot be counted.
    """

    subject: str
    arch: str
    kernel: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int | None
    threads: int | None
    occupancy: Occupancy | None
    instructions: int
    loop_instructions: int
    whole: Mapping[str, int]
    loop: Mapping[str, int]
    exp2_expected: int | None
    cycles: Mapping[str, float | None]

    @property
    def limiter(self) -> str | None:
        """The busiest pipe of those that are known."""
        known = {pipe: cycles for pipe, cycles in self.cycles.items() if cycles is not None}
        return max(known, key=known.__getitem__, default=None)

    @property
    def sentences(self) -> list[str]:
        """What the figures say."""
        said = [self._products()]
        if self.spill_bytes:
            said.append(
                f"{self.spill_bytes} bytes spilled: values that found no register go through "
                "local memory"
            )
        if self.occupancy is not None:
            said.append(self.occupancy.explain())
        if self.threads is None:
            said.append("threads and shared memory unknown: no Triton metadata beside the file")
        if self.exp2_expected is not None and self.loop_instructions:
            count, expected = self.loop.get("MUFU.EX2", 0), self.exp2_expected
            said.append(f"{count} exp2 a thread in the loop for {expected} scores")
            if count > expected:
                said[-1] += f", {count - expected} beyond them, as rescale factors are"
        if self.limiter is not None:
            said.append(
                f"busiest pipe of the loop: {self.limiter}, {self.cycles[self.limiter]:.0f} cycles"
            )
        return said

    def _products(self) -> str:
        used = [family for family in MATRIX_FAMILIES if family in self.whole]
        newest = architecture(self.arch).matmul_instruction
        if used == ["HMMA"] and newest != "mma.sync":
            return f"tensor cores by HMMA, though {self.arch} has {newest}"
        if used:
            return f"tensor cores by {', '.join(used)}"
        multiplications, exponentials = self.loop.get("FFMA", 0), self.loop.get("MUFU.EX2", 0)
        if multiplications <= _FFMA_OF_A_SCORE * exponentials:
            return "no matrix products in a loop"
        if self.arch == "sm_75" and not self.subject.endswith(".cubin"):
            return "no tensor cores on sm_75: Triton emits FFMA only"
        return "no tensor cores: the products are FFMA"

    def to_dict(self) -> dict[str, Any]:
        """All of it for JSON."""
        return {**asdict(self), "limiter": self.limiter, "sentences": self.sentences}


def card_of(subject: str, arch: str, kernel: Compiled) -> SassCard:
    """The card of a compiled kernel of an exhibit. Raises UnknownArchitectureError."""
    found = {
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "threads": kernel.threads,
    }
    return _card(subject, arch, kernel.name, kernel.listing, found)


def card_of_cubin(path: Path) -> SassCard:
    """The card of a cubin with one kernel, with what Triton's cache has beside it (NAME.json).

    Raises UnreadableCubinError; UnknownArchitectureError.
    """
    beside = path.with_suffix(".json")
    try:
        code = read_cubin(path.read_bytes())
        metadata = json.loads(beside.read_text()) if beside.exists() else {}
    except (OSError, OfflineError) as error:
        raise UnreadableCubinError(f"{path}: {error}") from error
    except ValueError as error:
        raise UnreadableCubinError(f"{beside}: not Triton's metadata: {error}") from error
    if not isinstance(metadata, dict):
        raise UnreadableCubinError(f"{beside}: not Triton's metadata: it must be an object")
    names = function_names(code["listing"])
    if len(names) != 1:
        raise UnreadableCubinError(f"{path}: {len(names)} kernels, not one: {', '.join(names)}")
    target = _ARCH.search(code["listing"])
    if target is None:
        raise UnreadableCubinError(f"{path}: it does not say which chip it is for")
    warps = metadata.get("num_warps")
    found = {
        "registers": code["registers"],
        "stack_bytes": code["stack_bytes"],
        "spill_bytes": code["spill_store_bytes"] + code["spill_load_bytes"],
        "shared_bytes": metadata.get("shared"),
        "threads": None if warps is None else 32 * warps,
    }
    return _card(str(path), f"sm_{target[1] or target[2]}", names[0], code["listing"], found)


def _card(subject: str, arch: str, kernel: str, listing: str, found: Mapping[str, Any]) -> SassCard:
    facts, instructions = architecture(arch), parse_sass(listing)
    loop = inner_loop(instructions)
    inside = loop.instructions if loop is not None else ()
    threads, shape = found["threads"], _shape(kernel)
    occupied = None
    if threads is not None:
        occupied = occupancy(
            facts,
            threads_per_block=threads,
            registers_per_thread=found["registers"],
            shared_bytes_per_block=found["shared_bytes"] or 0,
        )
    return SassCard(
        subject=subject,
        arch=arch,
        kernel=kernel,
        **found,
        occupancy=occupied,
        instructions=len(instructions),
        loop_instructions=len(inside),
        whole=families(instructions),
        loop=families(inside),
        exp2_expected=shape.tile_m * shape.tile_n // threads if shape and threads else None,
        cycles=loop_cycles(facts, inside, threads, shape) if inside and threads else {},
    )


def _shape(kernel: str) -> TileShape | None:
    found = _TILE.search(kernel)
    return TileShape(int(found["m"]), int(found["n"]), int(found["d"])) if found else None


def loop_cycles(
    arch: Architecture, loop: Sequence[Instruction], threads: int, shape: TileShape | None
) -> dict[str, float | None]:
    """Pipe -> cycles of an SM for one iteration of a block in which every warp runs `loop`.

    Shared memory is counted without bank conflicts and as if no two lanes read the same word. The
    shape of tcgen05's products is not in the code, so they are those of `shape`; None without it,
    and for tensor cores whose rate for this instruction is not known.
    """
    warps = -(-threads // arch.warp_size)
    counts: dict[str, int] = {}
    for instruction in loop:
        counts[instruction.base] = counts.get(instruction.base, 0) + 1
    fma = sum(counts.get(name, 0) + 2 * counts.get(f"{name}2", 0) for name in _FMA)
    cycles: dict[str, float | None] = {}
    if any(family in families(loop) for family in MATRIX_FAMILIES):
        cycles["tensor cores"] = _tensor_cycles(arch, loop, warps, shape)
    cycles["exp2"] = None
    if arch.exp2_per_clock is not None:
        cycles["exp2"] = counts.get("MUFU", 0) * threads / arch.exp2_per_clock
    cycles["FMA units"] = fma * threads / arch.fma_per_clock
    cycles["shared memory"] = _shared_cycles(arch, loop, warps, shape)
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
        size = _product_size(base, modifiers)
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


def _product_size(base: str, modifiers: Sequence[str]) -> int | None:
    """Multiply-adds of one HMMA ("16816" is 16 x 8 x 16) or HGMMA ("64x128x16")."""
    first = modifiers[0] if modifiers else ""
    if base == "HGMMA" and re.fullmatch(r"\d+x\d+x\d+", first):
        m, n, k = (int(part) for part in first.split("x"))
        return m * n * k
    if base == "HMMA" and re.fullmatch(r"168(4|8|16|32)", first):
        return 16 * 8 * int(first[3:])
    return None


def _shared_cycles(
    arch: Architecture, loop: Sequence[Instruction], warps: int, shape: TileShape | None
) -> float | None:
    """Accesses of warps, and what wgmma and tcgen05 read of their operands themselves."""
    total = 0.0
    tcgen05 = False
    for instruction in loop:
        base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
        if base in ("LDS", "STS", "LDGSTS"):
            width = next((_WIDTHS[m] for m in modifiers if m in _WIDTHS), 4)
            total += width * arch.warp_size * warps
        elif base in ("LDSM", "STSM"):
            matrices = _MATRICES.search(instruction.opcode)
            total += 128 * int(matrices[1] or 1) * warps if matrices else 0
        elif base == "HGMMA":
            if _product_size(base, modifiers) is None:
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
