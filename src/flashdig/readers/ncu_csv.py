"""The CSV that `ncu --csv` prints: raw page (a kernel a row) or details page (a metric a row).

Columns are found by their headers, never by their place: which ones there are depends on the
version and on what was collected.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from flashdig.readers import ncu_units
from flashdig.readers.ncu_metrics import kernel_from_metrics
from flashdig.readers.ncu_model import NcuKernel, Rule
from flashdig.readers.open_file import UnreadableFileError

_ABOUT_THE_KERNEL = frozenset(
    {
        "ID",
        "Process ID",
        "Process Name",
        "Host Name",
        "Kernel Name",
        "Context",
        "Stream",
        "Block Size",
        "Grid Size",
        "Device",
        "CC",
    }
)
# with --nvtx: "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", and a
# second one of start/stop ranges, which belong to no thread
_PUSHED_RANGES = "Push/Pop_Range"
_NVTX_COLUMNS = (_PUSHED_RANGES, "Start/Stop_Range")
_FIELDS_BEHIND_RANGE = 6
_NEEDED = ("ID", "Kernel Name")
_DETAILS = ("Metric Name", "Metric Unit", "Metric Value")
# labels that two sections of the details page share, with different meanings
_SHARED_LABELS = frozenset({"Memory Throughput"})
_FIELD_LIMIT = 16 << 20


@dataclass(frozen=True)
class _Row:
    line: int
    cells: list[str]


@dataclass
class _Draft:
    """A kernel while its rows come in."""

    line: int
    about: dict[str, str]
    metrics: dict[str, float | str] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)


def read_csv(text: Iterator[str], source: str) -> list[NcuKernel]:
    """The kernels of an `ncu --csv` output, in its order.

    Args:
        text: lines of the file; what the profiled program printed before the table is skipped.
        source: file name for messages.

    Raises UnreadableFileError with file and line for anything else.
    """
    rows = _rows(text, source)
    header = _find_header(rows, source)
    if all(name in header.cells for name in _DETAILS):
        drafts = _details(rows, header, source)
    else:
        drafts = _raw(rows, header, source)
    if not drafts:
        raise UnreadableFileError(
            f"{source}, line {header.line}: the table of Nsight Compute holds no kernel"
        )
    return [_kernel(draft, source) for draft in drafts]


def _rows(text: Iterator[str], source: str) -> Iterator[_Row]:
    limit = csv.field_size_limit()
    csv.field_size_limit(min(_FIELD_LIMIT, sys.maxsize))
    reader = csv.reader(text)
    try:
        for cells in reader:
            # ncu writes its own remarks as ==PROF== and ==WARNING== lines
            if cells and not cells[0].startswith("=="):
                yield _Row(reader.line_num, cells)
    except csv.Error as error:
        raise UnreadableFileError(f"{source}, line {reader.line_num}: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _find_header(rows: Iterator[_Row], source: str) -> _Row:
    for row in rows:
        if all(name in row.cells for name in _NEEDED):
            repeated = {name for name in row.cells if row.cells.count(name) > 1}
            if repeated & _ABOUT_THE_KERNEL:
                raise UnreadableFileError(
                    f"{source}, line {row.line}: the column {sorted(repeated)[0]!r} stands twice"
                )
            return row
    raise UnreadableFileError(
        f"{source}: this is no CSV of Nsight Compute: no line names the columns "
        "'ID' and 'Kernel Name' (write one with: ncu --import FILE --csv --page raw)"
    )


def _raw(rows: Iterator[_Row], header: _Row, source: str) -> list[_Draft]:
    units: list[str] | None = None
    drafts = []
    number_at = header.cells.index("ID")
    for row in rows:
        if len(row.cells) != len(header.cells):
            raise UnreadableFileError(
                f"{source}, line {row.line}: {len(row.cells)} cells where the header "
                f"(line {header.line}) has {len(header.cells)}"
            )
        if units is None:
            # the row behind the header holds the units, and no ID
            if row.cells[number_at]:
                raise UnreadableFileError(
                    f"{source}, line {row.line}: the row of units is missing, so the numbers "
                    "cannot be read"
                )
            units = row.cells
            continue
        draft = _Draft(row.line, _about(header, row))
        for name, unit, value in zip(header.cells, units, row.cells, strict=True):
            if not _is_about(name):
                _put(draft, name, unit, value)
        drafts.append(draft)
    return drafts


def _details(rows: Iterator[_Row], header: _Row, source: str) -> list[_Draft]:
    shortest = max(header.cells.index(name) for name in (*_NEEDED, *_DETAILS)) + 1
    drafts: dict[tuple[str, str], _Draft] = {}
    for row in rows:
        # rows of metrics end before the columns of rules
        if not shortest <= len(row.cells) <= len(header.cells):
            raise UnreadableFileError(
                f"{source}, line {row.line}: {len(row.cells)} cells where the header "
                f"(line {header.line}) has {len(header.cells)}"
            )
        about = _about(header, row)
        draft = drafts.setdefault(
            (about.get("Process ID", ""), about["ID"]), _Draft(row.line, about)
        )
        if draft.about["Kernel Name"] != about["Kernel Name"]:
            raise UnreadableFileError(
                f"{source}, line {row.line}: kernel {about['ID'][:40]} has another name than in "
                f"line {draft.line}"
            )
        cells = dict(zip(header.cells, row.cells, strict=False))
        section, label = cells.get("Section Name", ""), cells["Metric Name"]
        if label:
            if label in _SHARED_LABELS:
                label = f"{section}: {label}"
            _put(draft, label, cells["Metric Unit"], cells["Metric Value"])
        elif cells.get("Rule Name"):
            draft.rules.append(_rule(cells, source, row.line))
    return list(drafts.values())


def _rule(cells: dict[str, str], source: str, line: int) -> Rule:
    try:
        speedup = ncu_units.in_base_units(cells.get("Estimated Speedup", ""), "%")
    except ValueError as error:
        raise UnreadableFileError(f"{source}, line {line}: estimated speedup {error}") from error
    return Rule(
        section=cells.get("Section Name", ""),
        name=cells["Rule Name"],
        kind=cells.get("Rule Type", ""),
        text=cells.get("Rule Description", ""),
        speedup_percent=speedup,
    )


def _about(header: _Row, row: _Row) -> dict[str, str]:
    return {
        name: value for name, value in zip(header.cells, row.cells, strict=False) if _is_about(name)
    }


def _is_about(column: str) -> bool:
    return column in _ABOUT_THE_KERNEL or any(part in column for part in _NVTX_COLUMNS)


def _ranges(about: dict[str, str]) -> tuple[str, ...]:
    """Names in a cell such as '4711  "<default domain>:forward:none:none:none:none:none:none"'.

    A name may hold colons; the six fields behind it are its payload, colour and message.
    """
    cell = next((value for name, value in about.items() if _PUSHED_RANGES in name), "")
    names = []
    for entry in re.findall(r'"([^"]*)"', cell):
        fields = entry.split(":")
        end = -_FIELDS_BEHIND_RANGE if len(fields) > _FIELDS_BEHIND_RANGE + 1 else 2
        names.append(":".join(fields[1:end]))
    return tuple(name for name in names if name)


def _put(draft: _Draft, name: str, unit: str, value: str) -> None:
    try:
        number = ncu_units.in_base_units(value, unit)
    except ValueError:
        draft.metrics[name] = value  # "PolicySpread", "all", device names
        return
    if number is not None:
        draft.metrics[name] = number


def _kernel(draft: _Draft, source: str) -> NcuKernel:
    about, line = draft.about, draft.line
    if not about["ID"].isascii() or not about["ID"].isdecimal():
        raise UnreadableFileError(
            f"{source}, line {line}: the ID {about['ID'][:40]!r} is no number; is this a table of "
            "Nsight Compute?"
        )
    capability = re.fullmatch(r"(\d{1,3})\.(\d{1,2})", about.get("CC", ""))
    device = about.get("Device", "")
    return kernel_from_metrics(
        number=int(about["ID"][:12]),
        name=about["Kernel Name"],
        source=source,
        metrics=draft.metrics,
        grid=_dimensions(about.get("Grid Size", "")),
        block=_dimensions(about.get("Block Size", "")),
        device=int(device) if re.fullmatch(r"[0-9]{1,4}", device) else None,
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
        rules=tuple(draft.rules),
        ranges=_ranges(about),
    )


def _dimensions(text: str) -> tuple[int, int, int] | None:
    """'(256, 1, 1)' as numbers; None for anything else."""
    found = re.fullmatch(r"\(?\s*([0-9]{1,10}), *([0-9]{1,10}), *([0-9]{1,10})\s*\)?", text)
    return None if found is None else (int(found[1]), int(found[2]), int(found[3]))
