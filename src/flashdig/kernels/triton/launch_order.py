"""Launches that start before the one ahead of them has ended: programmatic dependent launch.

Between two kernels of one stream a GPU idles for a microsecond or so. A kernel that its launch
allows to (`launch_pdl`) is put on the multiprocessors as soon as every block of the kernel ahead
has said so, and waits there for that kernel's end and its writes (CUDA C++ programming guide,
"Programmatic dependent launch and synchronization"). Every kernel here waits at some time, so that
the end of one is the end of all before it: what follows in the stream sees everything written.

ORDER of a kernel:

    "none"      as usual
    "waits"     it begins when the one ahead has ended
    "overlaps"  it reads nothing that the one ahead writes, and so only ends after it
    "last"      as "waits", but what follows, which is not ours, does not start early
    "beside"    as "overlaps", and what follows does not start early either
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# architectures that have it
ORDERED = ("sm_90", "sm_100", "sm_120")


@triton.jit
def begin_after(ORDER: tl.constexpr):
    """Stands before the first memory access."""
    if ORDER == "waits":
        gdc_wait()
        gdc_launch_dependents()
    elif ORDER == "overlaps":
        gdc_launch_dependents()
    elif ORDER == "last":
        gdc_wait()


@triton.jit
def end_after(ORDER: tl.constexpr):
    """Stands behind the last memory access; every program comes there."""
    if ORDER == "overlaps" or ORDER == "beside":  # noqa: PLR1714 - no sets in kernels
        gdc_wait()
