"""The walk's steps about the machine: memory, shared memory, tensor-core instructions, shuffles,
and the article's measured times."""

from __future__ import annotations

import math

import torch

from flashdig.generations.walk_data import Check, Shown, Step
from flashdig.generations.walk_loop import largest_difference
from flashdig.generations.walk_shared_memory import TileChoice

# The article's case (sections 2.1 and 6.4) and its chip (section 2.2).
BATCH = 8
NUM_HEADS = 16
SEQLEN = 4096
HEAD_DIM = 64
CHIP_FLOPS = 300e12
CHIP_BYTES_PER_SECOND = 2e12
NAIVE_SECONDS = 120e-3
FUSED_SECONDS = 35e-3
NAIVE_BYTES = 8e9
FUSED_BYTES = 1.2e9

MIB = 2**20
GIB = 2**30
MMA_M, MMA_N, MMA_K = 16, 8, 16
LANES = 32


def _total_flops() -> int:
    """Two products of 2 N² d FLOP for each head of each sequence."""
    return BATCH * NUM_HEADS * 2 * (2 * SEQLEN * SEQLEN * HEAD_DIM)


def memory_step() -> Step:
    """Bytes of S and P and the traffic they cause, against what the fused form moves."""
    head_bytes = SEQLEN * SEQLEN * 4
    scores_bytes = BATCH * NUM_HEADS * head_bytes
    both_bytes = 2 * scores_bytes
    score_traffic = 4 * scores_bytes  # write S, read S, write P, read P
    tensor_bytes = BATCH * NUM_HEADS * SEQLEN * HEAD_DIM * 4
    fused_traffic = 4 * tensor_bytes  # Q, K, V in and O out, each once
    naive_intensity = _total_flops() / (score_traffic + fused_traffic)
    fused_intensity = _total_flops() / fused_traffic
    ridge = CHIP_FLOPS / CHIP_BYTES_PER_SECOND
    shared_bytes = 100 * 1024
    return Step(
        "Why S and P are not written out",
        f"Batch {BATCH}, {NUM_HEADS} heads, seqlen {SEQLEN}, head_dim {HEAD_DIM}, float32. S alone "
        f"is {head_bytes / MIB:g} MiB a head ({head_bytes / 1e6:.1f} MB) and "
        f"{scores_bytes / GIB:g} GiB in all; P doubles that. Both are written and read once, while "
        "the result needs only Q, K, V and O. One head's S is also "
        f"{head_bytes / shared_bytes:.0f} times as large as 100 KiB of shared memory, so it must "
        "be cut.",
        "bytes of S = batch * heads * N^2 * 4;  traffic of S and P = 4 * bytes of S;  "
        "intensity = 4 N^2 d * batch * heads FLOP / bytes moved",
        (
            Shown("S of one head, MiB", head_bytes / MIB),
            Shown("S of all heads, GiB", scores_bytes / GIB),
            Shown("S and P, GiB", both_bytes / GIB),
            Shown("traffic of S and P, GB", score_traffic / 1e9),
            Shown("Q, K, V and O, GB", fused_traffic / 1e9),
            Shown("FLOP per byte: naive", naive_intensity),
            Shown("FLOP per byte: fused, at least those bytes", fused_intensity),
            Shown("FLOP per byte that the article's chip needs", ridge),
            Shown("S of one head / shared memory", head_bytes / shared_bytes),
        ),
        (
            Check("S of one head, MiB", head_bytes / MIB, 64),
            Check("S, GiB", scores_bytes / GIB, 8),
            Check("S and P, GiB", both_bytes / GIB, 16),
            Check("naive is bound by memory", float(naive_intensity < ridge), 1),
            Check("fused need not be", float(fused_intensity > ridge), 1),
        ),
    )


