"""Mangled C++ names made readable, as far as decoding a kernel needs it.

A small reader of the Itanium C++ ABI (https://itanium-cxx-abi.github.io/cxx-abi/abi.html#mangling):
qualified names, template arguments, literals and substitutions, which is what the families look
at. Pointers and qualifiers are left out, as are the types of the call's arguments, and a name that
is cut or strange comes back as far as it could be read.
"""

from __future__ import annotations

from collections.abc import Callable

_BUILTIN = {
    "v": "void",
    "b": "bool",
    "c": "char",
    "a": "signed char",
    "h": "unsigned char",
    "s": "short",
    "t": "unsigned short",
    "i": "int",
    "j": "unsigned int",
    "l": "long",
    "m": "unsigned long",
    "x": "long long",
    "y": "unsigned long long",
    "f": "float",
    "d": "double",
    "z": "...",
}
_EXTENDED = {"DF16_": "half", "DF16b": "bfloat16", "Dh": "half", "Dn": "nullptr_t"}
_STANDARD = {
    "a": "std::allocator",
    "b": "std::basic_string",
    "s": "std::string",
    "i": "std::istream",
    "o": "std::ostream",
    "d": "std::iostream",
}
_MAX_DEPTH = 200
# a hostile name could repeat what it repeats; real ones are far below
_MAX_SEEN = 2000
_MAX_TEXT = 20_000


class _UnreadableError(Exception):
    """The rest of the name is cut or outside of what is read here."""


def is_mangled(name: str) -> bool:
    """True for names of the Itanium C++ ABI (_Z...)."""
    return name.startswith("_Z") and len(name) > 3


def readable(name: str) -> str:
    """`_ZN5flash16flash_fwd_kernelI...Li64E...` as `flash::flash_fwd_kernel<..., 64, ...>`.

    A name that is not mangled comes back unchanged.
    """
    if not is_mangled(name):
        return name
    reader = _Reader(name)
    try:
        reader.name()
    except _UnreadableError:
        reader.out.extend(">" * reader.open_templates)
    return "".join(reader.out)


