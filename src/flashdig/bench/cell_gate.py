"""Correct first, for cells with any feature, forward and backward.

An output is compared with float64 on whole (sequence, KV head) pairs: all of them where the problem
is small, else the first, the last, two random ones and, of packed input, the longest sequence. The
allowance is twice (gradients three times) the largest error of eager attention in the inputs' dtype
plus 1e-5, as in `flashdig.bench.gate`.

Dropout draws its own mask in every implementation, so nothing can be equal. There the mean and the
variance over all masks are known exactly (`flashdig.bench.exact`): the output must have the mean's
size, and deviate from it as much as the variance says.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.bench.cell_inputs import CellInputs
from flashdig.bench.cells import Cell
from flashdig.bench.exact import written_out
from flashdig.bench.gate import (
    ERROR_FACTOR,
    ERROR_FLOOR,
    OVERFLOW_ALLOWANCE,
    RANDOM_SEED,
    WHOLE_PROBLEM_LIMIT,
    GateResult,
)

if TYPE_CHECKING:
    import torch

GRADIENT_FACTOR = 3.0
GRADIENTS = ("dq", "dk", "dv")
# (sequence, KV head) pairs up to which all are compared
ALL_PAIRS_LIMIT = 64
# a statistic of dropout may be this many of its standard deviations off
DROPOUT_DEVIATIONS = 6.0
# and this much more: what rounding to 16 bits adds
DROPOUT_ROUNDING = 0.02


@dataclass(frozen=True)
class _Exact:
    """One compared pair: float64 values, and variances with dropout."""

    sequence: int
    head_kv: int
    values: dict[str, torch.Tensor]
    variances: dict[str, torch.Tensor]


@dataclass(frozen=True)
class CellReference:
    """What every output for one cell's inputs is compared with.

    Attributes:
        eager_errors: largest error of eager attention by name, over the compared pairs; empty with
            dropout.
        checked: what is compared, in words.
    """

    inputs: CellInputs
    pairs: tuple[_Exact, ...]
    eager_errors: dict[str, float]
    checked: str

    def check(self, tensors: Mapping[str, torch.Tensor]) -> GateResult:
        """Judge tensors by name: "out", or "dq", "dk" and "dv", in the inputs' layout."""
        for name, x in tensors.items():
            problem = self._whole_problem(name, x)
            if problem is not None:
                return GateResult(False, None, None, problem, self.checked)
        if self.inputs.cell.dropout_p > 0:
            found = [self._dropout_problem(name, x) for name, x in tensors.items()]
            reason = "; ".join(r for r in found if r is not None) or "ok"
            return GateResult(reason == "ok", None, None, reason, self.checked)
        judged = {name: (self._error(name, x), self._budget(name)) for name, x in tensors.items()}
        # written so that a NaN does not pass
        reasons = [
            f"error of {name} {error:.3g} against float64 is above the allowed {budget:.3g}"
            for name, (error, budget) in judged.items()
            if not error <= budget
        ]
        # the tensor that comes closest to what is allowed, or goes furthest beyond
        error, budget = max(judged.values(), key=lambda one: one[0] / one[1])
        finite = math.isfinite(error) and math.isfinite(budget)
        return GateResult(
            ok=not reasons,
            error=error if finite else None,
            budget=budget if finite else None,
            reason="; ".join(reasons) or "ok",
            checked=self.checked,
            rms_error=self._rms_error(tensors["out"]) if "out" in tensors else None,
        )

    def _whole_problem(self, name: str, x: torch.Tensor) -> str | None:
        """What can be said of the whole tensor."""
        import torch

        expected = self.inputs.shape_of(name)
        if tuple(x.shape) != expected:
            return f"{name} has shape {tuple(x.shape)}, expected {expected}"
        if x.dtype != self.inputs.out_dtype:
            return f"{name} is {x.dtype}, expected {self.inputs.out_dtype}"
        # one reduction and no mask of the tensor's size: NaN and infinity both survive a maximum
        if x.numel() and not bool(torch.isfinite(x.abs().max())):
            return f"{name} has values that are NaN or infinite"
        return None

    def _of_pair(self, name: str, x: torch.Tensor, pair: _Exact) -> torch.Tensor:
        """The part of a result that a pair is compared with, float64, in the layout of `_Exact`."""
        cell = self.inputs.cell
        rows = self.inputs.sequence(name, x, pair.sequence)
        if name in ("dk", "dv"):
            return rows[None, :, pair.head_kv].double()
        group = cell.num_heads // cell.num_heads_kv
        heads = slice(pair.head_kv * group, (pair.head_kv + 1) * group)
        return rows[:, heads].transpose(0, 1)[None].double()

    def _error(self, name: str, x: torch.Tensor) -> float:
        differences = (
            float((self._of_pair(name, x, pair) - pair.values[name]).abs().max())
            for pair in self.pairs
        )
        # max() drops a NaN that is not first
        return math.nan if any(map(math.isnan, found := list(differences))) else max(found)

    def _rms_error(self, out: torch.Tensor) -> float | None:
        squares = [
            (self._of_pair("out", out, pair) - pair.values["out"]).square().mean()
            for pair in self.pairs
        ]
        error = math.sqrt(float(sum(squares)) / len(squares))
        return error if math.isfinite(error) else None

    def _budget(self, name: str) -> float:
        factor = ERROR_FACTOR if name == "out" else GRADIENT_FACTOR
        budget = factor * self.eager_errors[name] + ERROR_FLOOR
        if math.isfinite(budget):
            return budget
        return OVERFLOW_ALLOWANCE * max(float(p.values[name].abs().max()) for p in self.pairs)

    def _dropout_problem(self, name: str, x: torch.Tensor) -> str | None:
        """How far a result under dropout is from its known mean and variance."""
        along = size = squares = 0.0
        count = rows = 0
        for pair in self.pairs:
            mean, variance = pair.values[name], pair.variances[name]
            found = self._of_pair(name, x, pair)
            varies = variance > 1e-6 * variance.mean()
            mean, variance, found = mean[varies], variance[varies], found[varies]
            along += float((found * mean / variance).sum())
            size += float((mean**2 / variance).sum())
            squares += float(((found - mean) ** 2 / variance).sum())
            count += mean.numel()
            rows += int(varies.any(dim=-1).sum())
        if not count:
            return None
        # least squares of found = factor * mean; a row's elements share a mask, hence only `rows`
        factor, spread = along / size, squares / count
        mean_allowed = DROPOUT_DEVIATIONS * math.sqrt(count / rows / size) + DROPOUT_ROUNDING
        spread_allowed = DROPOUT_DEVIATIONS * math.sqrt(4 / rows) + DROPOUT_ROUNDING
        if not abs(factor - 1) <= mean_allowed:
            return (
                f"{name} under dropout is {factor:.4g} times its mean, "
                f"allowed is 1 +- {mean_allowed:.2g}"
            )
        if not abs(spread - 1) <= spread_allowed:
            return (
                f"{name} under dropout varies {spread:.4g} times as much as it must, "
                f"allowed is 1 +- {spread_allowed:.2g}"
            )
        return None


