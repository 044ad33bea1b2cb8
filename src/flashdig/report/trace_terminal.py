"""A trace's summary on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashdig.findings.finding import Finding
from flashdig.readers.breakdown import TIME_CLASSES, DeviceBreakdown, Shares
from flashdig.readers.compare import Comparison, Difference
from flashdig.readers.kernel_names import decode
from flashdig.readers.summary import AttentionGroup, TraceSummary
from flashdig.report.finding_words import gain_words, headline
from flashdig.report.quantities import duration, share
from flashdig.report.trace_words import (
    CLASS_WORDS,
    comparison_words,
    group_modules,
    group_parts,
    host_words,
    origin_words,
    verdict,
)

_MOST_STEPS = 10
_MOST_KERNELS = 15
_MOST_GROUPS = 25


def print_summary(
    summary: TraceSummary, console: Console, findings: Sequence[Finding] = ()
) -> None:
    """One trace: verdict, findings, attention calls, where time went, kernels, host."""
    console.print(f"[bold]{escape(summary.source)}[/bold]")
    console.print(escape(origin_words(summary)), style="dim")
    console.print()
    for sentence in verdict(summary):
        console.print(escape(sentence))
    if findings:
        print_short_findings(findings, console)
    if summary.attention:
        _print_attention(summary.attention, console)
    for breakdown in summary.breakdowns:
        _print_breakdown(breakdown, len(summary.breakdowns) > 1, console)
    if summary.kernels:
        _print_kernels(summary, console)
    _heading("Host", console)
    for sentence in host_words(summary.host):
        console.print(escape(sentence))
    if summary.mean_occupancy is not None:
        console.print(
            f"Mean occupancy by duration: {summary.mean_occupancy:.3g} % (an estimate from launch "
            "sizes, no counter)."
        )
    if summary.peak_allocated_bytes is not None:
        console.print(f"Most device memory allocated: {summary.peak_allocated_bytes / 1e9:.4g} GB.")
    console.print()


def print_short_findings(
    findings: Sequence[Finding], console: Console, *, places: bool = False
) -> None:
    """What costs time or needs a check, in short; what is fine is left to `flashdig explain`.

    Args:
        places: say what each is about, as counters of several kernels need it.
    """
    shown = [f for f in findings if f.verdict in ("slow", "check", "elsewhere")]
    if not shown:
        return
    _heading("Findings", console)
    for finding in shown:
        gain = gain_words(finding.gain)
        end = f" To gain: {gain}." if gain else ""
        about = f" {finding.where.rstrip('.')}." if places else ""
        text = escape(finding.claim + end + about)
        console.print(f"[bold]{escape(headline(finding))}[/bold]: {text}")
    console.print("flashdig explain says what to try, with code", style="dim")


def print_ranks(summaries: Sequence[TraceSummary], console: Console) -> None:
    """All ranks of a run side by side."""
    console.print("[bold]Ranks[/bold]")
    table = _table("rank", "elapsed", "busy", "idle", "attention", "communication", "hidden")
    for summary in summaries:
        busy, elapsed = summary.busy_ns, summary.elapsed_ns
        if busy is None or elapsed is None:
            table.add_row(str(summary.rank), *["–"] * 6)
            continue
        exchanged = sum(breakdown.kinds.communication_ns for breakdown in summary.breakdowns)
        hidden = sum(breakdown.kinds.hidden_communication_ns for breakdown in summary.breakdowns)
        table.add_row(
            str(summary.rank),
            duration(elapsed),
            duration(busy),
            share(elapsed - busy, elapsed),
            duration(summary.class_ns("attention_forward", "attention_backward")),
            duration(exchanged),
            share(hidden, exchanged),
        )
    console.print(table)
    console.print("hidden: the share of communication behind which something computes", style="dim")
    console.print()


def _heading(title: str, console: Console) -> None:
    console.print()
    console.print(f"[bold]{escape(title)}[/bold]")


def _table(*columns: str, left: int = 1) -> Table:
    """A plain table whose first `left` columns are text and whose others are numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, column in enumerate(columns):
        if index < left:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    return table


def _print_attention(groups: Sequence[AttentionGroup], console: Console) -> None:
    _heading("Attention calls", console)
    table = _table("attention", "calls", "kernels", "device/call", "TFLOP/s", "host/call")
    for group in groups[:_MOST_GROUPS]:
        kernels = f"{group.kernels_per_call:.3g}"
        if group.copies_per_call:
            kernels += f"+{group.copies_per_call:.3g}"
        words = group.describe()
        if group.first.recomputed:
            words += ", recomputed in the backward"
        modules = group_modules(group)
        if modules:
            words += f" in {modules}"
        parts = group_parts(group)
        table.add_row(
            escape(words) + (f"\n[dim]  {escape(parts)}[/dim]" if parts else ""),
            f"{group.count:,}",
            kernels,
            _time(group.median_device_ns),
            "" if group.tflop_per_s is None else f"{group.tflop_per_s:.4g}",
            _time(group.median_host_ns),
        )
    console.print(table)
    if len(groups) > _MOST_GROUPS:
        console.print(
            f"… and {len(groups) - _MOST_GROUPS} kinds more (--json has all)", style="dim"
        )
    console.print("kernels: a call's kernels + its copies and memsets", style="dim")


