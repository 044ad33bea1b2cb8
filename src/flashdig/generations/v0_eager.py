"""v0: attention out of torch's own operations, and torch's fused attention, as the profiling article
runs them: naive, with the mask written in place, and scaled_dot_product_attention by each backend.

    scores = Q K^T            seqlen_q x seqlen_k in device memory
    scores = scores * scale   read and written again
    scores[mask] = -inf       out of place: copied first, then read and written again
    P = softmax(scores)       read and written again
    O = P V                   read once more

Source: the profiling article's scripts 04_a to 04_c. The mask is made once and kept, as there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashdig.costs.traffic import Traffic, tensor_bytes
from flashdig.generations.base import Generation, Prediction
from flashdig.problem import AttentionProblem


@functools.lru_cache(maxsize=4)
def hidden_pairs(seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """Bool (seqlen_q, seqlen_k), True where causality hides the key; made once, as by the article."""
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    return ones.triu(1 + seqlen_k - seqlen_q)


def for_every_query_head(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values copied for each query head of their group; x itself without groups."""
    group_size = num_heads // x.shape[1]
    return x if group_size == 1 else x.repeat_interleave(group_size, dim=1)


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    k, v = for_every_query_head(k, q.shape[1]), for_every_query_head(v, q.shape[1])
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(hidden_pairs(q.shape[2], k.shape[2], q.device), float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs, v), None


def inplace(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    k, v = for_every_query_head(k, q.shape[1]), for_every_query_head(v, q.shape[1])
    scores = torch.matmul(q, k.transpose(-2, -1))
    scores = scores * q.shape[-1] ** -0.5
    if causal:
        scores.masked_fill_(hidden_pairs(q.shape[2], k.shape[2], q.device), float("-inf"))
    probs = torch.softmax(scores, dim=-1)
    return torch.matmul(probs, v), None


def unsupported_by_eager(problem: AttentionProblem, device_type: str) -> list[str]:
    if problem.causal and problem.seqlen_q > problem.seqlen_k:
        return ["rows without keys come out as NaN: softmax divides 0 by 0"]
    return []


@dataclass(frozen=True)
class EagerPass:
    """One operation over the score matrix: how often it reads and writes it."""

    reads: int
    writes: int


def predict_eager(problem: AttentionProblem, *, out_of_place_mask: bool) -> Prediction:
    """Every operation reads and writes the whole score matrix once; a copy does so once more."""
    size = tensor_bytes(problem)
    group = problem.group_size
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    matrix = pairs * problem.element_bytes
    passes = [EagerPass(0, 1), EagerPass(1, 1), EagerPass(1, 1), EagerPass(1, 0)]
    mask_bytes = 0
    if problem.causal:
        passes.append(EagerPass(1, 1))
        mask_bytes = problem.seqlen_q * problem.seqlen_k
        if out_of_place_mask:
            passes.append(EagerPass(1, 1))
    copies = Traffic(size.k + size.v, group * (size.k + size.v)) if group > 1 else Traffic(0, 0)
    matrices_alive = 3 if problem.causal and out_of_place_mask else 2
    return Prediction(
        kernels=(5 if problem.causal else 4) if group == 1 else None,
        load_bytes=copies.load_bytes
        + size.q
        + group * (size.k + size.v)
        + mask_bytes
        + matrix * sum(step.reads for step in passes),
        store_bytes=copies.store_bytes + size.o + matrix * sum(step.writes for step in passes),
        matmul_flops=2 * pairs * (problem.head_dim + problem.head_dim_v),
        scratch_bytes=matrices_alive * matrix + copies.store_bytes,
    )


def sdpa(backend: SDPBackend) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    """scaled_dot_product_attention held to one backend: it raises where that one cannot serve."""

    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )
        return out, None

    return run


def unsupported_by_sdpa(
    problem: AttentionProblem,
    device_type: str,
    *,
    cuda_dtypes: tuple[str, ...],
    cpu: bool,
    max_head_dim: int | None,
) -> list[str]:
    """Documented limits; what torch refuses beyond them shows as the error of the run itself."""
    reasons = []
    if problem.causal and problem.seqlen_q != problem.seqlen_k:
        reasons.append("torch aligns its causal mask top-left when lengths differ")
    if device_type == "cpu" and not cpu:
        reasons.append("needs a CUDA device")
    if device_type == "cuda" and problem.dtype not in cuda_dtypes:
        reasons.append(f"dtype must be {' or '.join(cuda_dtypes)}, not {problem.dtype}")
    if max_head_dim is not None and problem.head_dim > max_head_dim:
        reasons.append(f"head_dim must be at most {max_head_dim}")
    return reasons