def cell_reference(inputs: CellInputs) -> CellReference:
    """Float64 results of a cell's inputs, with gradients where there is a dout."""
    cell = inputs.cell
    chosen = compared_pairs(cell)
    pairs: list[_Exact] = []
    eager_errors: dict[str, float] = {}
    for sequence, head_kv in chosen:
        heads = inputs.heads(sequence, head_kv)
        exact = written_out(heads)
        pairs.append(_Exact(sequence, head_kv, exact.values, exact.variances))
        if cell.dropout_p > 0:
            continue
        for name, eager in written_out(heads, rounded_to=inputs.q.dtype).values.items():
            error = float((eager.double() - exact.values[name]).abs().max())
            worst = eager_errors.get(name, 0.0)
            eager_errors[name] = error if math.isnan(error) else max(error, worst)
    total = cell.batch * cell.num_heads_kv
    checked = f"{len(chosen)} of {total} (sequence, KV head) pairs"
    return CellReference(inputs, tuple(pairs), eager_errors, checked)


def compared_pairs(cell: Cell) -> list[tuple[int, int]]:
    """The (sequence, KV head) pairs that are compared with float64."""
    heads = cell.num_heads_kv
    total = cell.batch * heads
    longest = max(cell.lengths) if cell.packed else 0
    scores = cell.num_heads * (
        sum(n * n for n in cell.lengths)
        if cell.packed
        else cell.batch * cell.seqlen_q * cell.seqlen_k
    )
    if total <= 4 or (total <= ALL_PAIRS_LIMIT and scores <= WHOLE_PROBLEM_LIMIT):
        return [divmod(number, heads) for number in range(total)]
    generator = random.Random(RANDOM_SEED)
    numbers = {0, total - 1, *generator.sample(range(1, total - 1), 2)}
    if longest:
        numbers.add(cell.lengths.index(longest) * heads + generator.randrange(heads))
    return [divmod(number, heads) for number in sorted(numbers)]
