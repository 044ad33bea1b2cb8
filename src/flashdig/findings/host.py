"""The host: a device that waits for launches, planning inside libraries, compiling in the loop."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import (
    MANY_KERNELS,
    UNPROFILED_HOST,
    Recording,
    place,
    stamp,
    times,
)
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.model import DeviceEvent, HostOp
from flashdig.readers.steps import find_steps

_LAUNCH_BOUND_SHARE = 0.3
_LEAST_PLANNING = 0.005
# host time that the device hides is worth a word from here on
_NOTABLE_NS = 100_000
_PLANNED_ANEW_NS = 1_000_000
_COMPILING = (
    "compile_inner",
    "CachingAutotuner.benchmark_all_configs",
    "CachingAutotuner.precompile",
    "_recursive_post_grad_passes",
    "compile_fx",
)
_LOADING = ("cuModuleLoad", "cudaModuleLoad", "cuLibraryLoad", "cudaLibraryLoad", "hipModuleLoad")


@dataclass(frozen=True)
class Gap:
    """A stretch in which the device had nothing to do; `before_launch_ns` of it passed before the
    host had even begun to launch what came next."""

    start_ns: int
    length_ns: int
    before_launch_ns: int
    event: DeviceEvent


def launch_bound(recording: Recording) -> list[Finding]:
    """The device idles because the host has not launched the next kernel yet."""
    steps = [
        step
        for breakdown in recording.summary.breakdowns
        for step in breakdown.steps
        if step.window.kernels >= MANY_KERNELS
    ]
    if not steps or len(recording.summary.breakdowns) != 1 or compiled_in_loop(recording):
        return []
    # the first step pays for the start of the recording
    step = min(steps, key=lambda one: one.shares.elapsed_ns)
    elapsed, busy, kernels = step.shares.elapsed_ns, step.shares.busy_ns, step.window.kernels
    gaps, launches = _gaps(recording, step.window.start_ns, step.window.end_ns)
    waited = sum(gap.before_launch_ns for gap in gaps)
    if launches < MANY_KERNELS or waited < _LAUNCH_BOUND_SHARE * elapsed:
        return []
    saved = UNPROFILED_HOST * elapsed - busy
    if saved <= 0.1 * elapsed:
        return []
    worst = max(gaps, key=lambda gap: gap.before_launch_ns)
    return [
        Finding(
            rule="launch-bound",
            verdict="slow",
            claim=(
                f"The device waits for the host for {percent(waited / elapsed)} of a step: a "
                f"kernel takes {seconds(busy / kernels / 1e9)} on average, and the host issues one "
                f"every {seconds(elapsed / kernels / 1e9)} (about "
                f"{seconds(UNPROFILED_HOST * elapsed / kernels / 1e9)} without the profiler)."
            ),
            where=f"{times(len(steps), 'step')} of about {kernels:,} kernels",
            numbers=(
                Number(
                    "device idle before the next launch had begun, one step",
                    waited,
                    "ns",
                    f"from ts {stamp(step.window.start_ns)}",
                ),
                Number(
                    "longest such gap",
                    worst.before_launch_ns,
                    "ns",
                    f"before {place(worst.event)}",
                ),
                Number("launches of a step", launches, "count"),
            ),
            gain=recording.host_gain(
                saved * len(steps) / 1e9,
                f"{UNPROFILED_HOST:.0%} of the fastest step, what the host needs without the "
                "profiler, less its busy time",
            ),
            advice=Advice(
                "Capture the step in a CUDA graph: torch.compile with mode='reduce-overhead', or "
                "by hand where shapes stay the same.",
                'step = torch.compile(step, mode="reduce-overhead")',
                ("torch", "step"),
            ),
            confidence="likely",
        )
    ]


def _gaps(recording: Recording, start: int, end: int) -> tuple[list[Gap], int]:
    """Idle stretches of one device between two moments, and the launches in between."""
    gaps: list[Gap] = []
    launches: set[int] = set()
    done = start
    for event in recording.trace.device_events():
        if not start <= event.start_ns < end:
            continue
        if event.launch is not None:
            launches.add(id(event.launch))
            if event.start_ns > done:
                waited = min(event.launch.start_ns, event.start_ns) - done
                gaps.append(Gap(done, event.start_ns - done, max(0, waited), event))
        done = max(done, event.end_ns)
    return gaps, len(launches)


def host_bound_call(recording: Recording) -> list[Finding]:
    """One attention call costs the host more than the device."""
    found = []
    for group in recording.groups:
        recorded, device = group.median_host_ns, group.median_device_ns
        if recorded is None or not device or group.count < 2 or group.first.pass_ != "forward":
            continue
        host = UNPROFILED_HOST * recorded
        # with other work around it the gaps of the whole step say more
        if (recording.share(group.device_ns or 0) or 0) < 0.5 or host < 1.2 * device:
            continue
        call = _typical(group.calls)
        found.append(
            Finding(
                rule="host-bound-call",
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"A call keeps the host for {seconds(recorded / 1e9)}, about "
                    f"{seconds(host / 1e9)} without the profiler, and the device for "
                    f"{seconds(device / 1e9)}: issued one by one, calls run at the host's pace."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("host time of a call, median", recorded, "ns", _op_place(call)),
                    Number("device time of a call, median", device, "ns"),
                ),
                gain=recording.host_gain(
                    (host - device) * group.count / 1e9,
                    f"{UNPROFILED_HOST:.0%} of the recorded host time, less the device's",
                ),
                advice=Advice(
                    "Replay the call from a CUDA graph, or give it more work at once.",
                    "graph = torch.cuda.CUDAGraph()\n"
                    "with torch.cuda.graph(graph):\n"
                    "    out = F.scaled_dot_product_attention(q, k, v)\n"
                    "graph.replay()  # q, k, v keep their places; copy new values into them",
                    ("F", "torch", "q", "k", "v"),
                ),
                confidence="likely",
            )
        )
    return found


def cudnn_planning(recording: Recording) -> list[Finding]:
    """cuDNN's attention spends host time in itself, where the profiler sees no operator."""
    calls = [c for c in recording.calls if c.backend == "cudnn" and c.pass_ == "forward"]
    own = [(call, op, recording.own_ns(op)) for call in calls if (op := _cudnn_op(call))]
    if len(own) < 2:
        return []
    # a new shape is planned from scratch, in milliseconds; that is not every call's cost
    call, op, typical = sorted(own, key=lambda entry: entry[2])[len(own) // 2]
    if typical > _PLANNED_ANEW_NS:
        return []
    host = median(c.host_ns or 0 for c, _, _ in own)
    device = median(c.device_ns or 0 for c, _, _ in own)
    if not host or typical < 0.3 * host or typical < 20_000:
        return []
    hidden = device > UNPROFILED_HOST * host
    if typical * len(own) < _LEAST_PLANNING * recording.elapsed_ns:
        return []
    return [
        Finding(
            rule="cudnn-planning",
            host_ns=typical,
            calls=tuple(c for c, _, _ in own),
            backend=call.backend,
            verdict="fine" if hidden else "slow",
            claim=(
                f"cuDNN looks up and prepares its plan in every call: {seconds(typical / 1e9)} of "
                f"the call's {seconds(host / 1e9)} on the host pass in _cudnn_attention_forward "
                "itself, outside of allocations and launches"
                + (
                    f". The device takes {seconds(device / 1e9)}, which hides it."
                    if hidden
                    else f"; the device takes {seconds(device / 1e9)}."
                )
            ),
            where=f"{times(len(own), 'call')} of {call.describe()}",
            numbers=(
                Number("host time of the operator itself", typical, "ns", place(op)),
                Number("host time of a call", host, "ns", _op_place(call)),
                Number("device time of a call", device, "ns"),
            ),
            gain=(
                None
                if hidden
                else recording.host_gain(
                    (typical - 10_000) * len(own) / 1e9,
                    "the operator's own host time, less 10 µs that any backend needs there",
                )
            ),
            advice=Advice(
                "Where the host is what limits, take the flash backend, or capture a CUDA graph.",
                "from torch.nn.attention import SDPBackend, sdpa_kernel\n"
                "with sdpa_kernel(SDPBackend.FLASH_ATTENTION):\n"
                "    out = F.scaled_dot_product_attention(q, k, v)",
                ("F", "q", "k", "v"),
            ),
            confidence="likely",
        )
    ]


def wrapper_cost(recording: Recording) -> list[Finding]:
    """Host time in the layers of a library, outside of what they allocate and launch."""
    found = []
    for group in recording.groups:
        call = _typical(group.calls)
        inner = _launching_operator(call)
        if call.op is None or inner is None or call.pass_ != "forward":
            continue
        if call.op.name.startswith("aten::"):
            continue
        # what is left is allocations, fills and launches
        around = (call.host_ns or 0) - inner.duration_ns + recording.own_ns(inner)
        device = group.median_device_ns or 0
        host = UNPROFILED_HOST * (call.host_ns or 0)
        if around < 0.3 * (call.host_ns or 0) or around < 30_000 or group.count < 2:
            continue
        hidden = device > host
        if hidden and around < _NOTABLE_NS:
            continue
        found.append(
            Finding(
                rule="wrapper-cost",
                host_ns=around,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="fine" if hidden else "slow",
                claim=(
                    f"{seconds(around / 1e9)} of a call's {seconds((call.host_ns or 0) / 1e9)} on "
                    f"the host pass in {call.op.name} and the layers around {inner.name}'s "
                    f"allocations and launches; the device takes {seconds(device / 1e9)}."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("host time of the call", call.host_ns or 0, "ns", place(call.op)),
                    Number(
                        "host time of the inner operator", inner.duration_ns, "ns", place(inner)
                    ),
                ),
                gain=(
                    None
                    if hidden
                    else recording.host_gain(
                        UNPROFILED_HOST * around * group.count / 1e9,
                        f"{UNPROFILED_HOST:.0%} of the recorded host time outside of operators and "
                        "launches inside of the call",
                    )
                ),
                advice=Advice(
                    "Capture the calls in a CUDA graph; the layers then run once.",
                    "graph = torch.cuda.CUDAGraph()\n"
                    "with torch.cuda.graph(graph):\n"
                    "    out = attend(q, k, v)\n"
                    "graph.replay()",
                    ("torch", "attend", "q", "k", "v"),
                ),
                confidence="likely",
            )
        )
    return found


def _launching_operator(call: AttentionCall) -> HostOp | None:
    """The innermost operator of a library (not aten) around the call's longest kernel."""
    if not call.events:
        return None
    op = max(call.events, key=lambda event: event.duration_ns).op
    while op is not None:
        if op.kind == "operator" and not op.name.startswith("aten::"):
            return op
        if op is call.op:
            return None
        op = op.parent
    return None


def compiled_in_loop(recording: Recording) -> list[Finding]:
    """Compiling, tuning or loading of kernels after the first step."""
    steps = find_steps(recording.trace)
    if len(steps) < 2:
        return []
    later = steps[1].start_ns
    end = steps[-1].end_ns
    compiling = _outermost(
        [
            op
            for op in recording.trace.host_ops
            if later <= op.start_ns < end and any(word in op.name for word in _COMPILING)
        ]
    )
    loads = [
        launch
        for launch in recording.trace.launches
        if later <= launch.start_ns < end and launch.name.startswith(_LOADING)
    ]
    spent = sum(op.duration_ns for op in compiling)
    loading = sum(launch.duration_ns for launch in loads)
    inside = sum(
        launch.duration_ns
        for launch in loads
        if any(op.start_ns <= launch.start_ns < op.end_ns for op in compiling)
    )
    total = spent + loading - inside
    elapsed = end - later
    if total < 0.05 * elapsed or total < 1_000_000:
        return []
    hit = {
        index
        for index, step in enumerate(steps[1:], start=1)
        for start in [*(op.start_ns for op in compiling), *(one.start_ns for one in loads)]
        if step.start_ns <= start < step.end_ns
    }
    what = "torch.compile compiles" if compiling else "Kernels are loaded or compiled"
    first = compiling[0].name if compiling else loads[0].name
    at = compiling[0].start_ns if compiling else loads[0].start_ns
    return [
        Finding(
            rule="compiled-in-loop",
            verdict="slow",
            claim=(
                f"{what} again after the first step, in {len(hit)} of {len(steps) - 1} later ones: "
                f"{seconds(total / 1e9)}, {percent(total / elapsed)} of their time. A shape or a "
                "value that the compiled code depends on changes from step to step."
            ),
            where=", ".join(steps[index].name for index in sorted(hit)[:5]),
            numbers=(
                Number("time in it", total, "ns", f"first: {first} at ts {stamp(at)}"),
                Number("module loads", len(loads), "count"),
            ),
            gain=recording.host_gain(
                total / 1e9,
                "the recorded time of compiling and loading after the first step",
            ),
            advice=Advice(
                "Compile for changing sizes, or pad them to a few; TORCH_LOGS=recompiles names "
                "the cause.",
                "compiled = torch.compile(attend, dynamic=True)",
                ("torch", "attend"),
            ),
            confidence="certain" if compiling else "likely",
        )
    ]


def _outermost(ops: list[HostOp]) -> list[HostOp]:
    kept: list[HostOp] = []
    for op in ops:  # in order of start
        if not kept or op.start_ns >= kept[-1].end_ns or op.thread != kept[-1].thread:
            kept.append(op)
    return kept


def _typical(calls: list[AttentionCall]) -> AttentionCall:
    return sorted(calls, key=lambda call: call.host_ns or 0)[len(calls) // 2]


def _op_place(call: AttentionCall) -> str | None:
    return None if call.op is None else place(call.op)


def _cudnn_op(call: AttentionCall) -> HostOp | None:
    """The operator in which cuDNN runs, inside of a call."""
    if call.op is None or call.host_ns is None:
        return None
    for event in call.events:
        op = event.op
        while op is not None and op is not call.op.parent:
            if op.name == "aten::_cudnn_attention_forward":
                return op
            op = op.parent
    return None
