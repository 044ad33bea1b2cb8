"""Cycles of one inner iteration (a tile of queries against a tile of keys) on each pipe of an SM.

Pipes: matrix products (tensor cores, or FMA units where none are used), shared memory, the special
function units that do exp2, FMA units for the softmax, and instruction issue. Instruction counts
are those of compiled loops: a Hopper forward of 128 x 128 at head_dim 128 and 64 has 490 and 451
instructions a warp with 8 warps, its backward of 64 x 128 at head_dim 128 has 419.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flashdig.costs.shared_memory import backward_operands, forward_operands
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
# Shared-memory bytes a multiply-add of CUDA-core products in float32: 1,024 wavefronts of 128 bytes
# for the 131,072 multiply-adds of a 32 x 32 x 64 iteration, by the counters of the Triton article.
_FMA_BYTES_A_MULTIPLY_ADD = 1.0


@dataclass(frozen=True)
class IterationCycles:
    """Cycles of one iteration on each pipe, if that pipe alone were working, at full rate.

    Attributes:
        matmul: all products; on tensor cores or FMA units as `path` says.
        shared: operands read from shared memory (and P, dS written, in the backward).
        copies: tiles of K and V written to shared memory by asynchronous copies.
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
    copies: float
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
            "shared memory": self.shared + self.copies,
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
    matmul_passes: int = 1,
    shared_cycles: float | None = None,
    issue_cycles: float | None = None,
    copies_tiles: bool = False,
) -> IterationCycles:
    """Cycles of `tile_m` queries against `tile_n` keys.

    Args:
        dtype: of the products' inputs, "tfloat32" included.
        warps: that share the tile.
        path: "fastest" is the architecture's best matrix instruction, "mma.sync" the older one,
            "fma" no tensor cores.
        matmul_flop_per_clock: of one SM of this very chip, where it differs from the
            architecture's (GeForce).
        matmul_passes: products of lower precision that make one of float32 ("3xTF32": three).
        shared_cycles, issue_cycles: of this very kernel, where they are known.
        copies_tiles: K and V come through copies into shared memory (all but the plainest kernels).

    Raises ValueError when the architecture has no such product.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    scores = tile_m * tile_n
    multiply_adds = scores * (3 * head_dim + 2 * head_dim_v if backward else head_dim + head_dim_v)
    rate = _matmul_rate(arch, dtype, path, matmul_flop_per_clock)
    element_bytes = DTYPE_BYTES["float32" if dtype == "tfloat32" else dtype]
    if path == "fma":
        shared_bytes = multiply_adds * _FMA_BYTES_A_MULTIPLY_ADD * element_bytes / 4
    else:
        operands = backward_operands if backward else forward_operands
        newest = path == "fastest"
        shared_bytes = operands(arch, tile_m, tile_n, head_dim, head_dim_v, warps, newest=newest)
        shared_bytes *= element_bytes
    copied_bytes = tile_n * (head_dim + head_dim_v) * element_bytes if copies_tiles else 0

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
        matmul=matmul_passes * 2 * multiply_adds / rate,
        shared=shared_bytes / arch.shared_bytes_per_clock
        if shared_cycles is None
        else shared_cycles,
        copies=copied_bytes / arch.shared_bytes_per_clock,
        exp2=None if exp2_rate is None else (scores + rescales) / exp2_rate,
        exp2_rescale=None if exp2_rate is None else rescales / exp2_rate,
        fma=fma_operations / arch.fma_per_clock,
        issue=lane_instructions / lanes + loop_instructions / arch.issue_per_clock
        if issue_cycles is None
        else issue_cycles,
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
