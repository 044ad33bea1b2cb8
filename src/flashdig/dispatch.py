"""Which backend serves a problem, and why the others do not: one table, asked by everyone.

`backend="auto"` takes the first backend of the table without reasons against it; a backend asked
for by name is obeyed, or refused with its reasons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flashdig.cache_support import reasons_against_triton
from flashdig.problem import AttentionProblem


@dataclass(frozen=True)
class Request:
    """What a call wants besides its problem, as far as it decides who can serve it.

    Attributes:
        device_type: torch's name: "cuda", "cpu", ...
        compute_capability: of a CUDA device, (9, 0); None elsewhere.
        triton: Triton is installed.
        interpreter: Triton runs kernels in its interpreter (TRITON_INTERPRET=1) and was asked for
            by name, so CPU tensors will do.
        return_lse, descale, paged: lse, descale factors, a page table are in the call.
        gradient: some input takes one.
        out_dtype: torch's name of the dtype of the result; None is that of q.
    """

    device_type: str
    compute_capability: tuple[int, int] | None = None
    triton: bool = True
    interpreter: bool = False
    return_lse: bool = False
    paged: bool = False
    descale: bool = False
    gradient: bool = False
    out_dtype: str | None = None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    Attributes:
        name: as typed in `backend=`.
        summary: for people.
        in_auto: taken by backend="auto" where it serves the problem.
        reasons_against: (problem, request) -> why it cannot serve it; empty when it can.
    """

    name: str
    summary: str
    in_auto: bool
    reasons_against: Callable[[AttentionProblem, Request], list[str]]


def _fused_cpu(problem: AttentionProblem, request: Request) -> list[str]:
    """torch's fused CPU attention: plain problems in which no key is hidden from all queries."""
    reasons = []
    if problem.packed:
        reasons.append("no packed input")
    if request.device_type != "cpu":
        reasons.append(f"runs on the CPU, not on {request.device_type}")
    if problem.dtype not in ("float32", "float16", "bfloat16"):
        # for float64 it keeps its statistics in float32: gradients are off by 1e-8
        reasons.append(f"exact for float32, float16 and bfloat16, not for {problem.dtype}")
    if request.descale:
        reasons.append("no descale factors")
    if request.out_dtype not in (None, problem.dtype):
        reasons.append(f"out_dtype is always the dtype of q, not {request.out_dtype}")
    if request.return_lse:
        reasons.append("its lse takes no gradient")
    for name, asked in (
        ("softcap", problem.softcap > 0.0),
        ("dropout", problem.dropout),
        ("ALiBi", problem.alibi != "none"),
        ("bias", problem.bias != "none"),
        ("sinks", problem.sinks),
    ):
        if asked:
            reasons.append(f"no {name}")
    if problem.group_size != 1:
        reasons.append("heads must not share keys: gradients would add up in the input's dtype")
    if problem.head_dim != problem.head_dim_v:
        reasons.append("head_dim_v must equal head_dim")
    mask = problem.mask
    square = problem.seqlen_q == problem.seqlen_k
    if not (mask.is_full or (mask.is_causal and mask.window_left is None and square)):
        reasons.append("masks other than causal with equal lengths")
    if 0 in (problem.batch, problem.num_heads, problem.seqlen_q, problem.seqlen_k):
        reasons.append("zero-size dimensions")
    if problem.head_dim_v == 0:
        reasons.append("zero-size dimensions")
    return reasons


def _against_sm_90(request: Request) -> list[str]:
    reasons = []
    if not request.triton:
        reasons.append("Triton is not installed")
    if request.device_type != "cuda":
        reasons.append(f"runs on NVIDIA GPUs, not on {request.device_type}")
    capability = request.compute_capability
    if capability is not None and capability != (9, 0):
        major, minor = capability
        reasons.append(f"needs compute capability 9.0, the device has {major}.{minor}")
    return reasons


def _against_widths(problem: AttentionProblem, unit: int) -> list[str]:
    return [
        f"{name} must be a multiple of {unit} between {unit} and 256, not {size}"
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v))
        if not unit <= size <= 256 or size % unit
    ]


def _against_asked(asked: Mapping[str, bool]) -> list[str]:
    return [f"no {name}" for name, wanted in asked.items() if wanted]


def _hopper(problem: AttentionProblem, request: Request) -> list[str]:
    """The Gluon kernels of sm_90a: 16-bit, without bias and dropout."""
    reasons = _against_sm_90(request)
    if problem.dtype not in ("float16", "bfloat16"):
        reasons.append(f"serves float16 and bfloat16, not {problem.dtype}")
    if request.out_dtype not in (None, problem.dtype):
        reasons.append(f"out_dtype is always the dtype of q, not {request.out_dtype}")
    reasons += _against_widths(problem, 8)
    asked = {"dropout": problem.dropout, "bias": problem.bias != "none"}
    asked |= {"descale factors": request.descale, "page_table": request.paged}
    return reasons + _against_asked(asked)


