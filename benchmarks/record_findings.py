"""Attention that is slow for one known reason, recorded before and after the advice is taken.

    python benchmarks/record_findings.py FOLDER

Writes for each case two traces (`NAME.before.json.gz`, `NAME.after.json.gz`) and `findings.json`, a
record with the times of both, measured without the profiler in rotated rounds. Every output is
compared with float64 first. What the rules of `flashdig.findings` promise is held against these
pairs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashdig
from flashdig.bench.environment import collect, revision
from flashdig.bench.results import append_run, new_run, timing_fields
from flashdig.bench.timing import Timing, time_rotated
from flashdig.evidence.preset_recordings import record_steps

Call = Callable[[], Any]
BF16 = torch.bfloat16


@dataclass
class Case:
    """before and after give the same attention; `exact` gives it in float64, in their layout."""

    before: Call
    after: Call
    exact: Call
    eager: Call
    problem: dict[str, Any]
    clock: str = "graph"
    notes: dict[str, Any] = field(default_factory=dict)


def normal(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def eager(q, k, v, mask=None, scale=None):
    """Plain attention in the inputs' dtype; mask is True where a key is visible."""
    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.softmax(scores, -1) @ v


def causal_mask(seqlen: int) -> torch.Tensor:
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device="cuda").tril()


def sizes(q, k, causal: bool = False) -> dict[str, Any]:
    """What a row of a record says of the problem."""
    return {
        "batch": q.shape[0],
        "num_heads": q.shape[1],
        "num_heads_kv": k.shape[1],
        "seqlen_q": q.shape[2],
        "seqlen_k": k.shape[2],
        "head_dim": q.shape[3],
        "head_dim_v": q.shape[3],
        "dtype": str(q.dtype).removeprefix("torch."),
        "causal": causal,
    }


def plain(q, k, v, mask=None) -> dict[str, Any]:
    """What before and after are compared with, and the problem."""
    whole = mask is not None and mask.shape == (q.shape[2], k.shape[2])
    causal = whole and bool(mask.equal(torch.ones_like(mask).tril()))
    return {
        "problem": sizes(q, k, causal),
        "exact": lambda: eager(q.double(), k.double(), v.double(), mask),
        "eager": lambda: eager(q, k, v, mask),
    }


def held(backend: SDPBackend, call: Call) -> Call:
    def run():
        with torch.no_grad(), sdpa_kernel(backend):
            return call()

    return run


def contiguous() -> Case:
    batch, seqlen, heads, dim = 4, 4096, 16, 64
    rows = [normal(batch, seqlen, heads * dim).view(batch, seqlen, heads, dim) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in rows)
    mask = causal_mask(seqlen)

    def before():
        a, b, c = (x.transpose(1, 2).contiguous() for x in rows)
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)

    def after():
        a, b, c = (x.transpose(1, 2) for x in rows)
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)

    flash = SDPBackend.FLASH_ATTENTION
    return Case(held(flash, before), held(flash, after), **plain(q, k, v, mask))


def repeated_heads() -> Case:
    batch, heads, heads_kv, seqlen, dim = 4, 32, 4, 2048, 128
    q, k, v = (
        normal(batch, heads, seqlen, dim),
        *(normal(batch, heads_kv, seqlen, dim) for _ in range(2)),
    )

    def repeat(x):  # as models do it: a view that is expanded, and copied by the reshape
        one = x[:, :, None].expand(batch, heads_kv, heads // heads_kv, seqlen, dim)
        return one.reshape(batch, heads, seqlen, dim)

    def before():
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), is_causal=True)

    def after():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flash = SDPBackend.FLASH_ATTENTION
    return Case(held(flash, before), held(flash, after), **plain(q, k, v, causal_mask(seqlen)))


def float32_products() -> Case:
    q, k, v = (normal(4, 16, 1024, 64, dtype=torch.float32) for _ in range(3))

    def run(allow: bool) -> Call:
        def call():
            torch.backends.cuda.matmul.allow_tf32 = allow
            try:
                with torch.no_grad():
                    return eager(q, k, v)
            finally:
                torch.backends.cuda.matmul.allow_tf32 = False

        return call

    return Case(run(False), run(True), **plain(q, k, v), notes={"allowed_error": 2e-3})