def _print_breakdown(breakdown: DeviceBreakdown, several: bool, console: Console) -> None:
    title = "Where device time went"
    _heading(f"{title}, GPU {breakdown.device}" if several else title, console)
    names = [name for name in TIME_CLASSES if breakdown.total.by_class.get(name)]
    table = _table("", *(["mean a step", "median"] if breakdown.steps else ["time"]), "of busy")
    shares = [step.shares for step in breakdown.steps if step.window.events]
    for name in names:
        total = breakdown.total.by_class[name]
        table.add_row(
            CLASS_WORDS[name],
            *_row_times([part.by_class.get(name, 0) for part in shares], total, breakdown),
            share(total, breakdown.total.busy_ns),
        )
    for words, values, total in (
        ("busy", [part.busy_ns for part in shares], breakdown.total.busy_ns),
        ("idle", [part.idle_ns for part in shares], breakdown.total.idle_ns),
        ("elapsed", [part.elapsed_ns for part in shares], breakdown.total.elapsed_ns),
    ):
        table.add_row(words, *_row_times(values, total, breakdown), "", style="dim")
    console.print(table)
    if breakdown.steps:
        _print_steps(breakdown, console)
    kinds = breakdown.kinds
    if kinds.hidden_fraction is not None:
        console.print(
            f"Communication: {duration(kinds.communication_ns)}, of which "
            f"{kinds.hidden_fraction:.0%} hides behind computation."
        )
    for note in breakdown.notes:
        console.print(escape(note), style="yellow")


def _row_times(values: list[int], total: int, breakdown: DeviceBreakdown) -> list[str]:
    """Mean and median of steps, or the total where there are none."""
    if not breakdown.steps:
        return [duration(total)]
    if not values:
        return ["", ""]
    return [duration(mean(values)), duration(median(values))]


def _print_steps(breakdown: DeviceBreakdown, console: Console) -> None:
    steps = breakdown.steps
    table = _table("step", "elapsed", "busy", "idle", "attention", "matmul", "rest", "kernels")
    shown = list(range(len(steps)))
    if len(steps) > _MOST_STEPS:
        half = _MOST_STEPS // 2
        shown = [*shown[:half], *shown[-half:]]
    for index in shown:
        step = steps[index]
        parts: Shares = step.shares
        attention = parts.by_class.get("attention_forward", 0)
        attention += parts.by_class.get("attention_backward", 0)
        matmul = parts.by_class.get("matmul", 0)
        table.add_row(
            escape(step.window.name),
            duration(parts.elapsed_ns),
            duration(parts.busy_ns),
            share(parts.idle_ns, parts.elapsed_ns),
            duration(attention),
            duration(matmul),
            duration(parts.busy_ns - attention - matmul),
            f"{step.window.kernels:,}",
        )
    console.print()
    console.print(table)
    if len(shown) < len(steps):
        hidden = len(steps) - len(shown)
        console.print(f"… {hidden} steps in between are not shown (--json has all)", style="dim")


def _print_kernels(summary: TraceSummary, console: Console) -> None:
    _heading("Kernels by family", console)
    busy = summary.busy_ns or 0
    table = _table("family", "role", "kernels", "total", "of busy", left=2)
    for row in summary.families[:_MOST_KERNELS]:
        table.add_row(
            escape(row.family),
            escape(row.role),
            f"{row.count:,}",
            duration(row.total_ns),
            share(row.total_ns, busy),
        )
    console.print(table)
    _heading("Longest kernels", console)
    table = _table("kernel", "count", "total", "mean", "occupancy")
    for kernel in summary.kernels[:_MOST_KERNELS]:
        percent = kernel.occupancy.percent
        table.add_row(
            escape(kernel.words),
            f"{kernel.count:,}",
            duration(kernel.total_ns),
            duration(kernel.mean_ns),
            "unknown" if percent is None else f"{percent:.3g} %",
        )
    console.print(table)
    if len(summary.kernels) > _MOST_KERNELS:
        console.print(
            f"… and {len(summary.kernels) - _MOST_KERNELS} names more (--json has all)", style="dim"
        )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Two traces side by side."""
    console.rule("[bold]Comparison[/bold]", align="left")
    console.print(escape(f"before: {comparison.before}"))
    console.print(escape(f"after:  {comparison.after}"))
    console.print()
    console.print(escape(comparison_words(comparison)), style="bold")
    unit = "a step (median)" if comparison.per_step else "in all"
    _print_differences(f"Device time {unit}", comparison.times, True, console)
    unit = "a step (mean)" if comparison.per_step else "in all"
    _print_differences(f"Counts {unit}", comparison.counts, False, console)
    _print_differences("One attention call (median)", comparison.attention, True, console)
    kernels = [
        Difference(decode(entry.name).words, entry.before, entry.after)
        for entry in comparison.kernels[:_MOST_KERNELS]
    ]
    _print_differences(f"Kernels that changed most, {unit}", kernels, True, console)


def _print_differences(
    title: str, entries: Sequence[Difference], are_times: bool, console: Console
) -> None:
    if not entries:
        return
    _heading(title, console)
    table = _table("", "before", "after", "ratio")
    for entry in entries:
        table.add_row(
            escape(CLASS_WORDS.get(entry.name, entry.name)),
            _time(entry.before) if are_times else _count(entry.before),
            _time(entry.after) if are_times else _count(entry.after),
            "" if entry.ratio is None else f"{entry.ratio:.3g}",
        )
    console.print(table)


def _time(nanoseconds: float | None) -> str:
    return "–" if nanoseconds is None else duration(nanoseconds)


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.4g}"