class _Reader:
    """Reads from left to right and writes to `out` as it goes.

    `seen` holds what later parts of the name may refer back to, in the ABI's order.
    """

    def __init__(self, mangled: str) -> None:
        self.text = mangled
        self.at = 2
        self.depth = 0
        self.open_templates = 0
        self.out: list[str] = []
        self.seen: list[str] = []

    def peek(self, letters: str) -> bool:
        return self.text.startswith(letters, self.at)

    def letter(self) -> str:
        if self.at >= len(self.text):
            raise _UnreadableError
        return self.text[self.at]

    def skip_through(self, closing: str) -> str:
        """Move behind the next `closing`; the text in between."""
        end = self.text.find(closing, self.at)
        if end < 0:
            raise _UnreadableError
        between, self.at = self.text[self.at : end], end + 1
        return between

    def remember(self, start: int) -> None:
        """What was written since `start` may be referred to from here on."""
        text = "".join(self.out[start:])
        if len(self.seen) >= _MAX_SEEN or len(text) > _MAX_TEXT:
            raise _UnreadableError
        self.seen.append(text)

    def deeper(self) -> None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise _UnreadableError

    def until_end(self, read: Callable[[], None], separator: str) -> None:
        """Repeat `read` up to the closing E, writing `separator` in between."""
        self.deeper()
        first = True
        while self.letter() != "E":
            if not first:
                self.out.append(separator)
            first = False
            read()
        self.at += 1
        self.depth -= 1

    def name(self, *, is_type: bool = False) -> None:
        """A name. A type's whole name may be referred to later, a function's may not."""
        self.deeper()
        start = len(self.out)
        if self.peek("N"):
            self.nested(is_type=is_type)
        elif self.peek("S") and not self.peek("St"):
            self.substitution()
            if self.peek("I"):
                self.template()
                if is_type:
                    self.remember(start)
        else:
            if self.peek("Z"):
                self.local()
            elif self.peek("St"):
                self.at += 2
                self.out.append("std::")
                self.part()
            else:
                self.part()
            if self.peek("I"):
                self.remember(start)
                self.template()
            if is_type:
                self.remember(start)
        self.depth -= 1

    def nested(self, *, is_type: bool) -> None:
        self.at += 1
        while self.letter() in "KVrRO":
            self.at += 1
        start = len(self.out)
        while self.letter() != "E":
            if self.peek("I"):
                self.template()
            else:
                if len(self.out) > start:
                    self.out.append("::")
                if self.peek("St"):
                    self.at += 2
                    self.out.append("std")
                    continue
                if self.peek("S"):
                    self.substitution()
                    continue
                self.part()
            if is_type or self.letter() != "E":
                self.remember(start)
        self.at += 1

    def local(self) -> None:
        """Something inside a function: the function's name, then the thing's."""
        self.at += 1
        self.name()
        start = len(self.out)
        self.until_end(self.type, ", ")
        del self.out[start:]
        self.out.append("::")
        if self.peek("d"):
            self.skip_through("_")
        self.name()

    def part(self) -> None:
        letter = self.letter()
        if letter in "0123456789":
            self.out.append(self.identifier())
        elif letter == "T":
            self.out.append("T")
            self.skip_through("_")
        elif self.peek("Ul"):
            self.at += 2
            self.out.append("{lambda(")
            self.until_end(self.type, ", ")
            self.skip_through("_")
            self.out.append(")}")
        elif letter.islower() and self.text[self.at + 1 : self.at + 2].isalpha():
            self.out.append("operator()" if self.peek("cl") else "operator")
            self.at += 2
        elif letter == "L":
            self.at += 1
            self.part()
        else:
            raise _UnreadableError

    def identifier(self) -> str:
        start = self.at
        while self.at < len(self.text) and self.text[self.at] in "0123456789":
            self.at += 1
        if self.at == start:
            raise _UnreadableError
        length = int(self.text[start : self.at][:6])
        word = self.text[self.at : self.at + length]
        self.at += len(word)
        return "(anonymous namespace)" if word.startswith("_GLOBAL__N_") else word

    def substitution(self) -> None:
        """S_ is the first thing seen, S0_ the second, in base 36; Sa, Ss, … are the library's."""
        self.at += 1
        if self.letter() in _STANDARD:
            self.out.append(_STANDARD[self.letter()])
            self.at += 1
            return
        digits = self.skip_through("_")
        try:
            place = int(digits, 36) + 1 if digits else 0
        except ValueError as error:
            raise _UnreadableError from error
        if place >= len(self.seen):
            raise _UnreadableError
        self.out.append(self.seen[place])

    def template(self) -> None:
        self.at += 1
        self.out.append("<")
        self.open_templates += 1
        self.until_end(self.argument, ", ")
        self.open_templates -= 1
        self.out.append(">")

    def argument(self) -> None:
        letter = self.letter()
        if letter == "L":
            self.literal()
        elif letter == "J":
            self.at += 1
            self.until_end(self.argument, ", ")
        elif letter == "X":
            raise _UnreadableError
        else:
            self.type()

    def literal(self) -> None:
        self.at += 1
        start = len(self.out)
        if self.peek("_Z"):
            self.at += 2
            self.name()
            del self.out[start:]
            self.out.append("function")
            self.skip_through("E")
            return
        self.type()
        kind = "".join(self.out[start:])
        del self.out[start:]
        value = self.skip_through("E").replace("n", "-")
        if kind == "bool":
            value = "true" if value == "1" else "false"
        self.out.append(value)

    def type(self) -> None:
        self.deeper()
        start = len(self.out)
        letter = self.letter()
        if letter in "PRO":
            self.at += 1
            self.type()
            self.remember(start)
        elif letter in "rVK":
            while self.letter() in "rVK":
                self.at += 1
            self.type()
            self.remember(start)
        elif letter == "D":
            self.extended()
        elif letter == "F":
            self.function_type()
            self.remember(start)
        elif letter == "A":
            self.skip_through("_")
            self.type()
            self.remember(start)
        elif letter in _BUILTIN:
            self.at += 1
            self.out.append(_BUILTIN[letter])
        else:
            self.name(is_type=True)
        self.depth -= 1

    def function_type(self) -> None:
        self.at += 1
        self.type()
        self.out.append("(")
        self.until_end(self.type, ", ")
        self.out.append(")")

    def extended(self) -> None:
        for letters, word in _EXTENDED.items():
            if self.peek(letters):
                self.at += len(letters)
                self.out.append(word)
                return
        if not self.peek("Dp"):
            raise _UnreadableError
        start = len(self.out)
        self.at += 2
        self.type()
        self.remember(start)
