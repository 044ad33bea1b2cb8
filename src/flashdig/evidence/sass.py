"""NVIDIA machine code as data: instructions with addresses and targets, loops, families.

Reads the text of `nvdisasm -c` (targets are labels) and of `cuobjdump -sass` (they are addresses).
A loop is found by dominators: waits whose retries stand behind the kernel's end jump back into its
middle, and an interval between target and branch would take that for a loop.

Source: NVIDIA's "CUDA Binary Utilities" for the instruction names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# families that explain an attention kernel -> opcodes without modifiers, or with those given
FAMILIES = {
    "FFMA": ("FFMA", "FFMA2"),
    "HMMA": ("HMMA",),
    "HGMMA": ("HGMMA",),
    "UTCHMMA": ("UTCHMMA",),
    "other matrix": ("IMMA", "QMMA", "OMMA", "DMMA", "IGMMA", "QGMMA", "UTCQMMA", "UTCIMMA"),
    "MUFU.EX2": ("MUFU.EX2",),
    "SHFL": ("SHFL",),
    "LDS": ("LDS",),
    "LDSM": ("LDSM",),
    "STS": ("STS", "STSM"),
    "LDGSTS": ("LDGSTS",),
    "UTMALDG": ("UTMALDG",),
    "UTMASTG": ("UTMASTG",),
    "UTMAREDG": ("UTMAREDG",),
    "BAR": ("BAR",),
}
MATRIX_FAMILIES = ("HMMA", "HGMMA", "UTCHMMA", "other matrix")

_FUNCTION = re.compile(r"^\s*(?:\.section\s+\.text\.([^\s,]+)|Function : (\S+))", re.MULTILINE)
_LABEL = re.compile(r"^\s*([.$\w]+):\s*$")
_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?"
    r"(?P<opcode>[A-Z][A-Z0-9_]*[.A-Za-z0-9_]*)(?P<operands>[^;]*)"
)
# newer listings say behind the operands what an instruction waits for: "&req={2} ?trans3"
_SCHEDULING = re.compile(r"\s+[&?]\w")
_TARGET = re.compile(r"`\((?P<label>[.$\w]+)\)|\b0x(?P<address>[0-9a-f]+)\s*$")
_JUMPS = ("BRA", "CALL")
_ENDS = ("EXIT", "RET")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction.

    Attributes:
        address: bytes from the start of the function.
        opcode: with its modifiers, as "HMMA.16816.F32".
        operands: as printed.
        target: address that a branch or call goes to, if it is in this code.
        conditional: it may fall through, by its predicate or its first operand.
        predicate: as printed without the "@".
    """

    address: int
    opcode: str
    operands: str
    target: int | None = None
    conditional: bool = False
    predicate: str | None = None

    @property
    def runs(self) -> bool:
        """False for what ptxas leaves as a barrier to its own scheduling: "@!PT LDS RZ, [RZ]"."""
        return self.predicate != "!PT"

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class Loop:
    """A natural loop: `head` is reached first, `instructions` are all that lead back to it."""

    head: int
    instructions: tuple[Instruction, ...]


def function_names(listing: str) -> list[str]:
    """The functions of a listing, in order."""
    return [first or second for first, second in _FUNCTION.findall(listing)]


