"""Device functions of the backward's tiles, which stand transposed: (keys, rows).

With S^T in a warpgroup's registers, P^T and dS^T are operands of dV and dK where they are.
"""

from flashdig.kernels.gluon_api import gl, gluon
from flashdig.kernels.hopper.problem import LOG2_E


@gluon.jit
def row_tiles(problem, start_n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile numbers (first, full_first, full_end, end) of the rows that see a tile of keys.

    Every key of the tile is seen by all rows of the tiles of [full_first, full_end). Rows past the
    sequence need no mask: their log-sum-exp is +inf. `end` is above `first` even where no row sees
    a key, so that a walk always has a first tile.
    """
    end_n = start_n + BLOCK_N
    first = start_n * 0
    full_first = first
    end = gl.cdiv(problem.seqlen_q, BLOCK_M)
    full_end = end
    if problem.RIGHT:
        seeing = gl.maximum(start_n - problem.offset - problem.right, 0)
        all_seen = gl.maximum(end_n - 1 - problem.offset - problem.right, 0)
        first = gl.minimum(seeing, problem.seqlen_q - 1) // BLOCK_M
        full_first = gl.cdiv(all_seen, BLOCK_M)
    if problem.LEFT:
        # the last row that sees key j is j + left - offset
        last = gl.minimum(end_n, problem.seqlen_k) - 1 + problem.left - problem.offset
        last_of_all = start_n + problem.left - problem.offset
        end = gl.minimum(end, gl.cdiv(gl.maximum(last + 1, 0), BLOCK_M))
        full_end = gl.maximum(last_of_all + 1, 0) // BLOCK_M
    end = gl.maximum(end, first + 1)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    full_first = gl.minimum(gl.maximum(full_first, first), full_end)
    # keys past the sequence are hidden in every tile
    if end_n > problem.seqlen_k:
        full_first = end
        full_end = end
    return first, full_first, full_end, end


@gluon.jit
def scores_of(products, problem, start_m, start_n):
    """(final scores, d score / d scaled product) of a (keys, rows) tile.

    Without softcap the second is an unused copy of the products.
    """
    scores = products
    slope = products
    if problem.SOFTCAP:
        # tanh, exact at both ends
        power = gl.exp2(products * (problem.score_factor * (2.0 * LOG2_E)))
        tanh = 1.0 - 2.0 / (1.0 + power)
        scores = tanh * problem.softcap
        slope = 1.0 - tanh * tanh
    elif problem.ALIBI:
        scores = products * problem.score_factor
    if problem.ALIBI:
        keys, rows = _places(products, start_m, start_n)
        distance = gl.abs((rows + problem.offset)[None, :] - keys[:, None])
        scores = scores - problem.slope * distance.to(gl.float32)
    return scores, slope


@gluon.jit
def hidden(scores, problem, start_m, start_n):
    """Scores with -inf where a row does not see a key, or no key is."""
    keys, rows = _places(scores, start_m, start_n)
    if problem.RIGHT:
        last = gl.minimum(rows + (problem.offset + problem.right), problem.seqlen_k - 1)
        visible = keys[:, None] <= last[None, :]
    else:
        visible = (keys < problem.seqlen_k)[:, None] & (rows >= 0)[None, :]
    if problem.LEFT:
        visible = visible & (keys[:, None] >= (rows + (problem.offset - problem.left))[None, :])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _places(tile, start_m, start_n):
    keys = start_n + gl.arange(0, tile.shape[0], gl.SliceLayout(1, tile.type.layout))
    rows = start_m + gl.arange(0, tile.shape[1], gl.SliceLayout(0, tile.type.layout))
    return keys, rows
