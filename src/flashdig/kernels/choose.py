"""Which tile a portable kernel takes: pure functions of the problem and the chip, no tuning.

The table is `configs/portable.toml`; a row says on which chip it was measured, or that it was not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal, get_args

from flashdig.problem import AttentionProblem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Pass = Literal["forward", "dq", "dkdv", "dk", "dv"]
Kind = Literal["half", "float32", "tf32"]

PASSES: tuple[Pass, ...] = get_args(Pass)
KINDS: tuple[Kind, ...] = get_args(Kind)
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

_TABLE = "portable.toml"
_KIND_OF_DTYPE: dict[str, Kind] = {
    "float16": "half",
    "bfloat16": "half",
    "float32": "float32",
    "tf32": "tf32",
}
# what a row must hold, and the values that are allowed; a list is one or more of them
_CHOICES: dict[str, tuple[Any, ...]] = {
    "head_dim": (16, 32, 64, 128, 256),
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6),
}
_LISTS: dict[str, tuple[str, ...]] = {"pass": PASSES, "arch": ARCHS, "dtype": KINDS}
_OPTIONAL = ("extra_terms", "spill_bytes")


@dataclass(frozen=True)
class TileConfig:
    """A tile and how a block walks it.

    Attributes:
        block_m, block_n: rows and keys of a tile.
        num_warps: warps of a block.
        num_stages: tiles in flight between global and shared memory.
        measured: where the choice was measured; "no" when it was only compiled.
        spill_bytes: the most that the compiler spills with any feature, as `Compiled.spill_bytes`
            counts them.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    measured: str = "no"
    spill_bytes: int = 0


@dataclass(frozen=True)
class Row:
    """A row of the table: a tile and what it serves.

    Attributes:
        passes, archs, kinds: any of these; "half" is float16 and bfloat16.
        head_dim: the widest head, of q and k or of v.
        extra_terms: with bias or dropout only, without them only, or (None) with both.
    """

    passes: tuple[str, ...]
    archs: tuple[str, ...]
    kinds: tuple[str, ...]
    head_dim: int
    extra_terms: bool | None
    tile: TileConfig

    def serves(self, pass_: str, arch: str, kind: str, head_dim: int, extra_terms: bool) -> bool:
        return (
            pass_ in self.passes
            and arch in self.archs
            and kind in self.kinds
            and head_dim <= self.head_dim
            and self.extra_terms in (None, extra_terms)
        )


def parse_table(text: str) -> tuple[Row, ...]:
    """The rows of a table in TOML, in order.

    Raises ValueError naming the row and the key for a key that is unknown or missing, and for a
    value that is not allowed.
    """
    document = tomllib.loads(text)
    unknown = sorted(set(document) - {"row"})
    if unknown:
        raise ValueError(f"{_TABLE}: unknown table {unknown[0]!r}; rows are [[row]]")
    return tuple(_row(written, number) for number, written in enumerate(document["row"], start=1))


def _row(written: Mapping[str, Any], number: int) -> Row:
    where = f"{_TABLE}, row {number} ({written.get('pass')}, {written.get('arch')})"
    known = {*_LISTS, *_CHOICES, "measured"}
    for key in sorted(set(written) - known - set(_OPTIONAL)):
        raise ValueError(f"{where}: unknown key {key!r}")
    for key in sorted(known - set(written)):
        raise ValueError(f"{where}: {key} is missing")
    for key, allowed in _LISTS.items():
        values = written[key]
        if not isinstance(values, list) or not values or not set(values) <= set(allowed):
            raise ValueError(f"{where}: {key} must be a list of {allowed}, got {values!r}")
    for key, allowed in _CHOICES.items():
        if type(written[key]) is not int or written[key] not in allowed:
            raise ValueError(f"{where}: {key} must be one of {allowed}, got {written[key]!r}")
    extra_terms = written.get("extra_terms")
    if "extra_terms" in written and not isinstance(extra_terms, bool):
        raise ValueError(f"{where}: extra_terms must be true or false, got {extra_terms!r}")
    measured = written["measured"]
    if not isinstance(measured, str) or not measured.strip():
        raise ValueError(f"{where}: measured must say where, or 'no', got {measured!r}")
    spill_bytes = written.get("spill_bytes", 0)
    if type(spill_bytes) is not int or spill_bytes < 0:
        raise ValueError(f"{where}: spill_bytes must be an integer >= 0, got {spill_bytes!r}")
    return Row(
        tuple(written["pass"]),
        tuple(written["arch"]),
        tuple(written["dtype"]),
        written["head_dim"],
        extra_terms,
        TileConfig(
            written["block_m"],
            written["block_n"],
            written["num_warps"],
            written["num_stages"],
            measured,
            spill_bytes,
        ),
    )


@functools.cache
def table() -> tuple[Row, ...]:
    """The committed rows; the first one that serves a problem is taken."""
    return parse_table(files("flashdig.kernels").joinpath("configs", _TABLE).read_text("utf-8"))


def choose_config(problem: AttentionProblem, arch: str, pass_: Pass) -> TileConfig:
    """The tile of one pass of a problem on a chip; the same for all lengths and batches.

    Args:
        arch: one of `ARCHS`; see `known_arch`.
        pass_: "forward", "dq", "dkdv" (both in one launch), "dk" or "dv".

    Raises ValueError naming the argument for a chip, a pass, a dtype or a head_dim without a tile.
    """
    tf32 = problem.allow_tf32 and problem.dtype == "float32"
    return choose_tile(
        pass_,
        arch,
        "tf32" if tf32 else problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        problem.bias != "none" or problem.dropout,
    )


@functools.cache
def choose_tile(
    pass_: Pass, arch: str, dtype: str, head_dim: int, head_dim_v: int, extra_terms: bool
) -> TileConfig:
    """`choose_config` from plain arguments, remembered: what launchers call.

    Args:
        dtype: "float16", "bfloat16", "float32" or "tf32".
        extra_terms: the problem has a bias or dropout, which need registers of their own.
    """
    if pass_ not in PASSES:
        raise ValueError(f"pass_ must be one of {', '.join(PASSES)}, got {pass_!r}")
    if arch not in ARCHS:
        raise ValueError(f"arch must be one of {', '.join(ARCHS)}, got {arch!r}")
    if dtype not in _KIND_OF_DTYPE:
        raise ValueError(f"dtype must be one of {', '.join(_KIND_OF_DTYPE)}, got {dtype!r}")
    widest = max(head_dim, head_dim_v)
    for row in table():
        if row.serves(pass_, arch, _KIND_OF_DTYPE[dtype], widest, extra_terms):
            return row.tile
    raise ValueError(f"head_dim {widest} has no {pass_} tile for {dtype} on {arch}")


def known_arch(capability: tuple[int, int]) -> str:
    """The table's name for a compute capability: itself, or the nearest older one it holds.

    Raises ValueError below 8.0, the oldest.
    """
    known = [(int(arch[3:-1]), int(arch[-1])) for arch in ARCHS]
    at_most = [c for c in known if c <= capability]
    if not at_most:
        raise ValueError(
            f"compute capability must be at least 8.0, got {capability[0]}.{capability[1]}"
        )
    major, minor = at_most[-1]
    return f"sm_{major}{minor}"
