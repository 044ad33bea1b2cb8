"""Matrix products that run on the CUDA cores although the chip has tensor cores."""

from __future__ import annotations

import math

from flashdig.costs.efficiency import efficiency
from flashdig.costs.units import percent, seconds
from flashdig.findings.finding import Advice, Finding, Number
from flashdig.findings.recording import Recording, chain, duration, times
from flashdig.readers.attribution_operators import dtype_of, tensors
from flashdig.readers.kernel_names import decode
from flashdig.readers.model import HostOp, Kernel

_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")
_LEAST_SHARE = 0.02


def products_on_cuda_cores(recording: Recording) -> list[Finding]:
    """float32 products without TF32: a tenth of the rate, or less."""
    inside = {id(e) for call in recording.calls for e in call.events if call.backend == "math"}
    plain: list[Kernel] = []
    in_math: list[Kernel] = []
    for kernel in recording.trace.kernels:
        name = decode(kernel.name)
        if name.role == "matmul" and name.tensor_cores is False and name.dtype == "float32":
            (in_math if id(kernel) in inside else plain).append(kernel)
    found = []
    for kernels, is_math in ((plain, False), (in_math, True)):
        total_ns = sum(kernel.duration_ns for kernel in kernels)
        if kernels and (recording.share(total_ns) or 0) >= _LEAST_SHARE:
            found.append(_finding(recording, kernels, is_math))
    return found


def _finding(recording: Recording, kernels: list[Kernel], is_math: bool) -> Finding:
    total_ns = sum(kernel.duration_ns for kernel in kernels)
    longest = max(kernels, key=lambda kernel: kernel.duration_ns)
    numbers = [
        duration("longest product", longest),
        Number("products", len(kernels), "count"),
        Number("their time", total_ns, "ns"),
    ]
    flops = _flops(longest)
    rate = ""
    if flops is not None:
        tflops = flops / longest.duration_ns / 1e3
        rate = f" The longest reaches {tflops:.3g} TFLOP/s."
        numbers.append(Number("operations of the longest product", flops, "FLOP"))
    share = recording.share(total_ns)
    wanted = {id(kernel) for kernel in kernels}
    calls = tuple(
        call for call in recording.calls if any(id(event) in wanted for event in call.events)
    )
    cause = (
        "The math backend casts 16-bit inputs to float32, and TF32 is off"
        if is_math and any(call.sizes.dtype in ("float16", "bfloat16") for call in calls)
        else "Inputs are float32 and TF32 is off"
    )
    saved = _saved_s(recording, kernels)
    return Finding(
        rule="products-on-cuda-cores",
        device_ns=total_ns / len(calls) if is_math else None,
        calls=calls if is_math else (),
        backend="math" if is_math else None,
        verdict="slow",
        claim=(
            f"{times(len(kernels), 'float32 product')} run on the CUDA cores, "
            f"{seconds(total_ns / 1e9)}"
            + (f" or {percent(share)} of the busy time" if share else "")
            + f". {cause}.{rate}"
        ),
        where="the math backend of attention" if is_math else decode(longest.name).words,
        numbers=tuple(numbers),
        gain=(
            None
            if saved is None
            else recording.device_gain(
                saved, "the chip's TF32 rate and its memory bandwidth at each product's sizes"
            )
        ),
        advice=Advice(
            "Allow TF32 (10 bits of mantissa in the factors, sums in float32), or use bfloat16.",
            'torch.set_float32_matmul_precision("high")',
            ("torch",),
        ),
        part_of="math-fallback" if is_math else None,
    )


def _saved_s(recording: Recording, kernels: list[Kernel]) -> float | None:
    """Time above what TF32 needs; None where the chip or a product's sizes are not known."""
    device = recording.device
    peak = None if device is None else device.flop_per_s("tfloat32")
    if device is None or peak is None:
        return None
    known = efficiency(device, "tfloat32")
    saved = 0.0
    for kernel in kernels:
        flops, moved = _flops(kernel), _bytes(kernel)
        if flops is None or moved is None:
            return None
        least = max(
            flops / (peak * known.matmul),
            moved / (device.memory_bytes_per_s * known.matmul_stream),
            1e-6,
        )
        saved += max(0.0, kernel.duration_ns / 1e9 - least)
    return saved


def _product(kernel: Kernel) -> HostOp | None:
    return next((op for op in chain(kernel) if op.name in _PRODUCTS), None)


def _factors(kernel: Kernel) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    op = _product(kernel)
    if op is None:
        return None
    shapes = [shape for shape in tensors(op) if shape]
    if op.name in ("aten::addmm", "aten::baddbmm"):
        shapes = shapes[1:]
    if len(shapes) < 2 or len(shapes[0]) != len(shapes[1]) or shapes[0][-1] != shapes[1][-2]:
        return None
    return shapes[0], shapes[1]


def _flops(kernel: Kernel) -> int | None:
    factors = _factors(kernel)
    return None if factors is None else 2 * math.prod(factors[0]) * factors[1][-1]


def _bytes(kernel: Kernel) -> int | None:
    factors, op = _factors(kernel), _product(kernel)
    if factors is None or op is None:
        return None
    left, right = factors
    result = math.prod(left[:-1]) * right[-1]
    element = {"float32": 4, "float64": 8}.get(dtype_of(op, 0) or "", 4)
    return (math.prod(left) + math.prod(right) + result) * element
