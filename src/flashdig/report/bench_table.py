"""A benchmark's tables: ours and each peer, cell by cell, from rows of one run of a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from flashdig.bench.standings import BEST, Mean, Standing, head_dims, means, standings
from flashdig.costs.units import with_unit

Row = Mapping[str, Any]

LEGEND = (
    "TFLOP/s: 4 x batch x heads x seqlen^2 x head_dim forward, 2.5 times that backward, half when "
    "causal; windows, packed and unequal lengths: visible pairs alone. of peak: share of the "
    "tensor cores' rate at the clock that was seen. vs best: how many times as fast as the fastest "
    "peer ours is, median of the rounds' own ratios, [interval between their order statistics that "
    "covers the median with at least 95 %]; A/A: how much a repeated measurement of the same call "
    "differs within a round, the larger of ours and the best peer's, median; * marks cells behind: "
    "the whole interval lies below 1. memory: peak above the inputs, of the forward, or in the "
    "backward's table of forward and backward. Backward times are of the backward alone."
)


def print_bench(rows: Sequence[Row], console: Console, against: str | None = None) -> None:
    """Tables of a run, one a pass, then what failed, then the geometric means."""
    found = standings(rows)
    for direction in dict.fromkeys(row["pass"] for row in rows):
        of_pass = [one for one in found if one.any_row["pass"] == direction]
        constants, labels = cell_labels([one.any_row for one in of_pass])
        title = f"{direction}: {constants}" if constants else direction
        console.print(f"[bold]{title}[/bold]", highlight=False)
        with_memory = any("peak_bytes" in row for row in rows)
        if any("ms" in row for row in rows) or not with_memory:
            console.print(bench_table(of_pass, labels, console.width))
        if any("tflop_per_joule" in row for row in rows):
            console.print(energy_table(of_pass, labels, console.width))
        if with_memory:
            console.print(memory_table(of_pass, labels, console.width))
    for line in failure_lines(rows):
        console.print(line, highlight=False, markup=False, style="dim")
    for mean in means(found, [BEST] if against is None else [against, BEST]):
        console.print(mean_line(mean), highlight=False)
    note = backward_note(rows)
    if note is not None:
        console.print(note, highlight=False, markup=False)
    if any("ms" in row for row in rows):
        console.print(LEGEND, highlight=False, markup=False, style="dim")


FA3_BACKWARD = (
    "FlashAttention-3's backward was not measured here. Published: 480 TFLOP/s for head_dim 256 on "
    "an H200 (FlashAttention pull request 2889), about 540 to 565 for head_dim 128 on an H100."
)


def backward_note(rows: Sequence[Row]) -> str | None:
    """What must be said where backward ratios stand without the peer that may be the fastest."""
    timed = {row["backend"] for row in rows if row["pass"] == "backward" and "ms" in row}
    on_gpu = any(row.get("clock") == "graph" for row in rows)
    return FA3_BACKWARD if timed and on_gpu and "fa3" not in timed else None


@dataclass(frozen=True)
class Column:
    """A column with its cells; the highest `rank` gives way first where the terminal is narrow."""

    name: str
    cells: Sequence[str]
    rank: int

    @property
    def width(self) -> int:
        # a frame, two blanks, and in the cells a backslash before each bracket
        return 3 + max(len(text.replace("\\[", "[")) for text in (self.name, *self.cells))


LABEL_WIDTH = 30


def fitting(columns: Sequence[Column], width: int) -> tuple[list[Column], list[str]]:
    """The columns that fit into `width`, and the names of the others. The first always stays; its
    cells wrap where they are longer than LABEL_WIDTH."""
    kept, hidden = list(columns), []
    label_width = min(columns[0].width, LABEL_WIDTH)
    while len(kept) > 1 and 1 + label_width + sum(c.width for c in kept[1:]) > width:
        last = max(kept[1:], key=lambda column: column.rank)
        kept.remove(last)
        hidden.append(last.name)
    return kept, hidden


def _table(columns: Sequence[Column], styles: Sequence[str | None], width: int) -> Table:
    """The columns that fit, with the names of the others below."""
    kept, hidden = fitting(columns, width)
    caption = f"(a wider terminal shows: {', '.join(hidden)})" if hidden else None
    table = Table(caption=caption, caption_justify="left")
    for column in kept:
        first = column is kept[0]
        justify: Literal["left", "right"] = "left" if first else "right"
        table.add_column(column.name, justify=justify, no_wrap=not first)
    for cells, style in zip(zip(*(c.cells for c in kept), strict=True), styles, strict=True):
        table.add_row(*cells, style=style)
    return table


def bench_table(found: Sequence[Standing], labels: Sequence[str], width: int) -> Table:
    """One pass: our time, TFLOP/s and share of the peak, the peers' TFLOP/s, ours over the best.

    Columns without a single figure are left out; who was not run is told below.
    """
    peers = list(dict.fromkeys(name for one in found for name in one.peers))
    columns = [Column("cell", labels, 0)]
    if len({one.ours["backend"] for one in found if one.ours is not None}) > 1:
        names = ["-" if one.ours is None else str(one.ours["backend"]) for one in found]
        columns.append(Column("backend", names, 3))
    columns += [
        Column(_our_name(found), [_time(one.ours) for one in found], 1),
        Column("TFLOP/s", [_tflops(one.ours) for one in found], 2),
        Column("of peak", [_percent(one.ours) for one in found], 4),
        Column("A/A", [_spread(one) for one in found], 3),
    ]
    for number, name in enumerate(peers):
        columns.append(Column(name, [_tflops(one.peers.get(name)) for one in found], 5 + number))
    columns.append(Column("vs best", [against_best(one) for one in found], 1))
    columns = [c for c in columns if c.rank <= 1 or any(text != "-" for text in c.cells)]
    behind = [one.against_best is not None and one.against_best.behind for one in found]
    return _table(columns, ["red" if is_behind else None for is_behind in behind], width)


def energy_table(found: Sequence[Standing], labels: Sequence[str], width: int) -> Table:
    """TFLOP a joule of one pass, and the clock that was held: ours and the peers'."""
    peers = list(dict.fromkeys(name for one in found for name in one.peers))
    columns = [Column("TFLOP/J (MHz)", labels, 0)]
    columns.append(Column(_our_name(found), [_energy(one.ours) for one in found], 1))
    for number, name in enumerate(peers):
        columns.append(Column(name, [_energy(one.peers.get(name)) for one in found], 2 + number))
    return _table(columns, [None] * len(found), width)


