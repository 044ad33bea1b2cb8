"""v2: the loops swapped, so that O stays in registers; the second paper's work partition.

    one program = one tile of queries of one (batch, head)      Q loaded once
    for each tile of keys that it sees:                         K, V tile loaded
        scores = Q K^T                                          BLOCK_M x BLOCK_N, on chip only
        O = O * rescale + P V                                   registers only
    O / row_sum and LSE stored once

Source: Dao 2023, algorithm 1 and sections 3.1 and 3.2, in the form in which the archaeology
article writes it in Triton; the second exhibit here is its variant with K transposed beforehand.
Not here: backward, anything but full and causal masks.
"""

import dataclasses

import torch
import triton
import triton.language as tl

from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.traffic import tensor_bytes, transpose_copy, v2_issued
from flashdig.generations.base import (
    Generation,
    LaunchPrediction,
    input_precision,
    tiled_flops,
    unsupported_by_triton,
)
from flashdig.kernels.primitives import round_to_tf32
from flashdig.problem import AttentionProblem

NAME = "flash_fwd_v2"
LOG2_E = 1.4426950408889634


def kernel_name(specialization):
    c = specialization.constants
    dtype = specialization.signature["q_ptr"].removeprefix("*")
    dtype = "tf32" if c["INPUT_PRECISION"] == "tf32" else dtype
    mask = "causal" if c["IS_CAUSAL"] else "full"
    variant = "_ktransposed" if c["K_IS_TRANSPOSED"] else ""
    return f"{NAME}{variant}_{dtype}_d{c['HEAD_DIM']}_m{c['BLOCK_M']}n{c['BLOCK_N']}_{mask}"


@triton.jit(repr=kernel_name)
def flash_fwd_v2(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seqlen_q,
    seqlen_k,
    group_size,
    softmax_scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    start_m = tl.program_id(0) * BLOCK_M
    head = tl.program_id(1).to(tl.int64)
    q_ptr += head * seqlen_q * HEAD_DIM
    out_ptr += head * seqlen_q * HEAD_DIM
    lse_ptr += head * seqlen_q
    k_ptr += head // group_size * seqlen_k * HEAD_DIM
    v_ptr += head // group_size * seqlen_k * HEAD_DIM
    offs_d = tl.arange(0, HEAD_DIM)

    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_inside = offs_m < seqlen_q
    q_offsets = offs_m[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_M, HEAD_DIM]
    q = tl.load(q_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
    if INPUT_PRECISION == "tf32":
        q = round_to_tf32(q)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    end_n = seqlen_k
    if IS_CAUSAL:  # tiles of keys past the last row's diagonal are never visited
        end_n = tl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        kv_offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_N, HEAD_DIM]
        kv_inside = offs_n[:, None] < seqlen_k
        if K_IS_TRANSPOSED:
            k_offsets = offs_d[:, None] * seqlen_k + offs_n[None, :]  # [HEAD_DIM, BLOCK_N]
            k_transposed = tl.load(k_ptr + k_offsets, mask=offs_n[None, :] < seqlen_k, other=0.0)
        else:
            k_transposed = tl.trans(tl.load(k_ptr + kv_offsets, mask=kv_inside, other=0.0))
        v = tl.load(v_ptr + kv_offsets, mask=kv_inside, other=0.0)
        if INPUT_PRECISION == "tf32":
            k_transposed, v = round_to_tf32(k_transposed), round_to_tf32(v)

        # [BLOCK_M, HEAD_DIM] @ [HEAD_DIM, BLOCK_N] -> [BLOCK_M, BLOCK_N]
        scores = tl.dot(q, k_transposed, input_precision=INPUT_PRECISION) * softmax_scale_log2
        visible = offs_n[None, :] < seqlen_k
        if IS_CAUSAL:
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
        scores = tl.where(visible, scores, float("-inf"))

        new_max = tl.maximum(row_max, tl.max(scores, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows without keys so far
        probs = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        row_max = new_max

        if INPUT_PRECISION == "tf32":
            probs = round_to_tf32(probs)
        # [BLOCK_M, BLOCK_N] @ [BLOCK_N, HEAD_DIM] -> [BLOCK_M, HEAD_DIM]
        update = tl.dot(probs.to(v.dtype), v, input_precision=INPUT_PRECISION)
        out = out * rescale[:, None] + update

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    tl.store(out_ptr + q_offsets, (out / divisor[:, None]).to(q.dtype), mask=row_inside[:, None])
    LN_2: tl.constexpr = 0.6931471805599453
    lse = (row_max + tl.log2(divisor)) * LN_2
    tl.store(lse_ptr + offs_m, lse, mask=row_inside)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, k_is_transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = v.shape[1], v.shape[2]
    tile = exhibit_tile(head_dim, q.element_size())
    out = torch.empty_like(q)
    lse = q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)
    flash_fwd_v2[(triton.cdiv(seqlen_q, tile.block_m), batch * num_heads)](
        q,
        k,
        v,
        out,
        lse,
        seqlen_q,
        seqlen_k,
        num_heads // num_heads_kv,
        head_dim**-0.5 * LOG2_E,
        HEAD_DIM=head_dim,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        IS_CAUSAL=causal,
        K_IS_TRANSPOSED=k_is_transposed,
        INPUT_PRECISION=input_precision(q.dtype),
        num_warps=tile.warps,
    )
    return out, lse


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return launch(q, k, v, causal, k_is_transposed=False)


def run_transposed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return launch(q, k.transpose(-1, -2).contiguous(), v, causal, k_is_transposed=True)


def predict(problem: AttentionProblem) -> LaunchPrediction:
    tile = exhibit_tile(problem.head_dim, problem.element_bytes)
    kernel = v2_issued(problem, tile.block_m, tile.block_n)
    return LaunchPrediction(
        kernels=1,
        traffic=kernel,
        triton=kernel,
        matmul_flops=tiled_flops(problem, tile, skip_masked_tiles=True),
        scratch_bytes=tensor_bytes(problem).lse,
    )


def predict_transposed(problem: AttentionProblem) -> LaunchPrediction:
    inside = predict(problem)
    copy = transpose_copy(problem)
    return dataclasses.replace(
        inside,
        kernels=2,  # the transposing copy and the kernel
        traffic=copy if inside.triton is None else copy + inside.triton,
        scratch_bytes=inside.scratch_bytes + copy.store_bytes,
    )


GENERATION = Generation(
    name="v2",
    title="v2: queries outside, O in registers",
    year=2023,
    source="Dao 2023, algorithm 1, sections 3.1 and 3.2; the archaeology article's second kernel",
    claim=(
        "The loops change places: O, row_max and row_sum stay in registers and are stored once, "
        "the division moves out of the loop, tiles that causality hides are never visited, and the "
        "grid grows by the number of query tiles."
    ),
    run=run,
    unsupported=unsupported_by_triton,
    predict=predict,
    is_triton=True,
)

TRANSPOSED = Generation(
    name="v2_transposed",
    title="v2 with K transposed beforehand",
    year=2025,
    source="the archaeology article's last kernel",
    claim=(
        "K is transposed in memory before the kernel, so that no tile is transposed inside: on "
        "CUDA cores that removes shared-memory bank conflicts; tensor cores read either layout, so "
        "there only the extra copy remains."
    ),
    run=run_transposed,
    unsupported=unsupported_by_triton,
    predict=predict_transposed,
    is_triton=True,
)
