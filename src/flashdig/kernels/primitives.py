"""Device functions that kernels and exhibits share."""

import triton
import triton.language as tl


@triton.jit
def round_to_tf32(x):
    """float32 rounded to the nearest TF32 (10 mantissa bits), ties away from zero.

    Tensor cores cut the low 13 bits off instead, which doubles the error and biases it.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
