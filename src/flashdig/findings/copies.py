"""Copies that nobody asked for: before a mask, before the kernel, and of grouped heads."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from flashdig.costs.traffic import tensor_bytes
from flashdig.costs.units import seconds, with_unit
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import (
    Recording,
    causal,
    chain,
    duration,
    is_copy,
    is_under,
    times,
)
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.attribution_operators import tensors
from flashdig.readers.model import Copy, DeviceEvent, HostOp

_COPYING = {"aten::contiguous", "aten::clone", "aten::reshape", "aten::copy_", "aten::flatten"}
# less of the busy time is not worth a word
_LEAST_SHARE = 0.003
_LEAST_REPEATED = 0.01


def hidden_mask_copy(recording: Recording) -> list[Finding]:
    """`masked_fill` copies the whole score matrix before it writes a single element."""
    found: list[tuple[AttentionCall, DeviceEvent]] = [
        (call, event)
        for call in recording.calls
        for event in call.events
        if call.backend == "eager" and is_copy(event) and is_under(event, "aten::masked_fill")
    ]
    if not found:
        return []
    call, event = found[0]
    total_ns = sum(copy.duration_ns for _, copy in found)
    if (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return []
    problem = call.problem()
    before = recording.expected(problem and causal(problem), "naive")
    after = recording.expected(problem and causal(problem), "inplace")
    saved_s, basis = total_ns / 1e9, "the recorded duration of the copies"
    if before is not None and after is not None:
        saved_s = (before.expected_s - after.expected_s) * len(found)
        basis = "the model's time for copying the score matrix once"
    size = event.num_bytes if isinstance(event, Copy) else None
    what = "the score matrix" if size is None else f"{with_unit(size, 'B')} of scores"
    numbers = [duration("copy, first call", event)]
    if size is not None:
        numbers.append(Number("bytes copied", size, "bytes", numbers[0].place))
    return [
        Finding(
            rule="hidden-mask-copy",
            device_ns=event.duration_ns,
            host_ns=_extra_host_ns(event),
            calls=tuple({id(c): c for c, _ in found}.values()),
            backend=call.backend,
            verdict="slow",
            claim=(
                f"masked_fill is out of place: it copies {what} in "
                f"{seconds(event.duration_ns / 1e9)} before it masks a single one. "
                "Nothing else reads the copy's source again."
            ),
            where=f"{times(len(found), 'call')} of {call.describe()}",
            numbers=tuple(numbers),
            gain=recording.device_gain(saved_s, basis),
            advice=Advice(
                "Write the mask in place; autograd allows it here, because neither the product nor "
                "the scale keeps its output, and raises an error where that does not hold.",
                "scores = torch.matmul(q, k.transpose(-2, -1)) * q.shape[-1] ** -0.5\n"
                'scores.masked_fill_(hidden, float("-inf"))\n'
                "out = torch.matmul(torch.softmax(scores, dim=-1), v)",
                ("torch", "q", "k", "v", "hidden"),
            ),
        )
    ]


def copies_before_kernel(recording: Recording) -> list[Finding]:
    """q, k or v made contiguous for a kernel that reads any strides."""
    copies: list[tuple[AttentionCall, HostOp, DeviceEvent]] = []
    for call in recording.calls:
        if call.backend in ("eager", "math") or call.pass_ == "backward" or call.op is None:
            continue
        wanted = {shape for shape in tensors(call.op)[:3] if shape is not None}
        for op in recording.operators_before(call):
            if op.name in _COPYING and _is_needless(op, wanted):
                copies += [
                    (call, op, event)
                    for event in recording.events_under.get(id(op), [])
                    if is_copy(event)
                ]
    total_ns = sum(event.duration_ns for _, _, event in copies)
    if not copies or (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return []
    calls = list({id(call): call for call, _, _ in copies}.values())
    first_call, first_op, first_event = copies[0]
    shape, strides = _first_tensor(first_op)
    moved = 2 * sum(_bytes(op) for _, op, _ in copies)
    saved_s, basis = total_ns / 1e9, "the recorded duration of the copies"
    if recording.device is not None and recording.device.measured is not None:
        model_s = moved / recording.device.measured.copy_bytes_per_s
        basis += f" (the model's {seconds(model_s)} for {with_unit(moved, 'B')})"
    return [
        Finding(
            rule="copy-before-kernel",
            calls=tuple(calls),
            backend=first_call.backend,
            verdict="slow",
            claim=(
                f"{first_op.name.removeprefix('aten::')}() copies a tensor of shape {shape} and "
                f"strides {strides} right before {first_call.backend}, which reads any strides as "
                f"long as the last one is 1: {len(copies) / len(calls):.3g} copies a call, "
                f"{seconds(total_ns / len(calls) / 1e9)}."
            ),
            where=f"{times(len(calls), 'call')} of {first_call.describe()}",
            numbers=(duration("first copy", first_event),),
            gain=recording.device_gain(saved_s, basis),
            advice=Advice(
                "Leave the copies out and pass the transposed views.",
                "# x: (batch, seqlen, heads, head_dim)\n"
                "q, k, v = (x.transpose(1, 2) for x in (q_rows, k_rows, v_rows))\n"
                "out = F.scaled_dot_product_attention(q, k, v)",
                ("F", "q_rows", "k_rows", "v_rows"),
            ),
            confidence="likely",
        )
    ]


def repeated_heads(recording: Recording) -> list[Finding]:
    """Grouped K and V heads copied for each query head before the attention."""
    copies: list[tuple[AttentionCall, HostOp, DeviceEvent]] = []
    for call in recording.calls:
        if call.pass_ == "forward":
            copies += [(call, op, event) for op, event in _repeats(recording, call)]
    total_ns = sum(event.duration_ns for _, _, event in copies)
    if not copies or (recording.share(total_ns) or 0) < _LEAST_REPEATED:
        return []
    calls = list({id(call): call for call, _, _ in copies}.values())
    call, op, event = copies[0]
    shape, _ = _first_tensor(op)
    repeats = next(size for size, stride in zip(*_first_tensor(op), strict=True) if stride == 0)
    numbers = [
        duration("first copy", event),
        Number("query heads a KV head", repeats, "count", f"{op.name}, shape {shape}"),
    ]
    saved_s, basis = total_ns / 1e9, "the recorded duration of the copies"
    problem = call.problem()
    if problem is not None and call.backend != "eager":
        grouped = problem.replace(num_heads_kv=max(1, problem.num_heads // repeats))
        extra = tensor_bytes(problem).k + tensor_bytes(problem).v
        kept = tensor_bytes(grouped).k + tensor_bytes(grouped).v
        numbers.append(Number("bytes of K and V after the copy", extra, "bytes"))
        numbers.append(Number("bytes of K and V before it", kept, "bytes"))
    masked = call.mask.kind == "tensor"
    return [
        Finding(
            rule="repeated-heads",
            device_ns=total_ns / len(calls) if call.backend == "eager" else None,
            calls=tuple(calls),
            backend=call.backend,
            verdict="slow",
            claim=(
                f"K and V are copied {repeats} times over before the attention, once for each "
                f"query head of a group ({median(e.duration_ns for _, _, e in copies) / 1e3:.3g} "
                f"µs a copy). Kernels for grouped heads read each KV head where it is."
            ),
            where=f"{times(len(calls), 'call')} of {call.describe()}",
            numbers=tuple(numbers),
            gain=recording.device_gain(saved_s, basis),
            advice=Advice(
                "Pass the grouped heads as they are."
                + (" With a mask tensor not every backend of torch takes them." if masked else ""),
                "# k, v: (batch, heads_kv, seqlen, head_dim)\n"
                "out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)",
                ("F", "q", "k", "v"),
            ),
        )
    ]


def _repeats(recording: Recording, call: AttentionCall) -> Iterator[tuple[HostOp, DeviceEvent]]:
    """Copies of an expanded tensor that has the size of the call's K or V."""
    sizes = call.sizes
    if sizes.seqlen_k is None or sizes.head_dim is None:
        return
    wanted = {
        (sizes.split or (0, 0))[0] * (sizes.split or (0, 0))[1] * sizes.seqlen_k * dim
        for dim in (sizes.head_dim, sizes.head_dim_v or sizes.head_dim)
    }
    before = (
        event
        for op in recording.operators_before(call)
        for event in recording.events_under.get(id(op), [])
    )
    seen: set[int] = set()
    for event in (*before, *call.events):
        if id(event) in seen or not is_copy(event):
            continue
        seen.add(id(event))
        for op in chain(event, call.op):
            shape, strides = _first_tensor(op)
            if op.name in _COPYING and _is_expanded(shape, strides) and math.prod(shape) in wanted:
                yield op, event
                break


