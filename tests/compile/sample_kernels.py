"""Kernels to compile by name: what a user's file may hold."""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@triton.autotune(configs=[triton.Config({"BLOCK_K": 64}, num_warps=4, num_stages=2)], key=["k"])
@triton.jit
def gemm(
    a_ptr,
    b_ptr,
    c_ptr,
    k: "i32",  # noqa: F821, a type in Triton's words
    bias_ptr=None,
    BLOCK_M: tl.constexpr = 64,
    BLOCK_N: tl.constexpr = 64,
    BLOCK_K: tl.constexpr = 32,
):
    m, n, kk = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        a = tl.load(a_ptr + m[:, None] * 1024 + kk[None, :] + start)
        b = tl.load(b_ptr + (kk[:, None] + start) * BLOCK_N + n[None, :])
        total = tl.dot(a, b, total)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n)[None, :]
    tl.store(c_ptr + m[:, None] * BLOCK_N + n[None, :], total)


@triton.jit
def scale(x_ptr, n, BLOCK: tl.constexpr, MODE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    if MODE == "double":
        x = x * 2
    tl.store(x_ptr + offsets, x, mask=offsets < n)


@gluon.jit
def copy(x_ptr, y_ptr, layout: gl.constexpr):
    offsets = gl.arange(0, 128, layout=layout)
    gl.store(y_ptr + offsets, gl.load(x_ptr + offsets))


def plain_function():
    return 1
