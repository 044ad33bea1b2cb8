"""Device functions of the backward's tiles: which rows see which keys, scores and their slopes."""

from flashdig.kernels.gluon_api import gl, gluon
from flashdig.kernels.hopper.problem import LOG2_E, columns_kept


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
def places(tile, start_m, start_n, KEYS_FIRST: gl.constexpr):
    """(keys, rows) of a tile, each with a dimension of one, so that they broadcast to it."""
    down: gl.constexpr = gl.SliceLayout(1, tile.type.layout)
    across: gl.constexpr = gl.SliceLayout(0, tile.type.layout)
    if KEYS_FIRST:
        keys = (start_n + gl.arange(0, tile.shape[0], down))[:, None]
        rows = (start_m + gl.arange(0, tile.shape[1], across))[None, :]
    else:
        keys = (start_n + gl.arange(0, tile.shape[1], across))[None, :]
        rows = (start_m + gl.arange(0, tile.shape[0], down))[:, None]
    return keys, rows


@gluon.jit
def scores_of(products, problem, keys, rows):
    """(final scores, d score / d scaled product) of a tile.

    Without softcap the second stands unused.
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
        distance = gl.abs(rows + problem.offset - keys)
        scores = scores - problem.slope * distance.to(gl.float32)
    return scores, slope


@gluon.jit
def hidden(scores, problem, keys, rows):
    """Scores with -inf where a row does not see a key, or no key is."""
    if problem.RIGHT:
        last = gl.minimum(rows + (problem.offset + problem.right), problem.seqlen_k - 1)
        visible = keys <= last
    else:
        visible = (keys < problem.seqlen_k) & (rows >= 0)
    if problem.LEFT:
        visible = visible & (keys >= rows + (problem.offset - problem.left))
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def hidden_transposed(scores, problem, start_m, start_n):
    """S^T of queries from start_m and keys from start_n on, with -inf where a query does not see a
    key, or no key is."""
    down: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
    keys = start_n + gl.arange(0, scores.shape[0], down)
    if problem.RIGHT or problem.LEFT:
        scores = _hidden_by_row(scores, problem, keys, start_m)
    else:
        scores = gl.where((keys < problem.seqlen_k)[:, None], scores, float("-inf"))
    return scores


@gluon.jit
def _hidden_by_row(scores, problem, keys, start_m):
    lowest = keys * 0
    if problem.RIGHT:
        lowest = keys - (problem.offset + problem.right + start_m)
    lowest = gl.where(keys < problem.seqlen_k, lowest, scores.shape[1])
    scores = columns_kept(scores, "ge", lowest)
    if problem.LEFT:
        scores = columns_kept(scores, "le", keys - (problem.offset - problem.left + start_m))
    return scores
