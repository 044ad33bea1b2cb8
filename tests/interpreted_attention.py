"""Runs flashdig.attention with Triton's interpreter, which is chosen before Triton is imported.

`python -m tests.interpreted_attention` prints, as JSON, the largest differences between backends
"triton" and "tiled" for every case: out, lse and each gradient.
"""

import json
import math
import os
import sys

if __name__ == "__main__":  # not where tests only read its tables
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from flashdig import attention, attention_varlen
from flashdig.evidence.quick_interpreter import quicken_interpreter
from tests.attention_cases import build, gradients, taking_gradients
from tests.faults.targets import spread

DENSE = ("causal more queries", "everything, small")
ZERO_SIZES = ((2, 0, 5), (2, 5, 0), (0, 5, 5))


def differences(call):
    """Largest differences between the tensors that `call(backend)` gives for the two backends.

    NaN where shapes, dtypes or strides differ.
    """
    both = []
    for backend in ("triton", "tiled"):
        torch.manual_seed(5)
        both.append([torch.nan_to_num(x, nan=math.nan, neginf=-9e9) for x in call(backend)])
    return [difference(a, b) for a, b in zip(*both, strict=True)]


def difference(a, b):
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return math.nan
    return (a - b).abs().amax().item() if a.numel() else 0.0


def dense(name):
    q, k, v, options = build(name, torch.float32)

    def call(backend):
        out, lse = attention(q, k, v, **options, return_lse=True, backend=backend)
        return [out, lse, *gradients(out, lse, taking_gradients(q, k, v, options))]

    return differences(call)


def packed():
    torch.manual_seed(0)
    cu_q = torch.tensor([1, 6, 6, 40], dtype=torch.int32)
    cu_k = torch.tensor([0, 9, 12, 60], dtype=torch.int32)
    used = torch.tensor([4, 0, 48], dtype=torch.int32)
    q, k, v, sinks = (
        torch.randn(shape).requires_grad_()
        for shape in ((42, 4, 16), (64, 2, 16), (64, 2, 24), (4,))
    )

    def call(backend):
        out, lse = attention_varlen(
            q, k, v, cu_q, cu_k, seqused_k=used, causal=True, window=(20, None), dropout_p=0.2,
            sinks=sinks, alibi_slopes=torch.rand(3, 4), return_lse=True, backend=backend,
        )  # fmt: skip
        return [out, lse, *gradients(out, lse, [q, k, v, sinks])]

    return differences(call)


def packed_without_keys():
    cu_q, cu_k = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 0, 0]).int()
    q, k, v, sinks = (
        torch.randn(shape).requires_grad_() for shape in ((7, 2, 8), (0, 2, 8), (0, 2, 6), 2)
    )

    def call(backend):
        used = torch.tensor([2, 2]).int()
        out, lse = attention_varlen(
            q, k, v, cu_q, cu_k, seqused_q=used, sinks=sinks, return_lse=True, backend=backend
        )
        return [out, lse, *gradients(out, lse, [q, k, v, sinks])]

    return differences(call)


def zero(batch, seqlen_q, seqlen_k):
    q, k, v, sinks = (
        torch.randn(shape).requires_grad_()
        for shape in ((batch, seqlen_q, 4, 8), (batch, seqlen_k, 2, 8), (batch, seqlen_k, 2, 6), 4)
    )

    def call(backend):
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True, backend=backend)
        return [out, lse, *gradients(out, lse, [q, k, v, sinks])]

    return differences(call)


def vmapped():
    q, k, v = (torch.randn(3, 2, 9, 2, 8) for _ in range(3))

    def call(backend):
        def loss(q, k, v):
            out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
            return out.sin().sum() + lse.sum()

        return list(torch.vmap(torch.func.grad(loss, (0, 1, 2)))(q, k, v))

    return differences(call)


def kept():
    """The third of three calls, which goes the short way, beside the tiled walk."""
    shapes = ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8), 4)
    q, k, v, sinks = (torch.randn(shape).requires_grad_() for shape in shapes)

    def call(backend):
        for _ in range(3 if backend == "triton" else 1):
            out, lse = attention(
                q, k, v, causal=True, sinks=sinks, return_lse=True, backend=backend
            )
        if backend == "triton":
            assert "Planned" in type(out.grad_fn).__name__
        return [out, lse, *gradients(out, lse, [q, k, v, sinks])]

    return differences(call)


def replayed():
    """Calls of q, k and v alone whose backward made its plan before: asked for part of the
    gradients, twice, with an upstream gradient of other strides, and to be differentiated."""
    shapes = ((1, 5, 2, 8), (1, 7, 2, 8), (1, 7, 2, 8))
    q, k, v = (torch.randn(shape).requires_grad_() for shape in shapes)
    upstream = torch.randn(shapes[0])
    replays = count_replays()

    def call(backend):
        def attend(*tensors):
            return attention(*tensors, causal=True, backend=backend)

        for _ in range(3 if backend == "triton" else 1):
            out = attend(q, k, v)
            all_of_them = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
        with torch.no_grad():
            alone = attend(q, k, v)
        if backend == "triton":
            before = replays[0]
            assert before > 0
        found = [out, alone, *all_of_them, *torch.autograd.grad(out, (k,), upstream)]
        turned = upstream.transpose(1, 2).contiguous().transpose(1, 2)
        found += torch.autograd.grad(attend(q, k, v), (q, k, v), turned)
        found += torch.autograd.grad(attend(q, k.detach(), v), (q, v), upstream)
        if backend == "triton":
            assert replays[0] > before
            (dq,) = torch.autograd.grad(attend(q, k, v), q, upstream, create_graph=True)
            with pytest.raises(RuntimeError, match="not twice differentiable"):
                dq.sum().backward()
        return found

    return differences(call)


def far_rows():
    """Rows that end beyond 2^31 elements, though those of a tile are near each other."""
    *inputs, upstream = (torch.randn(1, 70, 1, 16).half() for _ in range(4))

    def call(tensors, upstream):
        tensors = [x.requires_grad_() for x in tensors]
        out = attention(*tensors, causal=True, backend="triton")
        return [out, *torch.autograd.grad(out, tensors, upstream)]

    near = call(inputs, upstream)
    far = call([spread(x.detach(), 1) for x in inputs], spread(upstream, 1))
    return [(a - b).abs().max().item() for a, b in zip(near, far, strict=True)]


def count_replays():
    from flashdig.kernels import replay

    whole, counts = replay.Replay.__call__, [0]

    def counted(self, *tensors):
        counts[0] += 1
        return whole(self, *tensors)

    replay.Replay.__call__ = counted
    return counts


def main() -> None:
    quicken_interpreter()
    found = {name: dense(name) for name in DENSE}
    found["packed"] = packed()
    found["packed without keys"] = packed_without_keys()
    found |= {f"zero sizes {sizes}": zero(*sizes) for sizes in ZERO_SIZES}
    found["vmap of grad"] = vmapped()
    found["kept"] = kept()
    found["replayed"] = replayed()
    found["far rows"] = far_rows()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
