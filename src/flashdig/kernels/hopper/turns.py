"""Consumers take turns at issuing their products, so that one's softmax meets another's.

Device code. A turn is handed on through a hardware barrier for each consumer: it waits there with
its 128 threads, and the consumer before it arrives with as many (Shah et al. 2024,
"FlashAttention-3", section 3.1, "pingpong scheduling"). All must take equally many turns.
"""

from flashdig.kernels.gluon_api import gl, gluon
from flashdig.kernels.hopper.hardware_barriers import arrive_at, meet_at

# Triton has the first few
_FIRST_BARRIER = gl.constexpr(8)


@gluon.jit
def give_first_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Each consumer calls it once, before its first turn: the last gives the turn to the first."""
    if CONSUMER == CONSUMERS - 1:
        arrive_at(_FIRST_BARRIER)


@gluon.jit
def wait_for_turn(CONSUMER: gl.constexpr):
    meet_at(_FIRST_BARRIER + CONSUMER)


@gluon.jit
def give_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """To the next consumer."""
    arrive_at(_FIRST_BARRIER + (CONSUMER + 1) % CONSUMERS)
