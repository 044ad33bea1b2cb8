"""Nsight Compute: what one kernel did inside, from a CSV or a report file.

`ncu --csv --page raw` and `--page details` are read as text; `.ncu-rep` needs the extra `ncu`.
"""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator
from pathlib import Path

from flashdig.readers.ncu_csv import read_csv
from flashdig.readers.ncu_model import NcuKernel, NcuOccupancy, Pipes, Rule, SharedMemory, Stalls
from flashdig.readers.ncu_report_file import REPORT_MAGIC, read_report
from flashdig.readers.open_file import ByteReader, UnreadableFileError

__all__ = [
    "NcuKernel",
    "NcuOccupancy",
    "Pipes",
    "Rule",
    "SharedMemory",
    "Stalls",
    "read_ncu",
]


def read_ncu(path: str) -> list[NcuKernel]:
    """The profiled kernels of a file, in the order they ran.

    Args:
        path: a CSV of the raw or the details page, plain, gzip or xz, "-" for standard input, or a
            report (`.ncu-rep`).

    Raises UnreadableFileError, with file and line, for anything else.
    """
    if path != "-" and _is_report(path):
        return read_report(path)
    reader = ByteReader(path)
    kernels = read_csv(_lines(reader), reader.name)
    if reader.truncated:
        raise UnreadableFileError(f"{reader.name}: the compressed data ends early")
    return kernels


def _is_report(path: str) -> bool:
    if path.lower().endswith((".ncu-rep", ".ncu-repz")):
        return True
    try:
        with Path(path).open("rb") as file:
            return file.read(len(REPORT_MAGIC)) == REPORT_MAGIC
    except OSError as error:
        raise UnreadableFileError(f"{path}: {error.strerror or error}") from error


def _lines(reader: ByteReader) -> Iterator[str]:
    """Lines of text, their ends kept: a quoted cell may hold line breaks."""
    decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
    rest = ""
    for piece in reader:
        if b"\x00" in piece:
            raise UnreadableFileError(f"{reader.name}: this is a binary file, not a CSV")
        lines = io.StringIO(rest + decode(piece), newline="").readlines()
        rest = lines.pop() if lines else ""
        yield from lines
    yield rest + decode(b"", final=True)
