"""What device memory read and wrote while exhibits ran: hardware counters, by Nsight Compute.

One `ncu` process runs `counters_worker`, which warms every exhibit up and then runs each exactly
once in an NVTX range of its name. Each kernel is counted on its own and starts from an empty L2
cache; what it wrote and still stands in the cache when it ends has not reached memory, and is not
among the bytes written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from flashdig.evidence.capture import NO_PERMISSION
from flashdig.evidence.worker import LOG, last_line, run_worker
from flashdig.readers.ncu import NcuKernel, read_ncu
from flashdig.readers.open_file import UnreadableFileError

METRICS = (
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors_srcunit_tex.sum",  # what the SMs ask the L2 for
    "gpu__time_duration.sum",
)
TIMEOUT_S = 300.0
_COUNTERS = "counters.csv"
_UNREAD = "Memory counters were not read"


@dataclass(frozen=True)
class KernelCounters:
    """Launches under one name.

    Attributes:
        us: microseconds in all, at the clocks of the counted run and from a cold cache.
        dram_read_bytes, dram_write_bytes: of device memory.
        l2_bytes: that the SMs asked the L2 cache for; None where not counted.
    """

    name: str
    count: int
    us: float | None
    dram_read_bytes: int
    dram_write_bytes: int
    l2_bytes: int | None


@dataclass(frozen=True)
class Counters:
    """One call's counters.

    Attributes:
        kernels: by name, in the order of their first launch.
        source: what read them, with its version.
        cache: the L2 cache before each kernel.
    """

    kernels: tuple[KernelCounters, ...]
    source: str
    cache: str = "cold"

    @property
    def dram_read_bytes(self) -> int:
        return sum(kernel.dram_read_bytes for kernel in self.kernels)

    @property
    def dram_write_bytes(self) -> int:
        return sum(kernel.dram_write_bytes for kernel in self.kernels)

    @property
    def dram_bytes(self) -> int:
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def l2_bytes(self) -> int | None:
        known = [kernel.l2_bytes for kernel in self.kernels if kernel.l2_bytes is not None]
        return sum(known) if len(known) == len(self.kernels) else None

    def to_dict(self) -> dict[str, Any]:
        """As a row of a record holds them."""
        return {
            "dram_read_bytes": self.dram_read_bytes,
            "dram_write_bytes": self.dram_write_bytes,
            "l2_bytes": self.l2_bytes,
            "cache": self.cache,
            "source": self.source,
            "kernels": [asdict(kernel) for kernel in self.kernels],
        }


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be counted.

    Attributes:
        launched: exhibit -> kernels that one call launches, in the order of the runs.
        q, k, v: (batch, heads, seqlen, head_dim), on the device to run on.
        tf32: whether float32 products may use TF32.
    """

    launched: Mapping[str, int]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    tf32: bool = False


def range_name(exhibit: str) -> str:
    """The NVTX range around the counted run of an exhibit."""
    return f"flashdig-rung-{exhibit}"


def find_ncu() -> str | None:
    """Nsight Compute's command: on the PATH, else in the CUDA toolkit."""
    found = shutil.which("ncu")
    if found is not None:
        return found
    toolkits = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders = os.pathsep.join(str(Path(toolkit, "bin")) for toolkit in toolkits if toolkit)
    return shutil.which("ncu", path=folders)


def counters_command(ncu: str, path: str | Path) -> list[str]:
    """Nsight Compute with its options; the command to run under it follows.

    Clocks stay as they are: locking them would change nothing that is counted.
    """
    return [
        ncu,
        *("--metrics", ",".join(METRICS)),
        *("--profile-from-start", "off"),
        *("--clock-control", "none", "--cache-control", "all"),
        *("--target-processes", "all"),
        "--nvtx",
        *("--csv", "--page", "raw", "--print-units", "base"),
        *("--log-file", str(path)),
    ]


def read_counters(
    plan: Plan, *, timeout_s: float = TIMEOUT_S
) -> tuple[dict[str, Counters], list[str]]:
    """(exhibit -> counters, notes); an exhibit that has none is told of in a note.

    Nothing of this ends a dig: where Nsight Compute is missing, the driver keeps its counters to
    administrators, or the time is over, there are no counters and one note that says so.
    """
    ncu = find_ncu()
    if ncu is None:
        return {}, [f"{_UNREAD}: Nsight Compute (ncu) is not on the PATH."]
    if plan.q.device.type == "cuda":
        torch.cuda.empty_cache()  # the other process needs the room
    with tempfile.TemporaryDirectory(prefix="flashdig-counters-") as folder:
        request = {
            "names": list(plan.launched),
            "device": str(plan.q.device),
            "causal": plan.causal,
            "tf32": plan.tf32,
        }
        Path(folder, "request.json").write_text(json.dumps(request))
        torch.save({"q": plan.q, "k": plan.k, "v": plan.v}, Path(folder, "inputs.pt"))
        try:
            run_worker(
                "flashdig.evidence.counters_worker",
                folder,
                timeout_s=timeout_s,
                environment={},
                under=counters_command(ncu, Path(folder, _COUNTERS)),
            )
        except subprocess.TimeoutExpired:
            return {}, [f"{_UNREAD}: Nsight Compute took longer than {timeout_s:g} s."]
        except OSError as error:
            return {}, [f"{_UNREAD}: {ncu}: {error.strerror or error}."]
        return _collect(folder, plan.launched, ncu)