def parse_sass(listing: str) -> list[Instruction]:
    """The instructions of a listing of one function, in order of their addresses.

    Raises ValueError when there are none, or when there is more than one function.
    """
    names = function_names(listing)
    if len(names) > 1:
        raise ValueError(f"{len(names)} functions in one listing, not one: {', '.join(names)}")
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found = []
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            waiting.append(label[1])
        elif match := _INSTRUCTION.search(line):
            address = int(match["address"], 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting.clear()
            found.append((address, match))
    if not found:
        raise ValueError("no instructions in this listing")
    addresses = {address for address, _ in found}
    return [_instruction(address, match, labels, addresses) for address, match in found]


def _instruction(
    address: int, match: re.Match[str], labels: dict[str, int], addresses: set[int]
) -> Instruction:
    opcode, operands = match["opcode"], _SCHEDULING.split(match["operands"].strip(), 1)[0]
    jumps = opcode.partition(".")[0] in _JUMPS
    target = None
    if jumps and (where := _TARGET.search(operands)):
        named = where["label"]
        target = labels.get(named) if named else int(where["address"], 16)
    # "BRA.U UP0, `(.L_x_0)": a uniform predicate stands among the operands
    conditional = match["predicate"] is not None or bool(re.match(r"!?U?P\d", operands))
    known = target if target in addresses else None
    return Instruction(address, opcode, operands, known, conditional, match["predicate"])


def loops(instructions: Sequence[Instruction]) -> list[Loop]:
    """All natural loops, those with the same head as one, in order of their heads.

    An instruction that jumps to itself, as stands behind the end of every kernel, is none.
    """
    blocks = basic_blocks(instructions)
    follows = successors(blocks)
    dominators = _dominators(follows)
    bodies: dict[int, set[int]] = {}
    before: list[list[int]] = [[] for _ in blocks]
    for number, after in enumerate(follows):
        for successor in after:
            before[successor].append(number)
    for number, after in enumerate(follows):
        for head in after:
            if number in dominators and head in dominators[number]:
                body = bodies.setdefault(head, {head})
                waiting = [number]
                while waiting:
                    block = waiting.pop()
                    if block not in body:
                        body.add(block)
                        waiting += [b for b in before[block] if b in dominators]
    found = []
    for head, body in sorted(bodies.items()):
        members = tuple(i for number in sorted(body) for i in blocks[number])
        if len(members) > 1:
            found.append(Loop(blocks[head][0].address, members))
    return found


def basic_blocks(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """Runs of instructions that are entered at the first and left at the last."""
    targets = {i.target for i in instructions}
    blocks: list[list[Instruction]] = []
    ended = True
    for instruction in instructions:
        if ended or instruction.address in targets:
            blocks.append([])
        blocks[-1].append(instruction)
        ended = instruction.base in (*_JUMPS, *_ENDS)
    return blocks


def successors(blocks: Sequence[Sequence[Instruction]]) -> list[set[int]]:
    """The blocks that may follow each block."""
    starts = {block[0].address: number for number, block in enumerate(blocks)}
    found = []
    for number, block in enumerate(blocks):
        last = block[-1]
        after = set()
        if last.target is not None:
            after.add(starts[last.target])
        # a call comes back; a jump to what is not in this code is taken to do so too
        goes_on = last.conditional or last.base not in (*_ENDS, "BRA")
        if goes_on and number + 1 < len(starts):
            after.add(number + 1)
        found.append(after)
    return found


def _dominators(follows: Sequence[set[int]]) -> dict[int, set[int]]:
    """Block -> the blocks on every way to it from the first; blocks without a way are left out."""
    reached = [0]
    for block in reached:
        reached += [b for b in sorted(follows[block]) if b not in reached]
    everything = set(reached)
    before: dict[int, list[int]] = {block: [] for block in reached}
    for block in reached:
        for successor in follows[block]:
            before[successor].append(block)
    dominators = {block: everything if block else {0} for block in reached}
    changed = True
    while changed:
        changed = False
        for block in reached[1:]:
            new = set.intersection(*(dominators[b] for b in before[block])) | {block}
            if new != dominators[block]:
                dominators[block] = new
                changed = True
    return dominators


def families(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Family -> instructions that run, in the order of FAMILIES, only those that occur."""
    opcodes = [i.opcode for i in instructions if i.runs]
    counts = {
        family: sum(any(_is(opcode, name) for name in names) for opcode in opcodes)
        for family, names in FAMILIES.items()
    }
    return {family: count for family, count in counts.items() if count}


def _is(opcode: str, name: str) -> bool:
    return opcode == name or opcode.startswith(f"{name}.")


def inner_loop(instructions: Sequence[Instruction]) -> Loop | None:
    """The innermost loop with matrix instructions; without tensor cores, with FFMA.

    Of several the one with most of them, then the first. None when no loop has any.
    """
    kinds = MATRIX_FAMILIES if _products(instructions, MATRIX_FAMILIES) else ("FFMA",)
    innermost = innermost_loops(instructions, kinds)
    return max(innermost, key=lambda loop: _products(loop.instructions, kinds), default=None)


def innermost_loops(instructions: Sequence[Instruction], kinds: Sequence[str]) -> list[Loop]:
    """The loops that hold an instruction of `kinds` and no other loop that holds one."""
    holding = [loop for loop in loops(instructions) if _products(loop.instructions, kinds)]
    spans = {loop.head: {i.address for i in loop.instructions} for loop in holding}
    return [
        loop
        for loop in holding
        if not any(spans[other.head] < spans[loop.head] for other in holding)
    ]


def _products(instructions: Iterable[Instruction], kinds: Sequence[str]) -> int:
    counts = families(instructions)
    return sum(counts.get(kind, 0) for kind in kinds)
