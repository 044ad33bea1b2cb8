"""One door to Gluon's names, which move between Triton releases (3.6 to 3.9 are served)."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

__all__ = [
    "commit_async_loads",
    "gl",
    "gluon",
    "load_to_shared",
    "mma_v2",
    "wait_for_async_loads",
]

# cp.async: (shared memory, pointers, mask) -> nothing; masked-off elements become 0. Triton 3.9
# calls it async_load and refuses the old name
load_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
commit_async_loads = async_copy.commit_group
# waits until at most so many committed groups are under way
wait_for_async_loads = async_copy.wait_group
