"""What may import what: the predicting and reading half works without torch and Triton."""

import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import flashdig

SOURCE = Path(flashdig.__file__).parent
WITHOUT_TORCH = ("hardware", "costs", "readers", "findings", "report", "bench", "cli")


def modules_of(package: str) -> list[str]:
    folder = SOURCE / package
    found = pkgutil.walk_packages([str(folder)], prefix=f"flashdig.{package}.")
    return [f"flashdig.{package}", *(module.name for module in found)]


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_imports_neither_torch_nor_triton(package) -> None:
    names = modules_of(package)
    assert len(names) > 1
    code = (
        "import sys, importlib; sys.modules['torch'] = None; sys.modules['triton'] = None\n"
        f"for name in {names!r}: importlib.import_module(name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_exhibits_import_no_kernel_and_no_other_exhibit() -> None:
    exhibits = ("v0_eager", "online_softmax", "v1_io_aware", "v2_work_partition")
    for exhibit in exhibits:
        text = (SOURCE / "generations" / f"{exhibit}.py").read_text()
        for other in exhibits:
            assert other == exhibit or f"generations.{other}" not in text
            assert f"generations import {other}" not in text
        kernels = [line for line in text.splitlines() if "flashdig.kernels" in line]
        assert all("primitives" in line for line in kernels)


def test_every_file_is_short_enough_to_read() -> None:
    long = {
        str(path.relative_to(SOURCE)): lines
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 500
    }
    assert long == {}
