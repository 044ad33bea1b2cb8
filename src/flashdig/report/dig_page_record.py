"""What a dig's page is made of: the rows of a record, checked, and sorted into problems.

`bench.rows` checks what every record must be. A page reads further, into what a row predicted and
launched, so that is checked here: a damaged record is refused with its row and field, not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashdig.bench.results import Record, Run
from flashdig.bench.rows import RecordError
from flashdig.evidence.card_file import Key
from flashdig.hardware.arch import UnknownArchitectureError, architecture
from flashdig.hardware.detect import device_of_name
from flashdig.hardware.devices import Device, find_device
from flashdig.problem import AttentionProblem
from flashdig.report.dig_table import PATHS, Row, problem_title

# the chip of what is expected and compiled where there is no GPU
REFERENCE_GPU = "h200"
# beyond any size, count or time of this world; float arithmetic with such values stays finite
_LARGEST = 1e24
Rule = tuple[str, Callable[[Any], bool]]


@dataclass(frozen=True)
class Problem:
    """One problem of a record, with its ladder and the steps from v1 to v2 on it.

    Attributes:
        title: sizes in a line, the preset in front.
        ladder: rungs of one run, bottom first; may be empty where only steps were taken.
        steps: path -> rows of one run, in order.
    """

    title: str
    preset: str | None
    ladder: Sequence[Row] = ()
    steps: Mapping[str, Sequence[Row]] = field(default_factory=dict)

    @property
    def rows(self) -> list[Row]:
        return [*self.ladder, *(row for rows in self.steps.values() for row in rows)]

    @property
    def attention(self) -> AttentionProblem:
        return attention_of(self.rows[0])


@dataclass(frozen=True)
class Dig:
    """The problems of a record or of one of its runs, the main one first.

    Attributes:
        runs: run_id -> run, those that a shown row belongs to, in the record's order.
        source: of the rows, for people: a file's name, or "this run".
        notes: what the run said beside its rows.
    """

    problems: Sequence[Problem]
    runs: Mapping[str, Run]
    source: str
    notes: Sequence[str] = ()

    @property
    def main(self) -> Problem:
        return self.problems[0]

    @property
    def main_run(self) -> Run:
        return self.runs[self.main.rows[0]["run_id"]]

    @property
    def gpu(self) -> str | None:
        """The driver's name of the main problem's GPU; None where there was none."""
        return self.main_run.environment.get("gpu")

    @property
    def device(self) -> Device | None:
        """The GPU's row of the device table; None where the table has none or there is no GPU."""
        return None if self.gpu is None else device_of_name(self.gpu)

    @property
    def shown_device(self) -> Device | None:
        """Whose expectations the pictures show: the GPU's, without one REFERENCE_GPU's."""
        return find_device(REFERENCE_GPU) if self.gpu is None else self.device

    @property
    def card_key(self) -> Key | None:
        """What v1 and v2 are compiled for on the main problem; None where the record names no chip
        that is known."""
        if self.gpu is None:
            capability: str | None = find_device(REFERENCE_GPU).architecture
        else:
            capability = self.main_run.environment.get("compute_capability")
        if capability is None:
            return None
        try:
            key = architecture(capability).key
        except UnknownArchitectureError:
            return None
        if key.startswith("gfx"):
            return None  # its compiler is another one
        return Key.of(self.main.attention, f"sm_{key.replace('.', '')}")


class UnknownProblemError(ValueError):
    """No problem of the record has this in its title; the message lists those that there are."""


def attention_of(row: Row) -> AttentionProblem:
    """A row's problem. Raises ValueError, naming the size, for one that cannot be."""
    problem = AttentionProblem.dense(
        row["batch"],
        row["num_heads"],
        row["seqlen_q"],
        row["head_dim"],
        row["dtype"],
        causal=row["causal"],
        num_heads_kv=row["num_heads_kv"],
        seqlen_k=row["seqlen_k"],
    )
    return problem.replace(
        head_dim_v=row["head_dim_v"], allow_tf32=bool(row["features"].get("tf32"))
    )


