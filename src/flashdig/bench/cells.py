"""A cell: one attention problem of a suite, as plain numbers, and the passes to measure on it."""

from __future__ import annotations

import dataclasses
import math
import operator
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flashdig.costs.flops import backward_flops, forward_flops, half_rule_flops, varlen_flops
from flashdig.problem import AttentionProblem, Causal, Mask

PASSES = ("forward", "backward")
DISTRIBUTIONS = ("log-normal",)


class CellFilterError(ValueError):
    """A filter of cells cannot be read; the message says what is allowed."""


@dataclass(frozen=True)
class Cell:
    """One problem of a suite.

    Attributes:
        lengths: of packed sequences, queries and keys alike; empty for dense input. `batch` is then
            their number, and seqlen_q and seqlen_k the longest.
        window: (left, right), inclusive; None is unlimited.
        alibi: slopes 2 ** (-8 h / num_heads), h from 1.
        bias: "float" is (1, num_heads, seqlen_q, seqlen_k), added; "bool" is (1, 1, seqlen_q,
            seqlen_k), True is visible, and the diagonal always is.
        sinks: one logit a head.
        name: for people; empty where the sizes say all.
        passes, rounds, peers: this cell's own choice; None takes the suite's.
    """

    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "bfloat16"
    causal: Causal = False
    window: tuple[int | None, int | None] | None = None
    softcap: float = 0.0
    alibi: bool = False
    bias: str = "none"
    sinks: bool = False
    dropout_p: float = 0.0
    lengths: tuple[int, ...] = ()
    name: str = ""
    passes: tuple[str, ...] | None = None
    rounds: int | None = None
    peers: tuple[str, ...] | None = None

    @property
    def packed(self) -> bool:
        return bool(self.lengths)

    @property
    def fp8(self) -> bool:
        """Inputs of 8 bits with descale factors, an output of bfloat16, no backward."""
        return self.dtype.startswith("float8")

    @property
    def mask(self) -> Mask:
        return Mask.from_arguments(self.causal, self.window)

    @property
    def problem(self) -> AttentionProblem:
        """What `dispatch` chooses a backend for."""
        return AttentionProblem(
            batch=self.batch,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            mask=self.mask,
            softcap=self.softcap,
            dropout=self.dropout_p > 0,
            alibi="heads" if self.alibi else "none",
            bias=self.bias,  # type: ignore[arg-type]
            sinks=self.sinks,
            packed=self.packed,
        )

    def flops(self, direction: str) -> int:
        """Useful FLOP of a pass.

        By the rule of published tables (all pairs, half when causal) where that rule exists: dense,
        equal lengths, no window. Elsewhere the visible pairs are counted.
        """
        mask = self.mask
        if self.packed:
            return varlen_flops(
                self.num_heads,
                self.head_dim,
                self.lengths,
                head_dim_v=self.head_dim_v,
                mask=mask,
                direction=direction,
            )
        by_rule = mask.is_full or (
            mask.is_causal and mask.window_left is None and self.seqlen_q == self.seqlen_k
        )
        if by_rule:
            return half_rule_flops(self.problem, direction)
        count = forward_flops if direction == "forward" else backward_flops
        return count(self.problem)

    @property
    def features(self) -> dict[str, Any]:
        """What a row holds beside sizes, dtype and causal; only what is asked for."""
        found: dict[str, Any] = {}
        if self.window is not None:
            found["window"] = list(self.window)
        for name in ("softcap", "alibi", "sinks", "dropout_p"):
            if getattr(self, name):
                found[name] = getattr(self, name)
        if self.bias != "none":
            found["bias"] = self.bias
        if self.packed:
            found["lengths"] = list(self.lengths)
        return found

    def fields(self) -> dict[str, Any]:
        """The problem as fields of a row."""
        names = (
            "batch", "num_heads", "num_heads_kv", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
            "dtype", "causal",
        )  # fmt: skip
        row = {name: getattr(self, name) for name in names}
        return {**row, "features": self.features, "name": self.title}

    @property
    def title(self) -> str:
        """One line for people: the name, or sizes and what is not the default."""
        return self.name or self.describe()

    def describe(self) -> str:
        """Sizes, dtype and features in one line."""
        text = self.problem.describe()
        if self.packed:
            text = text.replace("batch", "sequences", 1).replace("seqlen", "longest", 1)
            text += f", {sum(self.lengths)} tokens"
        if self.window is not None:
            left, right = ("all" if side in (None, -1) else side for side in self.window)
            text += f", window {left}" if self.mask.is_causal else f", window {left}/{right}"
        if self.softcap:
            text += f", softcap {self.softcap:g}"
        if self.alibi:
            text += ", ALiBi"
        if self.bias != "none":
            text += f", {self.bias} bias"
        if self.sinks:
            text += ", sinks"
        if self.dropout_p:
            text += f", dropout {self.dropout_p:g}"
        return text


