"""Bytes of a recording, whatever it is wrapped in: plain or gzip (several members), file or stdin.

What a file is, its first bytes say, never its suffix. Decompression happens in pieces, so memory
stays bounded whatever a file expands to.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

CHUNK_BYTES = 1 << 20
MAX_EXPANSION = 1000
MAX_MEMBER_BYTES = 8 << 30
# A member smaller than this does no harm, however well it compressed.
_HARMLESS_BYTES = 1 << 20

_GZIP_MAGIC = b"\x1f\x8b"
_SQLITE_MAGIC = b"SQLite format 3\x00"
_FOREIGN_MAGIC = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard: unpack it first (zstd -d)",
    b"BZh": "compressed with bzip2: unpack it first (bunzip2)",
    b"\xfd7zXZ\x00": "compressed with xz: unpack it first (unxz)",
    b"NVR\x00": "an Nsight Compute report: read it with the Nsight Compute reader",
    b"\x80\x02": "a Python pickle, not a trace: export one with export_chrome_trace",
    b"\x80\x04": "a Python pickle, not a trace: export one with export_chrome_trace",
    b"\x7fELF": "a program, not a trace",
}
_FOREIGN_SUFFIX = {
    ".nsys-rep": "an Nsight Systems report: export it first (nsys export --type sqlite FILE)",
    ".qdrep": "an Nsight Systems report: export it first (nsys export --type sqlite FILE)",
    ".ncu-rep": "an Nsight Compute report, which holds counters and no timeline",
}


class UnreadableFileError(ValueError):
    """A file cannot be read as a recording; the message names the file and the place in it."""


def is_sqlite(path: str) -> bool:
    """True when the file is an SQLite database, by its first bytes. Raises UnreadableFileError."""
    if path == "-":
        return False
    with _open(path) as file:
        return file.read(len(_SQLITE_MAGIC)) == _SQLITE_MAGIC


class ByteReader:
    """Iterates over the decompressed bytes of a file or of standard input ("-") in pieces.

    Args:
        path: file name, or "-".
        allow_large: also read gzip members that expand more than 1000:1 or to more than 8 GiB.
        progress: called with the number of (compressed) bytes read so far.

    Attributes:
        truncated: set when a gzip member ends early; what came before it was delivered.
        is_gzip: set once the first bytes are known.

    Raises UnreadableFileError while iterating.
    """

    def __init__(
        self,
        path: str,
        *,
        allow_large: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.path = path
        self.name = "standard input" if path == "-" else path
        self.allow_large = allow_large
        self.truncated = False
        self.is_gzip = False
        self._progress = progress

    def __iter__(self) -> Iterator[bytes]:
        if self.path == "-":
            yield from self._pieces(sys.stdin.buffer)
            return
        with _open(self.path) as file:
            yield from self._pieces(file)

    def _pieces(self, file: BinaryIO) -> Iterator[bytes]:
        raw = self._raw(file)
        first = next(raw, b"")
        self._refuse_foreign(first)
        if first.startswith(_GZIP_MAGIC):
            self.is_gzip = True
            yield from self._gunzip(first, raw)
            return
        if first:
            yield first
        yield from raw

    def _raw(self, file: BinaryIO) -> Iterator[bytes]:
        total = 0
        while True:
            try:
                piece = file.read(CHUNK_BYTES)
            except OSError as error:
                raise UnreadableFileError(f"{self.name}: {error.strerror or error}") from error
            if not piece:
                return
            total += len(piece)
            if self._progress is not None:
                self._progress(total)
            yield piece

    def _refuse_foreign(self, first: bytes) -> None:
        if first.startswith(_SQLITE_MAGIC):
            raise UnreadableFileError(
                f"{self.name}: an SQLite database cannot be read from a stream; give its file name"
            )
        for suffix, what in _FOREIGN_SUFFIX.items():
            if self.path.lower().endswith(suffix):
                raise UnreadableFileError(f"{self.name}: this is {what}")
        for magic, what in _FOREIGN_MAGIC.items():
            if first.startswith(magic):
                raise UnreadableFileError(f"{self.name}: this is {what}")

    def _gunzip(self, data: bytes, raw: Iterator[bytes]) -> Iterator[bytes]:
        """Members one after the other; zero padding between or behind them is legal."""
        read_before = 0  # compressed bytes of earlier pieces
        while True:
            data, skipped = _without_padding(data, raw)
            read_before += skipped
            if not data:
                return
            if not _GZIP_MAGIC.startswith(data[:2]):
                raise UnreadableFileError(
                    f"{self.name}: byte {read_before} follows a complete gzip member but starts no "
                    "other one; the file is damaged, or not all of it is gzip"
                )
            member = zlib.decompressobj(wbits=31)
            taken = produced = 0
            while not member.eof:
                try:
                    text = member.decompress(data, CHUNK_BYTES)
                except zlib.error as error:
                    raise UnreadableFileError(
                        f"{self.name}: the compressed data is damaged near byte "
                        f"{read_before + taken} ({error})"
                    ) from error
                left = member.unused_data if member.eof else member.unconsumed_tail
                taken += len(data) - len(left)
                data = left
                produced += len(text)
                self._check_expansion(taken, produced)
                if text:
                    yield text
                if not data and not member.eof:
                    data = next(raw, b"")
                    if not data and not text:
                        self.truncated = True
                        return
            read_before += taken

    def _check_expansion(self, taken: int, produced: int) -> None:
        if self.allow_large or produced <= _HARMLESS_BYTES:
            return
        if produced > MAX_MEMBER_BYTES:
            raise UnreadableFileError(
                f"{self.name}: a gzip member expands to more than {MAX_MEMBER_BYTES >> 30} GiB; "
                "--allow-large reads it nevertheless"
            )
        if produced > MAX_EXPANSION * taken:
            raise UnreadableFileError(
                f"{self.name}: a gzip member expands more than {MAX_EXPANSION}:1, which no trace "
                "does; --allow-large reads it nevertheless"
            )


def _without_padding(data: bytes, raw: Iterator[bytes]) -> tuple[bytes, int]:
    """The data from the first byte that is not zero on, and how many bytes were left out."""
    skipped = 0
    while True:
        stripped = data.lstrip(b"\x00")
        skipped += len(data) - len(stripped)
        if stripped:
            # a member's two magic bytes may lie on both sides of a piece boundary
            return (stripped if len(stripped) > 1 else stripped + next(raw, b"")), skipped
        data = next(raw, b"")
        if not data:
            return b"", skipped


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UnreadableFileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a name with a NUL byte
        raise UnreadableFileError(f"{path!r}: {error}") from error
