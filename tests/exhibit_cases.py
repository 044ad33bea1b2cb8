"""The conformance cases that every exhibit passes, in the interpreter and on a GPU."""

import torch

from flashdig.bench.gate import check
from flashdig.generations.inputs import QKV, random_qkv
from flashdig.generations.ladder import RUNGS
from flashdig.problem import AttentionProblem

TRITON_RUNGS = ("online_softmax", "v1", "v2", "v2_transposed")
EAGER_RUNGS = tuple(name for name in RUNGS if name not in TRITON_RUNGS)

# name -> (batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, causal)
CASES = {
    "whole tiles": (1, 2, 2, 64, 64, 32, False),
    "whole tiles causal": (2, 1, 1, 128, 128, 16, True),
    "odd": (1, 2, 2, 37, 37, 16, False),
    "odd causal": (1, 2, 2, 101, 101, 32, True),
    "gqa": (2, 4, 2, 33, 50, 16, False),
    "mqa causal": (1, 3, 1, 45, 70, 16, True),
    "more keys causal": (1, 1, 1, 20, 97, 16, True),
    "rows without keys": (1, 2, 1, 75, 40, 16, True),
    "one query": (2, 2, 1, 1, 130, 16, True),
    "one key": (1, 2, 2, 65, 1, 16, False),
}


def problem_of(name: str, dtype: str) -> AttentionProblem:
    batch, num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, causal = CASES[name]
    return AttentionProblem.dense(
        batch,
        num_heads,
        seqlen_q,
        head_dim,
        dtype,
        causal=causal,
        num_heads_kv=num_heads_kv,
        seqlen_k=seqlen_k,
    )


def inputs_of(name: str, dtype: str, device: str = "cpu") -> QKV:
    return random_qkv(problem_of(name, dtype), device=device, seed=hash_of(name))


def hash_of(name: str) -> int:
    """A seed that does not change between processes."""
    return sum(name.encode())


def assert_within_contract(
    out: torch.Tensor, lse: torch.Tensor | None, inputs: QKV, causal: bool
) -> None:
    result = check(out, inputs.q, inputs.k, inputs.v, causal=causal, lse=lse, pairs="all")
    assert result.ok, result.reason
