"""Generation: one rung of the ladder as data (claim, prediction) and code (run).

An exhibit takes q (batch, num_heads, seqlen_q, head_dim) and k, v (batch, num_heads_kv, seqlen_k,
head_dim), contiguous: the layout of the articles it reproduces. It covers what its source covers
(full and bottom-right causal attention, MHA and GQA) and nothing more; `unsupported` says why a
problem is not served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    Outcome = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Prediction:
    """What one call is expected to do, written down before it runs.

    Attributes:
        kernels: device kernels launched.
        load_bytes, store_bytes: bytes that the kernels' load and store instructions ask for
            ("issued" traffic); None where the kernel is a library's and its instructions are not
            ours to count.
        matmul_flops: floating-point operations of the matrix products as executed, masked parts of
            visited tiles included.
        scratch_bytes: peak memory beyond inputs and output.
    """

    kernels: int
    load_bytes: int | None
    store_bytes: int | None
    matmul_flops: int
    scratch_bytes: int


@dataclass(frozen=True)
class Generation:
    """One exhibit.

    Attributes:
        name: short and stable, as typed on the command line and stored in records.
        title: for people.
        year: of the publication that it reproduces.
        source: publication and place in it.
        claim: what changed against the rung below and why that should be faster, in a sentence.
        run: (q, k, v, causal) -> (out, lse or None); softmax scale head_dim ** -0.5, lse natural
            logarithm in float32.
        unsupported: (problem, device type) -> reasons why this exhibit cannot run it; empty when it
            can.
        predict: problem -> Prediction.
        is_triton: runs in Triton's interpreter, so its traffic can be counted without a GPU.
    """

    name: str
    title: str
    year: int
    source: str
    claim: str
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Outcome]
    unsupported: Callable[[AttentionProblem, str], list[str]]
    predict: Callable[[AttentionProblem], Prediction]
    is_triton: bool = False
