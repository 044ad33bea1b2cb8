"""Shared-memory traffic of one inner iteration: operands, copied tiles, bank conflicts.

Elements where an operand is read without conflicts, wavefronts (of 128 bytes) where lanes collide.
"""

from __future__ import annotations

from flashdig.costs.banks import WAVEFRONT_BYTES, masked_lane_access
from flashdig.hardware.arch import Architecture

# A 16-row slice is the least that one warp's product works on.
_MMA_SYNC_ROWS = 16
# Triton's layout of a CUDA-core product: 16 lanes side by side, so 2 lanes above each other. The
# lanes above each other ask for the same columns ("tid & 15"), those side by side for the same row.
_LANES_ASIDE = 16
_VECTOR_BYTES = 16
_FLOAT_BYTES = 4


def forward_operands(
    arch: Architecture,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    warps: int,
    *,
    newest: bool,
) -> float:
    """Elements of the forward's operands read from shared memory.

    `newest` products multiply 64 or more rows by the same B; with `mma.sync` each group of warps
    over other rows reads B itself. Where there are more warps than slices of 16 rows, warps stand
    side by side: they read the same Q, and exchange P through shared memory.
    """
    keys = tile_n * (head_dim + head_dim_v)
    if newest and arch.mma_rows is not None:
        return tile_m * head_dim + keys * max(1.0, tile_m / arch.mma_rows)
    row_warps = max(1, min(warps, tile_m // _MMA_SYNC_ROWS))
    column_warps = max(1, warps // row_warps)
    exchanged = tile_m * tile_n * (1 + column_warps) if column_warps > 1 else 0
    return tile_m * head_dim * column_warps + keys * row_warps + exchanged


def backward_operands(
    arch: Architecture,
    tile_m: int,
    tile_n: int,
    head_dim: int,
    head_dim_v: int,
    warps: int,
    *,
    newest: bool,
) -> float:
    """Elements of the five products' operands in shared memory, and P and dS written to it."""
    if newest and arch.mma_rows is not None:
        column_warps = 1
        repeats_m = max(1.0, tile_m / arch.mma_rows)
        repeats_n = max(1.0, tile_n / arch.mma_rows)
    else:
        # warps stand in two columns: each reads its half of B and the rows of A twice
        column_warps = 2 if warps > 1 else 1
        repeats_m = repeats_n = float(max(1, warps // column_warps))
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


def cutlass_operands(tile_m: int, tile_n: int, head_dim: int, head_dim_v: int) -> float:
    """Elements that CUTLASS's fused attention (SDPA's memory-efficient backend) moves.

    Its two products are whole threadblock products, each with a pipeline of its own: Q is copied
    again for every tile of keys, P goes through shared memory, and 32 x 32 warp tiles read A once
    for each column of warps and B once for each row.
    """
    warp = 32
    rows = max(1, tile_m // warp)
    columns, columns_v = max(1, tile_n // warp), max(1, min(tile_n, head_dim_v) // warp)
    queries, keys = tile_m * head_dim, tile_n * head_dim
    scores, keys_v = tile_m * tile_n, tile_n * head_dim_v
    read = columns * queries + rows * keys + columns_v * scores + rows * keys_v
    return read + queries + keys + scores + keys_v


def fma_wavefronts(
    tile_m: int, tile_n: int, head_dim: int, head_dim_v: int, warps: int, *, k_is_transposed: bool
) -> int:
    """Wavefronts of the operands of CUDA-core products in float32, as Triton lays them out.

    A warp is 2 rows of 16 lanes. Each lane reads Q and P along their rows and V along its columns,
    16 bytes at a time, without conflicts. K's tile is stored as it is in memory, head_dim fast: 16
    lanes that want 16 keys at the same place ask for 16 rows of one tile, whose distance is a
    multiple of the 32 banks. With K transposed beforehand the same lanes read along a row.
    """
    row_groups = 2 * warps
    rows = max(1, tile_m // row_groups)  # rows of queries a lane
    keys = max(1, tile_n // _LANES_ASIDE)  # keys a lane
    columns = max(1, head_dim_v // _LANES_ASIDE)  # columns of the output a lane
    whole = masked_lane_access(0, bytes_per_lane=_VECTOR_BYTES).wavefronts
    vector = _VECTOR_BYTES // _FLOAT_BYTES
    queries = rows * (head_dim // vector) * whole
    probs = rows * (tile_n // vector) * whole
    values = tile_n * _along_a_row(columns)
    if k_is_transposed:
        keys_wavefronts = head_dim * _along_a_row(keys)
    else:
        row_bytes = head_dim * _FLOAT_BYTES
        column = masked_lane_access(keys * row_bytes, bytes_per_lane=_VECTOR_BYTES)
        keys_wavefronts = keys * (head_dim // vector) * column.wavefronts
    return warps * (queries + probs + values + keys_wavefronts)


def _along_a_row(floats: int) -> int:
    """Wavefronts of 16 lanes side by side that read `floats` neighbours each."""
    width = min(floats, _VECTOR_BYTES // _FLOAT_BYTES) * _FLOAT_BYTES
    loads = max(1, floats * _FLOAT_BYTES // width)
    stride = floats * _FLOAT_BYTES
    return loads * masked_lane_access(stride, bytes_per_lane=width).wavefronts


def wavefront_cycles(arch: Architecture, wavefronts: float) -> float:
    return wavefronts * WAVEFRONT_BYTES / arch.shared_bytes_per_clock
