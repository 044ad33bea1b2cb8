"""Bytes of a recording, whatever it is wrapped in: plain, gzip or xz (of several members), file or
standard input.

What a file is, its first bytes say, never its suffix. Decompression happens in pieces, so memory
stays bounded whatever a file expands to.
"""

from __future__ import annotations

import lzma
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

CHUNK_BYTES = 1 << 20
MAX_EXPANSION = 1000
MAX_MEMBER_BYTES = 8 << 30
# of xz's window; its own highest setting takes 65 MiB
MAX_XZ_MEMORY_BYTES = 1 << 30
# A member smaller than this does no harm, however well it compressed.
_HARMLESS_BYTES = 1 << 20

_SQLITE_MAGIC = b"SQLite format 3\x00"
_FOREIGN_MAGIC = {
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard: unpack it first (zstd -d)",
    b"BZh": "compressed with bzip2: unpack it first (bunzip2)",
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


class _Member(Protocol):
    """One compressed member being unpacked, as `lzma.LZMADecompressor` does it."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


class _GzipMember:
    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=31)

    @property
    def eof(self) -> bool:
        return self._member.eof

    @property
    def needs_input(self) -> bool:
        return not self._member.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._member.unused_data

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        return self._member.decompress(self._member.unconsumed_tail + data, max_length)


@dataclass(frozen=True)
class _Compression:
    name: str
    magic: bytes
    member: Callable[[], _Member]


_COMPRESSIONS = (
    _Compression("gzip", b"\x1f\x8b", _GzipMember),
    _Compression(
        "xz",
        b"\xfd7zXZ\x00",
        lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_XZ_MEMORY_BYTES),
    ),
)


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
        allow_large: also read compressed members that expand more than 1000:1 or beyond 8 GiB.
        progress: called with the number of (compressed) bytes read so far.

    Attributes:
        truncated: set when a compressed member ends early; what came before it was delivered.
        is_compressed: set once the first bytes are known.

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
        self.is_compressed = False
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
        for kind in _COMPRESSIONS:
            if first.startswith(kind.magic):
                self.is_compressed = True
                yield from self._unpack(kind, first, raw)
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

    def _unpack(self, kind: _Compression, data: bytes, raw: Iterator[bytes]) -> Iterator[bytes]:
        """Members one after the other; zero padding between or behind them is legal."""
        read_before = 0  # compressed bytes of earlier pieces
        while True:
            data, skipped = _without_padding(data, raw, len(kind.magic))
            read_before += skipped
            if not data:
                return
            if not kind.magic.startswith(data[: len(kind.magic)]):
                raise UnreadableFileError(
                    f"{self.name}: byte {read_before} follows a complete {kind.name} member but "
                    f"starts no other one; the file is damaged, or not all of it is {kind.name}"
                )
            member = kind.member()
            taken = produced = 0
            while not member.eof:
                taken += len(data)
                try:
                    text = member.decompress(data, CHUNK_BYTES)
                except (zlib.error, lzma.LZMAError) as error:
                    raise UnreadableFileError(
                        f"{self.name}: the compressed data is damaged near byte "
                        f"{read_before + taken - len(data)} ({error})"
                    ) from error
                taken -= len(member.unused_data)
                produced += len(text)
                self._check_expansion(kind, taken, produced)
                if text:
                    yield text
                data = b""
                if not member.eof and member.needs_input:
                    data = next(raw, b"")
                    if not data and not text:
                        self.truncated = True
                        return
            data = member.unused_data
            read_before += taken

    def _check_expansion(self, kind: _Compression, taken: int, produced: int) -> None:
        if self.allow_large or produced <= _HARMLESS_BYTES:
            return
        if produced > MAX_MEMBER_BYTES:
            raise UnreadableFileError(
                f"{self.name}: a member of {kind.name} expands to more than "
                f"{MAX_MEMBER_BYTES >> 30} GiB; --allow-large reads it nevertheless"
            )
        if produced > MAX_EXPANSION * taken:
            raise UnreadableFileError(
                f"{self.name}: a member of {kind.name} expands more than {MAX_EXPANSION}:1, which "
                "no trace does; --allow-large reads it nevertheless"
            )


def _without_padding(data: bytes, raw: Iterator[bytes], magic_bytes: int) -> tuple[bytes, int]:
    """The data from the first byte that is not zero on, and how many bytes were left out."""
    skipped = 0
    while True:
        stripped = data.lstrip(b"\x00")
        skipped += len(data) - len(stripped)
        if stripped:
            break
        data = next(raw, b"")
        if not data:
            return b"", skipped
    # a member's magic bytes may lie on both sides of a piece boundary
    while len(stripped) < magic_bytes and (more := next(raw, b"")):
        stripped += more
    return stripped, skipped


def _open(path: str) -> BinaryIO:
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise UnreadableFileError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a name with a NUL byte
        raise UnreadableFileError(f"{path!r}: {error}") from error
