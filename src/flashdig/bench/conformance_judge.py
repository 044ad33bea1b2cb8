"""Runs a backend's kernels on a conformance case and compares every result with float64.

The allowance is that of `flashdig.bench.gate`: twice (gradients three times) the largest error of
eager attention that rounds QK^T, P and O to the dtype, plus 1e-5. Two things in which eager
attention may have luck are allowed for apart (`_share_of_largest`): the order of long float32 sums,
and the rounding of values that are all the same.

In a case of a few rows that error is one draw of a random number, and by luck it may be almost 0.
A case beyond its allowance is therefore judged once more, by the largest error of eager attention
over several draws of the same case; how many cases needed that is part of the record.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashdig.bench.cell_gate import GRADIENT_FACTOR
from flashdig.bench.conformance_eager import Results, eager_rounded
from flashdig.bench.conformance_inputs import LEAVES, Inputs, make_inputs
from flashdig.bench.gate import (
    ERROR_FACTOR,
    ERROR_FLOOR,
    LSE_TOLERANCE,
    OVERFLOW_ALLOWANCE,
    poisoned_allocator,
)
from flashdig.kernels.choose import TileConfig

if TYPE_CHECKING:
    import torch

    from flashdig.bench.conformance_cases import Case

PASSES = ("dq", "dkdv", "dk", "dv")
# draws of a case that is judged once more
REDRAWS = 24
# half a unit in the last of TF32's 10 mantissa bits
TF32_ROUNDING = 2.0**-11
# between two paths to one log-sum-exp, per 1 + |lse|
LSE_PATHS_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Kernels:
    """What is judged: the launchers of a backend, with the portable ones' tile for all passes."""

    backend: str = "triton"
    tile: TileConfig | None = None

    def of_case(self, case: Case) -> Kernels:
        """Those that serve a case: some backends have others where bits must repeat."""
        if not case.features.get("deterministic"):
            return self
        return replace(self, backend=f"{self.backend}_deterministic")

    def forward(self, *tensors: Any, **numbers: Any) -> tuple[torch.Tensor, torch.Tensor]:
        config = {} if self.tile is None else {"config": self.tile}
        out, lse = self._launcher(0)(*tensors, **numbers, **config)
        return out, lse

    def backward(self, *tensors: Any, **numbers: Any) -> tuple[torch.Tensor | None, ...]:
        configs = {} if self.tile is None else {"configs": dict.fromkeys(PASSES, self.tile)}
        return tuple(self._launcher(1)(*tensors, **numbers, **configs))

    def _launcher(self, direction: int) -> Any:
        from flashdig.ops.attention import LAUNCHERS

        module = importlib.import_module(LAUNCHERS[self.backend][direction])
        return getattr(module, ("attention_forward", "attention_backward")[direction])


def run_kernels(inputs: Inputs, kernels: Kernels) -> dict[str, Any]:
    """out, lse and the gradients by name ("dq", ...; None where not wanted)."""
    kernels = kernels.of_case(inputs.case)
    operands, numbers = inputs.operands(), inputs.numbers()
    out, lse = kernels.forward(*operands, **numbers)
    positional = (inputs.grad_out, inputs.grad_lse, *operands, out, lse)
    gradients = kernels.backward(*positional, **numbers, wanted=inputs.wanted())
    named = {f"d{name}": x for name, x in zip(LEAVES, gradients, strict=True)}
    return {"out": out, "lse": lse, **named}


@dataclass(frozen=True)
class Judgement:
    """What is wrong with a case, and whether it took more draws of the yardstick to say."""

    problems: tuple[str, ...]
    redrawn: bool = False


def judge(inputs: Inputs, kernels: Kernels = Kernels()) -> Judgement:
    """Run the kernels on poisoned memory and compare; one read from the device."""
    import torch

    with poisoned_allocator():
        ours = run_kernels(inputs, kernels)
    exact = _oracle(inputs)
    found = _form_problems(inputs, ours, exact)
    if found:
        return Judgement(tuple(found))
    eager = eager_rounded(inputs)
    names = list(exact)
    figures = [_figures(inputs, name, ours[name], exact[name], eager[name]) for name in names]
    if inputs.case.sampled:
        again = run_kernels(inputs, kernels)
        names.append("a second run")
        repeated = [n for n in exact if repeats(n, inputs.case)]
        figures.append(_row([_count(ours[n] != again[n]) for n in repeated], inputs.q.device))
        if inputs.case.packed:
            names.append("dense calls")
            figures.append(_row(lse_of_dense_calls(inputs, ours["lse"], kernels), inputs.q.device))
    rows = dict(zip(names, torch.stack(figures).tolist(), strict=True))
    share = _share_of_largest(inputs)
    said = _verdicts(rows, share)
    if not said or any(math.isnan(row[0]) or row[3] for row in rows.values()):
        return Judgement(said)
    for name, errors in _redrawn_errors(inputs, list(exact)).items():
        rows[name][1] = max(rows[name][1], *errors)
    return Judgement(_verdicts(rows, share), redrawn=True)


