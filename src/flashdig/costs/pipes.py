"""Cycles of one inner iteration (a tile of queries against a tile of keys) on each pipe of an SM.

Pipes: matrix products (tensor cores, or FMA units where none are used), shared memory, the special
function units that do exp2, FMA units for the softmax, and instruction issue. Instruction counts
are those of compiled loops: a Hopper forward of 128 x 128 at head_dim 128 and 64 has 490 and 451
instructions a warp with 8 warps, its backward of 64 x 128 at head_dim 128 has 419.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashdig.hardware.arch import Architecture
from flashdig.problem import DTYPE_BYTES

Path = Literal["fastest", "mma.sync", "fma"]

# A score of the forward: scale and subtract in one FMA, max, exp2, add; the conversion of P to the
# input type and a move of it handle two scores an instruction.
_INSTRUCTIONS_A_SCORE = 5.0
# Of the backward: scale and subtract, exp2, dP - delta, the product with P, and the conversions and
# moves of P and dS.
_INSTRUCTIONS_A_SCORE_BACKWARD = 6.0
# Addresses, barriers, row reductions between lanes, issue of the products and copies, a warp.
_LOOP_INSTRUCTIONS = 103
_LOOP_INSTRUCTIONS_BACKWARD = 195
# Lanes that hold a row of an accumulator together, each of which computes the rescale factor.
_LANES_A_ROW = 4
# A 16-row slice is the least that one warp's product works on.
_MMA_SYNC_ROWS = 16
# Shared-memory bytes a multiply-add of CUDA-core products in float32: 1,024 wavefronts of 128 bytes
# for the 131,072 multiply-adds of a 32 x 32 x 64 iteration, by the counters of the Triton article.
_FMA_BYTES_A_MULTIPLY_ADD = 1.0


@dataclass(frozen=True)
class IterationCycles:
    """Cycles of one iteration on each pipe, if that pipe alone were working, at full rate.

    Attributes:
        matmul: all products; on tensor cores or FMA units as `path` says.
        shared: operands read from shared memory (and P, dS written, in the backward).
        exp2: exponentials, those of the rescale factors included; None where the rate is unknown.
        exp2_rescale: the part for rescale factors.
        fma: softmax arithmetic on the FMA units.
        issue: instructions of softmax and loop over the issue slots.
        exp2_issue: the part of `issue` that starts exponentials.
        waits_for_operands: products by `mma.sync` on chips with a newer instruction, which reads
            shared memory itself. There the loads into registers were seen to add to the products
            (FlashAttention-2 on an H200), while on Ampere they overlap (its paper's A100 figures).
    """

    path: Path
    waits_for_operands: bool
    matmul: float
    shared: float
    exp2: float | None
    exp2_rescale: float | None
    fma: float
    issue: float
    exp2_issue: float

    @property
    def pipes(self) -> dict[str, float]:
        """Pipe, in words -> cycles."""
        products = "FMA units (products)" if self.path == "fma" else "tensor cores"
        cycles = {
            products: self.matmul,
            "shared memory": self.shared,
            "FMA units": self.fma,
            "issue": self.issue,
        }
        if self.exp2 is not None:
            cycles["exp2"] = self.exp2
        return cycles

    @property
    def limiter(self) -> str:
        """The busiest pipe."""
        return max(self.pipes, key=self.pipes.__getitem__)

    @property
    def overlapped(self) -> float:
        """Cycles if all pipes worked at the same time: no schedule is faster."""
        return max(self.pipes.values())


def inner_iteration(
    arch: Architecture,
    *,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int | None = None,
    dtype: str = "bfloat16",
    warps: int = 8,
    path: Path = "fastest",
    backward: bool = False,
    matmul_flop_per_clock: float | None = None,
) -> IterationCycles:
    """Cycles of `tile_m` queries against `tile_n` keys.

    Args:
        dtype: of the products' inputs, "tfloat32" included.
        warps: that share the tile.
        path: "fastest" is the architecture's best matrix instruction, "mma.sync" the older one,
            "fma" no tensor cores.
        matmul_flop_per_clock: of one SM of this very chip, where it differs from the
            architecture's (GeForce).

    Raises ValueError when the architecture has no such product.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    scores = tile_m * tile_n
    multiply_adds = scores * (3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v)
    rate = _matmul_rate(arch, dtype, path, matmul_flop_per_clock)
    element_bytes = DTYPE_BYTES["float32" if dtype == "tfloat32" else dtype]
    if path == "fma":
        shared_bytes = multiply_adds * _FMA_BYTES_A_MULTIPLY_ADD * element_bytes / 4
    elif backward:
        shared_bytes = _backward_operands(arch, tile_m, tile_n, head_dim, head_dim_v, warps, path)
        shared_bytes *= element_bytes
    else:
        shared_bytes = _forward_operands(arch, tile_m, tile_n, head_dim, head_dim_v, warps, path)
        shared_bytes *= element_bytes

    rescales = 0 if backward else _LANES_A_ROW * tile_m
    if backward:
        lane_instructions = scores * _INSTRUCTIONS_A_SCORE_BACKWARD + tile_m * head_dim
        loop_instructions = warps * _LOOP_INSTRUCTIONS_BACKWARD
        fma_operations = 3 * scores
    else:
        lane_instructions = scores * _INSTRUCTIONS_A_SCORE + tile_m * head_dim_v
        loop_instructions = warps * _LOOP_INSTRUCTIONS
        fma_operations = 2 * scores + tile_m * head_dim_v
    lanes = arch.warp_size * arch.issue_per_clock
    exp2_rate = arch.exp2_per_clock
    return IterationCycles(
        path=path,
        waits_for_operands=path == "mma.sync" and arch.mma_rows is not None,
        matmul=2 * multiply_adds / rate,
        shared=shared_bytes / arch.shared_bytes_per_clock,
        exp2=None if exp2_rate is None else (scores + rescales) / exp2_rate,
        exp2_rescale=None if exp2_rate is None else rescales / exp2_rate,
        fma=fma_operations / arch.fma_per_clock,
        issue=lane_instructions / lanes + loop_instructions / arch.issue_per_clock,
        exp2_issue=(scores + rescales) / lanes,
    )


def _matmul_rate(
    arch: Architecture, dtype: str, path: Path, matmul_flop_per_clock: float | None
) -> float:
    if path == "fma":
        return 2 * arch.fma_per_clock
    if matmul_flop_per_clock is not None:
        return matmul_flop_per_clock
    if dtype not in arch.mma_flop_per_clock:
        raise ValueError(
            f"the tensor cores of compute capability {arch.key} do not multiply {dtype}; "
            f"they do {', '.join(arch.mma_flop_per_clock)}"
        )
    return arch.mma_flop_per_clock[dtype]


def _forward_operands(
    arch: Architecture,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    warps: int,
    path: Path,
) -> float:
    """Elements read from shared memory; P comes from registers or tensor memory."""
    keys = tile_n * (head_dim + head_dim_v)
    return tile_m * head_dim + keys * _repeats(arch, tile_m, warps, path)


def _backward_operands(
    arch: Architecture,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    warps: int,
    path: Path,
) -> float:
    """Elements of the five products' operands in shared memory, and P and dS written to it."""
    if path == "mma.sync" or arch.mma_rows is None:
        # warps stand in two columns: each reads its half of B and the rows of A twice
        column_warps = 2 if warps > 1 else 1
        row_warps = max(1, warps // column_warps)
        repeats_m = repeats_n = float(row_warps)
    else:
        column_warps = 1
        repeats_m = _repeats(arch, tile_m, warps, path)
        repeats_n = _repeats(arch, tile_n, warps, path)
    scores = tile_m * tile_n
    queries, keys = tile_m * head_dim, tile_n * head_dim
    queries_v, keys_v = tile_m * head_dim_v, tile_n * head_dim_v
    products = (
        column_warps * queries + repeats_m * keys,  # S = Q K^T
        column_warps * queries_v + repeats_m * keys_v,  # dP = dO V^T
        column_warps * scores + repeats_n * queries_v,  # dV = P^T dO
        column_warps * scores + repeats_m * keys,  # dQ = dS K
        column_warps * scores + repeats_n * queries,  # dK = dS^T Q
    )
    return sum(products) + 2 * scores


def _repeats(arch: Architecture, rows: int, warps: int, path: Path) -> float:
    """How often the B operand is read from shared memory: once for each group of rows."""
    if path == "mma.sync" or arch.mma_rows is None:
        return float(max(1, min(warps, rows // _MMA_SYNC_ROWS)))
    return max(1.0, rows / arch.mma_rows)
