"""A suite: which cells are measured, how, and against whom, read from a TOML file.

    description = "..."            rounds = 12        target_ms = 2.0     seed = 0
    passes = ["forward", "backward"]                  measure = ["time", "memory"]
    peers = ["sdpa_flash", ...]    ours = ["auto"]    against = "sdpa_flash"

    [defaults]                     keys of every cell
    [[cell]]                       one cell
    [[grid]]                       every combination of the keys that hold several values

Keys of a cell are those of `flashdig.bench.cells.Cell`; `seqlen` sets both lengths, `tokens` sets
batch to tokens / seqlen, and `lengths` is a list or a table {distribution, total, ...}. An unknown
key is an error.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdig.bench.cells import DISTRIBUTIONS, PASSES, Cell, drawn_lengths
from flashdig.bench.results import SUITE_PATTERN
from flashdig.bench.timing import DEFAULT_ROUNDS, DEFAULT_TARGET_MS
from flashdig.problem import DTYPE_BYTES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PEERS = (
    "sdpa_flash",
    "sdpa_cudnn",
    "sdpa_efficient",
    "sdpa_math",
    "flex",
    "fa3",
    "fa4",
)
MEASURES = ("time", "memory")
DTYPES = tuple(name for name in DTYPE_BYTES if name != "float8_e5m2")
SUITE_FOLDER = Path("benchmarks") / "suites"


class SuiteError(ValueError):
    """A suite is not what it should be; the message names file, place, key and what is allowed."""


@dataclass(frozen=True)
class Suite:
    """What to measure.

    Attributes:
        name: the file's, without ".toml"; the record's too.
        target_ms: length of one timed replay.
        measure: "time", "memory" or both.
        ours: backends of `flashdig.dispatch.BACKENDS`, or "auto".
        against: the peer that geometric means are taken against, beside the best one.
        seed: of the inputs.
    """

    name: str
    description: str
    cells: tuple[Cell, ...]
    passes: tuple[str, ...] = PASSES
    peers: tuple[str, ...] = ()
    ours: tuple[str, ...] = ("auto",)
    against: str | None = None
    measure: tuple[str, ...] = MEASURES
    rounds: int = DEFAULT_ROUNDS
    target_ms: float = DEFAULT_TARGET_MS
    seed: int = 0


# (what is allowed, in words; whether a value is)
Rule = tuple[str, Callable[[Any], bool]]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _some_of(names: Sequence[str]) -> Rule:
    def allowed(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(x in names for x in value)

    return f"a non-empty list out of {', '.join(names)}", allowed


def _one_of(names: Sequence[Any]) -> Rule:
    words = ", ".join(str(n).lower() if isinstance(n, bool) else repr(n) for n in names)
    # 1 == True, but is not meant by it
    return f"one of {words}", lambda v: any(v == n and type(v) is type(n) for n in names)


def _is_window(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    return all(_is_int(side) and side >= -1 for side in value)


SIZE: Rule = ("an integer >= 1", lambda value: _is_int(value) and value >= 1)
TEXT: Rule = ("a string", lambda value: isinstance(value, str))
SWITCH: Rule = _one_of((True, False))
SEED: Rule = ("an integer", _is_int)
POSITIVE: Rule = ("a number > 0", lambda value: _is_number(value) and value > 0)
NAMES: Rule = (
    "a non-empty list of strings",
    lambda v: isinstance(v, list) and bool(v) and all(isinstance(n, str) and n for n in v),
)

SUITE_KEYS: dict[str, Rule] = {
    "description": TEXT,
    "passes": _some_of(PASSES),
    "peers": _some_of(PEERS),
    "ours": NAMES,
    "against": _one_of(PEERS),
    "measure": _some_of(MEASURES),
    "rounds": SIZE,
    "target_ms": POSITIVE,
    "seed": SEED,
}
CELL_KEYS: dict[str, Rule] = {
    "name": TEXT,
    "batch": SIZE,
    "tokens": SIZE,
    "num_heads": SIZE,
    "num_heads_kv": SIZE,
    "seqlen": SIZE,
    "seqlen_q": SIZE,
    "seqlen_k": SIZE,
    "head_dim": SIZE,
    "head_dim_v": SIZE,
    "dtype": _one_of(DTYPES),
    "causal": _one_of((True, False, "bottom-right", "top-left")),
    "window": ("[left, right], integers >= 0, or -1 for unlimited", _is_window),
    "softcap": ("a number >= 0", lambda value: _is_number(value) and value >= 0),
    "alibi": SWITCH,
    "bias": _one_of(("none", "float", "bool")),
    "sinks": SWITCH,
    "dropout_p": ("a number >= 0 and < 1", lambda value: _is_number(value) and 0 <= value < 1),
    "lengths": (
        "a list of integers >= 1, or a table {distribution, total, ...}",
        lambda v: isinstance(v, dict) or (isinstance(v, list) and bool(v) and all(map(SIZE[1], v))),
    ),
    "passes": SUITE_KEYS["passes"],
    "rounds": SIZE,
    "peers": SUITE_KEYS["peers"],
}
LENGTHS_KEYS: dict[str, Rule] = {
    "distribution": _one_of(DISTRIBUTIONS),
    "total": SIZE,
    "median": POSITIVE,
    "sigma": ("a number >= 0", lambda value: _is_number(value) and value >= 0),
    "longest": SIZE,
    "seed": SEED,
}


def known_suites(folders: Sequence[Path]) -> dict[str, Path]:
    """Suites by name; an earlier folder wins."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.glob("*.toml")):
            found.setdefault(path.stem, path)
    return found


