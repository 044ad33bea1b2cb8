"""Which tile a portable kernel takes: pure functions of the problem and the chip, no tuning.

The tables are `configs/portable.toml`; a row says on which chip it was measured, or that it was
not.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Pass = Literal["forward", "dq", "dkdv", "dk", "dv"]


@dataclass(frozen=True)
class TileConfig:
    """A tile and how a block walks it.

    Attributes:
        block_m, block_n: rows and keys of a tile.
        num_warps: warps of a block.
        num_stages: tiles in flight between global and shared memory.
        measured: where the choice was measured; "no" when it was only compiled.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    measured: str = "no"


@functools.cache
def table() -> tuple[dict[str, Any], ...]:
    text = files("flashdig.kernels").joinpath("configs", "portable.toml").read_text()
    return tuple(tomllib.loads(text)["row"])


@functools.cache
def choose_tile(
    pass_: Pass, arch: str, dtype: str, head_dim: int, head_dim_v: int, extra_terms: bool
) -> TileConfig:
    """The first row of the table that fits.

    Args:
        pass_: "forward", "dq", "dkdv" (both in one launch), "dk" or "dv".
        arch: "sm_80", "sm_86", "sm_89", "sm_90", "sm_100" or "sm_120"; see `known_arch`.
        dtype: "float16", "bfloat16", "float32" or "tf32".
        extra_terms: the problem has a bias or dropout, which need registers of their own.
    """
    kind = {"float16": "half", "bfloat16": "half"}.get(dtype, dtype)
    widest = max(head_dim, head_dim_v)
    for row in table():
        if (
            row["pass"] == pass_
            and arch in row["arch"]
            and kind in row["dtype"]
            and widest <= row["head_dim"]
            and row.get("extra_terms", extra_terms) == extra_terms
        ):
            return TileConfig(
                row["block_m"],
                row["block_n"],
                row["num_warps"],
                row["num_stages"],
                row.get("measured", "no"),
            )
    raise ValueError(f"no {pass_} tile for {dtype}, head_dim {widest} on {arch}")


def known_arch(capability: tuple[int, int]) -> str:
    """The table's name for a compute capability: itself, or the nearest older one it holds."""
    known = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))
    at_most = [c for c in known if c <= capability]
    if not at_most:
        raise ValueError(
            f"compute capability must be at least 8.0, got {capability[0]}.{capability[1]}"
        )
    major, minor = at_most[-1]
    return f"sm_{major}{minor}"
