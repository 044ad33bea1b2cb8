"""What ptxas says while it compiles: registers, spills, and why products of wgmma are serialised.

Triton keeps the PTX of a kernel but not what ptxas printed about it, so ptxas of the installed
Triton is run once more on that PTX, with the options that Triton gives it.

Source: NVIDIA's "CUDA Compiler Driver NVCC", "Printing Code Generation Statistics".
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
# "ptxas info    : (C7510) Potential Performance Loss: ...", "ptxas-blackwell warning : ..."
_MESSAGE = re.compile(
    r"^ptxas[\w-]*\s+(?P<kind>info|warning)\s*:\s*(?P<text>.+?)\s*$", re.MULTILINE
)
_NUMBERED = re.compile(r"\(C\d+\)")
_TARGET = re.compile(r"^\.target\s+sm_(\d+)", re.MULTILINE)
# "... serialized due to insufficient register resources for the wgmma pipeline ..."
_SERIALISED = re.compile(r"wgmma\S* instructions are serialized", re.IGNORECASE)


class PtxasError(RuntimeError):
    """ptxas could not be run, or refused the code; the message is its last line."""


@dataclass(frozen=True)
class PtxasReport:
    """ptxas on one kernel.

    Attributes:
        registers: of a thread.
        stack_bytes, spill_store_bytes, spill_load_bytes: of a thread, each access counted once.
        warnings: its warnings and numbered remarks ("(C7510) ..."), each once, in order.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    warnings: tuple[str, ...]

    @property
    def serialises_wgmma(self) -> bool:
        """Products that should overlap wait for each other."""
        return any(_SERIALISED.search(warning) for warning in self.warnings)


def read_report(text: str) -> PtxasReport:
    """The report in what `ptxas -v` printed about a file with one kernel.

    Raises PtxasError when the figures are missing.
    """
    # of several functions the last is the kernel: what it calls comes before it
    stacks, used = list(_STACK.finditer(text)), list(_USED.finditer(text))
    if not stacks or not used:
        raise PtxasError("ptxas printed no registers and no stack frame")
    stack = stacks[-1]
    warnings = [
        found["text"]
        for found in _MESSAGE.finditer(text)
        if found["kind"] == "warning" or _NUMBERED.match(found["text"])
    ]
    return PtxasReport(
        registers=int(used[-1]["registers"]),
        stack_bytes=int(stack["stack"]),
        spill_store_bytes=int(stack["stores"]),
        spill_load_bytes=int(stack["loads"]),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def run_ptxas(ptx: str, metadata: Mapping[str, Any], *, timeout_s: float = 120.0) -> PtxasReport:
    """ptxas on the PTX of a kernel, with the options that Triton's metadata ask for.

    Args:
        metadata: `enable_fp_fusion` and `ptx_options` are read; what is missing is Triton's
            default.

    Raises PtxasError.
    """
    target = _TARGET.search(ptx)
    if target is None:
        raise PtxasError("the PTX names no target")
    with tempfile.TemporaryDirectory(prefix="flashdig-ptxas-") as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        name = ptx[target.start() :].split(maxsplit=2)[1].rstrip(",")
        command = [
            _ptxas(int(target[1])),
            "-lineinfo",
            *([] if metadata.get("enable_fp_fusion", True) else ["--fmad=false"]),
            "-v",
            *_release_options(),
            *(metadata.get("ptx_options") or "").split(),
            f"--gpu-name={name}",
            str(source),
            "-o",
            str(Path(folder, "kernel.cubin")),
        ]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PtxasError(f"ptxas: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise PtxasError(last)
    return read_report(done.stderr)


def _ptxas(arch: int) -> str:
    """The ptxas that Triton would use for this chip."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)


def _release_options() -> list[str]:
    """Triton 3.9 works around a fault of ptxas 13 with this; 3.6 gives no such option."""
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return ["--regAllocOptLevel=2"] if (major, minor) >= (3, 9) else []
