"""Covering arrays: few combinations of options in which every two values meet.

Faults mostly need two features together (Kuhn, Wallace and Gallo, "Software fault interactions and
implications for software testing", 2004), and all pairs fit into hundredths of all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence

Combination = dict[str, Hashable]
# two options with their values, the options in the order of the domains
Pair = tuple[tuple[str, Hashable], tuple[str, Hashable]]
Allowed = Callable[[Mapping[str, Hashable]], bool]


def feasible_pairs(domains: Mapping[str, Sequence[Hashable]], allowed: Allowed) -> list[Pair]:
    """Every pair of values of two options that may stand together, in the domains' order."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(domains, 2)
        for x in domains[a]
        for y in domains[b]
        if allowed({a: x, b: y})
    ]


def pairs_of(combination: Mapping[str, Hashable], names: Sequence[str]) -> set[Pair]:
    """The pairs that one combination covers."""
    return {((a, combination[a]), (b, combination[b])) for a, b in itertools.combinations(names, 2)}


def covering_array(
    domains: Mapping[str, Sequence[Hashable]], allowed: Allowed = lambda _: True
) -> list[Combination]:
    """Combinations that cover every feasible pair; the same list in every run.

    Greedy: a combination begins with the first pair that is not covered, and each further option
    takes the value that covers most new pairs with those already there; of equal ones, the value
    that was used least.

    Args:
        domains: values by option.
        allowed: whether options, some or all of them, may stand together. It must be so that every
            allowed choice of some can be continued to all.

    Raises ValueError for an option without values, and where a combination cannot be completed.
    """
    for name, values in domains.items():
        if not values:
            raise ValueError(f"domains: {name} has no values")
    names = list(domains)
    missing = dict.fromkeys(feasible_pairs(domains, allowed))
    used = {(name, value): 0 for name in names for value in domains[name]}
    found: list[Combination] = []
    while missing:
        chosen: Combination = dict(next(iter(missing)))
        # options with many values first: they need the most combinations
        for name in sorted(names, key=lambda n: -len(domains[n])):
            if name not in chosen:
                chosen[name] = _best_value(name, domains, chosen, allowed, missing, used)
        for name in names:
            used[name, chosen[name]] += 1
        for pair in pairs_of(chosen, names):
            missing.pop(pair, None)
        found.append({name: chosen[name] for name in names})
    return found


def _best_value(
    name: str,
    domains: Mapping[str, Sequence[Hashable]],
    chosen: Combination,
    allowed: Allowed,
    missing: Mapping[Pair, None],
    used: Mapping[tuple[str, Hashable], int],
) -> Hashable:
    order = list(domains)

    def covers(value: Hashable) -> int:
        mine = (name, value)
        others = ((other, chosen[other]) for other in chosen)
        return sum(
            ((mine, other) if order.index(name) < order.index(other[0]) else (other, mine))
            in missing
            for other in others
        )

    values = [value for value in domains[name] if allowed({**chosen, name: value})]
    if not values:
        raise ValueError(f"no value of {name} may stand beside {chosen}")
    return max(values, key=lambda value: (covers(value), -used[name, value]))
