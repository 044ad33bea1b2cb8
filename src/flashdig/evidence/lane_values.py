"""What integer registers hold in every lane: the instructions that compute addresses, carried out.

A value is known up to a multiple of a power of two that all lanes share, as the place of a buffer
in a pipeline is: that moves all lanes' addresses alike. What is loaded, or computed by an
instruction that is not understood, is unknown. Branches are taken to go the same way in all lanes.

Source: NVIDIA's "CUDA Binary Utilities" for the instruction names; what LOP3, LEA, SHF and SGXT
compute follows PTX's lop3, mad/shl, shf and bfe, in the PTX manual.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from flashdig.evidence.sass import Instruction, basic_blocks, successors
from flashdig.evidence.sass_operands import operands, split_operands

Vector: TypeAlias = npt.NDArray[np.int64]
_BITS = 32
_MASK = 2**_BITS - 1
_REGISTER = re.compile(r"(?P<sign>[-~]?)(?P<name>U?R(?:\d+|Z))(?:\.\w+)*")
_NUMBER = re.compile(r"-?0x[0-9a-f]+|-?\d+")
_PREDICATE = re.compile(r"(?P<not>!?)(?P<name>U?P(?:\d|T))")
_COMPARISONS: Mapping[str, Callable[[Vector, Vector], npt.NDArray[np.bool_]]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


@dataclass(frozen=True)
class Lanes:
    """A register of a block's threads: values + n * 2^bits, with the same unknown n everywhere.

    Attributes:
        values: one of each thread; bits: 32 when they are exact.
    """

    values: Vector
    bits: int = _BITS

    @property
    def exact(self) -> bool:
        return self.bits >= _BITS


Value: TypeAlias = Lanes | None
State: TypeAlias = dict[str, Value]


def lane_values(
    instructions: Sequence[Instruction], threads: int, wanted: Callable[[Instruction], bool]
) -> dict[int, Value]:
    """Address -> the first address in brackets of each `wanted` instruction, in every thread.

    None where it is unknown.
    """
    machine = _Machine(threads)
    blocks = basic_blocks(instructions)
    follows = successors(blocks)
    entries: dict[int, State] = {0: {}}
    waiting = [0]
    found: dict[int, Value] = {}
    while waiting:
        number = waiting.pop()
        state = dict(entries[number])
        for instruction in blocks[number]:
            if wanted(instruction):
                found[instruction.address] = machine.address(instruction, state)
            machine.step(instruction, state)
        for successor in sorted(follows[number]):
            if successor not in entries:
                entries[successor] = dict(state)
            else:
                joined = _join_states(entries[successor], state)
                if _same_states(joined, entries[successor]):
                    continue
                entries[successor] = joined
            if successor not in waiting:
                waiting.append(successor)
    return found


def _join_states(first: State, second: State) -> State:
    return {name: _join(first[name], second[name]) for name in first if name in second}


def _same_states(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)


def _same(first: Value, second: Value) -> bool:
    if first is None or second is None:
        return first is second
    return first.bits == second.bits and np.array_equal(first.values, second.values)


def _join(first: Value, second: Value) -> Value:
    """One of two values, the same one in all lanes."""
    if first is None or second is None:
        return None
    difference = second.values - first.values
    if np.any(difference != difference[0]):
        return None
    step = int(difference[0])
    trailing = _BITS if step == 0 else (step & -step).bit_length() - 1
    return Lanes(first.values, min(first.bits, second.bits, trailing))


class _Machine:
    """Instructions on lanes. Predicates are registers of 0 and 1."""

    def __init__(self, threads: int) -> None:
        self.thread = np.arange(threads, dtype=np.int64)

    def constant(self, number: int) -> Lanes:
        return Lanes(_signed(np.full_like(self.thread, number & _MASK)))

    def unknown_uniform(self) -> Lanes:
        return Lanes(np.zeros_like(self.thread), 0)

    def read(self, text: str, state: State) -> Value:
        """An operand: a register with its sign, a number, a constant of the launch."""
        text = text.removesuffix(".reuse")
        if _NUMBER.fullmatch(text):
            return self.constant(int(text, 0))
        if re.match(r"-?c\[", text):
            return self.unknown_uniform()
        found = _REGISTER.fullmatch(text)
        if found is None:
            return None
        name = found["name"]
        value = self.constant(0) if name.endswith("Z") else state.get(name)
        if value is None or not found["sign"]:
            return value
        return Lanes(-value.values - (found["sign"] == "~"), value.bits)

    def predicate(self, text: str, state: State) -> Value:
        found = _PREDICATE.fullmatch(text)
        if found is None:
            return None
        value = self.constant(1) if found["name"].endswith("PT") else state.get(found["name"])
        if value is None or not found["not"]:
            return value
        return Lanes(1 - value.values)

    def address(self, instruction: Instruction, state: State) -> Value:
        """ "[R9.X4+UR17+0xc000]" in every thread."""
        found = re.search(r"\[([^\]]*)\]", instruction.operands)
        if found is None:
            return None
        total: Value = self.constant(0)
        for part in re.findall(r"[^+]+", found[1]):
            scale = re.search(r"\.X(\d+)", part)
            value = self.read(re.sub(r"\.X\d+", "", part.strip()), state)
            if scale is not None:
                value = _multiply(value, self.constant(int(scale[1])))
            total = _add(total, value)
        return total

    def step(self, instruction: Instruction, state: State) -> None:
        """Carries out one instruction on `state`."""
        if not instruction.runs:
            return
        name, value = self._result(instruction, state)
        written = [name] if name else []
        written += [one for one in operands(instruction).written if one != name]
        written += self._predicates_written(instruction, name)
        for target in written:
            own = value if target == name else None
            if instruction.predicate is not None:
                own = self._guarded(instruction.predicate, own, state.get(target), state)
            state[target] = own

    def _predicates_written(self, instruction: Instruction, name: str) -> list[str]:
        """Predicates stand first, or behind the first register, where an instruction sets them."""
        parts = split_operands(instruction.operands)
        sets = "SETP" in instruction.base or instruction.base in ("R2P", "PLOP3", "UPLOP3")
        leading = parts[:2] if sets else parts[1:3] if parts and parts[0][0] in "RU" else parts[:1]
        return [p for p in leading if re.fullmatch(r"U?P\d", p) and p != name]

    def _guarded(self, predicate: str, new: Value, old: Value, state: State) -> Value:
        known = self.predicate(predicate, state)
        if known is not None and known.exact and new is not None and old is not None:
            if new.exact and old.exact:
                return Lanes(np.where(known.values == 1, new.values, old.values))
            if np.all(known.values == known.values[0]):
                return new if known.values[0] == 1 else old
        if predicate.lstrip("!").startswith("UP"):
            return _join(new, old)
        return new if _same(new, old) else None

    def _result(self, instruction: Instruction, state: State) -> tuple[str, Value]:
        """(the register, or predicate, that is computed; its value)."""
        parts = split_operands(instruction.operands)
        base, modifiers = instruction.base, instruction.opcode.split(".")[1:]
        if base in ("ISETP", "UISETP"):
            return self._comparison(parts, modifiers, state)
        if base == "SHFL" and len(parts) == 5:
            return parts[1], self._shuffle(parts, modifiers, state)
        name = parts[0] if parts else ""
        if not re.fullmatch(r"U?R\d+", name):
            return "", None
        if base in ("S2R", "S2UR"):
            return name, self._special(parts[1])
        if base in ("LDC", "ULDC", "LDCU"):
            return name, self.unknown_uniform()
        sources = [p for p in parts[1:] if not _PREDICATE.fullmatch(p)]
        read = [self.read(p, state) for p in sources]
        if base in ("SEL", "USEL"):
            return name, self._select(read, parts[-1], state)
        if base in ("R2UR", "VOTEU"):
            return name, self._of_first_lane(read[0] if read and base == "R2UR" else None)
        return name, _compute(base.removeprefix("U"), modifiers, read)

    def _special(self, source: str) -> Value:
        if source == "SR_TID.X":
            return Lanes(self.thread)
        if source in ("SR_TID.Y", "SR_TID.Z"):
            return self.constant(0)
        if source == "SR_LANEID":
            return Lanes(self.thread % 32)
        return self.unknown_uniform()

    def _of_first_lane(self, value: Value) -> Value:
        return None if value is None else Lanes(value.values[self.thread // 32 * 32], value.bits)

    def _shuffle(self, parts: Sequence[str], modifiers: Sequence[str], state: State) -> Value:
        """SHFL.IDX from one lane, as the number of a warp is made the same in all of it."""
        value, lane = self.read(parts[2], state), self.read(parts[3], state)
        if "IDX" not in modifiers or lane is None or not lane.exact or np.any(lane.values):
            return None
        return self._of_first_lane(value)

    def _select(self, read: Sequence[Value], predicate: str, state: State) -> Value:
        if len(read) < 2:
            return None
        first, second = read[0], read[1]
        known = self.predicate(predicate, state)
        if first is None or second is None:
            return None
        if known is not None and first.exact and second.exact:
            return Lanes(np.where(known.values == 1, first.values, second.values))
        if "UP" in predicate:
            return _join(first, second)
        return first if _same(first, second) else None

    def _comparison(
        self, parts: Sequence[str], modifiers: Sequence[str], state: State
    ) -> tuple[str, Value]:
        """ISETP.NE.U32.AND P3, PT, R6, RZ, PT: only what is exact and combined with true."""
        name = parts[0]
        if len(parts) != 5 or parts[1] not in ("PT", "UPT"):
            return name, None
        first, second = self.read(parts[2], state), self.read(parts[3], state)
        plain = parts[4] in ("PT", "UPT") and "AND" in modifiers and modifiers[0] in _COMPARISONS
        if not plain or first is None or second is None or not (first.exact and second.exact):
            return name, None
        signed = "U32" not in modifiers
        sides = [_signed(one.values) if signed else one.values & _MASK for one in (first, second)]
        return name, Lanes(_COMPARISONS[modifiers[0]](*sides).astype(np.int64))


def _signed(values: Vector) -> Vector:
    sign = np.int64(2**31)
    signed: Vector = ((values & _MASK) ^ sign) - sign
    return signed


def _compute(base: str, modifiers: Sequence[str], read: Sequence[Value]) -> Value:
    """The result of an integer instruction; None for all that is not understood."""
    if base in ("MOV", "MOV32I"):
        return read[0]
    if base in ("IADD3", "IADD", "IADD32I", "VIADD") and "X" not in modifiers:
        total = read[0]
        for value in read[1:]:
            total = _add(total, value)
        return total
    if base == "IMAD" and not {"HI", "X"} & set(modifiers) and len(read) >= 3:
        return _add(_multiply(read[0], read[1]), read[2])
    if base == "LEA" and "X" not in modifiers:
        return _lea(modifiers, read)
    if base == "SHF":
        return _shift(modifiers, read)
    if base == "LOP3" and len(read) == 4:
        return _bitwise(read[0], read[1], read[2], _number(read[3]))
    if base == "SGXT" and len(read) == 2:
        return _extend(read[0], _number(read[1]), "U32" not in modifiers)
    return None


def _number(value: Value) -> int | None:
    """The value that is exact and the same everywhere."""
    if value is None or not value.exact or np.any(value.values != value.values[0]):
        return None
    return int(value.values[0])


def _add(first: Value, second: Value) -> Value:
    if first is None or second is None:
        return None
    return Lanes(_signed(first.values + second.values), min(first.bits, second.bits))


def _multiply(first: Value, second: Value) -> Value:
    if first is None or second is None:
        return None
    if first.exact and second.exact:
        return Lanes(_signed(first.values * second.values))
    for one, other in ((first, second), (second, first)):
        factor = _number(one)
        if factor == 0:
            return one
        if factor is not None:
            trailing = (factor & -factor).bit_length() - 1
            return Lanes(_signed(other.values * factor), min(_BITS, other.bits + trailing))
    uniform = all(np.all(one.values == one.values[0]) for one in (first, second))
    return Lanes(np.zeros_like(first.values), 0) if uniform else None


def _lea(modifiers: Sequence[str], read: Sequence[Value]) -> Value:
    if "HI" in modifiers:
        shift = _number(read[3]) if len(read) == 4 else None
        if shift is None or _number(read[2]) != 0:
            return None
        return _add(_right(read[0], _BITS - shift, signed=False), read[1])
    shift = _number(read[2]) if len(read) == 3 else 0
    return None if shift is None else _add(_left(read[0], shift), read[1])


def _shift(modifiers: Sequence[str], read: Sequence[Value]) -> Value:
    amount = _number(read[1]) if len(read) == 3 else None
    if amount is None or "U64" in modifiers or "S64" in modifiers:
        return None
    if "L" in modifiers and "HI" not in modifiers:
        return _left(read[0], amount)
    if "R" in modifiers and "HI" in modifiers:
        return _right(read[2], amount, signed="S32" in modifiers)
    return None


def _left(value: Value, amount: int) -> Value:
    if value is None:
        return None
    return Lanes(_signed(value.values << amount), min(_BITS, value.bits + amount))


def _right(value: Value, amount: int, *, signed: bool) -> Value:
    if value is None:
        return None
    if value.exact:
        values = _signed(value.values) if signed else value.values & _MASK
        return Lanes(values >> amount)
    # all lanes must lie in one block of 2^bits: else a carry into the unknown part differs
    block = value.values >> value.bits
    if np.any(block != block[0]):
        return None
    low = value.values & (2**value.bits - 1)
    return Lanes(low >> amount, max(0, value.bits - amount))


def _bitwise(first: Value, second: Value, third: Value, table: int | None) -> Value:
    """LOP3: bit i of the result is bit 4a + 2b + c of the table, for each bit."""
    if table is None:
        return None
    read = [first, second, third]
    # what the table does not look at may be unknown
    for number, weight in enumerate((4, 2, 1)):
        if all((table >> n & 1) == (table >> (n ^ weight) & 1) for n in range(8)):
            read[number] = Lanes(np.zeros(1, dtype=np.int64))
    if any(value is None for value in read):
        return None
    known = [value for value in read if value is not None]
    bits = min(value.bits for value in known)
    result = np.zeros(max(value.values.size for value in known), dtype=np.int64)
    for n in range(8):
        if table >> n & 1:
            sides = zip(known, (4, 2, 1), strict=True)
            terms = [value.values if n & weight else ~value.values for value, weight in sides]
            result = result | (terms[0] & terms[1] & terms[2])
    if bits >= _BITS:
        return Lanes(_signed(result))
    mask = 2**bits - 1
    inexact = [value for value in known if not value.exact]
    exact = [value for value in known if value.exact]
    if len(inexact) == 1 and len(exact) == 2:
        high = _high_bits_are_zero(known, inexact[0], table, mask)
        if high:
            return Lanes(result & mask)
    # the unknown parts combine to an unknown part, if nothing above the known bits varies
    for value in known:
        block = value.values >> bits
        if np.any(block != block[0]):
            return None
    return Lanes(result & mask, bits)


def _high_bits_are_zero(known: Sequence[Lanes], inexact: Lanes, table: int, mask: int) -> bool:
    """Whether the result has nothing above `mask`, whatever the one inexact operand has there."""
    for unknown in (np.int64(0), np.int64(-1)):
        terms = [
            np.full(1, unknown) if value is inexact else value.values & ~mask & _MASK
            for value in known
        ]
        high: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
        for n in range(8):
            if table >> n & 1:
                sides = zip(terms, (4, 2, 1), strict=True)
                a, b, c = (term if n & weight else ~term for term, weight in sides)
                high = high | (a & b & c)
        if np.any(high & ~mask & _MASK):
            return False
    return True


def _extend(value: Value, width: int | None, signed: bool) -> Value:
    if value is None or width is None or value.bits < width or not width:
        return None
    low = value.values & (2**width - 1)
    return Lanes((low ^ 2 ** (width - 1)) - 2 ** (width - 1) if signed else low)
