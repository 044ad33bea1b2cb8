"""How fast the keys and values of a decode cell can be read at all: a kernel that does only that.

For a few megabytes a launch and an empty pipeline count: the chip's bandwidth would say too much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

WORDS = 2048  # of 4 bytes, read at once by 128 threads
STEPS = 4


@triton.jit
def flashdig_read_bytes(x_ptr, y_ptr, out_ptr, words, WORDS: tl.constexpr, STEPS: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * (WORDS * STEPS)
    total = tl.zeros([WORDS], tl.int32)
    for step in tl.static_range(STEPS):
        places = start + step * WORDS + tl.arange(0, WORDS)
        inside = places < words
        total += tl.load(x_ptr + places, mask=inside, other=0)
        total += tl.load(y_ptr + places, mask=inside, other=0)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def reader(k: torch.Tensor, v: torch.Tensor, count: int) -> Callable[[], torch.Tensor]:
    """A call that reads the first `count` bytes of each of k and v, contiguous CUDA tensors, and
    returns one sum for each program."""
    x, y = (z.reshape(-1).view(torch.int32) for z in (k, v))
    words = count // 4
    programs = triton.cdiv(words, WORDS * STEPS)
    out = torch.empty(programs, dtype=torch.int32, device=k.device)

    def call() -> torch.Tensor:
        flashdig_read_bytes[(programs,)](x, y, out, words, WORDS=WORDS, STEPS=STEPS, num_warps=4)
        return out

    return call
