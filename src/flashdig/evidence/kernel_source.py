"""Anyone's Triton or Gluon kernel, named on a command line, compiled for any chip without a GPU.

A kernel is `package.module:kernel` or `path/file.py:kernel`. What a launch would tell the compiler
is told in words: the types of the arguments, in order ("*fp16,*fp16,i32:16,seqlen=i64"), and the
values of compile-time constants ("BLOCK_M=64"). Compilers and imports can end a process: each
compilation has one of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashdig.evidence.offline import Compiled, OfflineError, compiled_from
from flashdig.evidence.worker import last_line, run_worker
from flashdig.hardware.arch import architecture
from flashdig.hardware.names import nearest

_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
_FLOATS = ("fp8e4nv", "fp8e5", "fp8e4b15", "fp16", "bf16", "fp32", "fp64")
_DESCRIPTOR = re.compile(r"tensordesc(_im2col)?<.+>")
_POINTER_ALIGNMENT = 16


@dataclass(frozen=True)
class ArgumentType:
    """An argument that is not a compile-time constant.

    Attributes:
        parameter: its name; None for the next one in order.
        type: in Triton's words: "*fp16", "i32", "fp32", "tensordesc<fp16[64, 64]>".
        divisible_by_16: what a launch would find of the address or the integer.
    """

    parameter: str | None
    type: str
    divisible_by_16: bool


@dataclass(frozen=True)
class KernelRequest:
    """A kernel and how it is to be compiled.

    Attributes:
        module: dotted name or path of a file; kernel: its name there.
        arguments: as `parse_signature` gives them; constants: name -> Python expression.
        num_warps, num_stages: None leaves the first autotune configuration's or Triton's own.
    """

    module: str
    kernel: str
    arguments: tuple[ArgumentType, ...]
    constants: dict[str, str]
    num_warps: int | None
    num_stages: int | None
    arch: str

    @property
    def subject(self) -> str:
        return f"{self.module}:{self.kernel}"


def split_subject(text: str) -> tuple[str, str]:
    """("package.module", "kernel") of "package.module:kernel"; a file's path for "file.py:kernel".

    Raises ValueError.
    """
    module, _, kernel = text.rpartition(":")
    if not module or not kernel.isidentifier():
        raise ValueError(
            f"a kernel is named package.module:kernel or path/file.py:kernel, got {text!r}"
        )
    if module.endswith(".py") and not Path(module).is_file():
        raise ValueError(f"{module}: no such file")
    return module, kernel


def parse_signature(text: str) -> tuple[ArgumentType, ...]:
    """The arguments of "*fp16,i32:16,n=i64": types in order, or by name.

    ":16" says that an integer is a multiple of 16, ":1" that an address is not. Without it
    addresses are multiples of 16, as those of torch's tensors are, and integers are anything.
    Raises ValueError.
    """
    # commas inside of <> and [] belong to a type
    parts = re.findall(r"(?:[^,<\[]|<[^>]*>|\[[^\]]*\])+", text)
    return tuple(_argument(part.strip()) for part in parts if part.strip())


def _argument(text: str) -> ArgumentType:
    name, equals, rest = text.partition("=")
    kind, colon, multiple = (rest if equals else text).strip().partition(":")
    kind = kind.strip()
    if equals and not name.strip().isidentifier():
        raise ValueError(f"{text!r}: {name.strip()!r} is not the name of a parameter")
    if colon and multiple.strip() not in ("1", "16"):
        raise ValueError(f"{text!r}: only :16 and :1 can be said of an argument")
    pointer = kind.startswith("*")
    known = (*_INTEGERS, *_FLOATS)
    if kind.lstrip("*").removeprefix("k") not in known and not _DESCRIPTOR.fullmatch(kind):
        raise ValueError(
            f"{text!r}: no type {kind!r}; nearest: {', '.join(nearest(kind.lstrip('*'), known))}; "
            'a pointer is "*fp16"'
        )
    if colon and kind not in _INTEGERS and not pointer:
        raise ValueError(f"{text!r}: :{multiple.strip()} is for pointers and integers")
    divisible = int(multiple) if colon else (_POINTER_ALIGNMENT if pointer else 1)
    return ArgumentType(name.strip() if equals else None, kind, divisible == _POINTER_ALIGNMENT)


def parse_constants(texts: Sequence[str]) -> dict[str, str]:
    """Name -> expression of ["BLOCK_M=64", ...]. Raises ValueError."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier() or not value:
            raise ValueError(f"a constant is NAME=VALUE, got {text!r}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found


def compile_kernel(request: KernelRequest, *, timeout_s: float = 300.0) -> tuple[Compiled, str]:
    """The kernel as compiled, and in words what was taken for granted ("" for nothing).

    Raises OfflineError, with the name of a parameter that is missing, with the compiler's refusal,
    or when it takes more than `timeout_s`; UnknownArchitectureError.
    """
    architecture(request.arch)
    with tempfile.TemporaryDirectory(prefix="flashdig-kernel-") as folder:
        Path(folder, "request.json").write_text(json.dumps(dataclasses.asdict(request)))
        try:
            code = run_worker(
                "flashdig.evidence.kernel_worker",
                folder,
                timeout_s=timeout_s,
                environment={"TRITON_INTERPRET": None},
            )
        except subprocess.TimeoutExpired as error:
            raise OfflineError(f"compiling took more than {timeout_s:g} s") from error
        answer = Path(folder, "compiled.json")
        if not answer.exists():
            last = last_line(folder) or "nothing was printed"
            raise OfflineError(f"the compiler ended its process: {last} (exit code {code})")
        found = json.loads(answer.read_text())
    if "error" in found:
        raise OfflineError(found["error"])
    return compiled_from(found["kernel"]), found["note"]


def request_from(written: dict[str, object]) -> KernelRequest:
    """A request from what `compile_kernel` wrote."""
    arguments = written["arguments"]
    assert isinstance(arguments, list)
    fields = {**written, "arguments": tuple(ArgumentType(**one) for one in arguments)}
    return KernelRequest(**fields)  # type: ignore[arg-type]
