"""Split-Q against split-K inside a block: the second paper's third change, alone.

One kernel, v2's algorithm with tensor-core instructions of sm_80; all that differs is how its four
warps share a tile of scores:

    split-Q, warps [4, 1]   each warp has 16 queries and all keys of the tile: row maximum, row sum
                            and P stay inside the warp, in registers
    split-K, warps [1, 4]   each warp has 16 keys and all queries: maxima, sums and P go through
                            shared memory, with barriers, in every step

In the first FlashAttention's kernel each warp multiplies its slice of P with its slice of V, and
the partial O's are added up through shared memory. Here O's columns are split instead, so that P
is what crosses over: fewer bytes (2 an element of P against 4 an element of O from each warp), the
same barriers; this is split-K at its best.

Source: Dao 2023, section 3.3 and figure 3; instruction order as in figure 1 there: K's tile is
loaded while P V runs, V's tile while Q K^T runs. Gluon, because Triton chooses warps itself.
Not here: float32, head dimensions besides 64 and 128, backward. Gluon has no interpreter.
"""

import torch
import triton

from flashdig.costs.schedules import Tile
from flashdig.costs.traffic import tensor_bytes, v2_issued
from flashdig.generations.base import (
    Generation,
    LaunchPrediction,
    tiled_flops,
    unsupported_by_triton,
)
from flashdig.kernels.gluon_api import (
    commit_async_loads,
    gl,
    gluon,
    load_to_shared,
    mma_v2,
    wait_for_async_loads,
)
from flashdig.problem import AttentionProblem

NAME = "flash_fwd_split"
LOG2_E = 1.4426950408889634
TILE = Tile(64, 64, 4)
HEAD_DIMS = (64, 128)


def kernel_name(specialization):
    c = specialization.constants
    split = "q" if c["WARPS_M"] > 1 else "k"
    dtype = specialization.signature["q_ptr"].removeprefix("*")
    mask = "causal" if c["IS_CAUSAL"] else "full"
    return f"{NAME}_{split}_{dtype}_d{c['HEAD_DIM']}_m{c['BLOCK_M']}n{c['BLOCK_N']}_{mask}"


@gluon.jit
def start_loading(smem, ptr, offs_row, offs_col, end_row, HEAD_DIM: gl.constexpr):
    """Rows below `end_row` of a (rows, HEAD_DIM) matrix, asynchronously; the others become 0."""
    offsets = offs_row[:, None] * HEAD_DIM + offs_col[None, :]
    load_to_shared(smem, ptr + offsets, mask=offs_row[:, None] < end_row)
    commit_async_loads()


