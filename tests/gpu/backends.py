"""Which backends of flashdig's own kernels serve the GPU that is here."""

import torch

from flashdig.dispatch import Request, support
from flashdig.problem import AttentionProblem


def gpu_backends() -> list[str]:
    """Those that serve a plain problem in bfloat16, fastest first."""
    request = Request("cuda", torch.cuda.get_device_capability())
    answers = support(AttentionProblem.dense(1, 1, 64, 64), request)
    return [backend.name for backend, reasons in answers if backend.in_auto and not reasons]
