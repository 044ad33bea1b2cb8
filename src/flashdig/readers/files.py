"""From file names to traces: directories, formats by content, and a distinct rank for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from flashdig.readers.model import ReadWarning, Trace
from flashdig.readers.nsys import read_nsys
from flashdig.readers.open_file import UnreadableFileError, is_sqlite
from flashdig.readers.trace import read_kineto

_TRACE_SUFFIXES = (".json", ".json.gz", ".json.xz", ".sqlite")
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,6})(?!\d)", re.IGNORECASE)


def read_traces(
    paths: Sequence[str],
    *,
    allow_large: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[Trace]:
    """Read recordings of one run, one or more ranks, in order of rank.

    Args:
        paths: trace files (Chrome/Kineto, plain, gzip or xz; Nsight Systems SQLite exports),
            directories of such files, or "-" for standard input.
        allow_large: also read compressed members beyond the safety limits.
        progress: called with the file name and the number of its bytes read so far.

    A rank is what the file says, else what its name says ("rank3"), else the lowest free number;
    no two traces share one. Raises UnreadableFileError.
    """
    traces: list[Trace] = []
    for path in _expand(paths):
        if is_sqlite(path):
            traces.extend(read_nsys(path))
        else:
            report = _report_for(path, progress)
            trace = read_kineto(path, allow_large=allow_large, progress=report)
            if not (trace.kernels or trace.copies or trace.host_ops or trace.launches):
                raise UnreadableFileError(
                    f"{trace.source}: a trace, but with no events of a PyTorch profiler in it"
                )
            traces.append(trace)
    _give_ranks(traces)
    traces.sort(key=lambda trace: trace.rank)
    return traces


def _report_for(
    path: str, progress: Callable[[str, int], None] | None
) -> Callable[[int], None] | None:
    if progress is None:
        return None
    return lambda count: progress(path, count)


def _expand(paths: Sequence[str]) -> list[str]:
    files: list[str] = []
    for path in paths:
        if path == "-" or not Path(path).is_dir():
            files.append(path)
            continue
        found = sorted(
            str(file)
            for file in Path(path).iterdir()
            if file.name.lower().endswith(_TRACE_SUFFIXES) and file.is_file()
        )
        if not found:
            raise UnreadableFileError(
                f"{path}: the directory holds no traces ({', '.join(_TRACE_SUFFIXES)})"
            )
        files.extend(found)
    if files.count("-") > 1:
        raise UnreadableFileError("standard input (-) can be read only once")
    return files


def _give_ranks(traces: list[Trace]) -> None:
    taken: dict[int, Trace] = {}
    without: list[Trace] = []
    for trace in traces:
        if not trace.rank_is_recorded:
            named = _RANK_IN_NAME.search(Path(trace.source).name)
            if named is None:
                without.append(trace)
                continue
            trace.rank = int(named.group(1))
        other = taken.get(trace.rank)
        if other is None:
            taken[trace.rank] = trace
            continue
        trace.warnings.append(
            ReadWarning(
                "duplicate_rank",
                f"{trace.source} and {other.source} both say rank {trace.rank}; this one gets the "
                "next free number",
            )
        )
        without.append(trace)
    free = 0
    for trace in without:
        while free in taken:
            free += 1
        trace.rank = free
        taken[free] = trace
