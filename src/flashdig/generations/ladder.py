"""The order of the exhibits, from naive to the newest, and how to get at them by name."""

from __future__ import annotations

import difflib
import importlib

from flashdig.generations.base import Generation

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


def generation(name: str) -> Generation:
    """The exhibit of a rung. Raises ValueError for an unknown name, with the nearest ones."""
    if name not in RUNGS:
        near = difflib.get_close_matches(name, RUNGS, n=3, cutoff=0.4) or list(RUNGS)
        raise ValueError(f"unknown rung {name!r}; did you mean {', '.join(near)}?")
    module, attribute = RUNGS[name]
    found: Generation = getattr(
        importlib.import_module(f"flashdig.generations.{module}"), attribute
    )
    return found
