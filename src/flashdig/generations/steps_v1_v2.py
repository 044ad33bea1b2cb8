"""From v1 to v2 one step at a time: both loop orders, every other change a compile-time flag.

    keys_outside      v1's loops: O, row_max and row_sum go through memory for every tile of keys
    queries_outside   v2's loops: they stay in registers

    SEQUENCE_PARALLEL   a program for each tile of queries     against one that walks all of them
    LATE_DIVISION       O divided by row_sum once              against for every tile of keys
    EXP2                2^x, log2(e) folded into the scale     against e^x
    STORES_LSE          one number a row                       against row_max and row_sum
    SKIPS_HIDDEN        tiles that causality hides are not visited
    K_IS_TRANSPOSED     K laid out as (head_dim, seqlen_k) beforehand

Without any, `flash_fwd_steps_keys_outside` does what v1 does, operation for operation; with all,
`flash_fwd_steps_queries_outside` does what v2 does. Which sets make sense: `steps_paths.py`.

Source: Dao 2023, sections 3.1 and 3.2, whose changes the paper measures only together.
Not here: backward, anything but full and causal masks.
"""

import torch
import triton
import triton.language as tl

from flashdig.costs.schedules import exhibit_tile
from flashdig.generations.base import input_precision
from flashdig.kernels.primitives import round_to_tf32

NAME = "flash_fwd_steps"
LOG2_E = 1.4426950408889634
FLAGS = {
    "SEQUENCE_PARALLEL": "parallel",
    "LATE_DIVISION": "latediv",
    "EXP2": "exp2",
    "STORES_LSE": "lse",
    "SKIPS_HIDDEN": "skip",
    "K_IS_TRANSPOSED": "ktransposed",
}


def kernel_name(order):
    def name(specialization):
        c = specialization.constants
        flags = "".join(f"_{word}" for flag, word in FLAGS.items() if c.get(flag))
        dtype = specialization.signature["q_ptr"].removeprefix("*")
        dtype = "tf32" if c["INPUT_PRECISION"] == "tf32" else dtype
        mask = "causal" if c["IS_CAUSAL"] else "full"
        tile = f"d{c['HEAD_DIM']}_m{c['BLOCK_M']}n{c['BLOCK_N']}"
        return f"{NAME}_{order}{flags}_{dtype}_{tile}_{mask}"

    return name


