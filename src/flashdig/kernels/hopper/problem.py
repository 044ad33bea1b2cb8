"""What a kernel computes: lengths, mask and score terms of one problem, and what follows for tiles.

Device code. Scores reach units of log2 by one factor, `exp_factor`, inside the exponential.
"""

from flashdig.kernels.gluon_api import aggregate, gl, gluon

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)


@aggregate
class Terms:
    """What makes scores of products, the same for a whole call; see `Problem`.

    Attributes:
        group_size: query heads that share keys.
        slopes_stride: of the batch, in ALiBi's slopes.
    """

    score_factor: gl.tensor
    exp_factor: gl.tensor
    softcap: gl.tensor
    group_size: gl.tensor
    slopes_stride: gl.tensor
    SOFTCAP: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, score_factor, exp_factor, softcap, group_size, slopes_stride, SOFTCAP):
        self.score_factor = score_factor
        self.exp_factor = exp_factor
        self.softcap = softcap
        self.group_size = group_size
        self.slopes_stride = slopes_stride
        self.SOFTCAP = gl.constexpr(SOFTCAP)


@aggregate
class Problem:
    """One sequence and head; constants are capitals.

    Attributes:
        offset: key position that lies on the diagonal of query row 0.
        left, right: keys seen on each side of the diagonal, where LEFT and RIGHT say so.
        score_factor: softmax_scale, or softmax_scale / softcap.
        exp_factor: what makes final scores log2; above zero.
        slope: ALiBi's, of this head.
    """

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    offset: gl.tensor
    left: gl.tensor
    right: gl.tensor
    score_factor: gl.tensor
    exp_factor: gl.tensor
    softcap: gl.tensor
    slope: gl.tensor
    LEFT: gl.constexpr
    RIGHT: gl.constexpr
    SOFTCAP: gl.constexpr
    ALIBI: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        seqlen_q,
        seqlen_k,
        offset,
        left,
        right,
        score_factor,
        exp_factor,
        softcap,
        slope,
        LEFT,
        RIGHT,
        SOFTCAP,
        ALIBI,
    ):
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.offset = offset
        self.left = left
        self.right = right
        self.score_factor = score_factor
        self.exp_factor = exp_factor
        self.softcap = softcap
        self.slope = slope
        self.LEFT = gl.constexpr(LEFT)
        self.RIGHT = gl.constexpr(RIGHT)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.ALIBI = gl.constexpr(ALIBI)


@gluon.jit
def problem_of(sizes, place, terms, slopes_ptr):
    """Of a `schedule.Place`; the slope of its head where slopes_ptr is one."""
    ALIBI: gl.constexpr = slopes_ptr is not None
    slope = terms.score_factor * 0.0
    if ALIBI:
        slope = gl.load(slopes_ptr + place.batch * terms.slopes_stride + place.head)
    return Problem(
        place.seqlen_q, place.seqlen_k, place.offset, sizes.left, sizes.right,
        terms.score_factor, terms.exp_factor, terms.softcap, slope,
        sizes.LEFT, sizes.RIGHT, terms.SOFTCAP, ALIBI,
    )  # fmt: skip


@gluon.jit
def key_tiles(problem, start_m, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Tile numbers (first, full_first, full_end, end) of the keys of a tile of rows.

    Every row sees whole the tiles of [full_first, full_end). `end` is above `first`, even where no
    row sees a key, so that a walk always has a first tile.
    """
    end_m = gl.minimum(start_m + BLOCK_M, problem.seqlen_q)
    diagonal = problem.offset
    first = start_m * 0
    end = gl.cdiv(problem.seqlen_k, BLOCK_N)
    full_first = first
    full_end = problem.seqlen_k // BLOCK_N
    if problem.RIGHT:
        seen = gl.maximum(end_m + diagonal + problem.right, 0)
        seen_by_all = gl.maximum(start_m + diagonal + problem.right + 1, 0)
        end = gl.cdiv(gl.minimum(problem.seqlen_k, seen), BLOCK_N)
        full_end = gl.minimum(problem.seqlen_k, seen_by_all) // BLOCK_N
    if problem.LEFT:
        begin = gl.maximum(start_m + diagonal - problem.left, 0)
        begin_of_all = gl.maximum(end_m - 1 + diagonal - problem.left, 0)
        first = gl.minimum(begin, problem.seqlen_k - 1) // BLOCK_N
        full_first = gl.cdiv(begin_of_all, BLOCK_N)
    end = gl.maximum(end, first + 1)
    full_end = gl.minimum(gl.maximum(full_end, first), end)
    full_first = gl.minimum(gl.maximum(full_first, first), full_end)
    return first, full_first, full_end, end


@gluon.jit
def final_scores(products, problem, rows, start_n):
    """Softcap and ALiBi; without either the products themselves."""
    scores = products
    if problem.SOFTCAP:
        # tanh, exact at both ends
        power = gl.exp2(products * (problem.score_factor * (2.0 * LOG2_E)))
        scores = (1.0 - 2.0 / (1.0 + power)) * problem.softcap
    elif problem.ALIBI:
        scores = products * problem.score_factor
    if problem.ALIBI:
        columns: gl.constexpr = gl.SliceLayout(0, products.type.layout)
        keys = start_n + gl.arange(0, products.shape[1], columns)
        distance = gl.abs((rows + problem.offset)[:, None] - keys[None, :])
        scores = scores - problem.slope * distance.to(gl.float32)
    return scores


@gluon.jit
def masked(scores, problem, rows, start_n):
    """Scores with -inf where a row does not see a key, or no key is."""
    if problem.LEFT:
        seen = _masked_on_both_sides(scores, problem, rows, start_n)
    else:
        seen = _masked_on_the_right(scores, problem, rows, start_n)
    return seen


@gluon.jit
def _masked_on_both_sides(scores, problem, rows, start_n):
    columns: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
    keys = start_n + gl.arange(0, scores.shape[1], columns)
    if problem.RIGHT:
        last = gl.minimum(rows + (problem.offset + problem.right), problem.seqlen_k - 1)
        visible = keys[None, :] <= last[:, None]
    else:
        visible = keys[None, :] < problem.seqlen_k
    visible = visible & (keys[None, :] >= (rows + (problem.offset - problem.left))[:, None])
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def _masked_on_the_right(scores, problem, rows, start_n):
    last = gl.full([scores.shape[0]], 0, gl.int32, rows.type.layout) + (problem.seqlen_k - 1)
    if problem.RIGHT:
        last = gl.minimum(rows + (problem.offset + problem.right), last)
    return columns_kept(scores, "le", last - start_n)


@gluon.constexpr_function
def _selection(comparison):
    return (
        f"{{ .reg .pred kept; setp.{comparison}.s32 kept, $2, $3; "
        "selp.f32 $0, $1, 0fFF800000, kept; }"
    )


@gluon.jit
def columns_kept(scores, COMPARISON: gl.constexpr, limits):
    """Scores with -inf in columns that are not "le" or "ge" (COMPARISON) their row's limit.

    By one comparison with a constant and one selection an element, where LLVM would gather 64
    comparisons in words first.
    """
    TEXT: gl.constexpr = _selection(COMPARISON)
    columns = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    # a thread's columns are its first one, 0, 2, 4 or 6, and constants
    limits = limits[:, None] - (columns & 6)[None, :]
    places = gl.convert_layout(gl.broadcast(scores, (columns & -7)[None, :])[1], scores.type.layout)
    return gl.inline_asm_elementwise(
        TEXT, "=f,f,r,r", [scores, places, gl.convert_layout(limits, scores.type.layout)],
        dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip
