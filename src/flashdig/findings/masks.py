"""Masks: built again in every call, converted in every call, as large as the scores, or padding."""

from __future__ import annotations

import math
from statistics import median

from flashdig.costs.units import seconds, with_unit
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import Recording, duration, is_under, place, times
from flashdig.readers.attribution import AttentionCall
from flashdig.readers.attribution_operators import tensors
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import DeviceEvent, HostOp

_TRIANGLES = ("aten::tril", "aten::triu", "aten::tril_", "aten::triu_")
_MAKING = (*_TRIANGLES, "aten::ones", "aten::scalar_tensor", "aten::where", "aten::full")
_SDPA = "aten::scaled_dot_product_attention"
_MASK_ARGUMENT = 3
_LEAST_SHARE = 0.002
_LEAST_CONVERTED = 0.01
# a mask smaller than this stays in the cache and costs next to nothing
_LARGE_MASK_BYTES = 8_000_000
_MASK_DTYPES = {"bool": 1, "c10::BFloat16": 2, "c10::Half": 2, "float": 4}


def mask_rebuilt(recording: Recording) -> list[Finding]:
    """The same triangle is made again for each call."""
    made: dict[int, tuple[AttentionCall, list[DeviceEvent]]] = {}
    for call in recording.calls:
        if call.pass_ != "forward":
            continue
        events = _mask_events(recording, call)
        if events:
            made[id(call)] = (call, events)
    total_ns = sum(event.duration_ns for _, events in made.values() for event in events)
    # once for several layers is as it should be
    calls = [call for call, _ in made.values()]
    if len(calls) < 2 or (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return []
    alike = [c for c in recording.calls if c.pass_ == "forward" and c.backend == calls[0].backend]
    if 2 * len(calls) <= len(alike):
        return []
    call, events = made[id(calls[0])]
    in_math = call.backend == "math"
    each = total_ns / len(calls)
    return [
        Finding(
            rule="mask-rebuilt",
            device_ns=each,
            calls=tuple(calls),
            backend=call.backend,
            verdict="slow",
            claim=(
                f"The causal mask is built anew in every call: {len(events)} kernels, "
                f"{seconds(each / 1e9)}"
                + (
                    " (is_causal is a flag to fused kernels only; the math backend makes ones, a "
                    "triangle and a float bias of it)."
                    if in_math
                    else "."
                )
            ),
            where=f"{times(len(calls), 'call')} of {call.describe()}",
            numbers=(
                duration("first kernel of it", events[0]),
                Number("its kernels", len(events), "count", place(events[0])),
            ),
            gain=recording.device_gain(total_ns / 1e9, "the recorded duration of these kernels"),
            advice=Advice(
                "Fused kernels need no mask for causal attention; elsewhere make it once.",
                "out = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                ("F", "q", "k", "v"),
            ),
            part_of="math-fallback" if in_math else None,
        )
    ]


def _mask_events(recording: Recording, call: AttentionCall) -> list[DeviceEvent]:
    """Kernels that make a triangle for one call, inside of it or right before it."""
    if call.backend == "math":
        inside = [
            event
            for event in call.events
            if is_under(event, *_MAKING) and not is_under(event, "aten::_safe_softmax")
        ]
        return inside if any(is_under(event, *_TRIANGLES) for event in inside) else []
    lengths = (call.sizes.seqlen_q, call.sizes.seqlen_k)
    before = [
        op for op in recording.operators_before(call) if op.name in (*_TRIANGLES, "aten::ones")
    ]
    if not any(op.name in _TRIANGLES and _ends_with(op, lengths) for op in before):
        return []
    return [event for op in before for event in recording.events_under.get(id(op), [])]


def _ends_with(op: HostOp, lengths: tuple[int | None, int | None]) -> bool:
    shape = next((shape for shape in tensors(op) if shape), ())
    return len(shape) >= 2 and tuple(shape[-2:]) == lengths


def safe_softmax(recording: Recording) -> list[Finding]:
    """What the math backend's softmax does besides softmax."""
    calls: list[AttentionCall] = []
    total_ns, first = 0, None
    for call in recording.calls:
        extra = [
            event
            for event in call.events
            if is_under(event, "aten::_safe_softmax") and decode(event.name).role != "softmax"
        ]
        if extra:
            calls.append(call)
            total_ns += sum(event.duration_ns for event in extra)
            first = first or extra
    if first is None or (recording.share(total_ns) or 0) < _LEAST_SHARE:
        return []
    return [
        Finding(
            rule="safe-softmax",
            device_ns=total_ns / len(calls),
            calls=tuple(calls),
            backend=calls[0].backend,
            verdict="slow",
            claim=(
                f"{len(first)} kernels around the softmax look for rows whose keys are all hidden "
                f"(plain softmax gives NaN there) and set them to 0: "
                f"{seconds(total_ns / len(calls) / 1e9)} a call."
            ),
            where=f"{times(len(calls), 'call')} of {calls[0].describe()}",
            numbers=(
                duration("first of them", first[0]),
                Number("kernels of a call", len(first), "count", place(first[0])),
            ),
            gain=recording.device_gain(total_ns / 1e9, "the recorded duration of these kernels"),
            advice=Advice(
                "A fused kernel has the same guard in registers; with causal or no mask there is "
                "no such row.",
                "out = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
                ("F", "q", "k", "v"),
            ),
            part_of="math-fallback",
        )
    ]


def mask_converted(recording: Recording) -> list[Finding]:
    """A boolean mask becomes a float bias in every call of scaled_dot_product_attention."""
    calls: list[AttentionCall] = []
    total_ns, first = 0, None
    for call in recording.calls:
        if call.backend == "math" or call.op is None or call.op.name != _SDPA:
            continue
        events = [e for e in call.events if is_under(e, "aten::where", "aten::scalar_tensor")]
        if events and _mask_dtype(call) == "bool":
            calls.append(call)
            total_ns += sum(event.duration_ns for event in events)
            first = first or events
    if first is None or len(calls) < 2 or (recording.share(total_ns) or 0) < _LEAST_CONVERTED:
        return []
    return [
        Finding(
            rule="mask-converted",
            device_ns=total_ns / len(calls),
            calls=tuple(calls),
            backend=calls[0].backend,
            verdict="slow",
            claim=(
                f"torch turns the boolean mask into a float bias in every call: {len(first)} "
                f"kernels, {seconds(total_ns / len(calls) / 1e9)}, besides the attention itself."
            ),
            where=f"{times(len(calls), 'call')} of {calls[0].describe()}",
            numbers=(
                duration("first kernel of it", first[0]),
                Number("its kernels", len(first), "count", place(first[0])),
            ),
            gain=recording.device_gain(total_ns / 1e9, "the recorded duration of these kernels"),
            advice=Advice(
                "Convert it once, before the layers.",
                "bias = torch.zeros_like(visible, dtype=q.dtype)\n"
                'bias.masked_fill_(~visible, float("-inf"))\n'
                "out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)",
                ("F", "torch", "q", "k", "v", "visible"),
            ),
        )
    ]


def quadratic_mask(recording: Recording) -> list[Finding]:
    """A mask tensor of seqlen_q x seqlen_k elements where a flag would do."""
    found: dict[tuple[int, ...], list[AttentionCall]] = {}
    for call in recording.calls:
        shape = _mask_shape(call)
        if call.pass_ == "forward" and shape is not None and _mask_bytes(call) is not None:
            found.setdefault(shape, []).append(call)
    findings = []
    for shape, calls in found.items():
        size = _mask_bytes(calls[0]) or 0
        if size < _LARGE_MASK_BYTES:
            continue
        call = calls[0]
        typical = median(c.device_ns or 0 for c in calls)
        share = recording.share(sum(c.device_ns or 0 for c in calls)) or 0
        if share < 0.05:
            continue
        findings.append(
            Finding(
                rule="quadratic-mask",
                calls=tuple(calls),
                backend=call.backend,
                verdict="check",
                claim=(
                    f"The mask is a tensor of {' x '.join(map(str, shape))}, "
                    f"{with_unit(size, 'B')}, read again in every call; it grows with the square "
                    "of the length, and torch's flash backend takes none. What it hides is not in "
                    "the file: a causal mask or a window needs no tensor and skips what it hides."
                ),
                where=f"{times(len(calls), 'call')} of {call.describe()}",
                numbers=(
                    Number("bytes of the mask", size, "bytes", f"inputs of {_at(call)}"),
                    Number("device time of a call", typical, "ns", _at(call)),
                ),
                advice=Advice(
                    "Say the mask instead of storing it, if it is causal, a window or ALiBi.",
                    "import flashdig\n"
                    "rows = [x.transpose(1, 2) for x in (q, k, v)]\n"
                    "out = flashdig.attention(*rows, causal=True, window=(512, 0))",
                    ("q", "k", "v"),
                ),
                confidence="likely",
            )
        )
    return findings


def padding(recording: Recording) -> list[Finding]:
    """A mask of its own for each sequence: what varlen would save is not in the file."""
    calls = [call for call in recording.calls if call.pass_ == "forward" and _per_sequence(call)]
    total_ns = sum(call.device_ns or 0 for call in calls)
    if not calls or (recording.share(total_ns) or 0) < 0.05:
        return []
    call = calls[0]
    return [
        Finding(
            rule="padding",
            calls=tuple(calls),
            backend=call.backend,
            verdict="check",
            claim=(
                f"Each of the {call.sizes.batch} sequences has its own mask row over "
                f"{call.sizes.seqlen_k} keys, as padding makes it. Padded keys and queries cost as "
                "much as real ones; packed input (varlen) leaves them out. The lengths are not in "
                "the file."
            ),
            where=f"{times(len(calls), 'call')} of {call.describe()}",
            numbers=(Number("their device time", total_ns, "ns", _at(call)),),
            advice=Advice(
                "See how much is padding: attention's share that is wasted, then pack if it is "
                "more than a tenth.",
                "# visible: (batch, 1, 1, seqlen), True for real keys\n"
                "lengths = visible[:, 0, 0].sum(-1).double()\n"
                "wasted = 1 - float((lengths**2).mean()) / visible.shape[-1] ** 2",
                ("visible",),
            ),
            confidence="possible",
        )
    ]


def _mask_shape(call: AttentionCall) -> tuple[int, ...] | None:
    """Of a mask tensor over queries and keys; None for others."""
    sizes = call.sizes
    if call.op is None or call.mask.kind != "tensor" or (sizes.seqlen_q or 0) < 2:
        return None
    for shape in tensors(call.op)[_MASK_ARGUMENT : _MASK_ARGUMENT + 1]:
        if shape and len(shape) >= 2 and shape[-2:] == (sizes.seqlen_q, sizes.seqlen_k):
            return shape
    return None


def _mask_bytes(call: AttentionCall) -> int | None:
    """Bytes in memory: dimensions that are expanded count once."""
    shape = _mask_shape(call)
    if shape is None or call.op is None or call.op.inputs is None:
        return None
    strides = call.op.inputs.strides
    kept = strides[_MASK_ARGUMENT] if len(strides) > _MASK_ARGUMENT else ()
    element = _MASK_DTYPES.get(_mask_dtype(call))
    if element is None or len(kept) != len(shape):
        return None
    return element * math.prod(size for size, stride in zip(shape, kept, strict=True) if stride)


def _mask_dtype(call: AttentionCall) -> str:
    if call.op is None or call.op.inputs is None or len(call.op.inputs.dtypes) <= _MASK_ARGUMENT:
        return ""
    return call.op.inputs.dtypes[_MASK_ARGUMENT]


def _per_sequence(call: AttentionCall) -> bool:
    """A mask (batch, 1, 1, seqlen_k) of a batch, each sequence with its own row in memory."""
    if call.op is None or call.op.inputs is None or call.mask.kind != "tensor":
        return False
    shapes, strides = tensors(call.op), call.op.inputs.strides
    if len(shapes) <= _MASK_ARGUMENT or len(strides) <= _MASK_ARGUMENT:
        return False
    shape, kept = shapes[_MASK_ARGUMENT], strides[_MASK_ARGUMENT]
    if shape is None or len(shape) != 4 or len(kept) != 4 or (call.sizes.seqlen_q or 0) < 2:
        return False
    rows = shape[2] == 1 or kept[2] == 0
    return shape[0] == call.sizes.batch and shape[0] > 1 and kept[0] != 0 and rows


def _at(call: AttentionCall) -> str:
    return "the call" if call.op is None else place(call.op)