def _collect(
    folder: str, launched: Mapping[str, int], ncu: str
) -> tuple[dict[str, Counters], list[str]]:
    """The counters that a run left in `folder`."""
    table, answer = Path(folder, _COUNTERS), Path(folder, "answer.json")
    said = Path(folder, LOG).read_text(errors="replace")
    if table.is_file():
        said += table.read_text(errors="replace")
    if NO_PERMISSION in said:
        return {}, [
            f"{_UNREAD}: the driver reserves profiling counters for administrators "
            f"({NO_PERMISSION})."
        ]
    failed: dict[str, str] = json.loads(answer.read_text()) if answer.is_file() else {}
    notes = [f"{_UNREAD} for {name}: {reason}." for name, reason in failed.items()]
    try:
        kernels = read_ncu(str(table))
    except UnreadableFileError:
        return {}, [f"{_UNREAD}: {_complaint(said, folder)}.", *notes]
    if not answer.is_file():
        notes.append(f"The run under Nsight Compute ended early: {_complaint(said, folder)}.")
    wanted = {name: count for name, count in launched.items() if name not in failed}
    groups, fault = attribute(kernels, wanted)
    if fault is not None:
        return {}, [f"{_UNREAD}: {fault}.", *notes]
    source = _version(ncu)
    found: dict[str, Counters] = {}
    for name, count in wanted.items():
        own = groups.get(name, [])
        counted = _sums(own)
        if counted is None:
            what = "no kernel of it was counted" if not own else "a kernel has no memory counters"
            notes.append(f"{_UNREAD} for {name}: {what}.")
            continue
        found[name] = Counters(counted, source)
        if count and count != len(own):
            notes.append(f"{name}: {len(own)} kernels were counted where {count} were recorded.")
    return found, notes


def attribute(
    kernels: Sequence[NcuKernel], launched: Mapping[str, int]
) -> tuple[dict[str, list[NcuKernel]], str | None]:
    """(exhibit -> its kernels, why they cannot be told apart or None).

    By the NVTX ranges of the launches; where no launch has one, by their order, if there are as
    many kernels as the exhibits launch.
    """
    if any(kernel.ranges for kernel in kernels):
        groups = {
            name: [kernel for kernel in kernels if range_name(name) in kernel.ranges]
            for name in launched
        }
        return groups, None
    expected = sum(launched.values())
    if expected != len(kernels):
        return {}, (
            f"{len(kernels)} kernels were counted without NVTX ranges where {expected} were "
            "recorded, so they cannot be told apart"
        )
    ordered = iter(kernels)
    return {name: [next(ordered) for _ in range(count)] for name, count in launched.items()}, None


def _sums(kernels: Sequence[NcuKernel]) -> tuple[KernelCounters, ...] | None:
    """Launches added up by name; None without any, or where memory was not counted."""
    by_name: dict[str, list[NcuKernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, []).append(kernel)
    sums = []
    for name, own in by_name.items():
        read = _sum([kernel.dram_read_bytes for kernel in own])
        written = _sum([kernel.dram_write_bytes for kernel in own])
        if read is None or written is None:
            return None
        l2_bytes = _sum([kernel.l2_from_sms_bytes for kernel in own])
        ns = _sum([kernel.duration_ns for kernel in own])
        sums.append(
            KernelCounters(
                name=name,
                count=len(own),
                us=None if ns is None else ns / 1000,
                dram_read_bytes=round(read),
                dram_write_bytes=round(written),
                l2_bytes=None if l2_bytes is None else round(l2_bytes),
            )
        )
    return tuple(sums) or None


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _complaint(said: str, folder: str) -> str:
    """What Nsight Compute complained of, else the last line of the worker."""
    errors = re.findall(r"^==ERROR== (.+?)\.?\s*$", said, re.MULTILINE)
    # of a worker that failed, its own last line says more
    own = [error for error in errors if "application returned an error" not in error]
    line = last_line(folder)
    if own or line is None:
        warnings = re.findall(r"^==WARNING== (?!Note)(.+?)\.?\s*$", said, re.MULTILINE)
        return str([*own, *errors, *warnings, "Nsight Compute printed nothing"][0])
    return line.rstrip(".")


def _version(ncu: str) -> str:
    try:
        said = subprocess.run(
            [ncu, "--version"], capture_output=True, text=True, timeout=30, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    found = re.search(r"\bVersion (\S+)", said)
    return "Nsight Compute" if found is None else f"Nsight Compute {found[1]}"
