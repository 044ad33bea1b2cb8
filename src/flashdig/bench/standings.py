"""Who is ahead: rows of one run, cell by cell, ours against every peer.

A ratio is ours over a peer in speed (above 1 ours is the faster): the median over the rounds of the
peer's time over ours, paired by round, with an interval between order statistics that covers the
median with at least 95 % (`flashdig.bench.timing.median_ratio`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashdig.bench.results import ratio
from flashdig.bench.rows import PROBLEM
from flashdig.bench.suite import PEERS
from flashdig.bench.timing import Ratio

Row = Mapping[str, Any]
BEST = "best peer"


@dataclass(frozen=True)
class Standing:
    """One of ours on one cell and pass, or (ours None) the peers alone.

    Attributes:
        ours: its row.
        peers: every peer's row by name, failed ones too.
        ratios: ours over each peer that was timed; empty where ours was not.
        best: name of the fastest peer; None where none was timed.
    """

    ours: Row | None
    peers: dict[str, Row]
    ratios: dict[str, Ratio]
    best: str | None

    @property
    def any_row(self) -> Row:
        """Some row of the cell: all hold the same problem."""
        return next(iter(self.peers.values())) if self.ours is None else self.ours

    @property
    def against_best(self) -> Ratio | None:
        return None if self.best is None else self.ratios.get(self.best)

    def against(self, name: str) -> Ratio | None:
        """Against a peer, or against the best one with BEST."""
        return self.against_best if name == BEST else self.ratios.get(name)


@dataclass(frozen=True)
class Mean:
    """Geometric mean of the cells' ratios.

    Attributes:
        direction, head_dim, backend: of the cells.
        against: a peer, or BEST.
        ratio: of ours over it.
        cells: how many; behind: those whose whole interval lies below 1.
    """

    direction: str
    head_dim: str
    backend: str
    against: str
    ratio: float
    cells: int
    behind: int


def is_peer(row: Row) -> bool:
    return row["backend"] in PEERS


def cell_key(row: Row) -> tuple[str, ...]:
    """What rows of one cell and pass share."""
    fields = [row.get("name"), row["features"], *(row[name] for name in PROBLEM)]
    return tuple(json.dumps(value, sort_keys=True) for value in fields)


def standings(rows: Sequence[Row]) -> list[Standing]:
    """One for each of ours on each cell and pass, in the order of the rows; rows of one run."""
    cells: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(cell_key(row), []).append(row)
    found = []
    for of_cell in cells.values():
        peers = {row["backend"]: row for row in of_cell if is_peer(row)}
        timed = {name: row for name, row in peers.items() if "ms" in row}
        best = min(timed, key=lambda name: float(timed[name]["ms"]), default=None)
        of_ours: list[Row | None] = [row for row in of_cell if not is_peer(row)]
        for ours in of_ours or [None]:
            ratios = {}
            if ours is not None and "ms" in ours:
                ratios = {name: ratio(ours, row) for name, row in timed.items()}
            found.append(Standing(ours, peers, ratios, best))
    return found


def means(found: Sequence[Standing], against: Sequence[str]) -> list[Mean]:
    """Geometric means by pass, head_dim and backend, against each of `against`."""
    groups: dict[tuple[str, str, str], list[Standing]] = {}
    for standing in found:
        if standing.ours is not None:
            ours = standing.ours
            key = (ours["pass"], head_dims(ours), ours["backend"])
            groups.setdefault(key, []).append(standing)
    result = []
    for (direction, head_dim, backend), members in groups.items():
        for name in dict.fromkeys(against):
            ratios = [r for r in (one.against(name) for one in members) if r is not None]
            if ratios:
                mean = statistics.geometric_mean([r.median for r in ratios])
                behind = sum(r.behind for r in ratios)
                result.append(Mean(direction, head_dim, backend, name, mean, len(ratios), behind))
    return result


def head_dims(row: Row) -> str:
    """128, or 192/128 where values have another."""
    dims = str(row["head_dim"])
    return dims if row["head_dim_v"] == row["head_dim"] else f"{dims}/{row['head_dim_v']}"
