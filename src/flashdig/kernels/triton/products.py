"""Device functions: matrix products, in the precision that a call may take.

PRECISION "bf16x6" is float32 on tensor cores: each operand is the sum of three bfloat16, exactly,
and six of their nine products are added up in float32. The three left out are below float32's own
rounding. Six products in bfloat16 cost what three in TF32 cost, and TF32 would keep 22 bits only.
"""

import triton
import triton.language as tl


@triton.jit
def _cut(x):
    """(x in bfloat16, cut off instead of rounded, so that nothing overflows; what is left)."""
    bits = x.to(tl.int32, bitcast=True)
    high = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return high, x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_parts(x):
    """Three bfloat16 whose sum is x, a finite float32 (8 of its 24 bits in each).

    Bits below bfloat16's smallest number, 2**-133, are lost; the parts of Inf are not its sum.
    """
    high, rest = _cut(x)
    middle, rest = _cut(rest)
    low, _rest = _cut(rest)
    return high, middle, low


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32."""
    if PRECISION == "bf16x6":
        a_high, a_middle, a_low = bfloat16_parts(a)
        b_high, b_middle, b_low = bfloat16_parts(b)
        # the smallest first
        total = tl.dot(a_low, b_high)
        total = tl.dot(a_high, b_low, total)
        total = tl.dot(a_middle, b_middle, total)
        total = tl.dot(a_middle, b_high, total)
        total = tl.dot(a_high, b_middle, total)
        return tl.dot(a_high, b_high, total)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr):
    """total + a @ b in float32."""
    if PRECISION == "bf16x6":
        # tensor cores cut their sums off instead of rounding: over many tiles that would add up
        return total + product(a, b, PRECISION)
    return tl.dot(a, b, total, input_precision=PRECISION)
