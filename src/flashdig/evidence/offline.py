"""What a kernel compiles to, for any chip and without a GPU: registers, spills, instructions.

An exhibit, or a pass of the portable kernels, is run with tensors that have no memory, under a
driver that compiles for the wanted chip and records each launch instead of making it. So signature,
alignment and constants are those of a real launch. Compilers can end a process:
`compile_exhibits` works in a process of its own.

Sources: NVIDIA's "CUDA Binary Utilities" for the instruction names; tools from Triton's wheel.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.evidence.worker import last_line, run_worker
from flashdig.hardware.arch import architecture
from flashdig.problem import AttentionProblem, Mask

# the start of an instruction in nvdisasm's listing, behind its address and predicate
_INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)(?P<rest>[.A-Z0-9_]*)"
)
_USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")


class OfflineError(RuntimeError):
    """Nothing could be compiled; the message says why in a line."""


@dataclass(frozen=True)
class Request:
    """An exhibit by name, the problem it is launched with, and the chip as "sm_90".

    "portable:forward" is a pass of the kernels that users run, with the table's tile for the chip;
    see `portable_launch.launch`.
    """

    exhibit: str
    problem: AttentionProblem
    arch: str


@dataclass(frozen=True)
class Compiled:
    """One kernel as the compiler left it.

    Attributes:
        name: as profilers show it.
        registers: of a thread.
        stack_bytes: local memory of a thread, where spilled registers live.
        spill_store_bytes, spill_load_bytes: widths of all local stores and loads of the code, each
            counted once, as ptxas counts them.
        shared_bytes: of a block.
        threads: of a block.
        grid: programs that were to be launched.
        opcodes: instruction with its modifiers ("HMMA.16816.F32") -> times in the code.
        order: instructions without modifiers, as they stand in the code.
        listing: nvdisasm's text of the code, for `sass.parse_sass`.
        ptx, options: what ptxas was given: the code, and Triton's metadata for `ptxas.run_ptxas`.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    shared_bytes: int
    threads: int
    grid: tuple[int, ...]
    opcodes: Mapping[str, int]
    order: tuple[str, ...]
    listing: str = ""
    ptx: str = ""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes

    def count(self, prefix: str) -> int:
        """Instructions of a family ("HMMA") or of one with modifiers ("BAR.SYNC")."""
        return sum(
            number
            for opcode, number in self.opcodes.items()
            if opcode == prefix or opcode.startswith(f"{prefix}.")
        )


def compile_exhibit(
    exhibit: str, problem: AttentionProblem, arch: str, *, timeout_s: float = 300.0
) -> Compiled:
    """The one Triton or Gluon kernel of an exhibit, compiled for `arch` ("sm_75" ... "sm_120").

    Raises OfflineError for an exhibit without one, and for what the compiler refuses;
    UnknownArchitectureError.
    """
    (kernels,) = compile_exhibits([Request(exhibit, problem, arch)], timeout_s=timeout_s)
    if len(kernels) != 1:
        raise OfflineError(f"{exhibit} launches {len(kernels)} Triton kernels, not one")
    return kernels[0]


def compile_exhibits(
    requests: Sequence[Request], *, timeout_s: float = 300.0
) -> list[list[Compiled]]:
    """The Triton kernels of each request, in the order in which they are launched.

    One process for all. Raises OfflineError with the request that it was working on when it died,
    and with the compiler's last line when it refused one; UnknownArchitectureError.
    """
    for request in requests:
        architecture(request.arch)
    with tempfile.TemporaryDirectory(prefix="flashdig-offline-") as folder:
        written = [dataclasses.asdict(request) for request in requests]
        Path(folder, "requests.json").write_text(json.dumps(written))
        try:
            code = run_worker(
                "flashdig.evidence.offline_worker",
                folder,
                timeout_s=timeout_s,
                environment={"TRITON_INTERPRET": None},
            )
        except subprocess.TimeoutExpired as error:
            raise OfflineError(f"compiling took more than {timeout_s:g} s") from error
        if code:
            raise OfflineError(_failure(requests, folder, code))
        found = json.loads(Path(folder, "compiled.json").read_text())
    return [[compiled_from(kernel) for kernel in kernels] for kernels in found]


def request_from(written: Mapping[str, Any]) -> Request:
    """A request from what `compile_exhibits` wrote."""
    fields = {**written["problem"], "mask": Mask(**written["problem"]["mask"])}
    return Request(written["exhibit"], AttentionProblem(**fields), written["arch"])


def compiled_from(kernel: Mapping[str, Any]) -> Compiled:
    """A kernel from what a worker wrote."""
    return Compiled(**{**kernel, "grid": tuple(kernel["grid"]), "order": tuple(kernel["order"])})


def ptxas_options(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What of Triton's metadata ptxas is told."""
    return {name: metadata.get(name) for name in ("enable_fp_fusion", "ptx_options")}


def read_cubin(cubin: bytes) -> dict[str, Any]:
    """Registers, stack, spills and instructions of a cubin with one kernel: fields of `Compiled`.

    Raises OfflineError when the tools cannot read it.
    """
    with tempfile.TemporaryDirectory(prefix="flashdig-cubin-") as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        usage = _USAGE.search(_tool("cuobjdump", "-res-usage", str(path)))
        # code only; without the analysis of branches, which takes a third of its time
        listing = _tool("nvdisasm", "-c", "-ndf", str(path))
    instructions = [(found["opcode"], found["rest"]) for found in _INSTRUCTION.finditer(listing)]
    if usage is None or not instructions:
        raise OfflineError("no code found in this cubin: are the tools too old for its chip?")
    return {
        "registers": int(usage["registers"]),
        "stack_bytes": int(usage["stack"]),
        "spill_store_bytes": sum(_width(rest) for name, rest in instructions if name == "STL"),
        "spill_load_bytes": sum(_width(rest) for name, rest in instructions if name == "LDL"),
        "opcodes": dict(collections.Counter(name + rest for name, rest in instructions)),
        "order": [name for name, _ in instructions],
        "listing": listing,
    }


def _width(modifiers: str) -> int:
    """Bytes that a thread moves by a load or store with these modifiers."""
    for modifier, width in (("128", 16), ("64", 8), ("U16", 2), ("S16", 2), ("U8", 1), ("S8", 1)):
        if modifier in modifiers.split("."):
            return width
    return 4


def _tool(name: str, *arguments: str) -> str:
    """What one of the CUDA tools in Triton's wheel prints."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(tool), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OfflineError(f"{name}: {last.replace(arguments[-1], 'the file')}")
    return done.stdout


def _failure(requests: Sequence[Request], folder: str, code: int) -> str:
    """Which request it was, and the last line that was printed about it."""
    progress = Path(folder, "progress.txt")
    number = int(progress.read_text()) if progress.exists() else None
    where = "starting the compiler"
    if number is not None:
        request = requests[number]
        where = f"{request.exhibit}, {request.problem.describe()}, for {request.arch}"
    return f"{where}: {last_line(folder) or 'nothing was printed'} (exit code {code})"
