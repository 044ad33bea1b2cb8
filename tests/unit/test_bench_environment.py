"""What is known of a machine, with and without torch, NVML, peers and git."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flashdig._version import __version__
from flashdig.bench import environment
from flashdig.bench.environment import (
    Clocks,
    collect,
    dotted_cudnn_version,
    open_sensors,
    peer_version,
    revision,
)

KEYS = {
    "gpu",
    "compute_capability",
    "sm_count",
    "memory_bytes",
    "driver",
    "power_limit_w",
    "nvml",
    "torch",
    "cuda",
    "cudnn",
    "triton",
    "numpy",
    "python",
    "platform",
    "cpu",
    "cpu_count",
    "flashdig",
    "peers",
}


def test_environment_is_json_and_names_its_versions() -> None:
    import numpy
    import torch

    found = collect()
    assert json.loads(json.dumps(found)) == found
    assert found.keys() == KEYS
    assert found["torch"] == torch.__version__
    assert found["numpy"] == numpy.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["flashdig"] == __version__
    assert found["peers"].keys() == {"flash_attn_interface", "flash_attn.cute"}


@pytest.mark.parametrize("missing", ["torch", "pynvml"])
def test_environment_without_an_optional_module(missing) -> None:
    script = (
        f"import sys, json; sys.modules[{missing!r}] = None\n"
        "from flashdig.bench.environment import collect, clocks_now\n"
        "clocks = clocks_now()\n"
        "print(json.dumps([collect(), clocks.sm_clock_mhz, clocks.power_w]))"
    )
    source = str(Path(environment.__file__).parents[2])
    finished = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": source, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    found, clock, power = json.loads(finished.stdout)
    assert (clock, power) == (None, None)
    assert found.keys() == KEYS
    assert found["nvml"] == "no GPU"
    assert found["gpu"] is None
    if missing == "torch":
        assert found["torch"] is found["cuda"] is found["cudnn"] is None


class FakeNvml:
    """The part of pynvml that is used; `broken` functions raise."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, broken: tuple[str, ...] = ()) -> None:
        self.broken = broken

    def _value(self, name: str, value):
        if name in self.broken:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlInit(self):
        return self._value("nvmlInit", None)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return self._value("nvmlDeviceGetHandleByUUID", f"handle of {uuid}")

    def nvmlDeviceGetClockInfo(self, handle, kind):
        assert (handle, kind) == ("handle of GPU-1", self.NVML_CLOCK_SM)
        return self._value("nvmlDeviceGetClockInfo", 1980)

    def nvmlDeviceGetPowerUsage(self, handle):
        return self._value("nvmlDeviceGetPowerUsage", 412_500)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._value("nvmlDeviceGetTotalEnergyConsumption", 81_500)

    def nvmlSystemGetDriverVersion(self):
        return self._value("nvmlSystemGetDriverVersion", b"580.95.05")


def test_sensors_read_megahertz_watts_and_joules() -> None:
    sensors = open_sensors("GPU-1", FakeNvml())
    assert sensors.unavailable is None
    assert sensors.clocks() == Clocks(1980.0, 412.5, 81.5)
    assert sensors.driver() == "580.95.05"


def test_a_reading_that_the_gpu_does_not_support_is_unknown() -> None:
    sensors = open_sensors(
        "GPU-1", FakeNvml(("nvmlDeviceGetPowerUsage", "nvmlSystemGetDriverVersion"))
    )
    assert sensors.clocks() == Clocks(1980.0, None, 81.5)
    assert sensors.driver() is None


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_sensors_that_cannot_be_opened_say_why(broken) -> None:
    sensors = open_sensors("GPU-1", FakeNvml((broken,)))
    assert sensors.unavailable == "NVML: Not Supported"
    assert sensors.clocks() == Clocks(None, None)
    assert sensors.driver() is None


