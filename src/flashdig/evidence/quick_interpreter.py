"""Triton's interpreter without the work that it does for nothing: half the time, the same bits.

In every call of a device function it looks through the whole language for functions to replace,
though the launch has replaced them already. And it does every operation on integers a second time
in int64, for an assertion about overflow that it leaves out unless its option `debug` is set.
"""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def quicken_interpreter() -> None:
    """Make this process's interpreter quick; for processes in which nothing is compiled.

    The language stays replaced between launches. A Triton that does this work otherwise is left
    as it is.
    """
    module: Any = interpreter
    if not hasattr(module, "_patch_lang") or not hasattr(module, "_LangPatchScope"):
        return
    everything = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    module._patch_lang(everything)
    module._patch_lang = lambda function: module._LangPatchScope()
    builder = module.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