def float32_attention() -> Case:
    q, k, v = (normal(4, 16, 2048, 64, dtype=torch.float32) for _ in range(3))
    half = [x.to(BF16) for x in (q, k, v)]

    def before():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def after():
        return F.scaled_dot_product_attention(*half, is_causal=True)

    mask = causal_mask(2048)
    efficient, cudnn = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION
    return Case(
        held(efficient, before),
        held(cudnn, after),
        **plain(q, k, v, mask),
        notes={"allowed_error": 3e-2},
    )


def window_as_tensor() -> Case:
    seqlen, left = 8192, 512
    q, k, v = (normal(1, 16, seqlen, 64) for _ in range(3))
    i = torch.arange(seqlen, device="cuda")
    distance = i[:, None] - i
    mask = (distance >= 0) & (distance <= left)
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def before():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def after():
        with torch.no_grad():
            return flashdig.attention(*rows, window=(left, 0)).transpose(1, 2)

    return Case(held(SDPBackend.EFFICIENT_ATTENTION, before), after, **plain(q, k, v, mask))


def padded_batch() -> Case:
    lengths = [2048, 256, 512, 300, 128, 700, 450, 96]
    batch, seqlen = len(lengths), max(lengths)
    q, k, v = (normal(batch, 16, seqlen, 64) for _ in range(3))
    known = torch.tensor(lengths, device="cuda")
    visible = torch.arange(seqlen, device="cuda")[None] < known[:, None]
    mask = visible[:, None, None]
    starts = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    starts[1:] = known.cumsum(0)
    packed = [x.transpose(1, 2)[visible] for x in (q, k, v)]

    def before():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def after():
        with torch.no_grad():
            return flashdig.attention_varlen(*packed, starts, starts, seqlen, seqlen)

    def real_rows(run: Call) -> Call:
        return lambda: run().transpose(1, 2)[visible]

    calls = plain(q, k, v, mask)
    case = Case(
        held(SDPBackend.EFFICIENT_ATTENTION, before),
        after,
        exact=real_rows(calls["exact"]),
        eager=real_rows(calls["eager"]),
        problem=calls["problem"],
    )
    case.notes = {"lengths": lengths, "view_before": real_rows}
    return case


def decode() -> Case:
    q, k, v = normal(1, 16, 1, 128), normal(1, 16, 32768, 128), normal(1, 16, 32768, 128)

    def call():
        return F.scaled_dot_product_attention(q, k, v)

    efficient, flash = SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION
    return Case(held(efficient, call), held(flash, call), **plain(q, k, v))


def launch_bound() -> Case:
    layers = 12
    q, k, v = (normal(1, 4, 256, 64) for _ in range(3))
    out = torch.empty_like(q)

    def before():
        x = q
        with torch.no_grad():
            for _ in range(layers):
                x = eager(x, k, v)
        return x

    graph = torch.cuda.CUDAGraph()
    before()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = before()

    def after():
        graph.replay()
        return out

    def deep(q64, k64, v64):
        for _ in range(layers):
            q64 = eager(q64, k64, v64)
        return q64

    return Case(
        before,
        after,
        exact=lambda: deep(q.double(), k.double(), v.double()),
        eager=lambda: deep(q, k, v),
        problem=sizes(q, k),
        clock="events",
    )


def strided_mask() -> Case:
    """A learned bias as models make it: (seqlen, seqlen, heads), permuted and not copied."""
    q, k, v = (normal(4, 16, 1024, 64) for _ in range(3))
    bias = normal(1024, 1024, 16).permute(2, 0, 1)[None]
    stored = bias.contiguous()

    def attend(mask: torch.Tensor) -> Call:
        def call():
            with torch.no_grad():
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        return call

    def added(a, b, c, d):
        return torch.softmax(a @ b.transpose(-2, -1) * 0.125 + d, -1) @ c

    wide = [x.double() for x in (q, k, v, bias)]
    return Case(
        attend(bias),
        attend(stored),
        exact=lambda: added(*wide),
        eager=lambda: added(q, k, v, bias),
        problem=sizes(q, k),
    )


