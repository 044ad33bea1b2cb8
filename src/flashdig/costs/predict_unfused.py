"""Time of attention that writes its scores to memory: its kernels, one after the other."""

from __future__ import annotations

from flashdig.costs import flops as flop_counts
from flashdig.costs import unfused
from flashdig.costs.efficiency import KERNEL_START_S, efficiency
from flashdig.costs.l2 import least_miss_fraction
from flashdig.costs.prediction import Prediction, Question
from flashdig.costs.roofline import Roofs, roofs
from flashdig.costs.traffic import compulsory
from flashdig.costs.unfused import Kernel
from flashdig.problem import AttentionProblem


def predict_unfused(question: Question) -> Prediction:
    problem, device, schedule = question.problem, question.device, question.schedule
    kernels = unfused_kernels(schedule.name, problem)
    floor = Roofs(0.0, 0.0, 0.0)
    floor_s = expected_s = 0.0
    seconds_by_name: dict[str, float] = {}
    for kernel in kernels:
        own = _roofs(kernel, question)
        floor += own
        floor_s += own.floor_s
        seconds = max(KERNEL_START_S, own.floor_s, _expected_s(kernel, question))
        expected_s += seconds
        seconds_by_name[kernel.name] = seconds_by_name.get(kernel.name, 0.0) + seconds
    scores_bytes = next(k.store_bytes for k in kernels if k.kind == "matmul")
    return Prediction(
        problem=problem,
        device=device.key,
        generation=schedule.name,
        direction=question.direction,
        floor_s=floor_s,
        expected_s=expected_s,
        floor_clock_hz=question.floor_clock_hz,
        expected_clock_hz=question.expected_clock_hz,
        limiter=floor.limiter,
        expected_limiter=max(seconds_by_name, key=seconds_by_name.__getitem__),
        flops=flop_counts.forward_flops(problem),
        executed_flops=sum(kernel.matmul_flops for kernel in kernels),
        exp2=flop_counts.exp2_count(problem),
        compulsory=compulsory(problem, stores_lse=False),
        issued=unfused.issued(kernels),
        memory=unfused.expected(kernels, device.cache_bytes),
        roofs=floor,
        kernels=sum(kernel.kind != "copy" for kernel in kernels),
        # online softmax writes over its scores; the others have source and target side by side
        scratch_bytes=scores_bytes * (1 if schedule.name == "online_softmax" else 2),
        notes=question.known.notes,
    )


def unfused_kernels(generation: str, problem: AttentionProblem) -> list[Kernel]:
    """The kernels of an unfused generation, in launch order."""
    if generation == "sdpa_math":
        return unfused.sdpa_math_kernels(problem)
    if generation == "online_softmax":
        return unfused.online_softmax_kernels(problem)
    return unfused.eager_kernels(problem, in_place=generation == "inplace")


def _dtype(kernel: Kernel, question: Question) -> str:
    """Whose peak the kernel's product runs at; any for kernels without one."""
    if kernel.matmul_dtype == "float32" and question.problem.allow_tf32:
        return "tfloat32"
    return kernel.matmul_dtype or "float32"


def _roofs(kernel: Kernel, question: Question) -> Roofs:
    cache = question.device.cache_bytes
    # what is stored may stay in the cache until the next kernel has read it
    stores = kernel.store_bytes * least_miss_fraction(kernel.store_bytes, cache)
    read_back = kernel.from_previous_bytes
    hits = read_back * (1.0 - least_miss_fraction(read_back, cache))
    return roofs(
        question.device,
        memory_bytes=kernel.load_bytes - hits + stores,
        flops=kernel.matmul_flops,
        dtype=_dtype(kernel, question),
        exp2=kernel.exponentials,
        clock_hz=question.floor_clock_hz,
    )


def _expected_s(kernel: Kernel, question: Question) -> float:
    device, known = question.device, question.known
    moved = kernel.expected(device.cache_bytes).total_bytes
    reached = {"copy": known.memcpy, "matmul": known.matmul_stream}.get(kernel.kind, known.copy)
    seconds = moved / (device.memory_bytes_per_s * reached)
    issued = device.arch.issue_per_clock * device.sm_count * question.expected_clock_hz
    seconds = max(seconds, kernel.warp_instructions / issued)
    if kernel.kind == "matmul":
        dtype = _dtype(kernel, question)
        peak = device.flop_per_s(dtype, question.expected_clock_hz)
        if peak is not None:  # a peak that is unknown has been refused by the roofs
            rate = peak * efficiency(device, dtype).matmul
            seconds = max(seconds, kernel.matmul_flops / rate)
    scores_per_s = {
        "broadcast": known.broadcast_scores_per_s,
        "softmax": known.softmax_scores_per_s(kernel.row_length),
    }.get(kernel.kind)
    return max(seconds, kernel.scores / scores_per_s) if scores_per_s else seconds