def dig_of(
    record: Record,
    source: str,
    *,
    run_id: str | None = None,
    wanted: str | None = None,
    notes: Sequence[str] = (),
) -> Dig:
    """The problems of a record, main one first.

    A problem that several runs met keeps the ladder with the most rungs and the longest path of
    steps, the newest of equal ones: ratios are of one run.

    Args:
        run_id: only this run's rows.
        wanted: a part of the main problem's title; by default the newest one without a preset.

    Raises RecordError for a record without rungs, for an unknown run, and for a row that a page
    cannot show; UnknownProblemError.
    """
    rows = record.rows if run_id is None else record.rows_of(run_id)
    shown = [row for row in rows if row["kind"] in ("rung", "step")]
    if not shown:
        where = "" if run_id is None else f" in run {run_id}"
        raise RecordError(f"no rung and no step of a dig{where}: there is nothing to show")
    shown = [_known(row) for row in shown]
    for number, row in enumerate(shown, start=1):
        _check_row(row, f"{row['kind']} {number} ({row['name']})")
    for run in record.runs:
        _check_environment(run)
    problems = _problems(shown, [run.run_id for run in record.runs])
    problems = _main_first(problems, wanted)
    used = {row["run_id"] for problem in problems for row in problem.rows}
    runs = {run.run_id: run for run in record.runs if run.run_id in used}
    return Dig(problems, runs, source, tuple(notes))


def _known(value: Any) -> Any:
    """Without what is None: unknown is the same as absent."""
    if isinstance(value, dict):
        return {name: _known(inner) for name, inner in value.items() if inner is not None}
    return [_known(inner) for inner in value] if isinstance(value, list) else value


def _problems(rows: Sequence[Row], order: Sequence[str]) -> list[Problem]:
    ladders: dict[str, dict[str, list[Row]]] = {}
    steps: dict[tuple[str, str], dict[str, list[Row]]] = {}
    titles: dict[str, str | None] = {}
    for row in rows:
        title = problem_title(row)
        titles.setdefault(title, row.get("preset"))
        if row["kind"] == "rung":
            ladders.setdefault(title, {}).setdefault(row["run_id"], []).append(row)
        else:
            path = (title, row["features"]["path"])
            steps.setdefault(path, {}).setdefault(row["run_id"], []).append(row)

    def best(by_run: Mapping[str, list[Row]]) -> list[Row]:
        return max(by_run.values(), key=lambda own: (len(own), order.index(own[0]["run_id"])))

    return [
        Problem(
            title,
            preset,
            best(ladders[title]) if title in ladders else (),
            {path: best(steps[title, path]) for path in PATHS if (title, path) in steps},
        )
        for title, preset in titles.items()
    ]


def _main_first(problems: list[Problem], wanted: str | None) -> list[Problem]:
    if wanted is not None:
        exact = [p for p in problems if p.title == wanted]
        matching = exact or [p for p in problems if wanted.lower() in p.title.lower()]
        if not matching:
            titles = "; ".join(problem.title for problem in problems)
            raise UnknownProblemError(f"no problem is called {wanted!r}; there are: {titles}")
    else:
        plain = [problem for problem in problems if problem.preset is None]
        matching = plain[-1:] or problems
    main = next((problem for problem in matching if problem.ladder), matching[0])
    return [main, *(problem for problem in problems if problem is not main)]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_NUMBER: Rule = ("a number >= 0", _is_number)
_COUNT: Rule = ("an integer >= 0", _is_count)
_TEXT: Rule = ("a string", _is_text)
_OBJECT: Rule = ("an object", lambda value: isinstance(value, dict))
_SIZES: Rule = (
    "three integers >= 0",
    lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_count, value)),
)

