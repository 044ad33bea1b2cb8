"""An attention problem as typed in one word: batch=4,heads=32/8,seqlen=4096,causal,softcap=30."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from flashdig.cli.errors import UsageError
from flashdig.cli.sizes import parse_size
from flashdig.hardware.names import nearest
from flashdig.problem import DTYPE_BYTES, AttentionProblem, Mask

SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8": "float8_e4m3fn"}
# parts of a problem text that are a word, or a word with one of these values (the first by default)
_CHOICES = {
    "causal": ("bottom-right", "top-left"),
    "alibi": ("heads", "batch_heads"),
    "bias": ("float", "bool"),
}
_FLAGS = ("sinks", "dropout", "packed", "paged", "deterministic", "tf32", "lse", "descale")
_VALUES = ("batch", "heads", "seqlen", "head_dim", "dtype", "window", "softcap", "out_dtype")
HELP = (
    "As batch=4,heads=32/8,seqlen=4096,head_dim=128,dtype=bfloat16,causal; heads, seqlen and "
    "head_dim may differ for keys and values (heads=32/8); more: window=1024/0, softcap=30, "
    "causal=top-left, alibi, bias, bias=bool, sinks, dropout, packed, paged, deterministic, tf32, "
    "lse, descale, out_dtype=float32."
)


@dataclass(frozen=True)
class TypedProblem:
    """A problem, what else its call asks for, and the features in words, as they were typed."""

    problem: AttentionProblem
    return_lse: bool
    descale: bool
    paged: bool
    out_dtype: str | None
    features: tuple[str, ...]

    def describe(self) -> str:
        shown = [word for word in self.features if word != "causal"]
        return ", ".join([self.problem.describe(), *shown])


def parse_problem(text: str, argument: str = "--problem") -> TypedProblem:
    """The problem that the text describes.

    `seqlen` must be there; batch is 1, heads 16, head_dim 128 and dtype bfloat16 by default.
    Raises UsageError that names the part which is wrong and what is allowed.
    """
    parts = _split(text, argument)
    if "seqlen" not in parts:
        raise UsageError(f"{argument} must say seqlen, as in seqlen=4096; got {text!r}")
    num_heads, num_heads_kv = _pair(parts, "heads", "16", argument)
    seqlen_q, seqlen_k = _pair(parts, "seqlen", "", argument)
    head_dim, head_dim_v = _pair(parts, "head_dim", "128", argument)
    out_dtype = parts.get("out_dtype")
    try:
        problem = AttentionProblem(
            batch=parse_size(parts.get("batch", "1"), f"{argument}: batch"),
            num_heads=num_heads,
            num_heads_kv=num_heads_kv,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
            head_dim=head_dim,
            head_dim_v=head_dim_v,
            dtype=_dtype(parts.get("dtype", "bfloat16"), f"{argument}: dtype"),
            mask=Mask.from_arguments(_causal(parts), _window(parts, argument)),
            softcap=_softcap(parts, argument),
            dropout="dropout" in parts,
            alibi=_choice(parts, "alibi"),
            bias=_choice(parts, "bias"),
            sinks="sinks" in parts,
            packed="packed" in parts or "paged" in parts,
            deterministic="deterministic" in parts,
            allow_tf32="tf32" in parts,
        )
    except ValueError as error:
        raise UsageError(f"{argument}: {error}") from error
    return TypedProblem(
        problem,
        return_lse="lse" in parts,
        descale="descale" in parts,
        paged="paged" in parts,
        out_dtype=None if out_dtype is None else _dtype(out_dtype, f"{argument}: out_dtype"),
        features=tuple(
            name if value in ("", _CHOICES.get(name, ("",))[0]) else f"{name}={value}"
            for name, value in parts.items()
            if name in (*_CHOICES, *_FLAGS, "window", "softcap", "out_dtype")
        ),
    )


def _split(text: str, argument: str) -> dict[str, str]:
    """name -> value, "" for a bare word; every name is known and there once."""
    parts: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.strip().partition("="))
        known = (*_VALUES, *_CHOICES, *_FLAGS)
        if name not in known:
            raise UsageError(
                f"{argument} has an unknown part {part.strip()!r}; "
                f"nearest: {', '.join(nearest(name, known))}"
            )
        if name in parts:
            raise UsageError(f"{argument} has {name} twice")
        if name in _VALUES and not value:
            raise UsageError(f"{argument}: {name} needs a value, as {name}=...")
        if name in _FLAGS and equals:
            raise UsageError(f"{argument}: {name} takes no value, got {part.strip()!r}")
        if name in _CHOICES and equals and value not in _CHOICES[name]:
            allowed = " or ".join(_CHOICES[name])
            raise UsageError(f"{argument}: {name} must be {allowed}, got {value!r}")
        parts[name] = value
    return parts


def _pair(parts: dict[str, str], name: str, default: str, argument: str) -> tuple[int, int]:
    """ "32/8" -> (32, 8); one number is both."""
    first, _, second = parts.get(name, default).partition("/")
    where = f"{argument}: {name}"
    return parse_size(first, where), parse_size(second or first, where)


def _dtype(text: str, where: str) -> str:
    dtype = SHORT_DTYPES.get(text, text)
    if dtype not in DTYPE_BYTES:
        raise UsageError(
            f"{where} must be one of {', '.join([*SHORT_DTYPES, *DTYPE_BYTES])}, got {text!r}"
        )
    return dtype


def _causal(parts: dict[str, str]) -> Literal[False, "bottom-right", "top-left"]:
    return _choice(parts, "causal") if "causal" in parts else False


def _choice(parts: dict[str, str], name: str) -> Any:
    return (parts[name] or _CHOICES[name][0]) if name in parts else "none"


def _window(parts: dict[str, str], argument: str) -> tuple[int, int] | None:
    if "window" not in parts:
        return None
    sides = parts["window"].split("/")
    try:
        left, right = (int(side) for side in sides)
    except ValueError as error:
        raise UsageError(
            f"{argument}: window must be left/right, as 1024/0 (-1 is unlimited), "
            f"got {parts['window']!r}"
        ) from error
    return left, right


def _softcap(parts: dict[str, str], argument: str) -> float:
    text = parts.get("softcap", "0")
    try:
        softcap = float(text)
    except ValueError:
        softcap = -1.0
    if not 0.0 <= softcap < float("inf"):
        raise UsageError(f"{argument}: softcap must be a number >= 0, got {text!r}")
    return softcap
