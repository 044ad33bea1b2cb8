"""How dK and dV of a tile of keys leave the Hopper backward's main kernel. Device code."""

from flashdig.kernels.gluon_api import (
    fence_async_shared,
    gl,
    gluon,
    reinterpreted,
    wait_for_tile_stores,
)
from flashdig.kernels.hopper.backward_shared import MEETING
from flashdig.kernels.hopper.hardware_barriers import meet_at
from flashdig.kernels.hopper.rows import store_rows

COLUMNS = gl.constexpr(64)  # that one store writes


@gluon.jit
def _store_gradient(
    desc, x, staging, pieces, piece, STEP: gl.constexpr, key_rows, row
):  # fmt: skip
    """Start writing one consumer's keys of a gradient through `staging`, whose columns are
    `pieces` from number `piece` on, STEP apart."""
    staging.store(x.to(staging.dtype))
    fence_async_shared()
    for block in gl.static_range(x.shape[1] // COLUMNS):
        store_rows(desc, key_rows, row, block * COLUMNS, pieces.index(piece + STEP * block))


@gluon.jit
def store_gradients(
    dk_desc, dv_desc, dk, dv, shared, slot, key_rows, row, CONSUMER: gl.constexpr
):  # fmt: skip
    """Start writing a consumer's keys of dK and dV, through its half of the tile's buffer of V,
    which nobody else reads; where there is no second one, through the buffers of dS, of which each
    consumer takes a part for itself, and wait until they are read."""
    dtype: gl.constexpr = shared.k.dtype
    KEYS: gl.constexpr = dk.shape[0]
    HEAD_DIM: gl.constexpr = shared.k.shape[2]
    BLOCK_M: gl.constexpr = shared.dscores.shape[2]
    BLOCKS: gl.constexpr = HEAD_DIM // COLUMNS
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, COLUMNS], dtype)
    if shared.k.shape[0] == 2:
        # V lies as blocks of columns; of each, the first half is the first consumer's
        pieces = reinterpreted(shared.v, dtype, [4 * BLOCKS, KEYS, COLUMNS], layout)
        piece = 2 * BLOCKS * slot + CONSUMER
        staging = shared.v.index(slot).slice(CONSUMER * KEYS, KEYS, 0)
        _store_gradient(dv_desc, dv, staging, pieces, piece, 2, key_rows, row)
        wait_for_tile_stores(0)
        _store_gradient(dk_desc, dk, staging, pieces, piece, 2, key_rows, row)
    else:
        HALVES: gl.constexpr = 4 * BLOCK_M // HEAD_DIM
        pieces = reinterpreted(shared.dscores, dtype, [HALVES * BLOCKS, KEYS, COLUMNS], layout)
        whole: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
        halves = reinterpreted(shared.dscores, dtype, [HALVES, KEYS, HEAD_DIM], whole)
        OF_DK: gl.constexpr = CONSUMER if HALVES == 2 else 2 + CONSUMER
        meet_at(MEETING)
        staging = halves.index(CONSUMER)
        _store_gradient(dv_desc, dv, staging, pieces, BLOCKS * CONSUMER, 1, key_rows, row)
        if HALVES == 2:
            wait_for_tile_stores(0)
        staging = halves.index(OF_DK)
        _store_gradient(dk_desc, dk, staging, pieces, BLOCKS * OF_DK, 1, key_rows, row)
        wait_for_tile_stores(0)
        meet_at(MEETING)