_GUESS: dict[str, Rule] = {
    "floor_ms": _NUMBER,
    "expected_ms": _NUMBER,
    "limiter": _TEXT,
    "expected_limiter": _TEXT,
    "clock_mhz": _NUMBER,
    "memory_load_bytes": _COUNT,
    "memory_store_bytes": _COUNT,
    "programs": _COUNT,
    "occupancy": _NUMBER,
    "waves": _NUMBER,
}
_PREDICTED: dict[str, Rule] = {
    **_GUESS,
    "kernels": _COUNT,
    "load_bytes": _COUNT,
    "store_bytes": _COUNT,
    "triton_load_bytes": _COUNT,
    "triton_store_bytes": _COUNT,
    "matmul_flops": _COUNT,
    "scratch_bytes": _COUNT,
    "guessed_at": _TEXT,
    "at_observed_clock": _OBJECT,
}
_LAUNCH: dict[str, Rule] = {
    "grid": _SIZES,
    "block": _SIZES,
    "registers": _COUNT,
    "shared_bytes": _COUNT,
    "occupancy_percent": _NUMBER,
    "occupancy_limit": _TEXT,
    "us": _NUMBER,
}
_FEATURES: dict[str, Rule] = {
    "tf32": ("true or false", lambda value: isinstance(value, bool)),
    "path": (f"one of {', '.join(PATHS)}", lambda value: value in list(PATHS)),
    "instructions": _OBJECT,
    "registers": _COUNT,
}
_EXCHANGE = ("BAR", "SHFL", "LDS", "LDSM", "STS")


def _check_row(row: Row, where: str) -> None:
    missing = [name for name in ("sentence", "features") if name not in row]
    if missing:
        raise RecordError(f"{where}: {', '.join(missing)} missing")
    _check_sizes(row, where)
    predicted = row.get("predicted", {})
    _check_fields(predicted, _PREDICTED, f"{where}: predicted")
    _check_fields(
        predicted.get("at_observed_clock", {}), _GUESS, f"{where}: predicted.at_observed_clock"
    )
    _check_fields(row["features"], _FEATURES, f"{where}: features")
    if row["kind"] == "step" and "path" not in row["features"]:
        raise RecordError(f"{where}: features: path missing")
    instructions = row["features"].get("instructions")
    if instructions is not None:
        missing = [family for family in _EXCHANGE if family not in instructions]
        if missing:
            raise RecordError(f"{where}: features.instructions: {', '.join(missing)} missing")
        _check_fields(
            instructions, dict.fromkeys(instructions, _COUNT), f"{where}: features.instructions"
        )
    for kernel in row.get("kernels", ()):
        _check_fields(kernel, _LAUNCH, f"{where}: kernel {kernel['name']!r}")
        if "us" not in kernel:
            raise RecordError(f"{where}: kernel {kernel['name']!r}: us missing")
    counted = row.get("counted", {})
    for name in ("load_bytes", "store_bytes"):
        if name in counted and name in predicted and f"triton_{name}" not in predicted:
            raise RecordError(f"{where}: predicted: triton_{name} missing beside counted.{name}")
    try:
        attention_of(row)
    except ValueError as error:
        raise RecordError(f"{where}: {error}") from error


def _check_fields(values: Mapping[str, Any], rules: Mapping[str, Rule], where: str) -> None:
    for name, rule in rules.items():
        allowed, is_allowed = rule
        value = values.get(name)
        if value is not None and not is_allowed(value):
            raise RecordError(f"{where}.{name} must be {allowed}, got {value!r}")


def _check_sizes(value: Any, where: str) -> None:
    """Numbers anywhere in a row stay within what arithmetic on them can bear."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_sizes(inner, f"{where}: {name}")
    elif isinstance(value, list):
        for inner in value:
            _check_sizes(inner, where)
    elif isinstance(value, int | float) and not -_LARGEST < value < _LARGEST:
        raise RecordError(f"{where} must lie within ±{_LARGEST:g}, got {str(value)[:40]}")


_ENVIRONMENT: dict[str, Rule] = {
    "gpu": _TEXT,
    "compute_capability": _TEXT,
    "power_limit_w": _NUMBER,
}


def _check_environment(run: Run) -> None:
    where = f"run {run.run_id!r}: environment"
    _check_fields(run.environment, _ENVIRONMENT, where)
    _check_sizes(run.environment, where)
