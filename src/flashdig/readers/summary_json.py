"""The JSON of `flashdig trace`: plain values, times in integer nanoseconds, unknown is null."""

from __future__ import annotations

from collections.abc import Sequence

from flashdig.costs.flops import RULE
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.breakdown import TIME_CLASSES, DeviceBreakdown, Shares
from flashdig.readers.compare import Comparison, Difference
from flashdig.readers.host_cost import HostCost
from flashdig.readers.kernel_table import KernelRow
from flashdig.readers.model import DeviceProperties
from flashdig.readers.summary import AttentionGroup, TraceSummary

SCHEMA = 1
Json = dict[str, object]


def summaries_to_json(
    summaries: Sequence[TraceSummary], comparison: Comparison | None = None
) -> Json:
    """The whole answer; `schema` rises when a field changes its meaning."""
    return {
        "schema": SCHEMA,
        "flops_rule": RULE,
        "traces": [summary_to_json(summary) for summary in summaries],
        "comparison": None if comparison is None else _comparison(comparison),
    }


def summary_to_json(summary: TraceSummary) -> Json:
    """One trace."""
    return {
        "source": summary.source,
        "format": summary.format,
        "rank": summary.rank,
        "world_size": summary.world_size,
        "incomplete": summary.incomplete,
        "warnings": [
            {"code": warning.code, "message": warning.message} for warning in summary.warnings
        ],
        "device_properties": [_device(device) for device in summary.devices],
        "kernels": summary.kernel_count if summary.breakdowns else None,
        "copies": summary.copies if summary.breakdowns else None,
        "elapsed_ns": summary.elapsed_ns,
        "busy_ns": summary.busy_ns,
        "mean_occupancy_percent": _rounded(summary.mean_occupancy),
        "peak_allocated_bytes": summary.peak_allocated_bytes,
        "devices": [_breakdown(breakdown) for breakdown in summary.breakdowns],
        "attention": [_attention(group) for group in summary.attention],
        "kernel_families": [
            {
                "family": row.family,
                "role": row.role,
                "count": row.count,
                "total_ns": row.total_ns,
            }
            for row in summary.families
        ],
        "kernel_names": [_kernel(row) for row in summary.kernels],
        "host": None if summary.host is None else _host(summary.host),
    }


def _device(device: DeviceProperties) -> Json:
    capability = device.compute_capability
    return {
        "index": device.index,
        "name": device.name,
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "num_sms": device.num_sms,
        "memory_bytes": device.memory_bytes,
    }


def _breakdown(breakdown: DeviceBreakdown) -> Json:
    kinds = breakdown.kinds
    return {
        "device": breakdown.device,
        "total": _shares(breakdown.total),
        "compute_ns": kinds.compute_ns,
        "communication_ns": kinds.communication_ns,
        "memory_ns": kinds.memory_ns,
        "communication_hidden_fraction": _rounded(kinds.hidden_fraction),
        "steps": [
            {
                "name": step.window.name,
                "events": step.window.events,
                "kernels": step.window.kernels,
                **_shares(step.shares),
            }
            for step in breakdown.steps
        ],
        "events_outside_steps": breakdown.outside_steps,
        "notes": breakdown.notes,
    }


def _shares(shares: Shares) -> Json:
    return {
        "elapsed_ns": shares.elapsed_ns,
        "busy_ns": shares.busy_ns,
        "idle_ns": shares.idle_ns,
        "by_class_ns": {
            name: shares.by_class[name] for name in TIME_CLASSES if name in shares.by_class
        },
    }


def _attention(group: AttentionGroup) -> Json:
    first = group.first
    sizes = first.sizes
    varying = len({call.sizes.seqlen_k for call in group.calls}) > 1
    return {
        "backend": first.backend,
        "pass": first.pass_,
        "description": group.describe(),
        "batch": sizes.batch,
        "num_heads": sizes.num_heads,
        "num_heads_kv": sizes.num_heads_kv,
        "seqlen_q": sizes.seqlen_q,
        "seqlen_k": None if varying else sizes.seqlen_k,
        "head_dim": sizes.head_dim,
        "head_dim_v": sizes.head_dim_v,
        "dtype": sizes.dtype,
        "packed": sizes.packed,
        "batch_times_heads": sizes.batch_times_heads,
        "mask": first.mask.kind,
        "window": first.mask.window,
        "causal": first.mask.causal,
        "dropout": first.dropout,
        "recomputed": first.recomputed,
        "decoding": first.is_decoding,
        "calls": group.count,
        "kernels_per_call": _rounded(group.kernels_per_call),
        "copies_per_call": _rounded(group.copies_per_call),
        "device_ns": group.device_ns,
        "device_median_ns": _rounded(group.median_device_ns),
        "parts_mean_ns": {label: _rounded(time) for label, time in group.parts_ns.items()},
        "host_median_ns": _rounded(group.median_host_ns),
        "flops": _rounded(group.flops),
        "tflop_per_s": _rounded(group.tflop_per_s),
        "sites": [_site(call) for call in group.calls],
    }


def _site(call: AttentionCall) -> Json:
    """One call: where it is and what it cost."""
    return {
        "start_ns": call.start_ns,
        "seqlen_k": call.sizes.seqlen_k,
        "device_ns": call.device_ns,
        "host_ns": call.host_ns,
        "module_path": list(call.module_path),
        "annotations": list(call.annotations),
        "parts": [
            {"label": part.label, "name": part.event.name, "duration_ns": part.event.duration_ns}
            for part in call.parts
        ],
    }


def _kernel(row: KernelRow) -> Json:
    return {
        "name": row.name,
        "words": row.words,
        "family": row.family,
        "role": row.role,
        "class": row.time_class,
        "count": row.count,
        "total_ns": row.total_ns,
        "mean_ns": _rounded(row.mean_ns),
        "min_ns": row.min_ns,
        "max_ns": row.max_ns,
        "grid": row.grid,
        "block": row.block,
        "registers_per_thread": row.registers_per_thread,
        "shared_memory_bytes": row.shared_memory_bytes,
        "launch_configurations": row.configurations,
        "occupancy": {
            "percent": _rounded(row.occupancy.percent),
            "source": row.occupancy.source,
            "limit": row.occupancy.limit,
            "explanation": row.occupancy.explanation,
        },
    }


def _host(host: HostCost) -> Json:
    return {
        "launches": host.launches,
        "graph_launches": host.graph_launches,
        "launch_ns": host.launch_ns,
        "launch_median_ns": host.launch_median_ns,
        "launch_delay_median_ns": host.launch_delay_median_ns,
        "synchronizations": host.synchronizations,
        "synchronization_ns": host.synchronization_ns,
        "launches_without_work": host.launches_without_work,
        "kernels_without_launch": host.kernels_without_launch,
    }


def _comparison(comparison: Comparison) -> Json:
    return {
        "before": comparison.before,
        "after": comparison.after,
        "per_step": comparison.per_step,
        "times_ns": [_difference(entry) for entry in comparison.times],
        "counts": [_difference(entry) for entry in comparison.counts],
        "attention_call_ns": [_difference(entry) for entry in comparison.attention],
        "kernels_ns": [_difference(entry) for entry in comparison.kernels],
    }


def _difference(entry: Difference) -> Json:
    return {
        "name": entry.name,
        "before": _rounded(entry.before),
        "after": _rounded(entry.after),
        "ratio": _rounded(entry.ratio),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
