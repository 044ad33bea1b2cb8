"""The record of measurements: `benchmarks/results/<gpu>/<suite>.json`.

    {"schema": 1, "suite": ..., "runs": {run_id: {...}}, "shared": {run_id: {...}},
     "names": [...], "rows": [{"run_id": ..., ...}]}

`shared` are fields that the rows of a run have in common (`record_shared`), `names` texts that rows
hold by number (`record_names`).

A run is appended, never replaced, and a ratio is taken within one run only: between two runs the
clocks, the driver and the temperature may differ. The file holds one run and one row a line, keys
sorted, so that a diff shows exactly what was added.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from flashdig.bench.record_names import named, numbered
from flashdig.bench.record_shared import completed, shortened
from flashdig.bench.rows import RecordError, check_json, check_row
from flashdig.bench.timing import Ratio, Timing, median_ratio

SCHEMA = 1
RECORD_KEYS = {"schema", "suite", "runs", "rows"}
RUN_KEYS = {"environment", "command", "revision", "started"}
SUITE_PATTERN = re.compile(r"[a-z0-9][a-z0-9_-]*")

Row = dict[str, Any]


class UnreadableRecordError(RecordError):
    """A file is not a record; the message names it."""


class UnwritableRecordError(RecordError):
    """A record cannot be stored where it should be; the message names the path."""


@dataclass(frozen=True)
class Run:
    """Where, when and how rows were measured.

    Attributes:
        run_id: unique within a record.
        environment: `environment.collect()`.
        command: the command line.
        revision: git commit, "-dirty" appended for a changed tree; None outside a checkout.
        started: ISO 8601, UTC.
    """

    run_id: str
    environment: dict[str, Any]
    command: str
    revision: str | None
    started: str

    def __post_init__(self) -> None:
        if not isinstance(self.run_id, str) or not self.run_id:
            raise RecordError(f"run_id must be a non-empty string, got {self.run_id!r}")
        where = f"run {self.run_id!r}"
        if not isinstance(self.environment, dict):
            raise RecordError(f"{where}: environment must be an object, got {self.environment!r}")
        check_json(self.environment, f"{where}: environment")
        if not isinstance(self.command, str) or not self.command:
            raise RecordError(f"{where}: command must be a non-empty string, got {self.command!r}")
        if self.revision is not None and not isinstance(self.revision, str):
            raise RecordError(f"{where}: revision must be a string or null, got {self.revision!r}")
        self.when()

    def when(self) -> datetime:
        """`started` as a time."""
        try:
            time = datetime.fromisoformat(self.started)
        except (TypeError, ValueError):
            time = None
        if time is None or time.utcoffset() != timedelta(0):
            raise RecordError(
                f"run {self.run_id!r}: started must be an ISO 8601 time in UTC "
                f"(2026-11-29T18:14:05+00:00), got {self.started!r}"
            )
        return time


def new_run(
    command: str,
    environment: Mapping[str, Any],
    revision: str | None,
    *,
    now: datetime | None = None,
) -> Run:
    """A run that starts now; its id is the time and four random digits."""
    now = (datetime.now(timezone.utc) if now is None else now).astimezone(timezone.utc)
    now = now.replace(microsecond=0)
    run_id = f"{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    return Run(run_id, dict(environment), command, revision, now.isoformat())


@dataclass(frozen=True)
class Record:
    """One suite's runs and rows on one GPU. Immutable: `with_run` returns a longer record."""

    suite: str
    runs: tuple[Run, ...] = ()
    rows: tuple[Row, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.suite, str) or not SUITE_PATTERN.fullmatch(self.suite):
            raise RecordError(
                f"suite must be lower-case letters, digits, '-' and '_', got {self.suite!r}"
            )
        known: set[str] = set()
        for run in self.runs:
            if run.run_id in known:
                raise RecordError(
                    f"run {run.run_id!r} is already in the record; a run is never replaced"
                )
            known.add(run.run_id)
        for number, row in enumerate(self.rows, start=1):
            check_row(row, known, f"row {number}")

    def with_run(self, run: Run, rows: Sequence[Mapping[str, Any]]) -> Record:
        """This record and one more run; rows get the run's id where they have none, and keep 6
        significant digits of a float: no clock here has more to say.

        Raises RecordError, naming the row and the field, for anything that the record cannot hold.
        """
        added: list[Row] = []
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, Mapping):
                raise RecordError(f"new row {number} must be an object, got {row!r}")
            row_of_run = {"run_id": run.run_id, **row}
            check_row(row_of_run, {run.run_id}, f"new row {number}")
            added.append(_measured(row_of_run))
        return replace(self, runs=(*self.runs, run), rows=(*self.rows, *added))

    def rows_of(self, run_id: str) -> list[Row]:
        """The rows of one run, in the order in which they were measured."""
        if all(run.run_id != run_id for run in self.runs):
            names = ", ".join(run.run_id for run in self.runs) or "none"
            raise RecordError(f"no run {run_id!r} in the record of {self.suite!r}; runs: {names}")
        return [row for row in self.rows if row["run_id"] == run_id]

    def latest_run(self) -> Run:
        """The run that started last; of equal ones the one appended last."""
        if not self.runs:
            raise RecordError(f"the record of {self.suite!r} holds no run")
        return max(reversed(self.runs), key=Run.when)

    def write(self, path: Path) -> None:
        """Store the record, whole or not at all: written beside its place, then renamed into it."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with temporary.open("w", encoding="utf-8", newline="\n") as file:
                    file.write(self.to_json())
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
        except OSError as error:
            raise UnwritableRecordError(f"cannot write {path}: {error.strerror}") from error

    def to_json(self) -> str:
        """The file's text: one run and one row a line, keys sorted."""
        runs = [f"{_line(run.run_id)}: {_line(_run_fields(run))}" for run in self.runs]
        shared, short = shortened(self.rows)
        names, short = numbered(short)
        rows = [_line(row) for row in short]
        of_runs = [f"{_line(run)}: {_line(fields)}" for run, fields in shared.items()]
        repeated = f'"shared": {{{_block(of_runs)}}},\n' if shared else ""
        if names:
            repeated += f'"names": [{_block([_line(name) for name in names])}],\n'
        return (
            f'{{\n"schema": {SCHEMA},\n"suite": {_line(self.suite)},\n'
            f'"runs": {{{_block(runs)}}},\n{repeated}"rows": [{_block(rows)}]\n}}\n'
        )


