"""Sentences about a trace that the terminal and the page share."""

from __future__ import annotations

from flashdig.readers.compare import Comparison
from flashdig.readers.host_cost import HostCost
from flashdig.readers.summary import AttentionGroup, TraceSummary
from flashdig.report.quantities import duration, share

CLASS_WORDS = {
    "attention_forward": "attention forward",
    "attention_backward": "attention backward",
    "matmul": "matmul",
    "convolution": "convolution",
    "norm": "norm",
    "softmax": "softmax",
    "elementwise": "elementwise",
    "reduction": "reduction",
    "sort": "sort and top-k",
    "other": "other",
    "unknown": "unknown",
    "copy": "copy",
    "communication": "communication",
}
# more than these are shown as a range
_MOST_MODULES = 3
ADDS_UP = (
    "Each moment of device time is counted once, so that the parts add up to the elapsed time; "
    "copies and communication that hide behind other work count as that work. Parts of an eager "
    "attention (its products, mask, softmax and copies) count as attention."
)


def verdict(summary: TraceSummary) -> list[str]:
    """What matters most, in at most four sentences."""
    busy, elapsed = summary.busy_ns, summary.elapsed_ns
    if not busy or not elapsed:
        return [
            "This recording holds no device work: it was made on the CPU alone, or its device "
            "events are missing. Device times are unknown, not 0."
        ]
    sentences = [f"The device is busy for {share(busy, elapsed)} of {duration(elapsed)}."]
    forward, backward = (
        summary.class_ns("attention_forward"),
        summary.class_ns("attention_backward"),
    )
    if not forward and not backward:
        sentences.append("No attention was found.")
        return sentences
    passes = [
        f"{words} {duration(time)}"
        for words, time in (("forward", forward), ("backward", backward))
        if time
    ]
    sentences.append(
        f"Attention takes {share(forward + backward, busy)} of the busy time ({', '.join(passes)})."
    )
    counts: dict[str, int] = {}
    for call in summary.attention_calls:
        counts[call.backend] = counts.get(call.backend, 0) + 1
    ran = ", ".join(f"{backend} in {count} calls" for backend, count in counts.items())
    sentences.append(f"What ran: {ran}.")
    return sentences


def device_words(summary: TraceSummary) -> str:
    """Names of the devices, or what is known instead."""
    names = sorted({device.name for device in summary.devices if device.name})
    used = len(summary.breakdowns)
    text = ", ".join(names) if names else "device not recorded"
    return f"{text} ({used} used)" if used > 1 else text


def origin_words(summary: TraceSummary) -> str:
    """Format, rank, counts."""
    format_words = {"kineto": "Kineto trace", "nsight-systems": "Nsight Systems export"}
    rank = f"rank {summary.rank}"
    if summary.world_size is not None:
        rank += f" of {summary.world_size}"
    if not summary.breakdowns:
        return f"{format_words[summary.format]}, {rank}, no device events"
    return (
        f"{format_words[summary.format]}, {rank}, {device_words(summary)}, "
        f"{summary.kernel_count:,} kernels, {summary.copies:,} copies and memsets"
    )


def host_words(host: HostCost | None) -> list[str]:
    """What the host did, a sentence each."""
    if host is None:
        return ["The recording holds no launches: what launching cost is unknown."]
    words = []
    if host.launches:
        text = f"{host.launches:,} launches took {duration(host.launch_ns)} of host time"
        if host.launch_median_ns is not None:
            text += f", {duration(host.launch_median_ns)} each (median)"
        words.append(text + ".")
    if host.graph_launches:
        words.append(f"{host.graph_launches:,} of them launched a CUDA graph.")
    if host.launch_delay_median_ns is not None:
        words.append(
            f"A kernel starts {duration(host.launch_delay_median_ns)} after its launch begins "
            "(median): a few µs mean that the device waits for the host, much more that the host "
            "runs ahead."
        )
    if host.synchronizations:
        words.append(
            f"{host.synchronizations:,} calls waited for the device, "
            f"{duration(host.synchronization_ns)} in all."
        )
    if host.kernels_without_launch:
        words.append(f"{host.kernels_without_launch:,} kernels have no launch in the file.")
    if host.launches_without_work:
        words.append(f"{host.launches_without_work:,} launches have no kernel in the file.")
    return words


def comparison_words(comparison: Comparison) -> str:
    """How much faster the second trace is, in a sentence."""
    what = "a step" if comparison.per_step else "the recording"
    busy = next((entry for entry in comparison.times if entry.name == "busy"), None)
    if busy is None or busy.ratio is None or not busy.after or not busy.before:
        return "Device time is not known in both traces, so that they cannot be compared."
    change = f"{duration(busy.before)} to {duration(busy.after)}"
    if 0.995 < busy.ratio < 1.005:
        return f"Device time of {what} did not change ({change})."
    if busy.ratio < 1:
        return f"Device time of {what} fell from {change}: {1 / busy.ratio:.3g} times faster."
    return f"Device time of {what} rose from {change}: {busy.ratio:.3g} times slower."


def group_parts(group: AttentionGroup) -> str:
    """What the parts of one call cost, or '' where it is a single kernel."""
    parts = group.parts_ns
    if len(parts) < 2:
        return ""
    return ", ".join(f"{label} {duration(time)}" for label, time in parts.items())


def group_modules(group: AttentionGroup) -> str:
    """The modules in which the calls of a group stand; '' where that was not recorded."""
    names = sorted({path[-1] for path in group.module_paths}, key=_by_number)
    if len(names) > _MOST_MODULES:
        return f"{names[0]} … {names[-1]} ({len(names)} modules)"
    return ", ".join(names)


def _by_number(module: str) -> tuple[str, int]:
    """The key by which Layer_2 comes before Layer_10."""
    name, _, number = module.rpartition("_")
    return (name, int(number)) if number.isdecimal() and len(number) < 10 else (module, 0)
