"""The yardstick of the conformance suite: eager attention in the inputs' dtype, with every feature.

It rounds QK^T, P and O to the dtype and keeps all that lies between in float32. Its gradients are
the equations of Dao 2023, algorithm 2, on whole matrices: P comes from scores computed anew and the
kept float32 LSE, and D = rowsum(dO * O) from the rounded O; dP and dS are rounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashdig.bench.conformance_inputs import LEAVES, Inputs, distance_from_diagonal

if TYPE_CHECKING:
    import torch

Results = dict[str, "torch.Tensor"]


def eager_rounded(inputs: Inputs) -> Results:
    """out, lse and the wanted gradients by name, each in its input's dtype and layout."""
    if not inputs.case.packed:
        found = _dense(inputs, inputs.q, inputs.k, inputs.v, inputs.grad_out, inputs.grad_lse, 0)
    else:
        found = _packed(inputs)
    kept = {"out": found["out"].to(inputs.q.dtype), "lse": found["lse"]}
    for name, wanted in zip(LEAVES, inputs.wanted(), strict=True):
        source = getattr(inputs, name)
        if wanted:
            gradient = found[f"d{name}"]
            if name == "bias":
                gradient = gradient.sum_to_size(source.shape)
            kept[f"d{name}"] = gradient.to(source.dtype)
    return kept


def _packed(inputs: Inputs) -> Results:
    """A sequence at a time; 0 (LSE -inf) in rows of none."""
    import torch

    q, k, v, grad_lse = inputs.q, inputs.k, inputs.v, inputs.grad_lse
    found = {
        "out": torch.zeros((*q.shape[:2], v.shape[-1]), device=q.device),
        "lse": torch.full((q.shape[1], q.shape[0]), -math.inf, device=q.device),
        "dsinks": torch.zeros(q.shape[1], device=q.device),
        **{
            f"d{name}": torch.zeros(x.shape, device=q.device)
            for name, x in (("q", q), ("k", k), ("v", v))
        },
    }
    for b, (rows, keys) in enumerate(inputs.spans()):
        part = _dense(
            inputs,
            q[rows][None],
            k[keys][None],
            v[keys][None],
            inputs.grad_out[rows][None],
            None if grad_lse is None else grad_lse[:, rows][None],
            b,
        )
        found["lse"][:, rows] = part["lse"][0]
        for name, where in (("out", rows), ("dq", rows), ("dk", keys), ("dv", keys)):
            found[name][where] = part[name][0].float()
        found["dsinks"] += part["dsinks"]
    return found


