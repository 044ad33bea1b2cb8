"""Time of a decode step: few queries, a long cache, and nothing but memory that matters.

The keys are split over the SMs (Flash-Decoding); all query heads of a group share each read of
their KV head.
"""

from __future__ import annotations

from flashdig.costs import flops as flop_counts
from flashdig.costs.prediction import Prediction, Question
from flashdig.costs.roofline import MEMORY, roofs
from flashdig.costs.traffic import FLOAT32_BYTES, compulsory, decode_issued

# Fewer keys than this are not worth a split of their own.
_KEYS_A_SPLIT = 256


def predict_decode(question: Question) -> Prediction:
    problem, device, known = question.problem, question.device, question.known
    kv_heads = max(1, problem.batch * problem.num_heads_kv)
    splits = max(1, min(device.sm_count // kv_heads, problem.seqlen_k // _KEYS_A_SPLIT))
    programs = kv_heads * splits
    minimum = compulsory(problem)
    flops = flop_counts.forward_flops(problem)
    floor = roofs(
        device,
        memory_bytes=minimum.total_bytes,
        flops=flops,
        dtype=question.dtype,
        exp2=problem.visible_pairs,
        clock_hz=question.floor_clock_hz,
        busy_fraction=min(1.0, programs / device.sm_count),
    )
    memory_s = known.read_start_s
    memory_s += minimum.total_bytes / (device.memory_bytes_per_s * known.read)
    compute_s = max(floor.matmul_s / known.matmul, (floor.exp2_s or 0.0) / known.exp2)
    compute_s *= question.floor_clock_hz / question.expected_clock_hz
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    return Prediction(
        problem=problem,
        device=device.key,
        generation=question.schedule.name,
        direction="decode",
        floor_s=floor.floor_s,
        expected_s=max(memory_s, compute_s),
        floor_clock_hz=question.floor_clock_hz,
        expected_clock_hz=question.expected_clock_hz,
        limiter=floor.limiter,
        expected_limiter=MEMORY if memory_s >= compute_s else floor.limiter,
        flops=flops,
        executed_flops=flops,
        exp2=flop_counts.exp2_count(problem),
        compulsory=minimum,
        issued=decode_issued(problem, splits),
        # the partial results of the splits are read back at once, from the cache
        memory=minimum,
        roofs=floor,
        kernels=1 if splits == 1 else 2,
        scratch_bytes=splits * rows * (problem.head_dim_v + 1) * FLOAT32_BYTES * (splits > 1),
        programs=programs,
        waves=programs / device.sm_count,
        notes=known.notes,
    )