def repeats(name: str, case: Case) -> bool:
    """Whether a result has the same bits in every run: all but dQ of a backend that adds it up in
    any order unless it is asked not to."""
    return name != "dq" or case.features.get("deterministic") is not False


def _redrawn_errors(inputs: Inputs, names: list[str]) -> dict[str, list[float]]:
    """Errors of eager attention, by name, for other values of the same case."""
    import torch

    errors: dict[str, list[float]] = {name: [] for name in names}
    for draw in range(1, REDRAWS):
        case = replace(inputs.case, seed=inputs.case.seed ^ draw)
        other = make_inputs(case, str(inputs.q.device))
        exact, eager = _oracle(other), eager_rounded(other)
        figures = [_figures(other, name, eager[name], exact[name], eager[name]) for name in names]
        for name, row in zip(names, torch.stack(figures).tolist(), strict=True):
            errors[name].append(row[1])
    return errors


def _share_of_largest(inputs: Inputs) -> float:
    """What a result may be off beside eager attention's error, as a share of its largest value.

    A float32 sum of n terms, one after the other, is off by about sqrt(n) roundings; a library's
    product adds in blocks and is off by fewer. Where all values of a tensor are the same, every
    term of a sum is rounded the same way: one rounding of the format does not average out.
    """
    import torch

    case = inputs.case
    tf32 = case.features["dtype"] == "tf32"
    share = 0.0
    if inputs.q.dtype == torch.float32 and not tf32:
        group = inputs.q.shape[-2] // inputs.k.shape[-2]
        terms = max(max(group * rows, keys) for rows, keys in case.lengths)
        share = math.sqrt(terms) * torch.finfo(torch.float32).eps / 2
    if case.distribution == "constant":
        share = max(share, TF32_ROUNDING if tf32 else torch.finfo(inputs.q.dtype).eps / 2)
    return share


def _verdicts(rows: dict[str, list[float]], share: float) -> tuple[str, ...]:
    said = (_verdict(name, row, share) for name, row in rows.items())
    return tuple(one for one in said if one is not None)


def _form_problems(inputs: Inputs, ours: dict[str, Any], exact: Results) -> list[str]:
    """Shapes, dtypes, and which gradients there are."""
    import torch

    found = []
    for name, x in ours.items():
        if name not in exact:
            if x is not None:
                found.append(f"{name} was not wanted")
            continue
        like = inputs.q if name == "out" else getattr(inputs, name.removeprefix("d"), None)
        dtype = torch.float32 if like is None else like.dtype
        if x is None:
            found.append(f"{name} is missing")
        elif x.shape != exact[name].shape or x.dtype != dtype:
            found.append(
                f"{name} is {x.dtype} {tuple(x.shape)}, expected {dtype} {tuple(exact[name].shape)}"
            )
    return found


