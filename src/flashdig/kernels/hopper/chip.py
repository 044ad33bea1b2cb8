"""What the Hopper launchers take the chip to be: its SMs and its L2 cache."""

from __future__ import annotations

import torch

from flashdig.kernels import launch

# bytes that the heads of one causal section may share of the L2 cache
L2_BYTES = 32 * 2**20
H200_MULTIPROCESSORS = 132


def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device; of an H200 for a compilation without one."""
    return launch.multiprocessors(device, H200_MULTIPROCESSORS)


def heads_together(
    heads: int, head_bytes: int, *, causal: bool, packed: bool, l2_bytes: int = L2_BYTES
) -> int:
    """Heads that are walked side by side, so that what their tiles share stays in L2.

    Args:
        head_bytes: what one head's tiles share.
        l2_bytes: that the heads of one causal section may share.
    """
    if packed or not causal:
        return 1
    return max(1, min(heads, l2_bytes // head_bytes))
