"""The order of the exhibits, from naive to the newest, and how to get at them by name."""

from __future__ import annotations

import difflib
import importlib

from flashdig.generations.base import Generation
from flashdig.generations.steps_paths import PREFIXES, step_generation, step_names

# rung -> (module, attribute); imported one by one, since the Triton exhibits need Triton
RUNGS = {
    "naive": ("v0_eager", "NAIVE"),
    "inplace": ("v0_eager", "INPLACE"),
    "sdpa_math": ("v0_eager", "SDPA_MATH"),
    "online_softmax": ("online_softmax", "GENERATION"),
    "v1": ("v1_io_aware", "GENERATION"),
    "v2": ("v2_work_partition", "GENERATION"),
    "v2_transposed": ("v2_work_partition", "TRANSPOSED"),
    "sdpa_efficient": ("v0_eager", "SDPA_EFFICIENT"),
    "sdpa_flash": ("v0_eager", "SDPA_FLASH"),
    "sdpa_cudnn": ("v0_eager", "SDPA_CUDNN"),
}
# beside the ladder: one kernel in Gluon, whose two halves differ in which warp gets what
PAIR = {
    "split_q": ("split_q_split_k", "SPLIT_Q"),
    "split_k": ("split_q_split_k", "SPLIT_K"),
}


def generation(name: str) -> Generation:
    """The exhibit of a rung, of a set of steps (see `step_generation`) or of half a pair.

    Raises ValueError for an unknown name, with the nearest ones.
    """
    if name.startswith(PREFIXES):
        return step_generation(name)
    if name in PAIR:
        return _exhibit(*PAIR[name])
    if name not in RUNGS:
        known = [*RUNGS, *PAIR, *step_names()]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(RUNGS)
        raise ValueError(f"unknown rung {name!r}; did you mean {', '.join(near)}?")
    return _exhibit(*RUNGS[name])


def _exhibit(module: str, attribute: str) -> Generation:
    found: Generation = getattr(
        importlib.import_module(f"flashdig.generations.{module}"), attribute
    )
    return found