@triton.jit
def load_keys(
    k_ptr,
    v_ptr,
    offs_n,
    offs_d,
    seqlen_k,
    HEAD_DIM: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """A tile of K and one of V, [BLOCK_N, HEAD_DIM]; K as it lies in memory."""
    kv_offsets = offs_n[:, None] * HEAD_DIM + offs_d[None, :]
    kv_inside = offs_n[:, None] < seqlen_k
    if K_IS_TRANSPOSED:
        k_offsets = offs_d[:, None] * seqlen_k + offs_n[None, :]
        k = tl.load(k_ptr + k_offsets, mask=offs_n[None, :] < seqlen_k, other=0.0)
    else:
        k = tl.load(k_ptr + kv_offsets, mask=kv_inside, other=0.0)
    v = tl.load(v_ptr + kv_offsets, mask=kv_inside, other=0.0)
    if INPUT_PRECISION == "tf32":
        k, v = round_to_tf32(k), round_to_tf32(v)
    return k, v


@triton.jit
def attend(
    q,
    k,
    v,
    out,
    row_max,
    row_sum,
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
    scale,
    IS_CAUSAL: tl.constexpr,
    LATE_DIVISION: tl.constexpr,
    EXP2: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One tile of queries against one of keys: the new out, row_max and row_sum.

    `scale` holds log2(e) with EXP2, and row_max is in that base.
    """
    if not K_IS_TRANSPOSED:
        k = tl.trans(k)
    # [BLOCK_M, HEAD_DIM] @ [HEAD_DIM, BLOCK_N] -> [BLOCK_M, BLOCK_N]
    scores = tl.dot(q, k, input_precision=INPUT_PRECISION) * scale
    visible = offs_n[None, :] < seqlen_k
    if IS_CAUSAL:
        visible = visible & (offs_n[None, :] <= offs_m[:, None] + seqlen_k - seqlen_q)
    scores = tl.where(visible, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, 1))
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # rows without keys so far
    if EXP2:
        probs = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(row_max - shift)
    else:
        probs = tl.exp(scores - shift[:, None])
        rescale = tl.exp(row_max - shift)
    new_sum = row_sum * rescale + tl.sum(probs, 1)
    if not LATE_DIVISION:
        divisor = tl.where(new_sum == 0.0, 1.0, new_sum)

    if INPUT_PRECISION == "tf32":
        probs = round_to_tf32(probs)
    # [BLOCK_M, BLOCK_N] @ [BLOCK_N, HEAD_DIM] -> [BLOCK_M, HEAD_DIM]
    update = tl.dot(probs.to(v.dtype), v, input_precision=INPUT_PRECISION)
    if LATE_DIVISION:
        out = out * rescale[:, None] + update
    else:
        out = (out * (row_sum * rescale)[:, None] + update) / divisor[:, None]
    return out, new_max, new_sum


@triton.jit(repr=kernel_name("keys_outside"))
def flash_fwd_steps_keys_outside(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    row_max_ptr,
    row_sum_ptr,
    seqlen_q,
    seqlen_k,
    group_size,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    LATE_DIVISION: tl.constexpr,
    EXP2: tl.constexpr,
    SKIPS_HIDDEN: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
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
        k, v = load_keys(
            k_ptr, v_ptr, offs_n, offs_d, seqlen_k, HEAD_DIM, K_IS_TRANSPOSED, INPUT_PRECISION
        )
        begin_m = 0
        if SKIPS_HIDDEN:  # tiles of queries before the first one that sees this tile of keys
            begin_m = tl.maximum(0, start_n - seqlen_k + seqlen_q) // BLOCK_M * BLOCK_M
        for start_m in range(begin_m, seqlen_q, BLOCK_M):
            offs_m = start_m + tl.arange(0, BLOCK_M)
            row_inside = offs_m < seqlen_q
            q_offsets = offs_m[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_M, HEAD_DIM]
            q = tl.load(q_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
            out = tl.load(out_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
            row_max = tl.load(row_max_ptr + offs_m, mask=row_inside, other=float("-inf"))
            row_sum = tl.load(row_sum_ptr + offs_m, mask=row_inside, other=0.0)

            if INPUT_PRECISION == "tf32":
                q = round_to_tf32(q)
            out, row_max, row_sum = attend(
                q,
                k,
                v,
                out,
                row_max,
                row_sum,
                offs_m,
                offs_n,
                seqlen_q,
                seqlen_k,
                scale,
                IS_CAUSAL,
                LATE_DIVISION,
                EXP2,
                K_IS_TRANSPOSED,
                INPUT_PRECISION,
            )
            if LATE_DIVISION:
                end_n = seqlen_k
                if SKIPS_HIDDEN:
                    end_n = tl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q)
                if start_n + BLOCK_N >= end_n:  # the last tile of keys that these rows visit
                    out = out / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
            tl.store(out_ptr + q_offsets, out, mask=row_inside[:, None])
            tl.store(row_max_ptr + offs_m, row_max, mask=row_inside)
            tl.store(row_sum_ptr + offs_m, row_sum, mask=row_inside)
        # the next tile of keys reads O, row_max and row_sum, perhaps by other threads
        tl.debug_barrier()


@triton.jit
def attend_to_all_keys(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    row_max_ptr,
    row_sum_ptr,
    start_m,
    seqlen_q,
    seqlen_k,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    LATE_DIVISION: tl.constexpr,
    EXP2: tl.constexpr,
    STORES_LSE: tl.constexpr,
    SKIPS_HIDDEN: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    """One tile of queries from start to end; the pointers are those of its head."""
    offs_d = tl.arange(0, HEAD_DIM)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    row_inside = offs_m < seqlen_q
    q_offsets = offs_m[:, None] * HEAD_DIM + offs_d[None, :]  # [BLOCK_M, HEAD_DIM]
    q = tl.load(q_ptr + q_offsets, mask=row_inside[:, None], other=0.0)
    dtype = q.dtype
    if INPUT_PRECISION == "tf32":
        q = round_to_tf32(q)
    out = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)

    end_n = seqlen_k
    if SKIPS_HIDDEN:  # tiles of keys past the last row's diagonal
        end_n = tl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q)
    for start_n in range(0, end_n, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        k, v = load_keys(
            k_ptr, v_ptr, offs_n, offs_d, seqlen_k, HEAD_DIM, K_IS_TRANSPOSED, INPUT_PRECISION
        )
        out, row_max, row_sum = attend(
            q,
            k,
            v,
            out,
            row_max,
            row_sum,
            offs_m,
            offs_n,
            seqlen_q,
            seqlen_k,
            scale,
            IS_CAUSAL,
            LATE_DIVISION,
            EXP2,
            K_IS_TRANSPOSED,
            INPUT_PRECISION,
        )

    divisor = tl.where(row_sum == 0.0, 1.0, row_sum)
    if LATE_DIVISION:
        out = out / divisor[:, None]
    tl.store(out_ptr + q_offsets, out.to(dtype), mask=row_inside[:, None])
    if STORES_LSE:
        if EXP2:
            LN_2: tl.constexpr = 0.6931471805599453
            lse = (row_max + tl.log2(divisor)) * LN_2
        else:
            lse = row_max + tl.log(divisor)
        tl.store(lse_ptr + offs_m, lse, mask=row_inside)
    else:
        tl.store(row_max_ptr + offs_m, row_max, mask=row_inside)
        tl.store(row_sum_ptr + offs_m, row_sum, mask=row_inside)


@triton.jit(repr=kernel_name("queries_outside"))
def flash_fwd_steps_queries_outside(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,  # or, where it is None, the next two
    row_max_ptr,
    row_sum_ptr,
    seqlen_q,
    seqlen_k,
    group_size,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    SEQUENCE_PARALLEL: tl.constexpr,
    LATE_DIVISION: tl.constexpr,
    EXP2: tl.constexpr,
    STORES_LSE: tl.constexpr,
    SKIPS_HIDDEN: tl.constexpr,
    K_IS_TRANSPOSED: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
):
    head = tl.program_id(1 if SEQUENCE_PARALLEL else 0).to(tl.int64)
    q_ptr += head * seqlen_q * HEAD_DIM
    out_ptr += head * seqlen_q * HEAD_DIM
    if STORES_LSE:
        lse_ptr += head * seqlen_q
    else:
        row_max_ptr += head * seqlen_q
        row_sum_ptr += head * seqlen_q
    k_ptr += head // group_size * seqlen_k * HEAD_DIM
    v_ptr += head // group_size * seqlen_k * HEAD_DIM

    if SEQUENCE_PARALLEL:
        attend_to_all_keys(
            q_ptr,
            k_ptr,
            v_ptr,
            out_ptr,
            lse_ptr,
            row_max_ptr,
            row_sum_ptr,
            tl.program_id(0) * BLOCK_M,
            seqlen_q,
            seqlen_k,
            scale,
            HEAD_DIM,
            BLOCK_M,
            BLOCK_N,
            IS_CAUSAL,
            LATE_DIVISION,
            EXP2,
            STORES_LSE,
            SKIPS_HIDDEN,
            K_IS_TRANSPOSED,
            INPUT_PRECISION,
        )
    else:
        for start_m in range(0, seqlen_q, BLOCK_M):
            attend_to_all_keys(
                q_ptr,
                k_ptr,
                v_ptr,
                out_ptr,
                lse_ptr,
                row_max_ptr,
                row_sum_ptr,
                start_m,
                seqlen_q,
                seqlen_k,
                scale,
                HEAD_DIM,
                BLOCK_M,
                BLOCK_N,
                IS_CAUSAL,
                LATE_DIVISION,
                EXP2,
                STORES_LSE,
                SKIPS_HIDDEN,
                K_IS_TRANSPOSED,
                INPUT_PRECISION,
            )


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    *,
    queries_outside: bool,
    sequence_parallel: bool,
    late_division: bool,
    exp2: bool,
    stores_lse: bool,
    skips_hidden: bool,
    k_is_transposed: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run one combination, which must make sense; q, k and v as every exhibit takes them.

    Returns out in q's dtype and the statistics, float32 (batch, num_heads, seqlen_q): (lse,) in
    natural units, or (row_max, row_sum), the maximum in base 2 with `exp2`.
    """
    if k_is_transposed:
        k = k.transpose(-1, -2).contiguous()
    batch, num_heads, seqlen_q, head_dim = q.shape
    num_heads_kv, seqlen_k = v.shape[1], v.shape[2]
    tile = exhibit_tile(head_dim, q.element_size())
    sizes = (
        seqlen_q,
        seqlen_k,
        num_heads // num_heads_kv,
        head_dim**-0.5 * LOG2_E if exp2 else head_dim**-0.5,
    )
    flags = {
        "HEAD_DIM": head_dim,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "IS_CAUSAL": causal,
        "LATE_DIVISION": late_division,
        "EXP2": exp2,
        "SKIPS_HIDDEN": skips_hidden,
        "K_IS_TRANSPOSED": k_is_transposed,
        "INPUT_PRECISION": input_precision(q.dtype),
        "num_warps": tile.warps,
    }
    if not queries_outside:
        out = torch.zeros_like(q, dtype=torch.float32)
        row_max = q.new_full((batch, num_heads, seqlen_q), float("-inf"), dtype=torch.float32)
        row_sum = torch.zeros_like(row_max)
        flash_fwd_steps_keys_outside[(batch * num_heads,)](
            q, k, v, out, row_max, row_sum, *sizes, **flags
        )
        return out.to(q.dtype), (row_max, row_sum)

    out = torch.empty_like(q)
    lse, row_max, row_sum = (
        q.new_empty((batch, num_heads, seqlen_q), dtype=torch.float32) if wanted else None
        for wanted in (stores_lse, not stores_lse, not stores_lse)
    )
    grid = (batch * num_heads,)
    if sequence_parallel:
        grid = (triton.cdiv(seqlen_q, tile.block_m), batch * num_heads)
    flash_fwd_steps_queries_outside[grid](
        q,
        k,
        v,
        out,
        lse,
        row_max,
        row_sum,
        *sizes,
        SEQUENCE_PARALLEL=sequence_parallel,
        STORES_LSE=stores_lse,
        **flags,
    )
    return out, (lse,) if stores_lse else (row_max, row_sum)
