"""Names of the Hopper kernels that attend: what each was compiled for, for profilers and people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def attention_name(
    specialization: Any, made: str, block_m: int, words: Mapping[str, bool], full: str = "full"
) -> str:
    """`flashdig_hopper_<made>_d<width>_m<rows>n<keys>`, the mask and features.

    Args:
        made: such as "forward_bf16", see `with_dtype`.
        words: of features that not all of these kernels have, and whether they are there; softcap,
            ALiBi and sinks come behind them.
        full: the mask's word where there is none.
    """
    c, signature = specialization.constants, specialization.signature
    head_dim = f"d{c['HEAD_DIM']}"
    if c["HEAD_DIM_V"] != c["HEAD_DIM"]:
        head_dim += f"v{c['HEAD_DIM_V']}"
    mask = "window" if c["LEFT"] else "causal" if c["RIGHT"] else full
    features = {
        **words,
        "softcap": c["SOFTCAP"],
        "alibi": signature.get("slopes_ptr", "constexpr") != "constexpr",
        "sinks": signature["sinks_ptr"] != "constexpr",
    }
    parts = [f"flashdig_hopper_{made}", head_dim, f"m{block_m}n{c['BLOCK_N']}", mask]
    parts += [word for word, there in features.items() if there]
    return "_".join(part for part in parts if part)


def with_dtype(made: str, specialization: Any) -> str:
    """ "forward" -> "forward_bf16", as queries are."""
    return f"{made}_{'bf16' if 'bf16' in specialization.signature['q_desc'] else 'fp16'}"
