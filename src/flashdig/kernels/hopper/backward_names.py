"""Names of the Hopper backward's kernels: what each was compiled for, for profilers and people."""

from __future__ import annotations

from typing import Any


def kernel_name(specialization: Any, made: str, tile: str) -> str:
    """`flashdig_hopper_<made>_<dtype>_d<width>_<tile>_<mask>` and its features.

    Args:
        made: "backward", "backward_dkdv" or "backward_dq".
        tile: "m64n128".
    """
    c = specialization.constants
    dtype = "bf16" if "bf16" in specialization.signature["q_desc"] else "fp16"
    parts = [f"flashdig_hopper_{made}_{dtype}_d{c['HEAD_DIM']}_{tile}"]
    parts.append("window" if c["LEFT"] else "causal" if c["RIGHT"] else "full")
    for there, word in (
        (c["PACKED"], "varlen"),
        (c["SOFTCAP"], "softcap"),
        (specialization.signature["slopes_ptr"] != "constexpr", "alibi"),
    ):
        if there:
            parts.append(word)
    return "_".join(parts)