def predict_fused(problem: AttentionProblem) -> Prediction:
    """One kernel whose instructions are the library's; it does the products and keeps an lse."""
    return Prediction(
        kernels=1,
        load_bytes=None,
        store_bytes=None,
        matmul_flops=2 * problem.visible_pairs * (problem.head_dim + problem.head_dim_v),
        scratch_bytes=tensor_bytes(problem).lse,
    )


def predict_math(problem: AttentionProblem) -> Prediction:
    """Twenty kernels when causal, as the article counts; float32 copies of everything for 16 bit."""
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return Prediction(
        kernels=20 if problem.causal and problem.element_bytes == 2 else None,
        load_bytes=None,
        store_bytes=None,
        matmul_flops=2 * pairs * (problem.head_dim + problem.head_dim_v),
        scratch_bytes=3 * pairs * 4,
    )


ARTICLE = "the profiling article"
HALF = ("float16", "bfloat16")
EVERY = ("float32", *HALF)

NAIVE = Generation(
    name="naive",
    title="naive: five operations",
    year=2017,
    source=f"{ARTICLE}, 04_a; Vaswani et al. 2017, equation 1",
    claim=(
        "Every operation is a kernel of its own that reads and writes the whole seqlen x seqlen "
        "matrix; the out-of-place mask copies it once more."
    ),
    run=naive,
    unsupported=unsupported_by_eager,
    predict=functools.partial(predict_eager, out_of_place_mask=True),
)

INPLACE = Generation(
    name="inplace",
    title="naive with the mask in place",
    year=2017,
    source=f"{ARTICLE}, 04_b",
    claim="masked_fill_ writes where it stands: the copy of the matrix is gone, and its memory.",
    run=inplace,
    unsupported=unsupported_by_eager,
    predict=functools.partial(predict_eager, out_of_place_mask=False),
)

SDPA_MATH = Generation(
    name="sdpa_math",
    title="SDPA, math backend",
    year=2023,
    source=f"{ARTICLE}, 04_c --backend math",
    claim=(
        "torch's reference: float32 inside, a mask built anew in every call, a softmax that guards "
        "against empty rows. It is careful, and pays for it."
    ),
    run=sdpa(SDPBackend.MATH),
    unsupported=functools.partial(
        unsupported_by_sdpa, cuda_dtypes=EVERY, cpu=True, max_head_dim=None
    ),
    predict=predict_math,
)

SDPA_EFFICIENT = Generation(
    name="sdpa_efficient",
    title="SDPA, memory-efficient backend",
    year=2022,
    source=f"{ARTICLE}, 04_c --backend efficient; xformers",
    claim="One fused CUTLASS kernel in the input's dtype; the matrix never leaves the chip.",
    run=sdpa(SDPBackend.EFFICIENT_ATTENTION),
    unsupported=functools.partial(
        unsupported_by_sdpa, cuda_dtypes=EVERY, cpu=False, max_head_dim=None
    ),
    predict=predict_fused,
)

SDPA_FLASH = Generation(
    name="sdpa_flash",
    title="SDPA, flash backend: FlashAttention-2 in CUDA",
    year=2023,
    source=f"{ARTICLE}, 04_c --backend flash; Dao 2023",
    claim=(
        "v2's loops in hand-written CUDA for Ampere: warps split the queries, not the keys, and "
        "exchange nothing."
    ),
    run=sdpa(SDPBackend.FLASH_ATTENTION),
    unsupported=functools.partial(
        unsupported_by_sdpa, cuda_dtypes=HALF, cpu=True, max_head_dim=256
    ),
    predict=predict_fused,
)

SDPA_CUDNN = Generation(
    name="sdpa_cudnn",
    title="SDPA, cuDNN backend",
    year=2024,
    source=f"{ARTICLE}, 04_c --backend cudnn",
    claim="A kernel generated for the problem; on Hopper with its asynchronous copies and WGMMA.",
    run=sdpa(SDPBackend.CUDNN_ATTENTION),
    unsupported=functools.partial(
        unsupported_by_sdpa, cuda_dtypes=HALF, cpu=False, max_head_dim=256
    ),
    predict=predict_fused,
)
