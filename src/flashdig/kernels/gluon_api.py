"""One door to Gluon's names, which move between Triton releases (3.6 to 3.9 are served)."""

from typing import Any

import triton.language.core
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

__all__ = [
    "aggregate",
    "commit_async_loads",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_tile",
    "load_to_shared",
    "mbarrier",
    "meet_in_partition",
    "mma_v2",
    "reinterpreted",
    "store_tile",
    "wait_for_async_loads",
    "wait_for_tile_stores",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

# cp.async: (shared memory, pointers, mask) -> nothing; masked-off elements become 0. Triton 3.9
# calls it async_load and refuses the old name
load_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_async_loads = async_copy.commit_group
# waits until at most so many committed groups are under way
wait_for_async_loads = async_copy.wait_group

# TMA: (descriptor, coordinates, barrier, shared memory) and (descriptor, coordinates, shared
# memory). Triton 3.8 gave them new names, 3.9 refuses the old ones
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
wait_for_tile_stores = tma.store_wait

# (shared memory, dtype, shape, layout) -> the same memory seen so; public since Triton 3.9
_memory: Any = vars(gl)["shared_memory_descriptor"]
reinterpreted = getattr(_memory, "reinterpret", None) or _memory._reinterpret

# where the warps of a partition wait for one another; Triton 3.9 renamed it
meet_in_partition: Any = vars(gl).get("barrier") or vars(gl)["thread_barrier"]

# a class whose members travel together through device functions; not public in any release yet
aggregate = triton.language.core._aggregate