@gluon.jit(repr=kernel_name)
def flash_fwd_split(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    seqlen_q,
    seqlen_k,
    group_size,
    softmax_scale_log2,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    WARPS_M: gl.constexpr,
    WARPS_N: gl.constexpr,
):
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # scores [BLOCK_M, BLOCK_N] and out [BLOCK_M, HEAD_DIM]: the one line in which the pair differs
    mma_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_M, WARPS_N], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma_layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, mma_layout)
    columns: gl.constexpr = gl.SliceLayout(0, mma_layout)
    # 16 bytes a thread; 128-byte rows of shared memory, swizzled so that ldmatrix has no conflicts
    copy_layout: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [WARPS_M * WARPS_N, 1], [1, 0]
    )
    copy_rows: gl.constexpr = gl.SliceLayout(1, copy_layout)
    shared_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])

    start_m = gl.program_id(0) * BLOCK_M
    head = gl.program_id(1).to(gl.int64)
    q_ptr += head * seqlen_q * HEAD_DIM
    out_ptr += head * seqlen_q * HEAD_DIM
    lse_ptr += head * seqlen_q
    k_ptr += head // group_size * seqlen_k * HEAD_DIM
    v_ptr += head // group_size * seqlen_k * HEAD_DIM

    end_n = seqlen_k
    if IS_CAUSAL:  # tiles of keys past the last row's diagonal are never visited
        end_n = gl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q)
    # whole tiles up to there, so that the load which runs ahead never passes it
    end_load = gl.minimum(seqlen_k, (gl.maximum(end_n, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N)

    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, HEAD_DIM], shared_layout)
    k_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], shared_layout)
    v_smem = gl.allocate_shared_memory(dtype, [BLOCK_N, HEAD_DIM], shared_layout)
    copy_cols = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, copy_layout))
    copy_m = start_m + gl.arange(0, BLOCK_M, copy_rows)
    copy_n = gl.arange(0, BLOCK_N, copy_rows)
    start_loading(q_smem, q_ptr, copy_m, copy_cols, seqlen_q, HEAD_DIM)
    start_loading(k_smem, k_ptr, copy_n, copy_cols, end_load, HEAD_DIM)

    offs_m = start_m + gl.arange(0, BLOCK_M, rows)
    out = gl.full([BLOCK_M, HEAD_DIM], 0.0, gl.float32, mma_layout)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, rows)
    row_sum = gl.full([BLOCK_M], 0.0, gl.float32, rows)
    for start_n in range(0, end_n, BLOCK_N):
        start_loading(v_smem, v_ptr, start_n + copy_n, copy_cols, end_load, HEAD_DIM)
        wait_for_async_loads(1)  # K, and Q in the first step; V is under way
        q = q_smem.load(left)
        k_transposed = k_smem.permute((1, 0)).load(right)
        # [BLOCK_M, HEAD_DIM] @ [HEAD_DIM, BLOCK_N] -> [BLOCK_M, BLOCK_N]
        nothing = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, mma_layout)
        scores = mma_v2(q, k_transposed, nothing) * softmax_scale_log2
        start_loading(k_smem, k_ptr, start_n + BLOCK_N + copy_n, copy_cols, end_load, HEAD_DIM)

        offs_n = start_n + gl.arange(0, BLOCK_N, columns)
        visible = offs_n[None, :] < seqlen_k
        if IS_CAUSAL:
            visible = visible & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
        scores = gl.where(visible, scores, float("-inf"))

        new_max = gl.maximum(row_max, gl.max(scores, 1))
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)  # rows without keys so far
        probs = gl.exp2(scores - shift[:, None])
        rescale = gl.exp2(row_max - shift)
        row_sum = row_sum * rescale + gl.sum(probs, 1)
        row_max = new_max

        probs = gl.convert_layout(probs.to(dtype), left)
        wait_for_async_loads(1)  # V; the next K is under way
        v = v_smem.load(right)
        # [BLOCK_M, BLOCK_N] @ [BLOCK_N, HEAD_DIM] -> [BLOCK_M, HEAD_DIM]
        out = mma_v2(probs, v, out * rescale[:, None])
    wait_for_async_loads(0)

    divisor = gl.where(row_sum == 0.0, 1.0, row_sum)
    out_columns = gl.arange(0, HEAD_DIM, columns)
    out_offsets = offs_m[:, None] * HEAD_DIM + out_columns[None, :]
    row_inside = offs_m < seqlen_q
    gl.store(out_ptr + out_offsets, (out / divisor[:, None]).to(dtype), mask=row_inside[:, None])
    LN_2: gl.constexpr = 0.6931471805599453
    gl.store(lse_ptr + offs_m, (row_max + gl.log2(divisor)) * LN_2, mask=row_inside)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, warps: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    batch, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = k.shape[1], k.shape[2]
    out = torch.empty_like(q)
    lse = q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32)
    flash_fwd_split[(triton.cdiv(seqlen_q, TILE.block_m), batch * num_heads)](
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
        BLOCK_M=TILE.block_m,
        BLOCK_N=TILE.block_n,
        IS_CAUSAL=causal,
        WARPS_M=warps[0],
        WARPS_N=warps[1],
        num_warps=TILE.warps,
    )
    return out, lse


def run_split_q(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return launch(q, k, v, causal, (TILE.warps, 1))


def run_split_k(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return launch(q, k, v, causal, (1, TILE.warps))


def unsupported(problem: AttentionProblem, device_type: str) -> list[str]:
    reasons = unsupported_by_triton(problem, device_type)
    if device_type == "cpu":
        reasons.append("Gluon has no interpreter")
    if problem.head_dim not in HEAD_DIMS:
        reasons.append(f"head_dim must be one of {', '.join(map(str, HEAD_DIMS))}")
    if problem.element_bytes != 2:
        reasons.append("dtype must be float16 or bfloat16: the instruction takes nothing wider")
    return reasons


def predict(problem: AttentionProblem) -> LaunchPrediction:
    return LaunchPrediction(
        kernels=1,
        traffic=v2_issued(problem, TILE.block_m, TILE.block_n),
        matmul_flops=tiled_flops(problem, TILE, skip_masked_tiles=True),
        scratch_bytes=tensor_bytes(problem).lse,
    )


SPLIT_Q = Generation(
    name="split_q",
    title="split-Q: each warp its own queries",
    year=2023,
    source="Dao 2023, section 3.3",
    claim=(
        "Each of the four warps has 16 queries and all keys of the tile, so nothing crosses from "
        "warp to warp: row maxima and sums are shuffled inside it, and P is already where the "
        "second product wants it."
    ),
    run=run_split_q,
    unsupported=unsupported,
    predict=predict,
)

SPLIT_K = Generation(
    name="split_k",
    title="split-K: each warp its own keys",
    year=2022,
    source="Dao 2023, section 3.3, on the first FlashAttention's kernel",
    claim=(
        "Each of the four warps has 16 keys and all queries of the tile, so row maxima, row sums "
        "and P go through shared memory, behind barriers, for every tile of keys."
    ),
    run=run_split_k,
    unsupported=unsupported,
    predict=predict,
)
