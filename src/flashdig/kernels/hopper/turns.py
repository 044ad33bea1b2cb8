"""Consumers take turns at issuing their products, so that one's softmax meets another's.

Device code. A turn is handed on through a hardware barrier for each consumer: it waits there with
its 128 threads, and the consumer before it arrives with as many (Shah et al. 2024,
"FlashAttention-3", section 3.1, "pingpong scheduling"). All must take equally many turns.
"""

from flashdig.kernels.gluon_api import gl, gluon

# of the 16 hardware barriers Triton takes the first few, one for each partition
_FIRST_BARRIER = gl.constexpr(8)


@gluon.constexpr_function
def _text(instruction):
    return f"{instruction} $1, 256; mov.b32 $0, $1;"


@gluon.jit
def _at_barrier(instruction: gl.constexpr, CONSUMER: gl.constexpr):
    TEXT: gl.constexpr = _text(instruction)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # one number a thread, so that the text stands there once
    number = gl.full([128], _FIRST_BARRIER + CONSUMER, gl.int32, layout)
    gl.inline_asm_elementwise(TEXT, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_first_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Each consumer calls it once, before its first turn: the last gives the turn to the first."""
    if CONSUMER == CONSUMERS - 1:
        _at_barrier("bar.arrive", 0)


@gluon.jit
def wait_for_turn(CONSUMER: gl.constexpr):
    _at_barrier("bar.sync", CONSUMER)


@gluon.jit
def give_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """To the next consumer."""
    _at_barrier("bar.arrive", (CONSUMER + 1) % CONSUMERS)
