"""Sizes and dtypes that miss the fast path: padded head_dim, float32, rows off their alignment."""

from __future__ import annotations

from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import (
    SCHEDULE_OF_BACKEND,
    Recording,
    main_kernel,
    place,
    place_of,
    times,
)
from flashdig.problem import DTYPE_BYTES
from flashdig.readers.attribution import AttentionCall

_LEAST_SHARE = 0.05
_VECTOR_BYTES = 16
_FUSED_ON_FLOAT32 = ("efficient", "flex_attention")


def padded_head_dim(recording: Recording) -> list[Finding]:
    """The kernel is built for a larger head_dim than the tensors have."""
    found = []
    for group in recording.groups:
        call, main = group.first, main_kernel(group.first)
        if main is None or call.sizes.head_dim is None or main[1].head_dim is None:
            continue
        kernel, _ = main
        dim, built = call.sizes.head_dim, main[1].head_dim
        waste = 1 - dim / built
        total_ns = sum(
            one.duration_ns for c in group.calls if (m := main_kernel(c)) for one in m[:1]
        )
        share = recording.share(total_ns) or 0
        if waste < 0.1 or share < _LEAST_SHARE:
            continue
        saved = _padding_share(recording, call, built)
        found.append(
            Finding(
                rule="padded-head-dim",
                device_ns=None if saved is None else saved * kernel.duration_ns,
                calls=tuple(group.calls),
                backend=group.first.backend,
                verdict="slow",
                claim=(
                    f"head_dim is {dim} and the kernel works on {built}: {percent(waste)} of its "
                    "products are zeros. The sizes that kernels are built for are multiples of 32 "
                    "or powers of two."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("head_dim of the tensors", dim, "count"),
                    Number("head_dim of the kernel", built, "count", place(kernel)),
                ),
                gain=(
                    None
                    if saved is None
                    else recording.device_gain(
                        saved * total_ns / 1e9,
                        f"the models of head_dim {dim} and {built}, one against the other",
                    )
                ),
                advice=Advice(
                    f"A model with head_dim {built} costs the same; one with a smaller built size "
                    "costs less. It is a choice of the model, not of the call."
                ),
                confidence="likely",
            )
        )
    return found


def _padding_share(recording: Recording, call: AttentionCall, built: int) -> float | None:
    """Part of the time that the model gives to the padding of head_dim."""
    problem, schedule = call.problem(), SCHEDULE_OF_BACKEND.get(call.backend)
    if problem is None or schedule is None:
        return None
    real = recording.expected(problem, schedule, call.pass_)
    padded = recording.expected(
        problem.replace(head_dim=built, head_dim_v=built), schedule, call.pass_
    )
    if real is None or padded is None or padded.expected_s <= real.expected_s:
        return None
    return 1 - real.expected_s / padded.expected_s


def float32_attention(recording: Recording) -> list[Finding]:
    """Fused attention in float32: several products of TF32 for one, and twice the bytes."""
    found = []
    for group in recording.groups:
        call = group.first
        if call.sizes.dtype != "float32" or call.backend not in _FUSED_ON_FLOAT32:
            continue
        if (recording.share(group.device_ns or 0) or 0) < _LEAST_SHARE or call.pass_ == "backward":
            continue
        problem = call.problem()
        half = None
        if problem is not None:
            half = _best(recording, call)
        typical = group.median_device_ns or 0
        if half is None or typical < 1.3e9 * half[1]:
            continue
        found.append(
            Finding(
                rule="float32-attention",
                device_ns=typical - half[1] * 1e9,
                calls=tuple(group.calls),
                backend=call.backend,
                verdict="slow",
                claim=(
                    f"Attention runs in float32, {seconds(typical / 1e9)} a call: the flash and "
                    f"cuDNN backends do not take it, and the products cost several of TF32. In "
                    f"bfloat16 the model gives {seconds(half[1])} ({half[0]})."
                ),
                where=f"{times(group.count, 'call')} of {group.describe()}",
                numbers=(
                    Number("device time of a call", typical, "ns", place_of(group.calls)),
                    Number(f"guess in bfloat16, {half[0]}", half[1] * 1e9, "ns"),
                ),
                gain=recording.device_gain(
                    group.count * (typical / 1e9 - half[1]), f"the model of {half[0]} in bfloat16"
                ),
                advice=Advice(
                    "Attend in bfloat16 (autocast does it); sums inside stay in float32.",
                    "q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))\n"
                    "out = F.scaled_dot_product_attention(q, k, v)",
                    ("F", "torch", "q", "k", "v"),
                ),
            )
        )
    return found


def _best(recording: Recording, call: AttentionCall) -> tuple[str, float] | None:
    """(schedule, seconds) of the fastest fused kernel of torch in bfloat16."""
    problem = call.problem()
    if problem is None:
        return None
    names = ["sdpa_cudnn"] if call.mask.kind == "tensor" else ["sdpa_cudnn", "sdpa_flash"]
    guesses = [
        recording.expected(problem.replace(dtype="bfloat16"), name, call.pass_) for name in names
    ]
    known = [(guess.generation, guess.expected_s) for guess in guesses if guess is not None]
    return min(known, key=lambda entry: entry[1], default=None)


def misaligned_rows(recording: Recording) -> list[Finding]:
    """Rows of q, k or v that do not begin at multiples of 16 bytes: copied, or read in pieces."""
    found = []
    for group in recording.groups:
        call = group.first
        if call.backend == "eager" or call.op is None or call.op.inputs is None:
            continue
        if call.pass_ == "backward" or (recording.share(group.device_ns or 0) or 0) < _LEAST_SHARE:
            continue
        element = DTYPE_BYTES.get(call.sizes.dtype or "")
        if element is None:
            continue
        for name, shape, strides in zip(
            ("q", "k", "v"), call.op.inputs.shapes[:3], call.op.inputs.strides[:3], strict=False
        ):
            steps = [
                stride
                for size, stride in zip(shape[:-1], strides[:-1], strict=False)
                if isinstance(size, int) and isinstance(stride, int) and size > 1 and stride
            ]
            odd = [step for step in steps if (step * element) % _VECTOR_BYTES]
            if odd:
                found.append(_misaligned(group.count, call, name, min(odd) * element, strides))
                break
    return found


def _misaligned(
    count: int, call: AttentionCall, name: str, step: int, strides: tuple[object, ...]
) -> Finding:
    return Finding(
        rule="misaligned-rows",
        backend=call.backend,
        verdict="slow",
        claim=(
            f"Rows of {name} are {step} bytes apart, no multiple of {_VECTOR_BYTES}: kernels that "
            "load 16 bytes a lane or whole tiles (TMA) cannot take them as they are, so they are "
            "copied, or another kernel serves the call. Lines of 128 bytes are best."
        ),
        where=f"{times(count, 'call')} of {call.describe()}",
        numbers=(
            Number(
                f"stride of {name}, bytes",
                step,
                "bytes",
                f"Input Strides {list(strides)} of {'' if call.op is None else place(call.op)}",
            ),
        ),
        advice=Advice(
            "Let head_dim, and the width of what q, k and v are slices of, be multiples of 8 "
            "elements (64 for whole lines).",
        ),
        confidence="likely",
    )
