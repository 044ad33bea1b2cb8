"""What tests of all folders share."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.fixture
def command(monkeypatch, capsys):
    """flashdig's command line in this process, as on a machine without a GPU.

    A process of its own takes three seconds to import torch; each command has a test that starts
    one.
    """

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        import torch

        from flashdig.cli import main

        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["flashdig", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        said = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, said.out, said.err)

    return run