def _row(figures: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Four figures: what `_figures` gives, here a count of differences in the last."""
    import torch

    total = torch.stack(figures).sum() if figures else torch.zeros((), device=device)
    return torch.cat((torch.zeros(3, dtype=torch.float64, device=device), total.double()[None]))


def _count(mark: torch.Tensor) -> torch.Tensor:
    return mark.sum().double()


def _largest(x: torch.Tensor) -> torch.Tensor:
    """max |x| in float64, NaN if any is; 0 of nothing."""
    import torch

    if not x.numel():
        return torch.zeros((), dtype=torch.float64, device=x.device)
    return x.double().abs().max()


def _figures(
    inputs: Inputs, name: str, x: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor
) -> torch.Tensor:
    """(error, eager attention's error, largest exact value, elements that must be exact and are
    not), float64."""
    import torch

    if name == "lse":
        infinite = torch.isneginf(exact)
        wrong = _count(torch.isneginf(x) != infinite)
        x, exact, eager = (torch.where(infinite, 0.0, one.double()) for one in (x, exact, eager))
        if inputs.q.dtype != torch.float32:  # scores are summed in float32 whatever the inputs are
            eager = exact
        # in units of what is allowed to any LSE
        size = 1 + exact.abs()
        return torch.stack(
            (_largest((x - exact) / size), _largest((eager - exact) / size), _largest(exact), wrong)
        )
    source = inputs.q if name == "out" else getattr(inputs, name.removeprefix("d"))
    hidden = torch.isnan(source)
    if name == "out":
        hidden = hidden.any(-1, keepdim=True)
    wrong = _count(hidden & (x != 0))
    return torch.stack(
        (_largest(x.double() - exact), _largest(eager.double() - exact), _largest(exact), wrong)
    )


def _verdict(name: str, row: list[float], share: float) -> str | None:
    error, eager_error, largest, wrong = row
    if name in ("a second run", "dense calls"):
        return f"{int(wrong)} values differ from {name}" if wrong else None
    if wrong:
        what = "-inf is missing or too much" if name == "lse" else "not 0 where nothing is seen"
        return f"{name}: {what} in {int(wrong)} values"
    if name == "lse":
        allowed = LSE_TOLERANCE + ERROR_FACTOR * eager_error
    else:
        factor = ERROR_FACTOR if name == "out" else GRADIENT_FACTOR
        allowed = factor * eager_error + ERROR_FLOOR + share * largest
        if not math.isfinite(allowed):
            allowed = OVERFLOW_ALLOWANCE * largest
    if error <= allowed:  # false for a NaN
        return None
    return f"{name}: error {error:.3g} is above {allowed:.3g} (largest value {largest:.3g})"


def lse_of_dense_calls(inputs: Inputs, lse: torch.Tensor, kernels: Kernels) -> list[torch.Tensor]:
    """How many of a packed call's log-sum-exps differ from those of a dense call a sequence."""
    from flashdig.kernels.reference import of_sequence

    found = []
    operands = inputs.operands()
    for b, (rows, keys) in enumerate(inputs.spans()):
        _, one = kernels.forward(
            inputs.q[rows][None],
            inputs.k[keys][None],
            inputs.v[keys][None],
            None,
            of_sequence(inputs.alibi_slopes, b),
            inputs.sinks,
            operands[6],
            *(None,) * 4,
            **inputs.numbers(),
        )
        packed = lse[:, rows]
        near = (packed - one[0]).abs() <= LSE_PATHS_TOLERANCE * (1 + packed.abs())
        found.append(_count(~near & (packed != one[0])))  # -inf equals -inf
    return found


def _oracle(inputs: Inputs) -> Results:
    """out, lse and the wanted gradients, float64."""
    import torch

    leaves = {
        name: x if x.dtype == torch.bool else x.detach().double()
        for name in LEAVES
        if (x := getattr(inputs, name)) is not None
    }
    names = [name for name, w in zip(LEAVES, inputs.wanted(), strict=True) if w]
    for name in names:
        leaves[name].requires_grad_()
    out, lse = _attended(inputs, leaves)
    found = {"out": out.detach(), "lse": lse.detach()}
    pairs = [(out, _cleaned(inputs.grad_out).double())]
    if inputs.grad_lse is not None:
        pairs.append((torch.where(torch.isneginf(lse), 0.0, lse), inputs.grad_lse.double()))
    # a result of nothing has no graph
    pairs = [(x, gradient) for x, gradient in pairs if x.requires_grad]
    gradients: Any = [None] * len(names)
    if pairs and names:
        results, weights = zip(*pairs, strict=True)
        gradients = torch.autograd.grad(
            results, [leaves[name] for name in names], weights, allow_unused=True
        )
    for name, gradient in zip(names, gradients, strict=True):
        found[f"d{name}"] = torch.zeros_like(leaves[name]) if gradient is None else gradient
    return found


def _cleaned(x: torch.Tensor) -> torch.Tensor:
    """x with 0 for NaN: what is hidden is masked, and must be a number for that."""
    import torch

    return torch.where(torch.isnan(x), 0.0, x)


def _attended(inputs: Inputs, leaves: Results) -> tuple[torch.Tensor, torch.Tensor]:
    from flashdig.kernels.reference import reference_attention, reference_attention_varlen

    case = inputs.case
    options: dict[str, Any] = {
        "causal": "top-left" if case.mask.alignment == "top-left" else False,
        "window": (case.mask.window_left, case.mask.window_right),
        "softmax_scale": case.softmax_scale,
        "softcap": case.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "sinks": leaves.get("sinks"),
        "dropout_p": case.dropout_p,
        "dropout_seed": case.seed,
    }
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    if inputs.cu_seqlens is None:
        return reference_attention(q, k, v, bias=leaves.get("bias"), **options)
    # lengths as numbers of the host: nothing is read back
    used_q, used_k = (x.cpu() for x in inputs.seqused) if inputs.seqused else (None, None)
    cu_seqlens = (x.cpu() for x in inputs.cu_seqlens)
    return reference_attention_varlen(
        q, k, v, *cu_seqlens, seqused_q=used_q, seqused_k=used_k, **options
    )