def drawn_lengths(
    distribution: str, *, total: int, median: float, sigma: float, longest: int, seed: int
) -> tuple[int, ...]:
    """Lengths of packed sequences, drawn until they add up to `total`; the last one is cut to fit.

    "log-normal": exp(normal(ln median, sigma)), rounded, between 1 and `longest`. The same
    arguments give the same lengths on every machine.
    """
    if distribution not in DISTRIBUTIONS:
        allowed = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"distribution must be one of {allowed}, got {distribution!r}")
    generator = random.Random(seed)
    lengths: list[int] = []
    left = total
    while left > 0:
        drawn = round(generator.lognormvariate(math.log(median), sigma))
        lengths.append(min(max(1, drawn), longest, left))
        left -= lengths[-1]
    return tuple(lengths)


_COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_TERM = re.compile(r"\s*([a-z_]+)\s*(<=|>=|!=|=|<|>)\s*(\S+)\s*")
_COMPARABLE = {
    field.name: field.type
    for field in dataclasses.fields(Cell)
    if field.name not in ("name", "passes", "rounds", "peers", "window", "lengths")
}


def cell_filter(text: str) -> Callable[[Cell], bool]:
    """Which cells a text like "head_dim=128,causal=true,seqlen_q>=4096" takes: those for which
    every term holds. A text without a comparison takes the cells whose title contains it.

    Raises CellFilterError for a key or a value that no cell can have.
    """
    if not re.search(r"[<>=]", text):
        wanted = text.strip().lower()
        return lambda cell: wanted in cell.title.lower() or wanted in cell.describe().lower()
    terms = [_term(part) for part in text.split(",")]

    def takes(cell: Cell) -> bool:
        return all(compare(getattr(cell, key), value) for key, compare, value in terms)

    return takes


def _term(text: str) -> tuple[str, Callable[[Any, Any], bool], Any]:
    match = _TERM.fullmatch(text)
    if match is None:
        raise CellFilterError(f"{text!r} is not key=value, with = or !=, <, <=, >, >=")
    key, sign, value = match.groups()
    if key not in _COMPARABLE:
        raise CellFilterError(f"{key!r} is not one of {', '.join(_COMPARABLE)}")
    return key, _COMPARISONS[sign], _filter_value(key, sign, value)


def _filter_value(key: str, sign: str, value: str) -> Any:
    kind = str(_COMPARABLE[key])
    if kind in ("bool", "Causal"):
        named = {"true": True, "false": False}
        if key == "causal":
            named |= {"top-left": "top-left", "bottom-right": "bottom-right"}  # type: ignore[dict-item]
        if value.lower() not in named or sign not in ("=", "!="):
            raise CellFilterError(f"{key} must be = or != {' or '.join(named)}, got {sign}{value}")
        return named[value.lower()]
    if kind == "str":
        if sign not in ("=", "!="):
            raise CellFilterError(f"{key} is text: compare it with = or !=, not {sign}")
        return value
    try:
        return float(value)
    except ValueError:
        raise CellFilterError(f"{key} is compared with a number, got {value!r}") from None