def suite_folders() -> list[Path]:
    """Where suites are looked for by name: under the current folder, then beside the sources."""
    checkout = Path(__file__).resolve().parents[3]
    return [SUITE_FOLDER, checkout / SUITE_FOLDER]


def load_suite(path: Path) -> Suite:
    """The suite in a TOML file. Raises SuiteError."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuiteError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SuiteError(f"{path} is not UTF-8 text: {error.reason}") from error
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{path} is not TOML: {error}") from error
    try:
        return suite_from(path.stem, content)
    except SuiteError as error:
        raise SuiteError(f"{path}: {error}") from error


def suite_from(name: str, content: Mapping[str, Any]) -> Suite:
    """The suite that parsed TOML describes."""
    if not SUITE_PATTERN.fullmatch(name):
        raise SuiteError(f"name must be lower-case letters, digits, '-' and '_', got {name!r}")
    settings = dict(content)
    defaults = settings.pop("defaults", {})
    cells, grids = settings.pop("cell", []), settings.pop("grid", [])
    _check(settings, SUITE_KEYS, "the suite", others="defaults, cell, grid")
    if not isinstance(defaults, dict):
        raise SuiteError(f"defaults must be a table, got {defaults!r}")
    _check(defaults, CELL_KEYS, "defaults")
    found: list[Cell] = []
    for place, table in _tables("grid", grids):
        for chosen in _combinations(table, place):
            found.append(_cell(_over(defaults, chosen), place))
    for place, table in _tables("cell", cells):
        found.append(_cell(_over(defaults, table), place))
    if not found:
        raise SuiteError("no cells: [[cell]] or [[grid]] is missing")
    lists = _hashable(settings)
    suite = Suite(name=name, cells=tuple(found), **{"description": "", **lists})
    if suite.against is not None and suite.against not in suite.peers:
        raise SuiteError(
            f"against must be one of the suite's peers ({', '.join(suite.peers) or 'none'}), "
            f"got {suite.against!r}"
        )
    for cell in suite.cells:
        passes = suite.passes if cell.passes is None else cell.passes
        if cell.fp8 and "backward" in passes:
            raise SuiteError(f'{cell.title}: fp8 has no backward; say passes = ["forward"]')
    return suite


# keys that say the same thing in another way: what a cell says replaces what defaults say
_INSTEAD = {
    "lengths": ("batch", "tokens", "seqlen", "seqlen_q", "seqlen_k"),
    "batch": ("tokens", "lengths"),
    "tokens": ("batch", "lengths"),
    "seqlen": ("seqlen_q", "seqlen_k", "lengths"),
    "seqlen_q": ("seqlen", "lengths"),
    "seqlen_k": ("seqlen", "lengths"),
}


def _over(defaults: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    replaced = {other for key in table for other in _INSTEAD.get(key, ())}
    return {**{k: v for k, v in defaults.items() if k not in replaced}, **table}


def _tables(key: str, tables: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SuiteError(f"{key} must be written as [[{key}]], got {tables!r}")
    for number, table in enumerate(tables, start=1):
        name = table.get("name")
        yield f"{key} {number}" + (f" ({name})" if isinstance(name, str) else ""), table


def _check(
    table: Mapping[str, Any], rules: Mapping[str, Rule], where: str, others: str = ""
) -> None:
    for key, value in table.items():
        if key not in rules:
            allowed = ", ".join(rules) + (f", {others}" if others else "")
            raise SuiteError(f"{where}: unknown key {key!r}; allowed are {allowed}")
        words, is_allowed = rules[key]
        if not is_allowed(value):
            raise SuiteError(f"{where}: {key} must be {words}, got {value!r}")


def _combinations(table: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """Every choice of one value for each key; the last key turns fastest."""
    values: list[list[Any]] = []
    for key, value in table.items():
        if key not in CELL_KEYS:
            _check({key: value}, CELL_KEYS, where)
        if CELL_KEYS[key][1](value):
            values.append([value])
        elif isinstance(value, list) and value:
            for choice in value:
                _check({key: choice}, CELL_KEYS, where)
            values.append(value)
        else:
            _check({key: value}, CELL_KEYS, where)
    for combination in itertools.product(*values):
        yield dict(zip(table, combination, strict=True))


def _cell(table: Mapping[str, Any], where: str) -> Cell:
    _check(table, CELL_KEYS, where)
    values = dict(table)
    lengths = _lengths(values.pop("lengths", None), where)
    if lengths:
        _refuse(values, _INSTEAD["lengths"], "lengths", where)
        values["batch"] = len(lengths)
        values["seqlen_q"] = values["seqlen_k"] = max(lengths)
    seqlen = values.pop("seqlen", None)
    if seqlen is not None:
        _refuse(values, ("seqlen_q", "seqlen_k"), "seqlen", where)
        values["seqlen_q"] = values["seqlen_k"] = seqlen
    tokens = values.pop("tokens", None)
    for key in ("seqlen_q", "seqlen_k", "num_heads", "head_dim"):
        if key not in values:
            raise SuiteError(f"{where}: {key} is missing")
    if tokens is not None:
        _refuse(values, ("batch",), "tokens", where)
        if tokens % values["seqlen_q"]:
            raise SuiteError(
                f"{where}: tokens ({tokens}) must be a multiple of seqlen_q ({values['seqlen_q']})"
            )
        values["batch"] = tokens // values["seqlen_q"]
    if "batch" not in values:
        raise SuiteError(f"{where}: batch is missing (or tokens, or lengths)")
    values.setdefault("num_heads_kv", values["num_heads"])
    values.setdefault("head_dim_v", values["head_dim"])
    if values["num_heads"] % values["num_heads_kv"]:
        raise SuiteError(
            f"{where}: num_heads ({values['num_heads']}) must be a multiple of num_heads_kv "
            f"({values['num_heads_kv']})"
        )
    if lengths and values.get("bias", "none") != "none":
        raise SuiteError(f"{where}: bias is not defined for packed input (lengths)")
    if values.get("dtype", "").startswith("float8"):
        for key, off in (("bias", "none"), ("dropout_p", 0)):
            if values.get(key, off) != off:
                raise SuiteError(f"{where}: {key} is not measured in fp8")
    fields = _hashable(values)
    fields["softcap"] = float(fields.get("softcap", 0.0))
    return Cell(lengths=lengths, **fields)


def _hashable(table: Mapping[str, Any]) -> dict[str, Any]:
    """Lists of the file as the tuples that Suite and Cell hold."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in table.items()}


def _refuse(values: Mapping[str, Any], keys: Sequence[str], beside: str, where: str) -> None:
    for key in keys:
        if key in values:
            raise SuiteError(f"{where}: {key} cannot stand beside {beside}, which sets it")


def _lengths(value: Any, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, list):
        return tuple(value)
    place = f"{where}: lengths"
    _check(value, LENGTHS_KEYS, place)
    for key in ("distribution", "total", "median"):
        if key not in value:
            raise SuiteError(f"{place}: {key} is missing")
    return drawn_lengths(
        value["distribution"],
        total=value["total"],
        median=value["median"],
        sigma=value.get("sigma", 1.0),
        longest=value.get("longest", value["total"]),
        seed=value.get("seed", 0),
    )
