"""The short way of kept calls on the CPU: the tiled walk's launchers as plans.

Triton's plans need a GPU or the interpreter; what keeps, finds and runs plans is the same for all.
"""

import contextlib
from unittest import mock

from flashdig import kept_calls
from flashdig.kernels import plans, tiled_launch
from flashdig.ops import attention as operators


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
        mock.patch.object(kept_calls, "_is_here", lambda q, options: options[-1] == "tiled"),
    ):
        yield counted
    forget()


def forget():
    kept_calls.forget()
    plans.forget()