def test_a_missing_pynvml_names_the_extra(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "flashdig[gpu]" in open_sensors("GPU-1").unavailable


@pytest.mark.parametrize(
    ("number", "text"), [(91900, "9.19.0"), (90100, "9.1.0"), (8902, "8.9.2"), (7605, "7.6.5")]
)
def test_cudnn_versions_are_dotted(number, text) -> None:
    assert dotted_cudnn_version(number) == text


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def distribution(name: str, version: str, *files: str) -> dict[str, str]:
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    record = "".join(f"{file},,\n" for file in (*files, f"{info}/METADATA", f"{info}/RECORD"))
    return {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/RECORD": record,
    }


IMPORTED = "raise AssertionError('imported')"


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_peers_are_found_by_their_files_and_never_imported(site) -> None:
    write(
        site,
        {
            "flash_attn_interface.py": IMPORTED,
            "flash_attn/__init__.py": IMPORTED,
            "flash_attn/cute/__init__.py": IMPORTED,
            **distribution("some-fa3-build", "3.0.0.post1", "flash_attn_interface.py"),
            **distribution("flash-attn", "2.8.3", "flash_attn/__init__.py"),
            **distribution("flash-attn-4", "4.0.0b36", "flash_attn/cute/__init__.py"),
        },
    )
    importlib.invalidate_caches()
    assert peer_version("flash_attn_interface") == "some-fa3-build 3.0.0.post1"
    assert peer_version("flash_attn.cute") == "flash-attn-4 4.0.0b36"


def test_flash_attention_2_alone_is_not_flash_attention_4(site) -> None:
    write(
        site,
        {
            "flash_attn/__init__.py": IMPORTED,
            **distribution("flash-attn", "2.8.3", "flash_attn/__init__.py"),
        },
    )
    importlib.invalidate_caches()
    assert peer_version("flash_attn.cute") is None


def test_a_peer_without_metadata_has_an_unknown_version(site) -> None:
    write(
        site,
        {
            "flash_attn_interface.py": IMPORTED,
            "flash_attn/__init__.py": IMPORTED,
            "flash_attn/cute/__init__.py": IMPORTED,
        },
    )
    importlib.invalidate_caches()
    assert peer_version("flash_attn_interface") == "unknown version"
    assert peer_version("flash_attn.cute") == "unknown version"


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "commit.gpgsign=false"]
    finished = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        check=True,
        capture_output=True,
        text=True,
    )
    return finished.stdout.strip()


@pytest.fixture
def checkout(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv(environment.REVISION_VARIABLE, raising=False)
    write(tmp_path, {"src/flashdig/module.py": "a = 1\n", "README.md": "text\n"})
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_revision_of_a_clean_checkout_is_its_commit(checkout) -> None:
    assert revision(checkout / "src/flashdig") == git(checkout, "rev-parse", "HEAD")


def test_new_records_leave_the_revision_clean_and_source_changes_do_not(checkout) -> None:
    commit = git(checkout, "rev-parse", "HEAD")
    write(checkout, {"benchmarks/results/nvidia-h200/dig.json": "{}", "README.md": "other\n"})
    assert revision(checkout / "src/flashdig") == commit
    write(checkout, {"src/flashdig/new.py": "b = 1\n"})
    assert revision(checkout / "src/flashdig") == f"{commit}-dirty"
    (checkout / "src/flashdig/new.py").unlink()
    write(checkout, {"src/flashdig/module.py": "a = 2\n"})
    assert revision(checkout / "src/flashdig") == f"{commit}-dirty"


def test_another_projects_checkout_is_not_ours(checkout) -> None:
    for folder in (".venv/lib/site-packages/flashdig", "vendored/flashdig/src/flashdig"):
        inside = checkout / folder
        write(inside, {"__init__.py": ""})
        assert revision(inside) is None


def test_outside_of_a_checkout_the_variable_speaks(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    package = tmp_path / "src/flashdig"
    package.mkdir(parents=True)
    monkeypatch.delenv(environment.REVISION_VARIABLE, raising=False)
    assert revision(package) is None
    monkeypatch.setenv(environment.REVISION_VARIABLE, "abc123")
    assert revision(package) == "abc123"


def test_without_git_the_revision_is_unknown(checkout, monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert revision(checkout / "src/flashdig") is None