def shared_memory_step() -> Step:
    """Buffers of the article's 64 x 64 x 64 tile in float16."""
    side, element_bytes = 64, 2
    buffer_kib = side * side * element_bytes / 1024
    names = ("Q", "K", "V", "S", "P")
    single = TileChoice(side, side, side, 1, keeps_scores=True)
    double = TileChoice(side, side, side, 2, keeps_scores=True)
    registers = TileChoice(side, side, side, 2, keeps_scores=False)
    return Step(
        "A tile in shared memory",
        f"{side} queries, {side} keys, head_dim {side}, 2 bytes: five buffers of "
        f"{buffer_kib:g} KiB make {single.shared_kib:g} KiB. The article adds "
        "them up to 32 and then says 40 with auxiliary variables. Double buffering K and V, as it "
        "then proposes, makes "
        f"{double.shared_kib:g}; with S and P in registers that falls to {registers.shared_kib:g} "
        "again. S and P in float32 in shared memory, its own advice on accuracy, would add "
        f"{2 * buffer_kib:g}.",
        "KiB = rows * columns * 2 / 1024 for each buffer",
        (
            Shown("KiB a buffer", (buffer_kib,) * len(names), columns=names),
            Shown(
                "KiB a block",
                (single.shared_kib, double.shared_kib, registers.shared_kib),
                columns=("all five", "K and V twice", "K and V twice, S and P in registers"),
            ),
        ),
        (
            Check("sum of the five buffers, KiB", buffer_kib * len(names), 40),
            Check("block with one stage, KiB", single.shared_kib, 40),
            Check("block with two stages of K and V, KiB", double.shared_kib, 56),
        ),
    )


def mma_step(tile: int = 64, head_dim: int = 64, warps: int = 4) -> Step:
    """Both products of a tile done fragment by fragment of m16n8k16, and counted."""
    index = torch.arange(tile * head_dim, dtype=torch.float64).reshape(tile, head_dim)
    # small whole numbers: every sum is exact
    q, k, v = index % 5 - 2, index % 7 - 3, index % 3 - 1
    scores, scores_count = _multiply_by_fragments(q, k.T)
    out, out_count = _multiply_by_fragments(scores, v)
    flops = 2 * MMA_M * MMA_N * MMA_K
    return Step(
        "Tensor-core instructions of a tile",
        f"One m16n8k16 multiplies 16x16 by 16x8 for a whole warp, {flops} FLOP. A 64x64x64 tile "
        f"takes 4 * 8 * 4 = 128 for Q Kᵀ and as many for P V, {warps} warps a quarter each.",
        "instructions = (M/16) (N/8) (K/16)",
        (
            Shown("m16n8k16 for Q Kᵀ", float(scores_count)),
            Shown("m16n8k16 for P V", float(out_count)),
            Shown("a warp", (scores_count + out_count) / warps),
            Shown("FLOP of the tile", float(flops * (scores_count + out_count))),
        ),
        (
            Check("fragments against the whole product", largest_difference(scores, q @ k.T), 0),
            Check("the second product too", largest_difference(out, q @ k.T @ v), 0),
            Check("instructions for Q Kᵀ", scores_count, 128),
            Check(
                "FLOP against 4 tile² d",
                flops * (scores_count + out_count),
                4 * tile * tile * head_dim,
            ),
        ),
    )


def _multiply_by_fragments(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, int]:
    """a (M, K) times b (K, N) in m16n8k16 fragments, and how many there were."""
    product = a.new_zeros(a.shape[0], b.shape[1])
    count = 0
    for row in range(0, a.shape[0], MMA_M):
        for column in range(0, b.shape[1], MMA_N):
            for inner in range(0, a.shape[1], MMA_K):
                product[row : row + MMA_M, column : column + MMA_N] += (
                    a[row : row + MMA_M, inner : inner + MMA_K]
                    @ b[inner : inner + MMA_K, column : column + MMA_N]
                )
                count += 1
    return product, count


