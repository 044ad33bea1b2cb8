"""A card of a compiled kernel: what it holds, its inner loop, the cycles of it on each pipe.

Cycles are of one iteration of one block, as if each pipe worked alone and never waited.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from flashdig.bench.results import Record
from flashdig.costs.banks import BankConflicts
from flashdig.evidence.bank_conflicts import LoopBanks, loop_banks, loop_conflicts
from flashdig.evidence.gemms import Gemms, fma_size, sort_products
from flashdig.evidence.loop_cycles import TileShape, loop_cycles, product_size
from flashdig.evidence.measured_loops import MeasuredLoop, measured_loop
from flashdig.evidence.offline import Compiled, OfflineError, read_cubin
from flashdig.evidence.ptxas import PtxasError, PtxasReport, run_ptxas
from flashdig.evidence.sass import (
    MATRIX_FAMILIES,
    Instruction,
    families,
    function_names,
    inner_loop,
    parse_sass,
)
from flashdig.evidence.triton_cache import metadata_beside
from flashdig.hardware.arch import architecture
from flashdig.hardware.occupancy import Occupancy, occupancy

_TILE = re.compile(r"_(?P<type>fp16|bf16|fp32)_d(?P<d>\d+)_m(?P<m>\d+)n(?P<n>\d+)_")
_ARCH = re.compile(r"\.target\s+sm_(\d+)|EF_CUDA_SM(\d+)")
# more than a softmax has and fewer than the products of the smallest head_dim have
_FFMA_OF_A_SCORE = 8


class UnreadableCubinError(ValueError):
    """The file is not a cubin with one kernel; the message names it."""


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
        gemms: the loop's products by what they multiply; None without an exponential in the loop.
        banks: conflicts of the loop's accesses to shared memory; None without accesses or threads.
        ptxas: what ptxas says of the kernel's PTX; None where there is none, as beside a cubin.
        measured: cycles of an SM for one iteration, from a record of this chip.
        note: what the reader must know of how the card was made; empty for nothing.
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
    gemms: Gemms | None = None
    banks: LoopBanks | None = None
    ptxas: PtxasReport | None = None
    note: str = ""
    measured: MeasuredLoop | None = None

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
        if self.ptxas is not None:
            said += [f"warning of ptxas: {warning}" for warning in self.ptxas.warnings]
        if self.occupancy is not None:
            said.append(self.occupancy.explain())
        if self.threads is None:
            said.append("threads and shared memory unknown: no Triton metadata beside the file")
        if self.exp2_expected is not None and self.loop_instructions:
            count, expected = self.loop.get("MUFU.EX2", 0), self.exp2_expected
            said.append(f"{count} exp2 a thread in the loop for {expected} scores")
            if count > expected:
                said[-1] += f", {count - expected} beyond them, as rescale factors are"
        if self.gemms is not None:
            said.append(self.gemms.explain())
        if self.banks is not None:
            said.append(self.banks.explain())
        if self.limiter is not None:
            said.append(
                f"busiest pipe of the loop: {self.limiter}, {self.cycles[self.limiter]:.0f} cycles"
            )
        if self.measured is not None:
            busiest = None if self.limiter is None else self.cycles[self.limiter]
            said.append(self.measured.explain(busiest))
        if self.note:
            said.append(self.note)
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SassCard:
        """A card from what `to_dict` gave, of this or an earlier release.

        Raises KeyError or TypeError for anything else.
        """
        optional = {field.name for field in fields(cls) if field.default is not MISSING}
        found = {
            field.name: values[field.name]
            for field in fields(cls)
            if field.name in values or field.name not in optional
        }
        for name, kind in (
            ("occupancy", Occupancy),
            ("gemms", Gemms),
            ("measured", MeasuredLoop),
        ):
            if found.get(name) is not None:
                found[name] = kind(**found[name])
        if found.get("banks") is not None:
            found["banks"] = LoopBanks.from_dict(found["banks"])
        if found.get("ptxas") is not None:
            warnings = tuple(found["ptxas"]["warnings"])
            found["ptxas"] = PtxasReport(**{**found["ptxas"], "warnings": warnings})
        return cls(**found)


def card_of(subject: str, arch: str, kernel: Compiled, *, note: str = "") -> SassCard:
    """The card of a compiled kernel. Raises UnknownArchitectureError."""
    found = {
        "registers": kernel.registers,
        "stack_bytes": kernel.stack_bytes,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes,
        "threads": kernel.threads,
    }
    code = _Code(kernel.name, kernel.listing, kernel.ptx, kernel.options, note)
    return _card(subject, arch, code, found)


def with_measured(card: SassCard, record: Record) -> SassCard:
    """The card with what a dig's record shows of its kernel on its chip."""
    shape = shape_of(card.kernel)
    if shape is None:
        return card
    return replace(card, measured=measured_loop(record, card.kernel, shape, card.arch))


