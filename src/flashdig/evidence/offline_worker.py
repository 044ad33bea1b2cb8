"""The process that `offline` starts: launches kernels under a driver that compiles and records.

python -m flashdig.evidence.offline_worker FOLDER
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from flashdig.evidence import portable_launch
from flashdig.evidence.offline import Request, ptxas_options, read_cubin, request_from
from flashdig.generations.ladder import generation
from flashdig.hardware.arch import architecture
from flashdig.problem import AttentionProblem


class OfflineDriver(DriverBase):
    """Stands where a GPU's driver would: compiles for `arch`, launches nothing, records all."""

    def __init__(self, arch: str) -> None:
        super().__init__()
        self.facts = architecture(arch)
        major, minor = self.facts.key.split(".")
        self.capability = 10 * int(major) + int(minor)
        self.utils = self
        self.launched: list[dict[str, Any]] = []
        self._loading: dict[str, Any] = {}
        self._files: dict[str, dict[str, str]] = {}

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        """Triton keeps compiled kernels by device: a number of its own for each capability."""
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("nothing can be timed without a GPU")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self.facts.shared_bytes_per_block}

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[object, None, int, int, int]:
        """(module, function, registers, spills, threads), as Triton asks for them."""
        found = read_cubin(kernel)
        self._loading.update(name=name, shared_bytes=shared, **found)
        return object(), None, found["registers"], found["stack_bytes"] // 4, 1024

    def unload_module(self, module: object) -> None:
        """Nothing was loaded."""

    def note_files(self, *, metadata: Any, metadata_group: dict[str, str], **_: object) -> None:
        """Triton's compilation listener: a kernel's files in the cache, by its hash."""
        self._files[metadata["hash"]] = metadata_group

    def launcher_cls(self, source: object, metadata: Any) -> Any:
        """A launcher that notes its kernel and the grid; Triton makes it, then loads the kernel."""
        files = self._files[metadata.hash]
        # a cache may be told to store binaries only
        ptx = next((path for name, path in files.items() if name.endswith(".ptx")), None)
        kernel = self._loading = {
            "threads": metadata.num_warps * metadata.target.warp_size,
            "ptx": "" if ptx is None else Path(ptx).read_text(),
            "options": ptxas_options(metadata._asdict()),
        }

        def launch(grid_0: int, grid_1: int, grid_2: int, *rest: object) -> None:
            self.launched.append({**kernel, "grid": [grid_0, grid_1, grid_2]})

        return launch


@functools.cache
def driver_for(arch: str) -> OfflineDriver:
    return OfflineDriver(arch)


def compile_one(request: Request) -> list[dict[str, Any]]:
    """The kernels that would be launched, in order."""
    driver = driver_for(request.arch)
    driver.launched.clear()
    triton.runtime.driver.set_active(driver)
    triton.knobs.compilation.listener = driver.note_files
    if portable_launch.launches(request.exhibit):
        portable_launch.launch(request.exhibit, request.problem, request.arch)
    else:
        run_exhibit(request.exhibit, request.problem)
    return list(driver.launched)


def run_exhibit(name: str, problem: AttentionProblem) -> None:
    """The exhibit's launches, on tensors without memory."""
    dtype = getattr(torch, problem.dtype)

    def tensor(heads: int, seqlen: int, head_dim: int) -> torch.Tensor:
        return torch.empty(problem.batch, heads, seqlen, head_dim, dtype=dtype, device="meta")

    q = tensor(problem.num_heads, problem.seqlen_q, problem.head_dim)
    k = tensor(problem.num_heads_kv, problem.seqlen_k, problem.head_dim)
    v = tensor(problem.num_heads_kv, problem.seqlen_k, problem.head_dim_v)
    torch.backends.cuda.matmul.fp32_precision = "tf32" if problem.allow_tf32 else "ieee"
    generation(name).run(q, k, v, problem.causal)


def main(folder: Path) -> None:
    compiled = []
    for number, written in enumerate(json.loads((folder / "requests.json").read_text())):
        (folder / "progress.txt").write_text(str(number))
        compiled.append(compile_one(request_from(written)))
    (folder / "compiled.json").write_text(json.dumps(compiled))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
