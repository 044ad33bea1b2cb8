"""What a measurement was made on: GPU, driver, library versions, clocks, and the source revision.

Everything unknown is None: no GPU, no NVML (the extra `gpu`), no torch and no git checkout are all
normal places to run.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig._version import __version__

PACKAGE_FOLDER = Path(__file__).resolve().parents[1]
REVISION_VARIABLE = "FLASHDIG_REVISION"

# import name -> a file that only this peer has; `flash_attn` alone may be FlashAttention-2, -4 or
# both
PEER_FILES = {
    "flash_attn_interface": "flash_attn_interface.py",
    "flash_attn.cute": "flash_attn/cute/__init__.py",
}


@dataclass(frozen=True)
class Clocks:
    """One reading of the sensors: SM clock in MHz, board power in W, energy in J since the driver
    was loaded.

    The power is what the driver reports, on recent GPUs an average over about a second, so a burst
    of milliseconds shows only in part.
    """

    sm_clock_mhz: float | None
    power_w: float | None
    energy_j: float | None = None


@dataclass(frozen=True)
class Sensors:
    """NVML's view of one GPU; without one, `unavailable` says why and every reading is None."""

    nvml: Any = None
    handle: Any = None
    unavailable: str | None = None

    def read(self, function: str, *arguments: object) -> float | None:
        """The number that an NVML function gives for this GPU; None where it does not support it.

        `arguments` are names of NVML constants or plain values.
        """
        if self.handle is None:
            return None
        values = [getattr(self.nvml, a) if isinstance(a, str) else a for a in arguments]
        try:
            return float(getattr(self.nvml, function)(self.handle, *values))
        except self.nvml.NVMLError:
            return None

    def clocks(self) -> Clocks:
        milliwatts = self.read("nvmlDeviceGetPowerUsage")
        millijoules = self.read("nvmlDeviceGetTotalEnergyConsumption")
        return Clocks(
            sm_clock_mhz=self.read("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM"),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            energy_j=None if millijoules is None else millijoules / 1e3,
        )

    def driver(self) -> str | None:
        if self.handle is None:
            return None
        try:
            version = self.nvml.nvmlSystemGetDriverVersion()
        except self.nvml.NVMLError:
            return None
        # bindings before nvidia-ml-py 11.5 return bytes
        return version.decode() if isinstance(version, bytes) else str(version)


def open_sensors(uuid: str | None, nvml: Any = None) -> Sensors:
    """The sensors of the GPU with this UUID ("GPU-..."), found even where CUDA_VISIBLE_DEVICES
    renumbers the GPUs. `nvml` is the module to use, pynvml by default."""
    if uuid is None:
        return Sensors(unavailable="no GPU")
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ModuleNotFoundError:
            return Sensors(unavailable="pynvml is not installed (pip install 'flashdig[gpu]')")
    try:
        nvml.nvmlInit()
        return Sensors(nvml, nvml.nvmlDeviceGetHandleByUUID(uuid))
    except nvml.NVMLError as error:
        return Sensors(unavailable=f"NVML: {error}")


@functools.cache
def _sensors_of(device: int | None) -> Sensors:
    return open_sensors(None if device is None else _uuid(device))


def _uuid(device: int) -> str:
    import torch

    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def _current_gpu() -> int | None:
    """Index of torch's current GPU; None without torch or a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def clocks_now(device: int | None = None) -> Clocks:
    """SM clock and power of a GPU at this moment, torch's current one by default."""
    return _sensors_of(_current_gpu() if device is None else device).clocks()


def collect(device: int | None = None) -> dict[str, Any]:
    """The environment as a JSON-able dict; GPU figures are of `device`, the current GPU by default.

    Keys: gpu, compute_capability, sm_count, memory_bytes, driver, power_limit_w, nvml ("ok" or why
    not), torch, cuda, cudnn, triton, numpy, python, platform, cpu, cpu_count, flashdig, peers.
    """
    index = _current_gpu() if device is None else device
    sensors = _sensors_of(index)
    milliwatts = sensors.read("nvmlDeviceGetPowerManagementLimit")
    return {
        **_gpu(index),
        "driver": sensors.driver(),
        "power_limit_w": None if milliwatts is None else milliwatts / 1e3,
        "nvml": sensors.unavailable or "ok",
        **_torch_versions(),
        "triton": _version_of("triton"),
        "numpy": _version_of("numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "flashdig": __version__,
        "peers": {name: peer_version(name) for name in PEER_FILES},
    }


def _gpu(index: int | None) -> dict[str, Any]:
    if index is None:
        return dict.fromkeys(("gpu", "compute_capability", "sm_count", "memory_bytes"))
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }


def _torch_versions() -> dict[str, str | None]:
    try:
        import torch
    except ImportError:
        return {"torch": None, "cuda": None, "cudnn": None}
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else dotted_cudnn_version(cudnn),
    }


def dotted_cudnn_version(number: int) -> str:
    """91900 -> "9.19.0"; up to cuDNN 8 the major version counted thousands, 8902 -> "8.9.2"."""
    major = 10_000 if number >= 90_000 else 1_000
    return f"{number // major}.{number % major // 100}.{number % 100}"


def _version_of(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def peer_version(name: str) -> str | None:
    """ "distribution version" of an installed peer, found without importing it.

    None where it is not installed, "unknown version" where its file is there without metadata.
    """
    file = PEER_FILES[name]
    top = name.partition(".")[0]
    for distribution_name in importlib.metadata.packages_distributions().get(top, []):
        distribution = importlib.metadata.distribution(distribution_name)
        if any(path.as_posix() == file for path in distribution.files or []):
            return f"{distribution.metadata['Name']} {distribution.version}"
    return "unknown version" if _peer_file_exists(top, file) else None


def _peer_file_exists(top: str, file: str) -> bool:
    # finding a submodule's spec would import its parent, so only the top is asked for
    spec = importlib.util.find_spec(top)
    if spec is None:
        return False
    if "/" not in file:
        return True
    inside = file.partition("/")[2]
    return any(
        (Path(folder) / inside).is_file() for folder in spec.submodule_search_locations or ()
    )


def _cpu_name() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or None


def revision(package_folder: Path = PACKAGE_FOLDER) -> str | None:
    """The git commit that the running package comes from, None outside a checkout of it.

    "-dirty" is appended when anything beside the package (its `src` folder) differs from that
    commit; records and documents do not count, since writing a record would dirty the next one. The
    environment variable FLASHDIG_REVISION speaks for copies of the source that carry no history.
    """
    source = package_folder.parent
    top = _git(source, "rev-parse", "--show-toplevel")
    # a virtual environment may lie inside some other project's checkout
    if top is None or source.name != "src" or Path(top).resolve() != source.parent.resolve():
        return os.environ.get(REVISION_VARIABLE) or None
    commit = _git(source, "rev-parse", "HEAD")
    changes = _git(source, "status", "--porcelain", "--", ".")
    if commit is None or changes is None:  # a checkout without a commit has no history either
        return os.environ.get(REVISION_VARIABLE) or None
    return f"{commit}-dirty" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        finished = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout.strip()
