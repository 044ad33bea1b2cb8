"""What is left: names of no known family, told apart by the plain words in them."""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.kernel_name import KernelName, Role
from flashdig.readers.kernel_names.symbol import Symbol

_SIGNS: tuple[tuple[frozenset[str], Role, str], ...] = (
    (frozenset({"attention", "attn", "fmha", "sdpa", "flash"}), "attention_forward", "attention"),
    (frozenset({"gemm", "gemv", "matmul"}), "matmul", "a matrix product"),
    (frozenset({"softmax"}), "softmax", "softmax"),
    (frozenset({"layernorm", "rmsnorm", "norm"}), "norm", "a norm"),
)
_BACKWARD = frozenset({"bwd", "backward", "dq", "dkdv", "dkv", "grad"})
_PART = frozenset({"preprocess", "postprocess", "combine", "reduce", "delta"})


def decode(symbol: Symbol) -> KernelName:
    """Family 'unknown'; the role is a guess where a word of the name suggests one."""
    words = _words(symbol.function)
    for signs, role, what in _SIGNS:
        sign = next((w for w in words if w in signs), None)
        # one word alone ("attention") is more likely somebody's annotation than a kernel
        if sign is None or (len(words) == 1 and role == "attention_forward"):
            continue
        backward = not _BACKWARD.isdisjoint(words)
        attention = role == "attention_forward"
        return KernelName(
            name=symbol.name,
            family="unknown",
            role=_attention_role(words, backward) if attention else role,
            pass_=("backward" if backward else "forward") if attention else None,
            words=f"No known family of kernels; the word '{sign}' suggests {what}.",
        )
    return KernelName(
        name=symbol.name,
        family="unknown",
        role="unknown",
        words="No known family of kernels.",
    )


def _attention_role(words: list[str], backward: bool) -> Role:
    if not _PART.isdisjoint(words):
        return "attention_part"
    return "attention_backward" if backward else "attention_forward"


def _words(function: str) -> list[str]:
    """The lower-case words of a function name: 'my_AttnFwd2' -> ['my', 'attn', 'fwd', '2']."""
    parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", function)
    return [part.lower() for part in parts]
