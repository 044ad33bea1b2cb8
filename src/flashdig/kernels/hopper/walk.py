"""A consumer's walk over key tiles, right to left: those that its rows see, in steps of one tile.

Device code. Tiles of the block that its own rows do not see pass by unread.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon, mbarrier, warpgroup_mma_wait
from flashdig.kernels.hopper.columns import (
    finished_output,
    release_blocks,
    scaled_if_needed,
    start_output,
    start_scores,
    take_blocks,
    tile_at,
)
from flashdig.kernels.hopper.problem import final_scores, key_tiles, masked
from flashdig.kernels.hopper.softmax import next_softmax
from flashdig.kernels.hopper.turns import give_turn, wait_for_turn


@aggregate
class Span:
    """Numbers of key tiles: a consumer walks [first, end), of the block's [first_of_all, ..).

    Attributes:
        full_first, full_end: tiles that every row of the consumer sees whole.
        before, after: tiles of the block that pass by before the walk and after it.
    """

    first: gl.tensor
    full_first: gl.tensor
    full_end: gl.tensor
    end: gl.tensor
    before: gl.tensor
    after: gl.tensor

    @gluon.constexpr_function
    def __init__(self, first, full_first, full_end, end, before, after):
        self.first = first
        self.full_first = full_first
        self.full_end = full_end
        self.end = end
        self.before = before
        self.after = after


@gluon.jit
def span_of(
    problem, block_row, row, BLOCK_M: gl.constexpr, ROWS: gl.constexpr, BLOCK_N: gl.constexpr
):
    """What a consumer walks.

    Args:
        block_row, row: queries at which the block's BLOCK_M begin and the consumer's ROWS; those
            of a consumer beyond the sequence walk one tile, since a walk has a first step.
    """
    first_of_all, _, _, end_of_all = key_tiles(problem, block_row, BLOCK_M, BLOCK_N)
    first, full_first, full_end, end = key_tiles(problem, row, ROWS, BLOCK_N)
    end = gl.minimum(end, end_of_all)
    first = gl.minimum(gl.where(row < problem.seqlen_q, first, end), end - 1)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    full_first = gl.minimum(gl.maximum(full_first, first), full_end)
    return Span(first, full_first, full_end, end, end_of_all - end, first - first_of_all)


@gluon.jit
def pass_by(
    keys, values, begin, count, CONSUMER: gl.constexpr, TURNS: gl.constexpr, JOINT: gl.constexpr
):
    """Lets `count` tiles of keys and values from number `begin` on pass unread.

    TURNS: consumers that take turns, or 0.
    JOINT: 1 where keys and values of a number are freed at once, else 0.
    """
    for step in range(begin, begin + count):
        take_blocks(keys, step)
        if not JOINT:
            release_blocks(keys, step)
        take_blocks(values, step)
        release_blocks(values, step)
        if TURNS > 0:
            wait_for_turn(CONSUMER)
            give_turn(CONSUMER, TURNS)


@gluon.jit
def settled(p):
    """p, unchanged: pairs of its elements are bound to registers here. A loop that takes p from
    another loop would else take it apart and put it together again in every step."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [p], dtype=p.dtype, is_pure=True, pack=2
    )


@gluon.jit
def walk(
    state, q_tiles, buffer, q_read, keys, values, zeros, problem, rows, done, begin, stop, span,
    MASKED: gl.constexpr, EARLY: gl.constexpr, CONSUMER: gl.constexpr, TURNS: gl.constexpr,
    JOINT: gl.constexpr,
):  # fmt: skip
    """Steps begin..stop of a span; step i meets key tile span.end - 1 - i. P V lags one step.

    Args:
        state: output, row_max, row_sums, P of the step before.
        q_tiles, buffer: of Q, and which of them.
        q_read: the barrier to arrive at when the last step has read Q, where EARLY.
        done: tiles of keys that passed before this span.
        TURNS: consumers that take turns, or 0.
        JOINT: 1 where values have the number of the step that multiplies with them and are freed
            with its keys, else 0.
    """
    out, row_max, row_sums, p = state
    BLOCK_N: gl.constexpr = zeros.shape[1]
    last = span.end - span.first - 1
    for step in range(begin, stop):
        k = take_blocks(keys, done + step)
        if TURNS > 0:
            wait_for_turn(CONSUMER)
        # a view of its own in every step: else ptxas 12.8 sets its descriptor up in one walk alone
        q = tile_at(q_tiles, buffer + (step >> 30))
        scores_started = start_scores(q, k, zeros)
        v = take_blocks(values, done + step - 1 + JOINT)
        out_started = start_output(p, v, out)
        if TURNS > 0:
            give_turn(CONSUMER, TURNS)
        scores = warpgroup_mma_wait(len(out), deps=(scores_started,))
        if not JOINT:
            release_blocks(keys, done + step)
        if EARLY:
            mbarrier.arrive(q_read, count=1, pred=step == last)
        start_n = (span.end - 1 - step) * BLOCK_N
        scores = final_scores(scores, problem, rows, start_n)
        if MASKED:
            scores = masked(scores, problem, rows, start_n)
        p_next, rescale, row_max, row_sums = next_softmax(
            scores, row_max, row_sums, problem.exp_factor, p.dtype
        )
        p_next = gl.convert_layout(p_next, p.type.layout)
        out = finished_output(out_started, p)
        release_blocks(values, done + step - 1 + JOINT)
        p = p_next
        out = scaled_if_needed(out, rescale)
    return out, row_max, row_sums, p