def _is_expanded(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """(batch, heads_kv, repeats, seqlen, dim), the repeats being one place in memory."""
    return (
        len(shape) == 5
        and len(strides) == 5
        and shape[2] > 1
        and strides[2] == 0
        and all(strides[i] for i in (3, 4) if shape[i] > 1)
    )


def _is_needless(op: HostOp, wanted: set[tuple[int, ...]]) -> bool:
    """A copy of one of the call's inputs whose last dimension was contiguous before it."""
    shape, strides = _first_tensor(op)
    if len(shape) != 4 or len(strides) != 4 or shape not in wanted or strides[-1] != 1:
        return False
    return all(stride > 0 for stride, size in zip(strides, shape, strict=True) if size > 1)


def _first_tensor(op: HostOp) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of the first argument; two empty tuples where they are not recorded."""
    if op.inputs is None or not op.inputs.shapes or not op.inputs.strides:
        return (), ()
    shape = tuple(size for size in op.inputs.shapes[0] if isinstance(size, int))
    strides = tuple(stride for stride in op.inputs.strides[0] if isinstance(stride, int))
    return (shape, strides) if len(shape) == len(strides) else ((), ())


def _bytes(op: HostOp) -> int:
    shape, _ = _first_tensor(op)
    kind = op.inputs.dtypes[0] if op.inputs is not None and op.inputs.dtypes else ""
    size = {"c10::BFloat16": 2, "c10::Half": 2, "float": 4, "double": 8}.get(kind, 0)
    return math.prod(shape) * size


def _extra_host_ns(event: DeviceEvent) -> float | None:
    """Host time of the out-of-place masked_fill beyond the in-place one inside of it."""
    outer = next((op for op in chain(event) if op.name == "aten::masked_fill"), None)
    inner = event.op
    while inner is not None and inner is not outer and inner.parent is not outer:
        inner = inner.parent
    return None if outer is None or inner is None else float(inner.duration_ns)
