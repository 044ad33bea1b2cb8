"""Why float32 is six products of bfloat16 parts: the error that tensor cores make of it, simulated.

They add 16 products of bfloat16 (8 of TF32) exactly to the accumulator and cut the sum off to
float32's 24 bits. `flashdig.kernels.triton.products` is the device code.
"""

import numpy as np
import pytest

TERMS = 128
# of the nine products, those that are taken, the smallest first
SIX = ((2, 0), (0, 2), (1, 1), (1, 0), (0, 1), (0, 0))
UNIT = 2.0**-24


def cut_off(x):
    """float64 to float32, towards zero."""
    nearest = x.astype(np.float32)
    beyond = np.abs(nearest.astype(np.float64)) > np.abs(x)
    return np.where(beyond, np.nextafter(nearest, np.float32(0)), nearest).astype(np.float64)


def accumulated(a, b, total, depth):
    for k in range(0, TERMS, depth):
        total = cut_off(total + a[:, k : k + depth] @ b[k : k + depth])
    return total


def bfloat16_parts(x):
    parts = []
    for _ in range(3):
        high = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
        parts.append(high.astype(np.float64))
        x = x - high
    assert not x.any()
    return parts


def six_of_bfloat16(a, b):
    a_parts, b_parts = bfloat16_parts(a), bfloat16_parts(b)
    total = np.zeros((len(a), b.shape[1]))
    for i, j in SIX:
        total = accumulated(a_parts[i], b_parts[j], total, 16)
    return total


def to_tf32(x):
    return ((x.view(np.int32) + 0x1000) & -0x2000).view(np.float32)


def three_of_tf32(a, b):
    total = np.zeros((len(a), b.shape[1]))
    a_parts, b_parts = ([to_tf32(x), to_tf32(x - to_tf32(x))] for x in (a, b))
    for i, j in ((1, 0), (0, 1), (0, 0)):
        total = accumulated(a_parts[i].astype(np.float64), b_parts[j].astype(np.float64), total, 8)
    return total


def one_fma_after_the_other(a, b):
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for k in range(TERMS):
        exact = total.astype(np.float64) + np.outer(a[:, k].astype(np.float64), b[k])
        total = exact.astype(np.float32)
    return total.astype(np.float64)


@pytest.mark.parametrize("values", ["normal", "positive"])
def test_six_products_are_as_near_as_float32_and_three_of_tf32_are_not(values) -> None:
    draw = np.random.default_rng(0)
    draws = draw.standard_normal if values == "normal" else draw.random
    a, b = draws((64, TERMS)).astype(np.float32), draws((TERMS, 96)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def error(product):
        return np.abs(product(a, b) - exact).max() / np.abs(exact).max() / UNIT

    ours, tf32, before = map(error, (six_of_bfloat16, three_of_tf32, one_fma_after_the_other))
    assert ours <= 1.1 * before
    assert tf32 > 1.5 * ours


def test_what_is_left_out_is_below_float32s_rounding() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.standard_normal((2, 4096)).astype(np.float32)
    a_parts, b_parts = bfloat16_parts(a), bfloat16_parts(b)
    taken = sum(a_parts[i] * b_parts[j] for i, j in SIX)
    exact = a.astype(np.float64) * b.astype(np.float64)
    assert (np.abs(taken - exact) <= 2.0**-21 * np.abs(exact)).all()
    assert np.median(np.abs(taken / exact - 1)) < UNIT
