"""Which registers a machine instruction reads and writes, as far as values flow through them.

Addresses of memory operands are apart from the values. Widths are those of the instruction's
modifiers: "LDS.128 R4" writes R4 to R7, "HMMA.16816.F32 R56" R56 to R59.

Source: NVIDIA's "CUDA Binary Utilities" for the names; shapes of fragments from the PTX manual,
"Warp-level matrix instructions" and "Asynchronous warpgroup-level matrix instructions".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from flashdig.evidence.sass import Instruction

_STORES = ("ST", "STG", "STS", "STSM", "STL", "STTM", "RED", "ATOMS", "LDGSTS")
_READ_ONLY = (*_STORES, "BAR", "BRA", "BRX", "RET", "EXIT", "WARPSYNC", "NANOSLEEP", "PLOP3")
_REGISTER = re.compile(r"[-~|!]*(?P<name>U?R(?:\d+|Z))(?P<modifiers>(?:\.\w+)*)\|?")
_PREDICATE = re.compile(r"!?U?P(\d|T)")
_WIDE = {"64": 2, "128": 4, "96": 3}
_PAIRED = ("FFMA2", "FADD2", "FMUL2")
# registers of A, B and the accumulator (in float32) of a warp's product by its shape
_HMMA = {"16816": (4, 2, 4), "1688": (2, 1, 4), "1684": (2, 1, 4), "16832": (4, 2, 4)}


@dataclass(frozen=True)
class Operand:
    """One operand.

    Attributes:
        text: as printed; registers: those whose value it is, empty for addresses and constants.
    """

    text: str
    registers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Operands:
    """Registers written, and the operands read, in the printed order."""

    written: tuple[str, ...]
    read: tuple[Operand, ...]


def split_operands(text: str) -> list[str]:
    """The operands of an instruction as printed."""
    parts, depth, start = [], 0, 0
    for position, sign in enumerate(text):
        depth += (sign in "[(") - (sign in "])")
        if sign == "," and not depth:
            parts.append(text[start:position].strip())
            start = position + 1
    return [part for part in (*parts, text[start:].strip()) if part]


def operands(instruction: Instruction) -> Operands:
    """What an instruction reads and writes."""
    base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
    parts = [part for part in split_operands(instruction.operands) if not _is_predicate(part)]
    written: tuple[str, ...] = ()
    widths = _widths(base, modifiers)
    writes = base not in _READ_ONLY and not base.endswith("SETP")  # those write predicates
    if writes and parts and (first := _REGISTER.fullmatch(parts[0])):
        written = _registers(first["name"], widths[0])
        parts = parts[1:]
    read = []
    # "R24, gdesc[UR8], R24": one descriptor for A and B; "R24, R4, gdesc[UR8], R24": A in registers
    descriptors = [number for number, part in enumerate(parts) if part.startswith("gdesc")]
    for number, part in enumerate(parts):
        found = _REGISTER.fullmatch(part)
        if found is None:
            read.append(Operand(part))
            continue
        width = widths[min(number + 1, len(widths) - 1)]
        if descriptors and number > descriptors[-1]:
            width = widths[0]
        if "64" in found["modifiers"].split("."):
            width = 2
        read.append(Operand(part, _registers(found["name"], width)))
    return Operands(written, tuple(read))


def _is_predicate(part: str) -> bool:
    return _PREDICATE.fullmatch(part) is not None


def _registers(name: str, width: int) -> tuple[str, ...]:
    kind = name.rstrip("0123456789Z")
    if name.endswith("Z"):
        return ()
    first = int(name[len(kind) :])
    return tuple(f"{kind}{first + step}" for step in range(width))


def _widths(base: str, modifiers: list[str]) -> tuple[int, ...]:
    """Registers of the result, then of the operands read (the last is that of all further)."""
    wide = next((_WIDE[one] for one in modifiers if one in _WIDE), 1)
    if base == "HMMA":
        a, b, c = _HMMA.get(modifiers[0] if modifiers else "", (4, 2, 4))
        a, b = (2 * a, 2 * b) if "TF32" in modifiers and modifiers[0] == "1688" else (a, b)
        c = c if "F32" in modifiers else c // 2
        return (c, a, b, c)
    if base == "HGMMA":
        size = re.fullmatch(r"\d+x(\d+)x\d+", modifiers[0]) if modifiers else None
        columns = int(size[1]) if size else 256
        accumulator = columns // 2 if "F32" in modifiers else columns // 4
        return (accumulator, 4)
    if base in ("LDSM", "STSM"):
        count = int(modifiers[-1]) if modifiers and modifiers[-1] in ("2", "4") else 1
        return (count, count)
    if base in ("LDTM", "STTM"):
        counts = [int(one[1:]) for one in modifiers if re.fullmatch(r"x\d+", one)]
        return (counts[0], counts[0]) if counts else (1, 1)
    if base in _PAIRED:
        return (2, 2)
    if base == "IMAD" and "WIDE" in modifiers:
        return (2, 1, 1, 2)
    if base == "CS2R":
        return (1,) if "32" in modifiers else (2,)
    return (wide, wide if base in _STORES else 1)