def _run_fields(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in RUN_KEYS}


def _measured(value: Any) -> Any:
    """A value with its floats cut to 6 significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _measured(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_measured(entry) for entry in value]
    return value


def _line(value: object) -> str:
    return json.dumps(
        value, sort_keys=True, allow_nan=False, ensure_ascii=False, separators=(",", ":")
    )


def _block(lines: Sequence[str]) -> str:
    return "\n" + ",\n".join(lines) + "\n" if lines else ""


def gpu_folder(name: str) -> str:
    """Folder of a GPU's records: "NVIDIA H200" -> "nvidia-h200"."""
    folder = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not folder:
        raise RecordError(f"GPU name must hold letters or digits, got {name!r}")
    return folder


def record_path(results: Path, gpu: str, suite: str) -> Path:
    """Where the record of a suite on a GPU lies: <results>/<gpu folder>/<suite>.json."""
    return results / gpu_folder(gpu) / f"{suite}.json"


def read_record(path: Path) -> Record:
    """The record in a file.

    Raises UnreadableRecordError, naming the file, for what is missing, no JSON, of another schema
    or holds a row that this version does not know.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnreadableRecordError(f"{path} does not exist") from None
    except OSError as error:
        raise UnreadableRecordError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnreadableRecordError(f"{path} is not UTF-8 text: {error.reason}") from error
    try:
        return _record_from(json.loads(text, object_pairs_hook=_object_without_repeats))
    except RecordError as error:
        raise UnreadableRecordError(f"{path}: {error}") from error
    except (ValueError, RecursionError) as error:  # also numbers and nesting beyond Python's limits
        raise UnreadableRecordError(f"{path} is not JSON: {error}") from error


def _object_without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"{repeated!r} stands twice in one object")
    return found


def _record_from(content: Any) -> Record:
    if not isinstance(content, dict) or "schema" not in content:
        raise RecordError("not a record: an object with the key 'schema' is expected")
    if content["schema"] != SCHEMA or isinstance(content["schema"], bool):
        raise RecordError(
            f"schema {content['schema']!r} is not the one that this version reads ({SCHEMA})"
        )
    _require_keys(content, RECORD_KEYS, "the record", {"names", "shared"})
    if not isinstance(content["runs"], dict):
        raise RecordError("runs must be an object")
    if not isinstance(content["rows"], list):
        raise RecordError("rows must be a list")
    runs = []
    for run_id, fields in content["runs"].items():
        _require_keys(fields, RUN_KEYS, f"run {run_id!r}")
        runs.append(Run(run_id, **fields))
    rows = named(content["rows"], content.get("names", []))
    rows = completed(rows, content.get("shared", {}))
    return Record(content["suite"], tuple(runs), tuple(rows))


def _require_keys(
    value: Any, keys: set[str], where: str, optional: frozenset[str] | set[str] = frozenset()
) -> None:
    if not isinstance(value, dict):
        raise RecordError(f"{where} must be an object")
    missing = sorted(keys - value.keys())
    unknown = sorted(value.keys() - keys - optional)
    if missing:
        raise RecordError(f"{where}: {', '.join(missing)} missing")
    if unknown:
        raise RecordError(f"{where}: unknown key {', '.join(map(repr, unknown))}")


def append_run(path: Path, suite: str, run: Run, rows: Sequence[Mapping[str, Any]]) -> Record:
    """Add one run to the record in a file, which is begun where there is none; returns the whole.

    Raises UnreadableRecordError when the file is not a record of this suite, RecordError when the
    run is there already or a row is wrong (the file then stays as it was), and
    UnwritableRecordError.
    """
    record = read_record(path) if path.exists() else Record(suite)
    if record.suite != suite:
        raise UnreadableRecordError(
            f"{path} is the record of suite {record.suite!r}, not of {suite!r}"
        )
    record = record.with_run(run, rows)
    record.write(path)
    return record


def timing_fields(timing: Timing) -> Row:
    """A timing as fields of a row."""
    return {
        "ms": timing.ms,
        "ms_all": list(timing.ms_all),
        "aa_spread": timing.aa_spread,
        "sm_clock_mhz": timing.sm_clock_mhz,
        "power_w": timing.power_w,
        "joules": timing.joules,
        "clock": timing.clock,
        "l2": timing.l2,
    }


def ratio(row_a: Mapping[str, Any], row_b: Mapping[str, Any]) -> Ratio:
    """How many times as fast as row_b row_a is: the median of row_b's times over row_a's, paired by
    round. `behind` then says that row_a is the slower one.

    Raises RecordError unless both were timed in one run with the same clock, cache state and number
    of rounds.
    """
    if row_a.get("run_id") is None:
        raise RecordError("no ratio with a row that belongs to no run")
    for field in ("run_id", "clock", "l2"):
        a, b = row_a.get(field), row_b.get(field)
        if a != b:
            raise RecordError(f"no ratio between rows of different {field}: {a!r} and {b!r}")
    times_a, times_b = row_a.get("ms_all"), row_b.get("ms_all")
    if not times_a or not times_b:
        raise RecordError("no ratio with a row that was not timed")
    if len(times_a) != len(times_b):
        raise RecordError(
            f"no ratio between {len(times_a)} and {len(times_b)} rounds: they cannot be paired"
        )
    return median_ratio(times_b, times_a)
