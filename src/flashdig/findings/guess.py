"""The guess: what an attention should show in a profiler, from shapes and models alone.

Nothing here looks at a recording. What is guessed is what somebody expects who reads the code:
attention made of operators is one kernel an operator and no copy; a call of a fused function is one
kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from flashdig.costs import unfused
from flashdig.costs.flops import direction_flops
from flashdig.costs.predict import predict
from flashdig.costs.prediction import Prediction
from flashdig.hardware.devices import Device
from flashdig.problem import AttentionProblem

Direction = Literal["forward", "backward", "decode"]
# Host time with a profiler that records shapes: of each operator, nested ones counted, and of each
# launch. Assumed, of the size seen in recordings of an H200's host (PyTorch 2.11).
OPERATOR_S = 6e-6
LAUNCH_S = 25e-6
# nested operators of a forward call, as PyTorch 2.11 writes them
_OPERATORS = {
    "eager": 33,
    "sdpa_math": 75,
    "sdpa_flash": 17,
    "sdpa_efficient": 17,
    "sdpa_cudnn": 7,
    "flash_attention": 25,
    "flex": 10,
    "flashdig": 6,
    "exhibit": 6,
}
# kernels of an attention made of operators in the backward: two products for each of the forward's,
# softmax, scale and mask
_EAGER_BACKWARD_KERNELS = 7
# a fused backward: delta, the main kernel, dq rounded; FlexAttention writes dq itself
_FUSED_BACKWARD_KERNELS = {"flex": 2}
_USUAL_BACKWARD_KERNELS = 3


@dataclass(frozen=True)
class Asked:
    """What the code asks for.

    Attributes:
        words: how a person would say it.
        schedule: of the cost models; None where there is none.
        operators: key of the table of operators.
    """

    words: str
    schedule: str | None
    operators: str


ASKED: Mapping[str, Asked] = {
    "eager": Asked("product, scale, mask, softmax, product", "inplace", "eager"),
    "sdpa_flash": Asked("scaled_dot_product_attention, flash backend", "sdpa_flash", "sdpa_flash"),
    "sdpa_efficient": Asked(
        "scaled_dot_product_attention, memory-efficient backend", "sdpa_efficient", "sdpa_efficient"
    ),
    "sdpa_cudnn": Asked("scaled_dot_product_attention, cuDNN backend", "sdpa_cudnn", "sdpa_cudnn"),
    "fa2": Asked("FlashAttention-2", "sdpa_flash", "flash_attention"),
    "fa3": Asked("FlashAttention-3", "v3", "flash_attention"),
    "fa4": Asked("FlashAttention-4", "v3", "flash_attention"),
    "flex": Asked("FlexAttention, compiled", "v2", "flex"),
    "flashdig": Asked("flashdig.attention", "v3", "flashdig"),
    "v1": Asked("the exhibit v1: keys outside", "v1", "exhibit"),
    "v2": Asked("the exhibit v2: queries outside", "v2", "exhibit"),
    "v2_transposed": Asked("v2 with K transposed beforehand", "v2_transposed", "exhibit"),
}


@dataclass(frozen=True)
class Guess:
    """What is expected of one call.

    Attributes:
        asked: in words.
        launches: host calls that start kernels.
        floor_s, expected_s: device time; None where the chip or the schedule is not known.
        host_s: host time under a profiler.
        compulsory_bytes, issued_bytes, memory_bytes: the three columns of traffic.
        scratch_bytes: memory beside input and output.
        occupancy: of the main kernel, 0 to 1.
        whole: it is of all that a step launches, what prepares the kernel included.
    """

    asked: str
    problem: AttentionProblem
    device: str | None
    direction: Direction
    schedule: str | None
    kernels: int
    copies: int
    launches: int
    host_s: float
    flops: int
    floor_s: float | None = None
    expected_s: float | None = None
    limiter: str | None = None
    compulsory_bytes: int | None = None
    issued_bytes: int | None = None
    memory_bytes: int | None = None
    scratch_bytes: int | None = None
    occupancy: float | None = None
    notes: tuple[str, ...] = ()
    whole: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def asked_of_sdpa(problem: AttentionProblem, device: Device | None, masked: bool) -> str:
    """What a call of scaled_dot_product_attention is expected to run as.

    cuDNN from Hopper on and flash before it for 16-bit data, as PyTorch 2.11 prefers them; a mask
    tensor excludes flash, float32 both.
    """
    hopper = device is not None and float(device.architecture) >= 9.0
    if problem.dtype not in ("float16", "bfloat16"):
        return "sdpa_efficient"
    if hopper:
        return "sdpa_cudnn"
    return "sdpa_efficient" if masked else "sdpa_flash"


def guess(
    asked: str,
    problem: AttentionProblem,
    device: Device | None,
    direction: Direction = "forward",
) -> Guess:
    """The guess for one call.

    Args:
        asked: a key of `ASKED`, or "sdpa" where torch chooses.
        problem: a mask of unknown content counts as none.
        device: None leaves out what depends on the chip.

    Raises ValueError for an unknown `asked`.
    """
    operators_of, words = None, None
    if asked == "sdpa":
        words = "scaled_dot_product_attention, torch's choice"
        asked = asked_of_sdpa(problem, device, masked=problem.bias != "none")
        operators_of = "sdpa_flash"  # whichever is chosen: the most of them
    if asked not in ASKED:
        raise ValueError(f"asked must be sdpa or one of {', '.join(ASKED)}, got {asked!r}")
    what = ASKED[asked]
    kernels = _kernels(what, problem, direction)
    launches = kernels
    operators = _OPERATORS[operators_of or what.operators] * (2 if direction == "backward" else 1)
    found = Guess(
        asked=words or what.words,
        problem=problem,
        device=None if device is None else device.key,
        direction=direction,
        schedule=what.schedule,
        kernels=kernels,
        copies=0,
        launches=launches,
        host_s=operators * OPERATOR_S + launches * LAUNCH_S,
        flops=direction_flops(problem, direction),
    )
    prediction = _prediction(what.schedule, problem, device, direction)
    if prediction is None:
        return found
    return replace(
        found,
        kernels=prediction.kernels if what.operators == "exhibit" else kernels,
        launches=prediction.kernels if what.operators == "exhibit" else launches,
        floor_s=prediction.floor_s,
        expected_s=prediction.expected_s,
        limiter=prediction.expected_limiter,
        compulsory_bytes=prediction.compulsory.total_bytes,
        issued_bytes=prediction.issued.total_bytes,
        memory_bytes=prediction.memory.total_bytes,
        scratch_bytes=prediction.scratch_bytes,
        occupancy=prediction.occupancy if what.operators == "exhibit" else None,
        notes=prediction.notes,
        whole=what.operators == "exhibit",
    )


def _kernels(what: Asked, problem: AttentionProblem, direction: Direction) -> int:
    if what.operators == "eager":
        if direction == "backward":
            return _EAGER_BACKWARD_KERNELS
        plain = problem.replace(num_heads_kv=problem.num_heads)
        return len(unfused.eager_kernels(plain, in_place=True))
    if direction == "backward":
        return _FUSED_BACKWARD_KERNELS.get(what.operators, _USUAL_BACKWARD_KERNELS)
    return 1


def _prediction(
    schedule: str | None, problem: AttentionProblem, device: Device | None, direction: Direction
) -> Prediction | None:
    if schedule is None or device is None:
        return None
    try:
        return predict(problem, device, schedule, direction)
    except ValueError:
        return None