def card_of_cubin(path: Path, *, subject: str | None = None) -> SassCard:
    """The card of a cubin with one kernel, with what Triton's cache has beside it.

    Args:
        subject: the card's; the path without it.

    NAME.json tells threads and shared memory, NAME.ptx is given to ptxas. Raises
    UnreadableCubinError; UnknownArchitectureError.
    """
    try:
        code = read_cubin(path.read_bytes())
        metadata = metadata_beside(path)
        ptx = path.with_suffix(".ptx")
        text = ptx.read_text() if ptx.exists() else ""
    except (OSError, OfflineError) as error:
        raise UnreadableCubinError(f"{path}: {error}") from error
    except ValueError as error:
        raise UnreadableCubinError(str(error)) from error
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
    arch = f"sm_{target[1] or target[2]}"
    return _card(
        subject or str(path), arch, _Code(names[0], code["listing"], text, metadata), found
    )


@dataclass(frozen=True)
class _Code:
    """A kernel's name, its listing, and what ptxas was given."""

    kernel: str
    listing: str
    ptx: str
    options: Mapping[str, Any]
    note: str = ""


def _card(subject: str, arch: str, code: _Code, found: Mapping[str, Any]) -> SassCard:
    facts, instructions = architecture(arch), parse_sass(code.listing)
    loop = inner_loop(instructions)
    inside = loop.instructions if loop is not None else ()
    threads, shape = found["threads"], shape_of(code.kernel)
    occupied = banks = None
    conflicts: dict[int, BankConflicts | None] = {}
    if threads is not None:
        occupied = occupancy(
            facts,
            threads_per_block=threads,
            registers_per_thread=found["registers"],
            shared_bytes_per_block=found["shared_bytes"] or 0,
        )
        if loop is not None:
            conflicts = loop_conflicts(instructions, loop, threads)
            banks = loop_banks(loop, conflicts)
    report, note = _ptxas(code, found["registers"])
    in_loop = families(inside)
    return SassCard(
        subject=subject,
        arch=arch,
        kernel=code.kernel,
        **found,
        occupancy=occupied,
        instructions=len(instructions),
        loop_instructions=len(inside),
        whole=families(instructions),
        loop=in_loop,
        exp2_expected=shape.tile_m * shape.tile_n // threads if shape and threads else None,
        cycles=loop_cycles(facts, inside, threads, shape, conflicts) if inside and threads else {},
        gemms=_gemms(inside, threads, shape) if in_loop.get("MUFU.EX2") else None,
        banks=banks,
        ptxas=report,
        note=note,
    )


def _ptxas(code: _Code, registers: int) -> tuple[PtxasReport | None, str]:
    """ptxas on the kernel's PTX, and the card's note with what is to be said of that."""
    said = [code.note] if code.note else []
    report = None
    if code.ptx:
        try:
            report = run_ptxas(code.ptx, code.options)
        except PtxasError as error:
            said.append(f"ptxas was not heard: {error}")
    if report is not None and report.registers != registers:
        said.append(
            f"the ptxas here gives {report.registers} registers, not {registers}: another release "
            "of it made the cubin, and its warnings may have been others"
        )
    return report, "; ".join(said)


def _gemms(
    loop: Sequence[Instruction], threads: int | None, shape: TileShape | None
) -> Gemms | None:
    """The loop's products by what they multiply, beside what the tile needs."""
    scores, output, unknown = sort_products(loop)
    if not (scores or output or unknown):
        return None
    needed = None
    if threads and shape:
        # Q K^T and P V are of one size
        needed = _needed((*scores, *output, *unknown), threads, shape)
    return Gemms(len(scores), len(output), len(unknown), needed, needed)


def _needed(products: Sequence[Instruction], threads: int, shape: TileShape) -> int | None:
    """Instructions a warp for one product of the tile; None for those of unknown or mixed size."""
    sizes = {_multiply_adds_of_a_warp(i) for i in products}
    (size,) = sizes if len(sizes) == 1 else (None,)
    if size is None:
        return None
    return -(-shape.tile_m * shape.tile_n * shape.head_dim * 32 // (threads * size))


def _multiply_adds_of_a_warp(instruction: Instruction) -> int | None:
    """A warp's share of one instruction's multiply-adds."""
    if instruction.base in ("FFMA", "FFMA2"):
        return 32 * fma_size(instruction)
    size = product_size(instruction.base, instruction.opcode.split(".")[1:])
    if size is None:
        return None
    return size // 4 if instruction.base == "HGMMA" else size


def shape_of(kernel: str) -> TileShape | None:
    """The tile in the name of one of our kernels."""
    found = _TILE.search(kernel)
    return TileShape(int(found["m"]), int(found["n"]), int(found["d"])) if found else None
