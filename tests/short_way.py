"""The short way of kept calls on the CPU: the tiled walk's launchers as plans.

Triton's plans need a GPU or the interpreter; what keeps, finds and runs plans is the same for all.
"""

import contextlib
from unittest import mock

import torch

from flashdig import attention, kept_calls, kept_keys
from flashdig.kernels import plans, tiled_launch
from flashdig.ops import attention as operators
from tests.attention_cases import build, gradients, taking_gradients


class Counted:
    """Plans that were made and calls that they served, by direction."""

    def __init__(self):
        self.made = {"forward": 0, "backward": 0}
        self.served = {"forward": 0, "backward": 0}

    def plan(self, direction, function, numbers):
        self.made[direction] += 1

        def plan(*tensors):
            self.served[direction] += 1
            return function(*tensors, **numbers)

        return plan

    def planner(self, backend, direction):
        if backend != "tiled":
            return None
        name = ("forward", "backward")[direction]
        function = getattr(tiled_launch, f"attention_{name}")
        return lambda *tensors, **numbers: self.plan(name, function, numbers)


@contextlib.contextmanager
def short_way():
    """Within it calls with backend="tiled" are kept; yields the counts."""
    counted = Counted()
    forget()
    with (
        mock.patch.object(operators, "_planner", counted.planner),
        mock.patch.object(kept_keys, "is_here", lambda q, options: options[-1] == "tiled"),
    ):
        yield counted
    forget()


def forget():
    kept_calls.forget()
    plans.forget()


def tiled(*args, **options):
    return attention(*args, backend="tiled", **options)


def inputs(seqlen=9, heads=2, head_dim=8, dtype=torch.float32, grad=False):
    torch.manual_seed(seqlen)
    return [torch.randn(1, seqlen, heads, head_dim, dtype=dtype).requires_grad_(grad)
            for _ in range(3)]  # fmt: skip


def results(name, dtype=torch.float32):
    q, k, v, options = build(name, dtype)
    torch.manual_seed(3)
    out, lse = tiled(q, k, v, **options, return_lse=True)
    return [out, lse, *gradients(out, lse, taking_gradients(q, k, v, options))]
