"""v0: attention out of torch's own operations, and torch's fused attention by each backend.

As the profiling article runs them: naive, with the mask written in place, and
scaled_dot_product_attention held to one backend.

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

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashdig.costs import unfused
from flashdig.costs.flops import forward_flops
from flashdig.costs.traffic import FLOAT32_BYTES, tensor_bytes
from flashdig.generations.base import Generation, LaunchPrediction
from flashdig.problem import AttentionProblem


@functools.lru_cache(maxsize=4)
def hidden_pairs(seqlen_q: int, seqlen_k: int, device: torch.device) -> torch.Tensor:
    """Bool (seqlen_q, seqlen_k), True where causality hides the key; made once and kept."""
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


def predict_eager(problem: AttentionProblem, *, in_place: bool) -> LaunchPrediction:
    """Every operation reads and writes the whole score matrix; a copy does so once more."""
    kernels = unfused.eager_kernels(problem, in_place=in_place)
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    matrices_alive = 3 if problem.causal and not in_place else 2
    copies = sum(k.store_bytes for k in kernels if k.name.startswith("repeat"))
    return LaunchPrediction(
        kernels=sum(kernel.kind != "copy" for kernel in kernels),
        traffic=unfused.issued(kernels),
        matmul_flops=sum(kernel.matmul_flops for kernel in kernels),
        scratch_bytes=matrices_alive * scores * problem.element_bytes + copies,
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


def predict_fused(problem: AttentionProblem) -> LaunchPrediction:
    """One kernel whose instructions are the library's; it does the products and keeps an lse."""
    return LaunchPrediction(
        kernels=1,
        traffic=None,
        matmul_flops=forward_flops(problem),
        scratch_bytes=tensor_bytes(problem).lse,
    )


def predict_math(problem: AttentionProblem) -> LaunchPrediction:
    """Twenty kernels when causal, as the article counts; 16-bit input is copied to float32."""
    kernels = unfused.sdpa_math_kernels(problem)
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return LaunchPrediction(
        kernels=len(kernels),
        traffic=unfused.issued(kernels),
        matmul_flops=sum(kernel.matmul_flops for kernel in kernels),
        scratch_bytes=3 * scores * FLOAT32_BYTES,
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
    predict=functools.partial(predict_eager, in_place=False),
)

INPLACE = Generation(
    name="inplace",
    title="naive with the mask in place",
    year=2017,
    source=f"{ARTICLE}, 04_b",
    claim="masked_fill_ writes where it stands: the copy of the matrix is gone, and its memory.",
    run=inplace,
    unsupported=unsupported_by_eager,
    predict=functools.partial(predict_eager, in_place=True),
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
