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

from flashdig.costs.schedules import Tile
from flashdig.costs.traffic import Traffic, visited_tiles
from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    Outcome = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class LaunchPrediction:
    """What one call is expected to do, written down before it runs.

    Attributes:
        kernels: device kernels launched, the copy engines' copies and fills apart.
        traffic: bytes that all its launches load and store ("issued" traffic; for torch's own
            kernels each tensor once); None for a fused library kernel, whose instructions are not
            ours to count.
        triton: the Triton kernel's part of it, equal to what an interpreter run counts.
        matmul_flops: floating-point operations of the matrix products as executed, masked parts of
            visited tiles included.
        scratch_bytes: peak memory beyond inputs and output.
    """

    kernels: int
    traffic: Traffic | None
    matmul_flops: int
    scratch_bytes: int
    triton: Traffic | None = None


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
        predict: problem -> LaunchPrediction.
        is_triton: runs in Triton's interpreter, so its traffic can be counted without a GPU.
    """

    name: str
    title: str
    year: int
    source: str
    claim: str
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Outcome]
    unsupported: Callable[[AttentionProblem, str], list[str]]
    predict: Callable[[AttentionProblem], LaunchPrediction]
    is_triton: bool = False


HEAD_DIMS = (16, 32, 64, 128, 256)


def unsupported_by_triton(problem: AttentionProblem, device_type: str) -> list[str]:
    """Reasons why the Triton exhibits do not serve a problem on this device."""
    reasons = []
    if problem.head_dim not in HEAD_DIMS or problem.head_dim_v != problem.head_dim:
        allowed = ", ".join(str(head_dim) for head_dim in HEAD_DIMS)
        reasons.append(f"head_dim must be one of {allowed}, the same for v")
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        reasons.append(f"dtype must be float32, float16 or bfloat16, not {problem.dtype}")
    if device_type == "cpu" and problem.dtype == "bfloat16":
        reasons.append("Triton's interpreter multiplies bfloat16 wrongly")
    if problem.batch * problem.num_heads > 65_535:
        reasons.append("more than 65,535 (batch, head) pairs: the paper's grid ends there")
    return reasons


def tiled_flops(problem: AttentionProblem, tile: Tile, *, skip_masked_tiles: bool) -> int:
    """FLOP of the two products as a tile loop executes them: whole tiles, masked parts too."""
    visits = visited_tiles(problem, tile.block_m, tile.block_n, skip_masked_tiles=skip_masked_tiles)
    pairs = problem.batch * problem.num_heads * visits.tiles * tile.block_m * tile.block_n
    return 2 * pairs * (problem.head_dim + problem.head_dim_v)


def input_precision(dtype: torch.dtype) -> str:
    """Triton's precision of float32 products: IEEE, or TF32 where torch allows it."""
    import torch

    if dtype != torch.float32:
        return "ieee"
    # torch.backends.cuda.matmul.allow_tf32 raises once anyone has used the newer settings
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