def memory_table(found: Sequence[Standing], labels: Sequence[str], width: int) -> Table:
    """Peak memory of one pass, ours and the peers'."""
    peers = list(dict.fromkeys(name for one in found for name in one.peers))
    columns = [Column("memory", labels, 0)]
    columns.append(Column(_our_name(found), [_memory(one.ours) for one in found], 1))
    for number, name in enumerate(peers):
        columns.append(Column(name, [_memory(one.peers.get(name)) for one in found], 2 + number))
    return _table(columns, [None] * len(found), width)


def _spread(one: Standing) -> str:
    """The larger A/A spread of ours and the best peer: how far their ratio can be trusted."""
    if one.ours is None or one.best is None or "ms" not in one.ours:
        return "-"
    spread = max(one.ours["aa_spread"], one.peers[one.best]["aa_spread"])
    return f"{100 * spread:.1f} %"


def _our_name(found: Sequence[Standing]) -> str:
    names = {one.ours["backend"] for one in found if one.ours is not None}
    return str(names.pop()) if len(names) == 1 else "ours"


def against_best(one: Standing) -> str:
    """ "1.05x fa3 [1.04 1.06]", with a star where ours is behind."""
    ratio = one.against_best
    if ratio is None:
        return "-"
    star = "*" if ratio.behind else ""
    return f"{star}{ratio.median:.3f}x {one.best} \\[{ratio.low:.3f} {ratio.high:.3f}]"


def mean_line(mean: Mean) -> str:
    """A geometric mean in one line."""
    text = (
        f"{mean.direction}, head_dim {mean.head_dim}: {mean.backend} is "
        f"[bold]{mean.ratio:.3f}x[/bold] as fast as {_with_article(mean.against)} "
        f"(geometric mean of {mean.cells} cell{'s' if mean.cells > 1 else ''}"
    )
    return text + (f", {mean.behind} behind)" if mean.behind else ", none behind)")


def _with_article(name: str) -> str:
    return f"the {name}" if name == BEST else name


