"""Which products of an attention loop are S = Q K^T and which O += P V, by where values flow.

A product is Q K^T when an exponential of the loop depends on its result, and P V when an operand is
an exponential's result, or when what it adds to is multiplied by one (the rescaled O). Values are
followed through registers, and for tcgen05 through tensor memory as a whole; shared memory ends
the trail. What neither rule reaches, or both, is left open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashdig.evidence.sass import FAMILIES, MATRIX_FAMILIES, Instruction
from flashdig.evidence.sass_operands import Operand, Operands, operands

_EXP2 = "exp2"
_MATRIX = {name for family in MATRIX_FAMILIES for name in FAMILIES[family]}
_FFMA = {"FFMA": 1, "FFMA2": 2}
_TENSOR_MEMORY = "tensor memory"


@dataclass(frozen=True)
class Gemms:
    """Instructions of one warp in the inner loop, by what they multiply.

    Attributes:
        scores: of Q K^T; output: of P V; open: that could be either.
        needed_scores, needed_output: what one tile needs by the size of an instruction; None where
            the tile or that size is unknown.
    """

    scores: int
    output: int
    open: int
    needed_scores: int | None = None
    needed_output: int | None = None

    def explain(self) -> str:
        """In words."""
        said = ", ".join(
            f"{count}{'' if needed is None else f' of {needed} needed'} for {name}"
            for name, count, needed in (
                ("Q K^T", self.scores, self.needed_scores),
                ("P V", self.output, self.needed_output),
            )
        )
        if self.open:
            said += f"; of {self.open} more the operands do not tell"
            left = [
                name
                for name, count, needed in (
                    ("Q K^T", self.scores, self.needed_scores),
                    ("P V", self.output, self.needed_output),
                )
                if needed is not None and count + self.open == needed
            ]
            if len(left) == 1:
                said += f", as many as {left[0]} still needs"
        return f"products of the loop: {said}"


def sort_products(loop: Sequence[Instruction]) -> tuple[list[Instruction], ...]:
    """(products of Q K^T, of P V, open ones) in a loop's instructions.

    Tensor-core products where there are any, FFMA otherwise.
    """
    by_tensor_cores = any(i.base in _MATRIX for i in loop)
    walk = _Walk(by_tensor_cores)
    read = [operands(i) for i in loop]
    # what flows into the next iteration is known after the first pass
    for _ in range(2):
        walk.begin()
        for instruction, one in zip(loop, read, strict=True):
            walk.step(instruction, one)
    scores: list[Instruction] = []
    output: list[Instruction] = []
    unknown: list[Instruction] = []
    for instruction in loop:
        if instruction.address not in walk.products:
            continue
        is_scores = instruction.address in walk.scores
        is_output = instruction.address in walk.output
        group = unknown if is_scores == is_output else scores if is_scores else output
        group.append(instruction)
    return scores, output, unknown


class _Walk:
    """Registers, and what their values came from: exponentials and products, by address."""

    def __init__(self, by_tensor_cores: bool) -> None:
        self.by_tensor_cores = by_tensor_cores
        self.tags: dict[str, frozenset[str | int]] = {}
        self.products: set[int] = set()
        self.scores: set[int] = set()
        self.output: set[int] = set()
        self.stores_exp2 = False  # to shared memory

    def begin(self) -> None:
        self.products, self.scores, self.output = set(), set(), set()

    def of(self, operand: Operand) -> frozenset[str | int]:
        none: frozenset[str | int] = frozenset()
        return none.union(*(self.tags.get(name, none) for name in operand.registers))

    def step(self, instruction: Instruction, one: Operands) -> None:
        tags = [self.of(operand) for operand in one.read]
        together = frozenset[str | int]().union(*tags)
        if instruction.opcode.startswith("MUFU.EX2"):
            self.scores |= {tag for tag in together if isinstance(tag, int)}
            together = frozenset([_EXP2])
        elif self.by_tensor_cores and instruction.base in _MATRIX:
            together = self._tensor_product(instruction, one, tags)
        elif not self.by_tensor_cores and instruction.base in _FFMA and len(tags) >= 3:
            together = self._fma(instruction, tags)
        else:
            self._meet(tags)
            self.stores_exp2 |= instruction.base in ("STS", "STSM") and _EXP2 in together
            if instruction.base == "STTM":
                held = self.tags.get(_TENSOR_MEMORY, frozenset())
                # an O that is rescaled goes back there too: that has products in it
                if _EXP2 in together and not any(isinstance(tag, int) for tag in together):
                    self.tags[_TENSOR_MEMORY] = held | {_EXP2}
            elif instruction.base == "LDTM":
                together = frozenset()
        for name in one.written:
            if instruction.conditional:
                self.tags[name] = self.tags.get(name, frozenset()) | together
            else:
                self.tags[name] = together

    def _meet(self, tags: Sequence[frozenset[str | int]]) -> None:
        """A product that is put together with an exponential, in two operands, goes into O."""
        for number, own in enumerate(tags):
            others = tags[:number] + tags[number + 1 :]  # type: ignore[operator]
            if _EXP2 not in own and any(_EXP2 in other for other in others):
                self.output |= {tag for tag in own if isinstance(tag, int)}

    def _tensor_product(
        self, instruction: Instruction, one: Operands, tags: Sequence[frozenset[str | int]]
    ) -> frozenset[str | int]:
        self.products.add(instruction.address)
        if instruction.base.startswith("UTC"):
            # A stands in tensor memory where P was put
            if _EXP2 in self.tags.get(_TENSOR_MEMORY, frozenset()):
                if one.read[0].text.startswith("tmem"):
                    self.output.add(instruction.address)
                elif not self.stores_exp2:
                    self.scores.add(instruction.address)  # P is nowhere else
            return frozenset()
        place = 2
        if instruction.base == "HGMMA":  # behind the descriptors of A and B, or of B alone
            place = 1 + max(n for n, read in enumerate(one.read) if read.text.startswith("gdesc"))
        factors, accumulator = tags[:place], tags[place]
        if any(_EXP2 in factor for factor in factors) or _EXP2 in accumulator:
            self.output.add(instruction.address)
        return accumulator | {instruction.address}

    def _fma(
        self, instruction: Instruction, tags: Sequence[frozenset[str | int]]
    ) -> frozenset[str | int]:
        first, second, accumulator = tags[:3]
        if not first and not second:
            # a product of two values from memory
            self.products.add(instruction.address)
            if _EXP2 in accumulator:
                self.output.add(instruction.address)
            return accumulator | {instruction.address}
        if frozenset([_EXP2]) in (first, second) and not (first and second):
            self.products.add(instruction.address)
            self.output.add(instruction.address)
            return accumulator | {instruction.address}
        self._meet([first | second, accumulator])
        return first | second | accumulator


def fma_size(instruction: Instruction) -> int:
    """Multiply-adds of a lane in one FFMA or FFMA2."""
    return _FFMA[instruction.base]