def butterfly_step() -> Step:
    """Maximum and sum over 32 lanes by exchanging with lane XOR 16, 8, 4, 2, 1."""
    values = [float((7 * lane) % 32) for lane in range(LANES)]
    maxima, sums = [values], [values]
    offsets = [LANES >> step for step in range(1, int(math.log2(LANES)) + 1)]
    for offset in offsets:
        maxima.append([max(x, maxima[-1][i ^ offset]) for i, x in enumerate(maxima[-1])])
        sums.append([x + sums[-1][i ^ offset] for i, x in enumerate(sums[-1])])
    lanes_of_row = _lanes_holding_row(0, tile_n=64)
    labels = ("start", *(f"xor {offset}" for offset in offsets))
    lanes = tuple(str(lane) for lane in range(LANES))
    return Step(
        "Butterfly reduction over a warp",
        "In each step every lane takes its partner's value (__shfl_xor_sync) and combines it: "
        "after 5 steps all 32 lanes hold the result, and none has to broadcast it. In the "
        "m16n8k16 accumulator a row lies in 4 lanes only, so a kernel that keeps S in registers "
        "reduces its own columns first and then needs 2 steps, not 5.",
        "x_lane = op(x_lane, x_(lane xor offset)) for offset 16, 8, 4, 2, 1",
        (
            Shown("maximum", tuple(tuple(row) for row in maxima), labels, lanes),
            Shown("sum", tuple(tuple(row) for row in sums), labels, lanes),
        ),
        (
            Check("steps", len(offsets), 5),
            Check("lanes with the maximum", float(maxima[-1].count(max(values))), LANES),
            Check("lanes with the sum", float(sums[-1].count(sum(values))), LANES),
            Check("lanes that hold row 0 of a mma accumulator", len(lanes_of_row), 4),
            Check("steps among those", math.log2(len(lanes_of_row)), 2),
        ),
    )


def _lanes_holding_row(row: int, tile_n: int) -> set[int]:
    """Lanes of a warp that hold elements of a row of m16n8k16 accumulators, tile_n columns wide.

    PTX ISA, "Matrix Fragments for mma.m16n8k16": lane holds rows lane // 4 and lane // 4 + 8,
    columns 2 (lane % 4) and the next, of each 8 columns.
    """
    return {
        lane
        for lane in range(LANES)
        for column in range(tile_n)
        if row % 8 == lane // 4 and column % 8 // 2 == lane % 4
    }


def performance_step() -> Step:
    """The article's measured claim held against arithmetic."""
    speed_up = NAIVE_SECONDS / FUSED_SECONDS
    saved_percent = (1 - FUSED_BYTES / NAIVE_BYTES) * 100
    flops = _total_flops()
    fused_rate, naive_rate = flops / FUSED_SECONDS / 1e12, flops / NAIVE_SECONDS / 1e12
    score_gb = BATCH * NUM_HEADS * SEQLEN * SEQLEN * 4 / 1e9
    tensors_gb = 4 * BATCH * NUM_HEADS * SEQLEN * HEAD_DIM * 4 / 1e9
    return Step(
        "The article's measurement, checked",
        "120 ms and 8 GB against 35 ms and 1.2 GB: the ratios follow. But 8 GB holds S and P in "
        "float16, or one of them in float32, not both; Q, K, V and O are "
        f"{tensors_gb:.2f} GB even in float32, so more than half of the 1.2 GB is "
        "something else; and "
        f"{fused_rate:.1f} TFLOP/s is {fused_rate * 1e12 / CHIP_FLOPS:.0%} of what section 2.2 "
        "says of such a chip: the fused kernel beats the naive form and is still far from the "
        "machine.",
        "speed-up = 120 / 35;  saving = 1 - 1.2 / 8;  rate = 4 N^2 d * batch * heads / 35 ms",
        (
            Shown("speed-up", speed_up),
            Shown("memory saved, %", saved_percent),
            Shown("TFLOP (both products, all heads)", flops / 1e12),
            Shown("fused, TFLOP/s", fused_rate),
            Shown("naive, TFLOP/s", naive_rate),
            Shown("share of the chip, %", fused_rate * 1e12 / CHIP_FLOPS * 100),
            Shown("S in float32, GB", score_gb),
            Shown("Q, K, V and O in float32, GB", tensors_gb),
        ),
        (
            Check("speed-up", speed_up, 3.4, 0.05),
            Check("memory saved, %", saved_percent, 85, 0.5),
            Check("fused, TFLOP/s", fused_rate, 15.7, 0.05),
        ),
    )
