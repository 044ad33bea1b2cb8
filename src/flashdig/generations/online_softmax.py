"""Online softmax: the row maximum and the row sum in one pass over scores that are still in memory.

    scores = Q K^T                              a matrix product of its own, to device memory
    one program = one row of scores:
        for each block of keys: row_max, row_sum updated together       first read
        for each block of keys: probabilities written over the scores   second read, one write
    O = P V                                     a matrix product of its own

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", algorithm 3. A
safe softmax reads each row three times; with scale and mask folded in, this reads it twice.
Not here: backward, anything but full and causal masks.
"""

import torch
import triton
import triton.language as tl

from flashdig.costs.traffic import tensor_bytes
from flashdig.costs.unfused import issued, online_softmax_kernels
from flashdig.generations.base import Generation, LaunchPrediction, unsupported_by_triton
from flashdig.problem import AttentionProblem

NAME = "online_softmax"
BLOCK_N = 1024


def kernel_name(specialization):
    c = specialization.constants
    dtype = specialization.signature["scores_ptr"].removeprefix("*")
    mask = "causal" if c["IS_CAUSAL"] else "full"
    return f"{NAME}_{dtype}_n{c['BLOCK_N']}_{mask}"


@triton.jit(repr=kernel_name)
def online_softmax(
    scores_ptr,
    lse_ptr,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * seqlen_k
    end_n = seqlen_k
    if IS_CAUSAL:
        end_n = tl.maximum(0, (row % seqlen_q).to(tl.int32) + 1 + seqlen_k - seqlen_q)

    row_max = float("-inf")
    row_sum = 0.0
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        loaded = tl.load(scores_ptr + offs_n, mask=offs_n < end_n, other=float("-inf"))
        scores = loaded.to(tl.float32) * softmax_scale
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        row_sum = row_sum * tl.exp(row_max - new_max) + tl.sum(tl.exp(scores - new_max), 0)
        row_max = new_max

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    for start_n in range(0, seqlen_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        loaded = tl.load(scores_ptr + offs_n, mask=offs_n < end_n, other=float("-inf"))
        scores = loaded.to(tl.float32) * softmax_scale
        probs = tl.where(offs_n < end_n, tl.exp(scores - row_max) / divisor, 0.0)
        tl.store(scores_ptr + offs_n, probs.to(loaded.dtype), mask=offs_n < seqlen_k)
    tl.store(lse_ptr + row, row_max + tl.log(divisor))


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    group_size = q.shape[1] // k.shape[1]
    if group_size > 1:
        k, v = (x.repeat_interleave(group_size, dim=1) for x in (k, v))
    scores = q @ k.transpose(-1, -2)
    batch, num_heads, seqlen_q, seqlen_k = scores.shape
    lse = q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)
    online_softmax[(batch * num_heads * seqlen_q,)](
        scores,
        lse,
        seqlen_q,
        seqlen_k,
        q.shape[-1] ** -0.5,
        BLOCK_N=min(BLOCK_N, triton.next_power_of_2(seqlen_k)),
        IS_CAUSAL=causal,
    )
    # 16-bit scores were rounded before the row was summed: their lse is not that of the problem
    return scores @ v, lse if q.dtype == torch.float32 else None


def predict(problem: AttentionProblem) -> LaunchPrediction:
    kernels = online_softmax_kernels(problem)
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    copies = sum(k.store_bytes for k in kernels if k.name.startswith("repeat"))
    return LaunchPrediction(
        kernels=len(kernels),
        traffic=issued(kernels),
        triton=next(kernel.issued for kernel in kernels if kernel.name == "online softmax"),
        matmul_flops=sum(kernel.matmul_flops for kernel in kernels),
        scratch_bytes=scores * problem.element_bytes + tensor_bytes(problem).lse + copies,
    )


GENERATION = Generation(
    name="online_softmax",
    title="online softmax over scores in memory",
    year=2018,
    source="Milakov and Gimelshein 2018, algorithm 3",
    claim=(
        "Row maximum and row sum are found together in one pass, with scale and mask folded in: "
        "the scores are read twice and written once, instead of once and back for every operation. "
        "They are still a seqlen x seqlen matrix in memory."
    ),
    run=run,
    unsupported=unsupported_by_triton,
    predict=predict,
    is_triton=True,
)
