"""The steps from v1 to v2: what each claims, which sets make sense, and the paths through them.

Two paths: cumulative, v1 and one step more at a time until v2; and leave-one-out, v2 without one
step (and without those that need it). On the ladder they are `step:NAME`, everything up to and with
NAME, and `without:NAME`; `v1+NAME+NAME` is any other set that makes sense.

Device code and launcher: `steps_v1_v2.py`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashdig.costs.schedules import exhibit_tile
from flashdig.costs.traffic import (
    Traffic,
    tensor_bytes,
    transpose_copy,
    v1_issued,
    v1_surroundings,
    v2_issued,
)
from flashdig.generations.base import (
    Generation,
    LaunchPrediction,
    tiled_flops,
    unsupported_by_triton,
)
from flashdig.problem import AttentionProblem

if TYPE_CHECKING:
    import torch

    from flashdig.generations.base import Outcome

CUMULATIVE, LEAVE_ONE_OUT, ANY_SET = "step:", "without:", "v1+"
PREFIXES = (CUMULATIVE, LEAVE_ONE_OUT, ANY_SET)
NO_STEP = "none"


@dataclass(frozen=True)
class Step:
    """One change on the way from v1 to v2.

    Attributes:
        name: short and stable.
        title: for people.
        claim: what it changes and why that should be faster, in a sentence.
        requires: the steps that it needs, and `reason`, why.
        needs_causal: there is nothing to gain, and nothing to run, without a causal mask.
        optional: not a part of v2.
    """

    name: str
    title: str
    claim: str
    requires: tuple[str, ...] = ()
    reason: str = ""
    needs_causal: bool = False
    optional: bool = False


STEPS = {
    step.name: step
    for step in (
        Step(
            "loop_order",
            "queries in the outer loop",
            "O, row_max and row_sum stay in registers for all tiles of keys and are stored once, "
            "rounded; K and V are loaded again for every tile of queries instead.",
        ),
        Step(
            "sequence_parallel",
            "a program for each tile of queries",
            "The grid grows from batch x heads programs to one for each tile of queries as well, "
            "so that few heads fill the chip too.",
            requires=("loop_order",),
            reason="several programs would add to the same O",
        ),
        Step(
            "late_division",
            "division after the loop",
            "O stays un-normalised until the last tile of keys: a product and a division for each "
            "of its elements leave the inner loop.",
        ),
        Step(
            "exp2",
            "2^x with the scale folded in",
            "log2(e) is part of the softmax scale, so the multiplication by it in front of every "
            "exponential is gone; and Triton's e^x guards denormals by two more, its 2^x does not.",
        ),
        Step(
            "lse",
            "LSE instead of row_max and row_sum",
            "One number a row is stored for the backward instead of two.",
            requires=("loop_order",),
            reason=(
                "with the keys outside, row_max and row_sum themselves go from tile to tile "
                "through memory"
            ),
        ),
        Step(
            "causal_skipping",
            "hidden tiles are not visited",
            "Tiles of keys that causality hides from a whole tile of queries are neither loaded "
            "nor multiplied: nearly half of them.",
            needs_causal=True,
        ),
        Step(
            "k_layout",
            "K transposed beforehand",
            "K is transposed once in memory, so that no tile of it is transposed inside: fewer "
            "shared-memory bank conflicts on CUDA cores, for one more copy.",
            optional=True,
        ),
    )
}


@dataclass(frozen=True)
class StepSet:
    """Some of the steps; iterates in the order of the path. Raises ValueError for unknown names."""

    names: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in self.names:
            step_named(name)

    @classmethod
    def of(cls, names: Iterable[str]) -> StepSet:
        return cls(frozenset(names))

    def __contains__(self, name: str) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[Step]:
        return (step for step in STEPS.values() if step.name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def refusals(self, causal: bool) -> list[str]:
        """Why this set makes no sense for such a mask; empty when it does."""
        reasons = []
        for step in self:
            for needed in step.requires:
                if needed not in self:
                    reasons.append(f"{step.name} needs {needed}: {step.reason}")
            if step.needs_causal and not causal:
                reasons.append(f"{step.name} needs a causal mask: nothing is hidden without one")
        return reasons

    def with_step(self, name: str) -> StepSet:
        return StepSet(self.names | {name})

    def without(self, name: str) -> StepSet:
        """Without a step and without those that need it."""
        step_named(name)
        kept = {s.name for s in self if s.name != name and name not in s.requires}
        return StepSet(frozenset(kept))

    def describe(self) -> str:
        return " + ".join(["v1", *(step.name for step in self)])


def step_named(name: str) -> Step:
    """Raises ValueError for an unknown name, with the nearest ones."""
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=2, cutoff=0.4) or list(STEPS)
        raise ValueError(f"unknown step {name!r}; did you mean {' or '.join(near)}?")
    return STEPS[name]


def steps_up_to(name: str, causal: bool) -> StepSet:
    """The cumulative path as far as `name` ("none" for v1), without steps that need another mask.

    `name` itself is always in the set, so that a set which makes no sense says so when it is run.
    """
    if name == NO_STEP:
        return StepSet()
    step_named(name)
    order = list(STEPS)
    before = order[: order.index(name)]
    return StepSet.of([*(n for n in before if causal or not STEPS[n].needs_causal), name])


def all_of_v2(causal: bool) -> StepSet:
    """What v2 is: every step but the optional one, and skipping only where something is hidden."""
    return StepSet.of(
        step.name for step in STEPS.values() if not step.optional and (causal or _serves_full(step))
    )


def cumulative_path(problem: AttentionProblem) -> list[StepSet]:
    """v1 first, then one step more at a time: the last but one is v2, the last has K transposed."""
    names = [name for name, step in STEPS.items() if problem.causal or _serves_full(step)]
    return [StepSet.of(names[:count]) for count in range(len(names) + 1)]


def leave_one_out(problem: AttentionProblem) -> dict[str, StepSet]:
    """Step -> v2 without it. Without the loop order goes all that needs it."""
    whole = all_of_v2(problem.causal)
    return {step.name: whole.without(step.name) for step in whole}


def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, steps: StepSet) -> Outcome:
    """Attention by v1 with these steps; tensors as `Generation.run` takes them.

    Returns out and the LSE, None for sets that store row_max and row_sum as v1 does. Raises
    ValueError for a set that makes no sense, with the reasons.
    """
    from flashdig.generations.steps_v1_v2 import launch

    _refuse(steps.refusals(causal), steps)
    out, statistics = launch(
        q,
        k,
        v,
        causal,
        queries_outside="loop_order" in steps,
        sequence_parallel="sequence_parallel" in steps,
        late_division="late_division" in steps,
        exp2="exp2" in steps,
        stores_lse="lse" in steps,
        skips_hidden="causal_skipping" in steps,
        k_is_transposed="k_layout" in steps,
    )
    return out, statistics[0] if "lse" in steps else None


def predict(problem: AttentionProblem, steps: StepSet) -> LaunchPrediction:
    """What one call of `run` does, skipping being no step where the mask hides nothing.

    Raises ValueError for a set that makes no sense under any mask.
    """
    _refuse(steps.refusals(causal=True), steps)
    tile = exhibit_tile(problem.head_dim, problem.element_bytes)
    skips = "causal_skipping" in steps
    size = tensor_bytes(problem)
    if "loop_order" in steps:
        kernel = v2_issued(
            problem,
            tile.block_m,
            tile.block_n,
            skip_masked_tiles=skips,
            statistics="lse" if "lse" in steps else "m_and_l",
        )
        around, kernels = Traffic(0, 0), 1
        scratch = size.lse if "lse" in steps else 2 * size.lse
    else:
        kernel = v1_issued(problem, tile.block_m, tile.block_n, skip_masked_tiles=skips)
        around = v1_surroundings(problem)
        rounds = problem.element_bytes < 4
        kernels = 5 if rounds else 4  # three fills, the kernel, the rounding
        wide = 4 * problem.batch * problem.num_heads * problem.seqlen_q * problem.head_dim_v
        scratch = 2 * size.lse + (wide if rounds else 0)
    if "k_layout" in steps:
        copy = transpose_copy(problem)
        around, kernels, scratch = around + copy, kernels + 1, scratch + copy.store_bytes
    return LaunchPrediction(
        kernels=kernels,
        traffic=around + kernel,
        triton=kernel,
        matmul_flops=tiled_flops(problem, tile, skip_masked_tiles=skips),
        scratch_bytes=scratch,
    )


def step_generations(problem: AttentionProblem) -> list[Generation]:
    """Both paths for a problem as exhibits: cumulative, then leave-one-out."""
    names = [name for name, step in STEPS.items() if problem.causal or _serves_full(step)]
    cumulative = [step_generation(f"{CUMULATIVE}{name}") for name in (NO_STEP, *names)]
    left_out = [step_generation(f"{LEAVE_ONE_OUT}{name}") for name in leave_one_out(problem)]
    return cumulative + left_out


def step_names() -> list[str]:
    """Names of both paths, as `step_generation` takes them."""
    cumulative = [f"{CUMULATIVE}{name}" for name in (NO_STEP, *STEPS)]
    return cumulative + [f"{LEAVE_ONE_OUT}{s.name}" for s in STEPS.values() if not s.optional]


def step_generation(name: str) -> Generation:
    """An exhibit: "step:NAME" (v1 with the path up to NAME), "without:NAME" (v2 without it) or
    "v1+NAME+NAME" (v1 with just these).

    Raises ValueError for another name, with the nearest ones, and for a set that makes no sense.
    """
    if name.startswith(CUMULATIVE):
        return _cumulative(name, name.removeprefix(CUMULATIVE))
    if name.startswith(LEAVE_ONE_OUT):
        return _left_out(name, name.removeprefix(LEAVE_ONE_OUT))
    if name.startswith(ANY_SET):
        return _any_set(name, StepSet.of(name.removeprefix(ANY_SET).split("+")))
    raise ValueError(f"a step is named {' or '.join(f'{p}NAME' for p in PREFIXES)}, not {name!r}")


def _cumulative(name: str, wanted: str) -> Generation:
    if wanted == NO_STEP:
        title, claim = "v1 by the kernel of the steps", "No step: what the steps are measured from."
    else:
        step = step_named(wanted)
        title, claim = f"+ {step.title}", step.claim
    return _exhibit(name, title, claim, lambda causal: steps_up_to(wanted, causal))


def _left_out(name: str, wanted: str) -> Generation:
    step = step_named(wanted)
    if step.optional:
        raise ValueError(f"{wanted} is no part of v2, so it cannot be left out of it")
    dependents = [other.title for other in STEPS.values() if wanted in other.requires]
    also = f" (nor {', '.join(dependents)}, which need it)" if dependents else ""

    def unsupported(problem: AttentionProblem, device_type: str) -> list[str]:
        reasons = unsupported_by_triton(problem, device_type)
        if step.needs_causal and not problem.causal:
            reasons.append(f"{wanted} needs a causal mask: there is nothing to leave out")
        return reasons

    exhibit = _exhibit(
        name,
        f"v2 without: {step.title}{also}",
        f"What this step is worth to v2, which is left without it. {step.claim}",
        lambda causal: all_of_v2(causal).without(wanted),
    )
    return dataclasses.replace(exhibit, unsupported=unsupported)


def _any_set(name: str, steps: StepSet) -> Generation:
    _refuse(steps.refusals(causal=True), steps)
    claim = " ".join(step.claim for step in steps)
    return _exhibit(name, steps.describe(), claim, lambda causal: steps)


def _exhibit(name: str, title: str, claim: str, steps: Callable[[bool], StepSet]) -> Generation:
    def run_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Outcome:
        return run(q, k, v, causal, steps(causal))

    def unsupported(problem: AttentionProblem, device_type: str) -> list[str]:
        refused = steps(problem.causal).refusals(problem.causal)
        return unsupported_by_triton(problem, device_type) + refused

    return Generation(
        name=name,
        title=title,
        year=2023,
        source="Dao 2023, sections 3.1 and 3.2, one change at a time",
        claim=claim,
        run=run_steps,
        unsupported=unsupported,
        predict=lambda problem: predict(problem, steps(problem.causal)),
        is_triton=True,
    )


def _refuse(reasons: list[str], steps: StepSet) -> None:
    if reasons:
        raise ValueError(f"{steps.describe()} makes no sense: {'; '.join(reasons)}")


def _serves_full(step: Step) -> bool:
    return not step.needs_causal
