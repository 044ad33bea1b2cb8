"""Expected memory traffic: what the L2 cache leaves of the issued bytes.

One rule, used everywhere: data that is touched again is found in the cache if the working set of
the blocks that run together fits, and not at all if that set is twice the cache, because every
reuse in attention is a sweep, in which each line has to wait for all the others. In between the
rule is linear. It is a first guess, and a counter of memory bytes is its test.
"""

from __future__ import annotations

import math

from flashdig.costs.traffic import (
    FLOAT32_BYTES,
    Traffic,
    flash_backward_issued,
    tensor_bytes,
    v1_issued,
    v2_issued,
)
from flashdig.problem import AttentionProblem


def miss_fraction(working_set_bytes: float, cache_bytes: float) -> float:
    """Part of the repeated accesses of a sweep that is expected to go to memory."""
    return min(1.0, max(0.0, working_set_bytes / cache_bytes - 1.0))


def least_miss_fraction(working_set_bytes: float, cache_bytes: float) -> float:
    """Part that must go to memory under any policy: what exceeds the cache."""
    if working_set_bytes <= cache_bytes:
        return 0.0
    return 1.0 - cache_bytes / working_set_bytes


def v1_working_set(
    problem: AttentionProblem, resident_programs: int, accumulator_bytes: int = FLOAT32_BYTES
) -> int:
    """Q, O, m and l of the heads in flight: a program sweeps all of its own for each key tile."""
    heads = max(1, min(resident_programs, problem.batch * problem.num_heads))
    row = problem.head_dim * problem.element_bytes
    row += problem.head_dim_v * accumulator_bytes + 2 * FLOAT32_BYTES
    return heads * problem.seqlen_q * row


def v1_expected(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    *,
    cache_bytes: float,
    resident_programs: int,
    accumulator_bytes: int = FLOAT32_BYTES,
    skip_masked_tiles: bool = False,
) -> Traffic:
    """Bytes at memory of `v1_issued`, for `resident_programs` programs at a time."""
    issued = v1_issued(
        problem,
        block_m,
        block_n,
        accumulator_bytes=accumulator_bytes,
        skip_masked_tiles=skip_masked_tiles,
    )
    size = tensor_bytes(problem)
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    state = rows * (problem.head_dim_v * accumulator_bytes + 2 * FLOAT32_BYTES)
    missing = miss_fraction(
        v1_working_set(problem, resident_programs, accumulator_bytes), cache_bytes
    )
    return Traffic(
        load_bytes=_first_and_again(size.q + size.k + size.v + state, issued.load_bytes, missing),
        store_bytes=_first_and_again(state, issued.store_bytes, missing),
    )


def v2_working_set(problem: AttentionProblem, block_m: int, resident_programs: int) -> int:
    """K and V of the KV heads whose query tiles are in flight together."""
    heads = max(1, problem.batch * problem.num_heads_kv)
    resident_heads = min(
        heads, math.ceil(resident_programs / _programs_a_kv_head(problem, block_m))
    )
    size = tensor_bytes(problem)
    return math.ceil((size.k + size.v) * resident_heads / heads)


def v2_expected(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    *,
    cache_bytes: float,
    resident_programs: int,
    skip_masked_tiles: bool = True,
) -> Traffic:
    """Bytes at memory of `v2_issued`.

    The resident programs of one KV head walk its tiles in step and share each read; the next cohort
    reads again, and hits as far as K and V of the resident heads fit.
    """
    issued = v2_issued(problem, block_m, block_n, skip_masked_tiles=skip_masked_tiles)
    size = tensor_bytes(problem)
    first = size.k + size.v
    cohort = max(1, min(resident_programs, _programs_a_kv_head(problem, block_m)))
    without_cache = max(first, (issued.load_bytes - size.q) // cohort)
    missing = miss_fraction(v2_working_set(problem, block_m, resident_programs), cache_bytes)
    keys = min(_first_and_again(first, without_cache, missing), issued.load_bytes - size.q)
    return Traffic(size.q + keys, issued.store_bytes)


def backward_expected(
    problem: AttentionProblem,
    block_m: int,
    block_n: int,
    *,
    cache_bytes: float,
    resident_programs: int,
) -> Traffic:
    """Bytes at memory of `flash_backward_issued`.

    Programs of one head walk its query tiles in step; Q, dO, LSE, delta and the float32 dQ of the
    resident heads are the working set.
    """
    issued = flash_backward_issued(problem, block_m, block_n)
    size = tensor_bytes(problem)
    heads = max(1, problem.batch * problem.num_heads)
    programs = max(1, math.ceil(problem.seqlen_k / block_n))
    accumulated = heads * problem.seqlen_q * problem.head_dim * FLOAT32_BYTES
    # each phase touches its tensors once: delta's pass, the main pass, dQ's conversion
    first_loads = size.q + 4 * size.o + 3 * size.lse + size.k + size.v + 2 * accumulated
    first_stores = size.lse + accumulated + size.q + size.k + size.v
    resident_heads = min(heads, math.ceil(resident_programs / programs))
    working_set = (size.q + size.o + 2 * size.lse + accumulated) * resident_heads / heads
    missing = miss_fraction(working_set, cache_bytes) / max(1, min(resident_programs, programs))
    return Traffic(
        load_bytes=_first_and_again(
            min(first_loads, issued.load_bytes), issued.load_bytes, missing
        ),
        store_bytes=_first_and_again(
            min(first_stores, issued.store_bytes), issued.store_bytes, missing
        ),
    )


def _programs_a_kv_head(problem: AttentionProblem, block_m: int) -> int:
    return max(1, problem.group_size * math.ceil(problem.seqlen_q / block_m))


def _first_and_again(first: int, issued: int, missing: float) -> int:
    return first + math.ceil(max(0, issued - first) * missing)