def _hopper_fp8(problem: AttentionProblem, request: Request) -> list[str]:
    """The fp8 forward of sm_90a: e4m3, without bias, dropout and pages."""
    reasons = _against_sm_90(request)
    if problem.dtype != "float8_e4m3fn":
        reasons.append(f"serves float8_e4m3fn, not {problem.dtype}")
    if request.out_dtype not in (None, "float16", "bfloat16"):
        reasons.append(f"out_dtype must be float16 or bfloat16, not {request.out_dtype}")
    reasons += _against_widths(problem, 16)
    asked = {"dropout": problem.dropout, "bias": problem.bias != "none"}
    asked |= {"page_table": request.paged}
    return reasons + _against_asked(asked)


def _triton(problem: AttentionProblem, request: Request) -> list[str]:
    """The portable Triton kernels: everything of the contract on GPUs since Ampere."""
    if request.paged:
        return _triton_pages(problem, request)
    reasons = []
    if not request.triton:
        reasons.append("Triton is not installed")
    if request.device_type != "cuda" and not request.interpreter:
        reasons.append(
            f"runs on NVIDIA GPUs, not on {request.device_type} (except asked for by name under "
            "TRITON_INTERPRET=1)"
        )
    capability = request.compute_capability
    if capability is not None and capability < (8, 0):
        major, minor = capability
        reasons.append(f"needs compute capability 8.0, the device has {major}.{minor}")
    dtypes = ["float16", "bfloat16", "float32"]
    if request.interpreter:
        dtypes.remove("bfloat16")  # Triton's interpreter multiplies it wrongly
    if problem.dtype not in dtypes:
        reasons.append(f"serves {', '.join(dtypes)}, not {problem.dtype}")
    if request.descale:
        reasons.append("no descale factors")
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if not 1 <= size <= 256:
            reasons.append(f"{name} must be between 1 and 256, not {size}")
    return reasons


def _triton_pages(problem: AttentionProblem, request: Request) -> list[str]:
    """The kernels over caches, for packed input with a page table."""
    reasons = [] if request.triton else ["Triton is not installed"]
    reasons += reasons_against_triton(
        request.device_type,
        request.compute_capability,
        problem.dtype,
        problem.head_dim,
        problem.head_dim_v,
        interpreter=request.interpreter,
    )
    if problem.dropout:
        reasons.append("no dropout with page_table")
    if request.gradient:
        reasons.append("no gradients with page_table")
    return reasons


def _anything(problem: AttentionProblem, request: Request) -> list[str]:
    return []


BACKENDS = (
    Backend("fused_cpu", "torch's fused CPU attention", True, _fused_cpu),
    Backend(
        "hopper",
        "Gluon kernels for Hopper (sm_90a), forward and backward",
        True,
        _hopper,
    ),
    Backend(
        "hopper_fp8",
        "e4m3 forward in Gluon for Hopper (sm_90a), products in 8 bits",
        True,
        _hopper_fp8,
    ),
    Backend("triton", "portable Triton kernels, NVIDIA GPUs since Ampere", True, _triton),
    Backend(
        "tiled",
        "tile by tile in plain torch, O(seqlen) memory, any device; on a GPU, packed input and "
        "dropout cost a synchronisation",
        True,
        _anything,
    ),
    Backend(
        "reference",
        "written out in full, differentiable twice, O(seqlen^2) memory",
        False,
        _anything,
    ),
)


def support(problem: AttentionProblem, request: Request) -> list[tuple[Backend, list[str]]]:
    """Every backend in the order of preference, with the reasons against it (empty: it serves)."""
    return [(backend, backend.reasons_against(problem, request)) for backend in BACKENDS]


def choose(problem: AttentionProblem, request: Request, name: str = "auto") -> Backend:
    """The backend that serves the call.

    Raises ValueError for an unknown name, and for a backend asked for by name that cannot serve it.
    """
    if name == "auto":
        for backend in BACKENDS:
            if backend.in_auto and not backend.reasons_against(problem, request):
                return backend
        raise ValueError(f"no backend serves {problem.describe()} on {request.device_type}")
    for backend in BACKENDS:
        if backend.name == name:
            reasons = backend.reasons_against(problem, request)
            if reasons:
                raise ValueError(f"backend {name!r} cannot serve this call: {'; '.join(reasons)}")
            return backend
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise ValueError(f"backend must be 'auto' or one of {names}, got {name!r}")