def fused() -> Case:
    q, k, v = (normal(4, 16, 2048, 64) for _ in range(3))
    mask = causal_mask(2048)

    def before():
        with torch.no_grad():
            return eager(q, k, v, mask)

    def after():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return Case(before, held(SDPBackend.CUDNN_ATTENTION, after), **plain(q, k, v, mask))


def padded_head_dim() -> Case:
    q, k, v = (normal(4, 16, 2048, 72) for _ in range(3))
    wide = [F.pad(x, (0, 24)).contiguous() for x in (q, k, v)]

    def before():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def after():
        return F.scaled_dot_product_attention(*wide, is_causal=True, scale=72**-0.5)[..., :72]

    flash = SDPBackend.FLASH_ATTENTION
    return Case(held(flash, before), held(flash, after), **plain(q, k, v, causal_mask(2048)))


def mask_in_every_call() -> Case:
    q, k, v = (normal(2, 8, 1024, 64) for _ in range(3))
    kept = causal_mask(1024)

    def before():
        with torch.no_grad():
            hidden = torch.ones(1024, 1024, dtype=torch.bool, device="cuda").triu(1)
            scores = q @ k.transpose(-2, -1) * 0.125
            scores.masked_fill_(hidden, float("-inf"))
            return torch.softmax(scores, -1) @ v

    hidden = ~kept

    def after():
        with torch.no_grad():
            scores = q @ k.transpose(-2, -1) * 0.125
            scores.masked_fill_(hidden, float("-inf"))
            return torch.softmax(scores, -1) @ v

    return Case(before, after, **plain(q, k, v, kept))


CASES = (
    *(contiguous, repeated_heads, float32_products, float32_attention, window_as_tensor),
    *(padded_batch, decode, launch_bound, padded_head_dim, mask_in_every_call),
    *(strided_mask, fused),
)


def largest_error(out: torch.Tensor, exact: torch.Tensor) -> float:
    return float((out.double() - exact).abs().max())


def gate(case: Case) -> tuple[str, float, float]:
    """ "ok" or what does not hold, the larger error of the two, and what is allowed."""
    exact = case.exact()
    allowed = case.notes.get("allowed_error", 2 * largest_error(case.eager(), exact) + 1e-5)
    view = case.notes.pop("view_before", lambda run: run)
    errors = [largest_error(call(), exact) for call in (view(case.before), case.after)]
    for name, error in zip(("before", "after"), errors, strict=True):
        if not error <= allowed:
            return (
                f"{name}: error {error:.3g} above the allowed {allowed:.3g}",
                max(errors),
                allowed,
            )
    return "ok", max(errors), allowed


def measure(name: str, case: Case, folder: Path) -> list[dict[str, Any]]:
    """Rows of both sides; their traces beside."""
    verdict, error, allowed = gate(case)
    for side in ("before", "after"):
        record_steps(folder / f"{name}.{side}.json.gz", getattr(case, side))
    calls = {"before": case.before, "after": case.after}
    timings = time_rotated(calls, clock=case.clock) if verdict == "ok" else {}  # type: ignore[arg-type]
    rows = []
    for side in calls:
        row = {
            "kind": "rung",
            "pass": "forward",
            **case.problem,
            "name": f"{name}.{side}",
            "gate": verdict,
            "error": error,
            "allowed_error": allowed,
            "features": {key: value for key, value in case.notes.items() if key == "lengths"},
        }
        timing = timings.get(side)
        if isinstance(timing, Timing):
            row |= timing_fields(timing)
        elif timing is not None:
            row["notes"] = timing.reason
        rows.append(row)
    return rows


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    run = new_run("python benchmarks/record_findings.py", collect(), revision())
    rows: list[dict[str, Any]] = []
    for make in CASES:
        name = make.__name__
        try:
            own = measure(name, make(), folder)
        except Exception as error:  # one case must not cost the others
            print(f"{name:22s} not run: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        rows += own
        print(f"{name:22s} {own[0]['gate']:10s} {[row.get('ms') for row in own]}", flush=True)
        torch.cuda.empty_cache()
    append_run(folder / "findings.json", "findings", run, rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
