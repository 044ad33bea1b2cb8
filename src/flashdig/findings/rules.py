"""All rules, and what they find in a trace or in counters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flashdig.costs.prediction import Prediction
from flashdig.findings import (
    copies,
    elsewhere,
    fallback,
    grid,
    host,
    masks,
    occupancies,
    products,
    sizes,
)
from flashdig.findings.counted import counted_kernels
from flashdig.findings.counters import COUNTER_RULES
from flashdig.findings.finding import Finding, in_order
from flashdig.findings.recording import Recording
from flashdig.hardware.devices import Device
from flashdig.readers.model import Trace
from flashdig.readers.ncu_model import NcuKernel
from flashdig.readers.summary import TraceSummary

TraceRule = Callable[[Recording], list[Finding]]
# rule -> what looks for it
TRACE_RULES: dict[str, TraceRule] = {
    "hidden-mask-copy": copies.hidden_mask_copy,
    "copy-before-kernel": copies.copies_before_kernel,
    "repeated-heads": copies.repeated_heads,
    "math-fallback": fallback.math_fallback,
    "slower-backend": fallback.slower_backend,
    "unfused-attention": fallback.unfused_attention,
    "products-on-cuda-cores": products.products_on_cuda_cores,
    "mask-rebuilt": masks.mask_rebuilt,
    "mask-converted": masks.mask_converted,
    "quadratic-mask": masks.quadratic_mask,
    "padding": masks.padding,
    "safe-softmax": masks.safe_softmax,
    "launch-bound": host.launch_bound,
    "host-bound-call": host.host_bound_call,
    "cudnn-planning": host.cudnn_planning,
    "wrapper-cost": host.wrapper_cost,
    "compiled-in-loop": host.compiled_in_loop,
    "small-grid": grid.small_grid,
    "decode-without-split": grid.decode_without_split,
    "tail-wave": grid.tail_wave,
    "causal-imbalance": grid.causal_imbalance,
    "occupancy-by-design": occupancies.occupancy_by_design,
    "occupancy-not-measured": occupancies.occupancy_not_measured,
    "occupancy-of-small-grid": occupancies.occupancy_of_small_grid,
    "padded-head-dim": sizes.padded_head_dim,
    "float32-attention": sizes.float32_attention,
    "misaligned-rows": sizes.misaligned_rows,
    "attention-not-the-bottleneck": elsewhere.attention_not_the_bottleneck,
    "slowing-down": elsewhere.slowing_down,
}


def find_in_trace(trace: Trace, summary: TraceSummary | None = None) -> list[Finding]:
    """What the rules find in one trace, the most expensive first."""
    recording = Recording.of(trace, summary)
    return in_order([found for rule in TRACE_RULES.values() for found in rule(recording)])


def find_in_counters(
    kernels: Sequence[NcuKernel],
    device: Device | None = None,
    guesses: Sequence[Prediction | None] = (),
    subjects: Sequence[str] = (),
) -> list[Finding]:
    """What the rules find in Nsight Compute's counters; see `counted.counted_kernels`."""
    counted = counted_kernels(kernels, device, guesses, subjects)
    return in_order([f for one in counted for rule in COUNTER_RULES.values() for f in rule(one)])


def documentation(rule: TraceRule | Callable[..., list[Finding]]) -> str:
    """A rule's own sentence."""
    return (rule.__doc__ or "").strip().splitlines()[0]
