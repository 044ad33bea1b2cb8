"""Bank conflicts of a loop's accesses to shared memory, from the addresses that its code computes.

What wgmma, tcgen05 and TMA read and write by descriptors is not among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdig.costs.banks import BankConflicts, access
from flashdig.evidence.lane_values import Value, lane_values
from flashdig.evidence.loop_cycles import WIDTHS, matrices
from flashdig.evidence.sass import Instruction, Loop

_ACCESSES = ("LDS", "STS", "LDGSTS", "LDSM", "STSM")
_WARP = 32


@dataclass(frozen=True)
class LoopBanks:
    """Accesses to shared memory in one iteration, by all warps of a block.

    Attributes:
        instructions: of a warp; known: those whose addresses are known.
        conflicts: of the known ones, all warps together.
        worst: opcode and wavefronts over ideal ones of the worst instruction; None when there is
            no conflict.
    """

    instructions: int
    known: int
    conflicts: BankConflicts
    worst: tuple[str, float] | None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoopBanks:
        """What `dataclasses.asdict` made a dictionary of."""
        worst = values["worst"]
        return cls(
            instructions=values["instructions"],
            known=values["known"],
            conflicts=BankConflicts(**values["conflicts"]),
            worst=None if worst is None else (worst[0], worst[1]),
        )

    def explain(self) -> str:
        """In words."""
        if not self.known:
            return (
                f"bank conflicts unknown: the layout of the {self.instructions} accesses in the "
                "loop is not in the code"
            )
        missing = self.instructions - self.known
        of = f" (of {missing} more accesses the layout is not known)" if missing else ""
        if self.worst is None:
            return f"no bank conflicts in the loop's {self.known} shared-memory accesses{of}"
        opcode, slow_down = self.worst
        return (
            f"bank conflicts: {self.conflicts.wavefronts} wavefronts an iteration where "
            f"{self.conflicts.ideal_wavefronts} would do; the worst is {opcode}, "
            f"{slow_down:.0f} times{of}"
        )


def loop_conflicts(
    code: Sequence[Instruction], loop: Loop, threads: int
) -> dict[int, BankConflicts | None]:
    """Address -> conflicts of each of the loop's accesses, all warps together.

    Every lane is taken as active; None where the addresses are unknown.
    """
    inside = [i for i in loop.instructions if i.base in _ACCESSES and i.runs]
    if not inside:
        return {}
    wanted = {i.address for i in inside}
    values = lane_values(code, threads, lambda i: i.address in wanted)
    return {i.address: _conflicts(i, values.get(i.address)) for i in inside}


def loop_banks(loop: Loop, found: Mapping[int, BankConflicts | None]) -> LoopBanks | None:
    """The sum of what `loop_conflicts` found; None for a loop without accesses."""
    if not found:
        return None
    known = {address: one for address, one in found.items() if one is not None}
    total = BankConflicts(
        requests=sum(one.requests for one in known.values()),
        wavefronts=sum(one.wavefronts for one in known.values()),
        ideal_wavefronts=sum(one.ideal_wavefronts for one in known.values()),
    )
    shown = None
    if total.conflicts:
        address = max(known, key=lambda place: known[place].slow_down)
        opcode = next(i.opcode for i in loop.instructions if i.address == address)
        shown = (opcode, known[address].slow_down)
    return LoopBanks(len(found), len(known), total, shown)


def _conflicts(instruction: Instruction, value: Value) -> BankConflicts | None:
    """Of one instruction in all warps; None when its addresses are unknown."""
    if value is None:
        return None
    if instruction.base in ("LDSM", "STSM"):
        moved = matrices(instruction)
        if moved is None:
            return None
        # each matrix has eight rows of 16 bytes, whose addresses eight lanes give
        width, lanes = 16, 8 * moved
    else:
        lanes = _WARP
        modifiers = instruction.opcode.split(".")[1:]
        width = next((WIDTHS[m] for m in modifiers if m in WIDTHS), 4)
    requests = wavefronts = ideal = 0
    for start in range(0, value.values.size, _WARP):
        own = value.values[start : start + lanes]
        own = own - own.min()  # the same shift for all lanes changes no conflict
        if (own % width).any():
            return None
        one = access([int(address) for address in own], width)
        requests += 1
        wavefronts += one.wavefronts
        ideal += one.ideal_wavefronts
    return BankConflicts(requests, wavefronts, ideal)