def _dense(
    inputs: Inputs,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    first: int,
) -> Results:
    """All results of a dense batch whose first sequence is number `first`, but for the broadcast
    dimensions of the bias, over which its gradient is not summed yet."""
    import torch

    case = inputs.case
    batch, seqlen_q, num_heads, _ = q.shape
    seqlen_k, num_heads_kv = k.shape[1:3]
    visible = inputs.visible[first]
    # (batch, num_heads, rows, width); what is hidden must be a number to be masked
    q, k, v, grad_out = (
        torch.where(torch.isnan(x), 0.0, x).transpose(1, 2) for x in (q, k, v, grad_out)
    )
    group = num_heads // num_heads_kv
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b of values of the dtype, summed in float32 and rounded to the dtype; float32."""
        if case.features["dtype"] == "tf32":
            return _to_tf32(a.float()) @ _to_tf32(b.float())
        return (a.float() @ b.float()).to(inputs.q.dtype).float()

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(inputs.q.dtype).float()

    def final_scores(products: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores with -inf for what is hidden, and the derivative of softcap."""
        scores = products * case.softmax_scale
        slope = torch.ones((), device=q.device)
        if case.softcap:
            tanh = torch.tanh(scores / case.softcap)
            scores, slope = case.softcap * tanh, 1.0 - tanh * tanh
        if inputs.bias is not None and inputs.bias.dtype != torch.bool:
            scores = scores + inputs.bias.float()
        if inputs.alibi_slopes is not None:
            slopes = inputs.alibi_slopes.expand(case.batch, num_heads)[first : first + batch]
            distance = distance_from_diagonal(case, seqlen_q, seqlen_k, q.device).abs()
            scores = scores - slopes[..., None, None] * distance
        return scores.masked_fill(~visible, -math.inf), slope

    scores, slope = final_scores(product(q, k.transpose(-1, -2)))
    # the sinks' column, or one that weighs nothing
    logits = torch.full((num_heads,), -math.inf, device=q.device)
    if inputs.sinks is not None:
        logits = inputs.sinks.float()
    columns = torch.cat(
        (scores, logits[:, None, None].expand(batch, num_heads, seqlen_q, 1)), dim=-1
    )
    alive = (columns > -math.inf).any(dim=-1, keepdim=True)
    columns = torch.where(alive, columns, 0.0)  # a softmax over no key is 0/0
    lse = torch.where(alive[..., 0], torch.logsumexp(columns, dim=-1), -math.inf)
    probs = torch.where(alive, torch.softmax(columns, dim=-1), 0.0)
    probs = torch.where(visible, probs[..., :seqlen_k], 0.0)
    kept = _kept(inputs, first, (batch, num_heads, seqlen_q, seqlen_k))
    dropped = rounded(probs * kept)
    out = product(dropped, v)

    # from here on as a backward that keeps only O and the LSE: P = exp(S - L), D = rowsum(dO * O)
    if q.dtype == torch.float32:
        # the scores come anew, summed in another order; in 16 bits their rounding hides that
        scores, slope = final_scores(product(q.flip(-1), k.flip(-1).transpose(-1, -2)))
    statistic = torch.where(alive, lse[..., None], 0.0)
    probs = torch.where(visible & alive, torch.exp(scores - statistic), 0.0)
    sink_probs = torch.where(alive, torch.exp(columns[..., seqlen_k:] - statistic), 0.0)
    dropped = rounded(probs * kept)
    delta = (out * grad_out.float()).sum(-1, keepdim=True)
    if grad_lse is not None:
        delta = delta - torch.where(alive, grad_lse[..., None], 0.0)
    grad_scores = probs * (product(grad_out, v.transpose(-1, -2)) * kept - delta)
    grad_products = rounded(grad_scores * slope)

    def of_kv_heads(x: torch.Tensor) -> torch.Tensor:
        grouped: torch.Tensor = x.unflatten(1, (num_heads_kv, group))
        return grouped.sum(2).transpose(1, 2)

    return {
        "out": out.transpose(1, 2),
        "lse": lse,
        "dq": product(grad_products, k).transpose(1, 2) * case.softmax_scale,
        "dk": of_kv_heads(product(grad_products.transpose(-1, -2), q)) * case.softmax_scale,
        "dv": of_kv_heads(product(dropped.transpose(-1, -2), grad_out)),
        "dbias": grad_scores,
        "dsinks": -(sink_probs * delta).sum((0, 2, 3)),
    }


def _kept(inputs: Inputs, first: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Dropout's factors: 0, or 1 / (1 - p); the same that the kernels draw."""
    import torch

    from flashdig.kernels.philox import keep_mask

    case, device = inputs.case, inputs.q.device
    if not case.dropout_p:
        return torch.ones((), device=device)
    if case.dropout_p == 1.0:
        return torch.zeros((), device=device)
    starts = (first, 0, 0, 0)
    ranges = (
        torch.arange(start, start + size, device=device)
        for start, size in zip(starts, shape, strict=True)
    )
    keep = keep_mask(case.seed, case.dropout_p, *ranges)
    factors: torch.Tensor = keep / (1.0 - case.dropout_p)
    return factors


def _to_tf32(x: torch.Tensor) -> torch.Tensor:
    """float32 rounded to TF32's 10 mantissa bits, to nearest, as the kernels round."""
    import torch

    return ((x.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
