"""A kernel name taken apart: function, template arguments, the C++ noise removed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from flashdig.readers.kernel_names.mangled import readable

# nsys and ncu write "(int)128", "(bool)0", "(unsigned int)2"
_CAST = re.compile(r"\((?:unsigned |signed )?(?:int|bool|long|char|short)\)(?=-?\d)")
_RETURN_TYPE = re.compile(r"^(?:void|std::enable_if<.*?>::type)\s+")
_MAX_LENGTH = 20_000  # names are kilobytes at most; a longer one is damage, and is cut


@dataclass(frozen=True)
class Symbol:
    """One kernel name in the forms the families match against.

    `name` is the text as it stands in the file; `text` is demangled and without return type,
    anonymous namespaces and casts.
    """

    name: str

    @cached_property
    def text(self) -> str:
        text = readable(self.name[:_MAX_LENGTH].strip())
        text = text.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
        text = _RETURN_TYPE.sub("", text)
        return _CAST.sub("", text)

    @cached_property
    def function(self) -> str:
        """The qualified function name, without template and call arguments."""
        cut = min((i for i in (self.text.find("<"), self.text.find("(")) if i >= 0), default=None)
        return self.text[:cut].strip()

    @cached_property
    def base(self) -> str:
        """The last part of `function`: 'flash_fwd_kernel' of 'pytorch_flash::flash_fwd_kernel'."""
        return self.function.rsplit("::", 1)[-1]

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The template arguments of the function, split at its own level; () without any."""
        return template_arguments(self.text)

    def inner(self, template: str) -> tuple[str, ...]:
        """Template arguments of the first `template<...>` anywhere in the name; () if absent."""
        found = self.text.find(template + "<")
        return () if found < 0 else template_arguments(self.text[found:])


def template_arguments(text: str) -> tuple[str, ...]:
    """Split the first <...> of `text` at its top level: 'f<a, g<b, c>>(d)' -> ('a', 'g<b, c>').

    Brackets that never close end with the text: names cut by a viewer still decode.
    """
    start = text.find("<")
    if start < 0 or "(" in text[:start]:
        return ()
    depth, begin, parts = 0, start + 1, []
    for i in range(start, len(text)):
        letter = text[i]
        if letter in "<({[":
            depth += 1
        elif letter in ">)}]":
            depth -= 1
            if depth == 0:
                parts.append(text[begin:i].strip())
                break
        elif letter == "," and depth == 1:
            parts.append(text[begin:i].strip())
            begin = i + 1
    else:
        parts.append(text[begin:].strip())
    return tuple(part for part in parts if part)


def flag(arguments: tuple[str, ...], position: int) -> bool | None:
    """A boolean template argument in any of its spellings; None where it is not there."""
    if position >= len(arguments):
        return None
    return {"true": True, "1": True, "false": False, "0": False}.get(arguments[position])


def number(arguments: tuple[str, ...], position: int) -> int | None:
    """A non-negative integer template argument; None where it is not one."""
    if position >= len(arguments):
        return None
    digits = arguments[position].rstrip("uUlL")
    return int(digits) if digits.isdecimal() and digits.isascii() and len(digits) < 10 else None


def numbers(text: str, pattern: str) -> tuple[int, ...]:
    """The groups of the first match of `pattern` as integers; () without a match."""
    match = re.search(pattern, text)
    return () if match is None else tuple(int(g) for g in match.groups() if g is not None)