def failure_lines(rows: Sequence[Row]) -> list[str]:
    """Who has no figure and why, each reason once with the number of cells that it stands for."""
    counted: dict[tuple[str, str], int] = {}
    for row in rows:
        reason = row["gate"]
        if reason == "ok":
            reason = row.get("notes", "")
            if "ms" in row or "no time" not in reason:
                continue
        key = (str(row["backend"]), reason)
        counted[key] = counted.get(key, 0) + 1
    return [
        f"{name}: {reason}" + (f" ({count} times)" if count > 1 else "")
        for (name, reason), count in counted.items()
    ]


def _time(row: Row | None) -> str:
    if row is None or "ms" not in row:
        return _verdict(row)
    return f"{row['ms']:.3f} ms"


def _tflops(row: Row | None) -> str:
    if row is None or "tflops" not in row:
        return _verdict(row)
    # a CPU's are thousandths
    return f"{row['tflops']:.1f}" if row["tflops"] >= 0.1 else f"{row['tflops']:.2g}"


def _percent(row: Row | None) -> str:
    share = None if row is None else row.get("tensor_utilisation")
    return "-" if share is None else f"{100 * share:.1f} %"


def _energy(row: Row | None) -> str:
    if row is None or "tflop_per_joule" not in row:
        return _verdict(row)
    clock = row.get("sm_clock_mhz")
    return f"{row['tflop_per_joule']:.3f}" + (f" ({clock:.0f})" if clock else "")


def _memory(row: Row | None) -> str:
    if row is None or "peak_bytes" not in row:
        return _verdict(row)
    return with_unit(row["peak_bytes"], "B")


def _verdict(row: Row | None) -> str:
    """In place of a figure: "-" where it was not tried, else that it failed."""
    if row is None or row["gate"] == "ok" or row["gate"].startswith("not run"):
        return "-"
    return "error" if row["gate"].startswith("error") else "wrong"


def _heads(row: Row) -> str:
    heads = str(row["num_heads"])
    return heads if row["num_heads_kv"] == row["num_heads"] else f"{heads}/{row['num_heads_kv']}"


def _seqlen(row: Row) -> str:
    seqlen = str(row["seqlen_q"])
    return seqlen if row["seqlen_k"] == row["seqlen_q"] else f"{seqlen}/{row['seqlen_k']}"


def _causal(row: Row) -> str:
    return {True: "causal", False: "full"}.get(row["causal"], f"causal {row['causal']}")


# in the order in which they are dropped from labels that stay different without them
_PARTS: dict[str, Callable[[Row], str]] = {
    "batch": lambda row: f"batch {row['batch']}",
    "heads": lambda row: f"heads {_heads(row)}",
    "seqlen": lambda row: f"seqlen {_seqlen(row)}",
    "head_dim": lambda row: f"head_dim {head_dims(row)}",
    "dtype": lambda row: str(row["dtype"]),
    "causal": _causal,
}


def cell_labels(rows: Sequence[Row]) -> tuple[str, list[str]]:
    """What all cells share, and a short label for each: what differs, or its own name.

    Names that only repeat the sizes give way to the short form.
    """
    own = [_own_name(row) for row in rows]
    sized = [row for row, name in zip(rows, own, strict=True) if not name]
    varying = [name for name, part in _PARTS.items() if len({part(row) for row in sized}) > 1]
    constant = [part(sized[0]) for name, part in _PARTS.items() if sized and name not in varying]
    for droppable in ("batch", "heads"):
        fewer = [name for name in varying if name != droppable]
        if droppable in varying and _distinct(sized, fewer) == _distinct(sized, varying):
            varying = fewer
    labels = [
        name or ", ".join(_PARTS[part](row) for part in varying) or ", ".join(constant)
        for row, name in zip(rows, own, strict=True)
    ]
    # constants of some cells are not a title for all
    return ("" if any(own) else ", ".join(constant)), labels


def _own_name(row: Row) -> str:
    """The cell's name, where it is not just its sizes."""
    name = str(row.get("name") or "")
    return "" if name.startswith("batch ") and not row["features"] else name


def _distinct(rows: Sequence[Row], parts: Sequence[str]) -> int:
    return len({tuple(_PARTS[part](row) for part in parts) for row in rows})
