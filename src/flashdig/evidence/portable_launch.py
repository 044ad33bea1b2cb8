"""The launches that a problem makes with the kernels that users run, on tensors without memory.

What `offline` compiles for "portable:forward", "hopper:backward" and the like: the kernels' own
launchers are called with tensors of the meta device, so signature, alignment and constants are
those of real launches.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from flashdig.kernels.choose import Pass, TileConfig, choose_config
from flashdig.kernels.triton.backward import Wanted, attention_backward
from flashdig.kernels.triton.forward_launch import attention_forward
from flashdig.problem import AttentionProblem

PREFIX = "portable:"
HOPPER_FORWARD = "hopper:forward"
HOPPER_FP8_FORWARD = "hopper:fp8_forward"
# name -> whether dQ comes from a kernel of its own
HOPPER_BACKWARD = {"hopper:backward": False, "hopper:backward_deterministic": True}
# pass -> which of (q, k, v, bias, sinks) take a gradient
_WANTED: dict[str, Wanted] = {
    "dq": (True, False, False, False, False),
    "dkdv": (False, True, True, False, False),
    "dk": (False, True, False, False, False),
    "dv": (False, False, True, False, False),
    "bias": (False, False, False, True, False),
}


def launch(name: str, problem: AttentionProblem, arch: str) -> None:
    """Launch one pass with the table's tile for `arch`; every backward one launches delta first.

    Args:
        name: "portable:" and "forward", "dq", "dkdv", "dk", "dv" or "bias"; or "hopper:forward",
            "hopper:fp8_forward" (e4m3, with descale factors), "hopper:backward" or
            "hopper:backward_deterministic", with their own tiles.

    Raises ValueError for another pass, and for what has no tile.
    """
    if name == HOPPER_FORWARD:
        from flashdig.kernels.hopper.forward_launch import attention_forward as hopper_forward

        hopper_forward(**_tensors(problem), **_settings(problem))
        return
    if name == HOPPER_FP8_FORWARD:
        _launch_fp8(problem)
        return
    if name in HOPPER_BACKWARD:
        from flashdig.kernels.hopper.backward_operator import attention_backward as hopper_backward

        call = {**_tensors(problem), **_settings(problem)}
        out, lse = _results(problem, call["q"], call["v"])
        wanted = (True, True, True, False, False)
        deterministic = HOPPER_BACKWARD[name]
        hopper_backward(
            out, None, **call, out=out, lse=lse, wanted=wanted, deterministic=deterministic
        )
        return
    pass_ = name.removeprefix(PREFIX)
    if pass_ != "forward" and pass_ not in _WANTED:
        known = ", ".join(("forward", *_WANTED))
        raise ValueError(f"unknown pass {pass_!r} of the portable kernels; known: {known}")
    call = {**_tensors(problem), **_settings(problem)}
    if pass_ == "forward":
        attention_forward(**call, config=choose_config(problem, arch, "forward"))
        return
    out, lse = _results(problem, call["q"], call["v"])
    configs: dict[Pass, TileConfig] = {}
    if pass_ != "bias":  # whose tile is not in the table
        chosen = cast(Pass, pass_)
        configs = {chosen: choose_config(problem, arch, chosen)}
    attention_backward(out, None, **call, out=out, lse=lse, wanted=_WANTED[pass_], configs=configs)


def launches(name: str) -> bool:
    """Whether `launch` knows kernels of that kind of name."""
    return name.startswith(PREFIX) or name in (HOPPER_FORWARD, HOPPER_FP8_FORWARD, *HOPPER_BACKWARD)


def _launch_fp8(problem: AttentionProblem) -> None:
    from flashdig.kernels.hopper.fp8_launch import attention_forward as fp8_forward

    tensors, settings = _tensors(problem), _settings(problem)
    for name in ("bias", "dropout_seed"):
        del tensors[name]
    for name in ("dropout_p", "allow_tf32"):
        del settings[name]
    descale = torch.empty(problem.batch, problem.num_heads_kv, device="meta")
    descales: dict[str, Any] = dict.fromkeys(("q_descale", "k_descale", "v_descale"), descale)
    fp8_forward(**tensors, **descales, **settings)


def _results(
    problem: AttentionProblem, q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as a forward call returns them."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="meta")
    rows = q.shape[0] if problem.packed else problem.seqlen_q
    lse_shape = (problem.num_heads, rows)
    lse = torch.empty(lse_shape if problem.packed else (problem.batch, *lse_shape), device="meta")
    return out, lse


def _settings(problem: AttentionProblem) -> dict[str, Any]:
    left, right = problem.mask.sides
    return {
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "dropout_p": 0.1 if problem.dropout else 0.0,
        "window_left": left,
        "window_right": right,
        "top_left": problem.mask.alignment == "top-left",
        "allow_tf32": problem.allow_tf32,
    }


def _tensors(problem: AttentionProblem) -> dict[str, Any]:
    """The operands that the problem names, by their names in the launchers."""
    dtype = getattr(torch, problem.dtype)
    batch, heads = problem.batch, problem.num_heads

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def operand(seqlen: int, num_heads: int, head_dim: int) -> torch.Tensor:
        rows = (batch * seqlen,) if problem.packed else (batch, seqlen)
        return meta(*rows, num_heads, head_dim, dtype=dtype)

    def lengths() -> torch.Tensor | None:
        return meta(batch + 1, dtype=torch.int32) if problem.packed else None

    bias = {
        "none": None,
        "bool": meta(1, heads, problem.seqlen_q, problem.seqlen_k, dtype=torch.bool),
        "float": meta(1, heads, problem.seqlen_q, problem.seqlen_k, dtype=dtype),
    }[problem.bias]
    slopes = {"none": None, "heads": meta(heads), "batch_heads": meta(batch, heads)}[problem.alibi]
    return {
        "q": operand(problem.seqlen_q, heads, problem.head_dim),
        "k": operand(problem.seqlen_k, problem.num_heads_kv, problem.head_dim),
        "v": operand(problem.seqlen_k, problem.num_heads_kv, problem.head_dim_v),
        "bias": bias,
        "alibi_slopes": slopes,
        "sinks": meta(heads) if problem.sinks else None,
        "dropout_seed": meta(1, dtype=torch.int64) if problem.dropout else None,
        "cu_seqlens_q": lengths(),
        "cu_seqlens_k": lengths(),
        "seqused_q": None,
        "seqused_k": None,
    }
