"""v1: tiles and online softmax, so that scores never leave the chip; the first paper's loops.

    one program = one (batch, head)             O, row_max, row_sum live in device memory
    for each tile of keys:                      K, V tile loaded once
        for each tile of queries:               Q, O, row_max, row_sum loaded and stored again
            scores = Q K^T                      BLOCK_M x BLOCK_N, on chip only
            O = (O * row_sum * rescale + P V) / new row_sum

Source: Dao et al. 2022, algorithm 1, in the form in which the archaeology article writes it in
Triton. O is float32 in device memory, whatever the input: it is rounded once, at the end.
Not here: backward, anything but full and causal masks.
"""

import torch
import triton
import triton.language as tl

from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.traffic import Traffic, tensor_bytes, v1_issued
from flashdig.generations.base import (
    Generation,
    LaunchPrediction,
    input_precision,
    tiled_flops,
    unsupported_by_triton,
)
from flashdig.kernels.primitives import round_to_tf32
from flashdig.problem import AttentionProblem

NAME = "flash_fwd_v1"


def kernel_name(specialization):
    c = specialization.constants
    dtype = specialization.signature["q_ptr"].removeprefix("*")
    dtype = "tf32" if c["INPUT_PRECISION"] == "tf32" else dtype
    mask = "causal" if c["IS_CAUSAL"] else "full"
    return f"{NAME}_{dtype}_d{c['HEAD_DIM']}_m{c['BLOCK_M']}n{c['BLOCK_N']}_{mask}"


@triton.jit(repr=kernel_name)
def flash_fwd_v1(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    row_max_ptr,
    row_sum_ptr,
    seqlen_q,
    seqlen_k,
    group_size,
    softmax_scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    q_ptr += head * seqlen_q * HEAD_DIM
    out_ptr += head * seqlen_q * HEAD_DIM
    row_max_ptr += head * seqlen_q
    row_sum_ptr += head * seqlen_q
    k_ptr += head // group_size * seqlen_k * HEAD_DIM
    v_ptr += head // group_size * seqlen_k * HEAD_DIM
    offs_d = tl.arange(0, HEAD_DIM)

    for start_n in range(0, seqlen_k, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        kv_offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_N, HEAD_DIM]
        kv_inside = offs_n[:, None] < seqlen_k
        k = tl.load(k_ptr + kv_offsets, mask=kv_inside, other=0.0)
        v = tl.load(v_ptr + kv_offsets, mask=kv_inside, other=0.0)
        if INPUT_PRECISION == "tf32":
            k, v = round_to_tf32(k), round_to_tf32(v)

        for start_m in range(0, seqlen_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            row_inside = offs_m < seqlen_q
            q_offsets = offs_m[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_M, HEAD_DIM]
            q = tl.load(q_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
            out = tl.load(out_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
            row_max = tl.load(row_max_ptr + offs_m, mask=row_inside, other=float("-inf"))
            row_sum = tl.load(row_sum_ptr + offs_m, mask=row_inside, other=0.0)

            if INPUT_PRECISION == "tf32":
                q = round_to_tf32(q)
            # [BLOCK_M, HEAD_DIM] @ [HEAD_DIM, BLOCK_N] -> [BLOCK_M, BLOCK_N]
            scores = tl.dot(q, tl.trans(k), input_precision=INPUT_PRECISION) * softmax_scale
            visible = offs_n[None, :] < seqlen_k
            if IS_CAUSAL:
                visible = visible & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
            scores = tl.where(visible, scores, float("-inf"))

            new_max = tl.maximum(row_max, tl.max(scores, 1))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows without keys so far
            probs = tl.exp(scores - shift[:, None])
            rescale = tl.exp(row_max - shift)
            new_sum = row_sum * rescale + tl.sum(probs, 1)
            divisor = tl.where(new_sum == 0.0, 1.0, new_sum)

            if INPUT_PRECISION == "tf32":
                probs = round_to_tf32(probs)
            # [BLOCK_M, BLOCK_N] @ [BLOCK_N, HEAD_DIM] -> [BLOCK_M, HEAD_DIM]
            update = tl.dot(probs.to(v.dtype), v, input_precision=INPUT_PRECISION)
            out = (out * (row_sum * rescale)[:, None] + update) / divisor[:, None]
            tl.store(out_ptr + q_offsets, out, mask=row_inside[:, None])
            tl.store(row_max_ptr + offs_m, new_max, mask=row_inside)
            tl.store(row_sum_ptr + offs_m, new_sum, mask=row_inside)
        # the next tile of keys reads O, row_max and row_sum, perhaps by other threads
        tl.debug_barrier()


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = k.shape[1], k.shape[2]
    tile = exhibit_tile(head_dim, q.element_size())
    out = torch.zeros_like(q, dtype=torch.float32)
    row_max = q.new_full((batch, num_heads, seqlen_q), float("-inf"), dtype=torch.float32)
    row_sum = torch.zeros_like(row_max)
    flash_fwd_v1[(batch * num_heads,)](
        q,
        k,
        v,
        out,
        row_max,
        row_sum,
        seqlen_q,
        seqlen_k,
        num_heads // num_heads_kv,
        head_dim**-0.5,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        IS_CAUSAL=causal,
        INPUT_PRECISION=input_precision(q.dtype),
        num_warps=tile.warps,
    )
    return out.to(q.dtype), None


def predict(problem: AttentionProblem) -> LaunchPrediction:
    tile = exhibit_tile(problem.head_dim, problem.element_bytes)
    kernel = v1_issued(problem, tile.block_m, tile.block_n)
    rows = problem.batch * problem.num_heads * problem.seqlen_q
    out_bytes = 4 * rows * problem.head_dim
    fills = Traffic(0, out_bytes + 8 * rows)
    rounding = Traffic(out_bytes, tensor_bytes(problem).o)
    if problem.element_bytes == 4:
        rounding = Traffic(0, 0)
    return LaunchPrediction(
        kernels=4 if problem.element_bytes == 4 else 5,  # three fills, the kernel, the rounding
        traffic=fills + kernel + rounding,
        triton=kernel,
        matmul_flops=tiled_flops(problem, tile, skip_masked_tiles=False),
        scratch_bytes=8 * rows + (0 if problem.element_bytes == 4 else out_bytes),
    )


GENERATION = Generation(
    name="v1",
    title="v1: tiles and online softmax",
    year=2022,
    source="Dao et al. 2022, algorithm 1; the archaeology article's first kernel",
    claim=(
        "One kernel: scores stay on chip, so memory traffic is linear in seqlen for each tile of "
        "keys; but O and its statistics go to memory and back for every tile of keys, and the grid "
        "has only batch x heads programs."
    ),
    run=run,
    unsupported=unsupported_by_triton,
    predict=predict,
    is_triton=True,
)
