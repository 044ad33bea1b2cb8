"""A trace's JSON text read event by event: linear time, memory for one event and one piece.

Takes both forms of the Chrome trace format, `{"traceEvents": [...], ...}` and a bare array. The
standard library's decoder is applied to a sliding buffer; numbers with a fraction stay text, so
that no digit of a time stamp is lost. Bytes that are no UTF-8 are kept apart (surrogate escapes)
until a name is looked at.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator

MAX_VALUE_CHARACTERS = 64 << 20
_SPACE = re.compile(r"[ \t\n\r]*")
_NEXT_OBJECT = re.compile(r"[ \t\n\r]*,[ \t\n\r]*(?=\{)")
_ESCAPED_BYTES = re.compile("[\udc80-\udcff]")
# as long as the longest thing that can be cut in half at the end: "-Infinity", "\u1234"
_CUT_TAIL = 9


class JsonDamageError(ValueError):
    """The text is no JSON from a byte offset on (of the decompressed text)."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(f"damaged at byte {offset}: {reason}")
        self.offset = offset
        self.reason = reason


class _EndOfTextError(Exception):
    """The text ended inside something."""


class JsonStream:
    """Events of a trace, and afterwards everything else that the file says.

    Args:
        pieces: the file's bytes in order.

    Attributes:
        metadata: top-level keys other than "traceEvents"; complete when iteration is over.
        truncated: the text ended inside something; all complete events were delivered.
        bad_bytes: number of bytes that were no UTF-8.
        is_trace: False while neither "traceEvents" nor a bare array has been seen.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.metadata: dict[str, object] = {}
        self.truncated = False
        self.bad_bytes = 0
        self.is_trace = False
        self._pieces = iter(pieces)
        self._decoder: codecs.IncrementalDecoder | None = None
        self._encoding = "utf-8"
        self._text = ""
        self._position = 0
        self._bytes_before = 0  # encoded size of all text before self._text
        self._at_end = False
        self._json = json.JSONDecoder(
            parse_float=str, parse_constant=lambda _constant: None, strict=False
        )

    @property
    def offset(self) -> int:
        """Byte offset of what is read next."""
        return self._byte_offset(self._position)

    def events(self) -> Iterator[object]:
        """The entries of "traceEvents", in file order. Raises JsonDamageError."""
        try:
            first = self._next_character()
            if first == "[":
                self._position += 1
                self.is_trace = True
                yield from self._array(closing_bracket_optional=True)
            elif first == "{":
                self._position += 1
                yield from self._top_level()
            else:
                raise self._damage("a trace starts with { or [")
            self._skip_space()
            if self._position < len(self._text):
                raise self._damage("more text follows the end of the trace")
        except _EndOfTextError:
            self.truncated = True

    def _top_level(self) -> Iterator[object]:
        while True:
            character = self._next_character()
            if character == "}":
                self._position += 1
                return
            if character == ",":
                self._position += 1
                continue
            if character != '"':
                raise self._damage("expected a name in quotes")
            key = self._value()
            if self._next_character() != ":":
                raise self._damage("expected a colon")
            self._position += 1
            if key == "traceEvents" and self._next_character() == "[":
                self._position += 1
                self.is_trace = True
                yield from self._array()
            else:
                self._next_character()
                self.metadata[str(key)] = self._value()

    def _array(self, closing_bracket_optional: bool = False) -> Iterator[object]:
        decode = self._json.raw_decode
        while True:
            self._skip_space()
            if self._position >= len(self._text):
                if closing_bracket_optional:
                    return
                raise _EndOfTextError
            if self._text[self._position] == "]":
                self._position += 1
                return
            yield self._value()
            # Most events lie whole in the buffer: decode those without a call each.
            while (gap := _NEXT_OBJECT.match(self._text, self._position)) is not None:
                try:
                    value, end = decode(self._text, gap.end())
                except (ValueError, RecursionError):
                    break  # cut off or damaged: self._value tells which
                self._position = end
                yield value
            self._skip_space()
            if self._text.startswith(",", self._position):
                self._position += 1
            elif self._position < len(self._text) and self._text[self._position] != "]":
                raise self._damage("expected a comma or the end of the list")

    def _value(self) -> object:
        """The JSON value at the current position; reads on until it is whole."""
        while True:
            try:
                value, end = self._json.raw_decode(self._text, self._position)
            except json.JSONDecodeError as error:
                cut = (
                    error.msg.startswith("Unterminated string")
                    or len(self._text) - error.pos <= _CUT_TAIL
                )
                if not cut:
                    self._position = error.pos
                    raise self._damage(error.msg) from error
                if self._at_end:
                    raise _EndOfTextError from error
            except RecursionError as error:
                raise self._damage("values are nested too deeply") from error
            except ValueError as error:  # the interpreter's limit on integers
                raise self._damage("a number has thousands of digits") from error
            else:
                # a number at the buffer's end may go on in the next piece
                if end < len(self._text) or self._at_end:
                    self._position = end
                    return value
            waiting = len(self._text) - self._position
            if waiting > MAX_VALUE_CHARACTERS:
                raise self._damage("one value is longer than 64 MiB")
            self._fill(waiting)

    def _next_character(self) -> str:
        self._skip_space()
        if self._position >= len(self._text):
            raise _EndOfTextError
        return self._text[self._position]

    def _skip_space(self) -> None:
        while True:
            space = _SPACE.match(self._text, self._position)
            assert space is not None
            self._position = space.end()
            if self._position < len(self._text) or self._at_end:
                return
            self._fill(1)

    def _fill(self, at_least: int) -> None:
        """Drop what was read; append at least that many characters, or all there are."""
        self._bytes_before += self._encoded_size(self._text[: self._position])
        parts = [self._text[self._position :]]
        self._position = 0
        added = 0
        while added < at_least and not self._at_end:
            piece = next(self._pieces, None)
            if piece is None:
                self._at_end = True
                decoded = "" if self._decoder is None else self._decoder.decode(b"", True)
            else:
                decoded = self._start_or_continue(piece)
            if not decoded.isascii():
                self.bad_bytes += len(_ESCAPED_BYTES.findall(decoded))
            parts.append(decoded)
            added += len(decoded)
        self._text = "".join(parts)

    def _start_or_continue(self, piece: bytes) -> str:
        if self._decoder is None:
            encoding: str = json.detect_encoding(piece[:4])
            marks = {"utf-8-sig": 3, "utf-16": 2, "utf-32": 4}
            if encoding in {"utf-16", "utf-32"}:
                encoding += "-le" if piece[:1] == b"\xff" else "-be"
                self._bytes_before = marks[encoding[:6]]
                piece = piece[self._bytes_before :]
            elif encoding == "utf-8-sig":
                self._bytes_before = marks[encoding]
                piece = piece[self._bytes_before :]
                encoding = "utf-8"
            self._encoding = encoding
            errors = "surrogateescape" if encoding == "utf-8" else "replace"
            self._decoder = codecs.getincrementaldecoder(encoding)(errors)
        return self._decoder.decode(piece)

    def _damage(self, reason: str) -> JsonDamageError:
        return JsonDamageError(self._byte_offset(self._position), reason)

    def _byte_offset(self, position: int) -> int:
        return self._bytes_before + self._encoded_size(self._text[:position])

    def _encoded_size(self, text: str) -> int:
        if self._encoding == "utf-8":
            if text.isascii():
                return len(text)
            return len(text.encode("utf-8", "surrogateescape"))
        return len(text.encode(self._encoding, "surrogatepass"))
