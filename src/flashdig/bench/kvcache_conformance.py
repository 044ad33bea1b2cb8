"""Attention over a cache against dense attention over the gathered cache, in float64.

    python -m flashdig.bench.kvcache_conformance --output kvcache-conformance.json

Every pair of features meets in some specialisation; each runs with several inputs. Slots of the
cache that hold no key are NaN, and must come back as they were. A pool of processes compiles and
runs the specialisations.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from flashdig.bench.environment import collect, revision
from flashdig.bench.kvcache_cases import FEATURES, SMALL_FEATURES, make_case, may_meet
from flashdig.bench.pairwise import Combination, covering_array, feasible_pairs
from flashdig.bench.results import append_run, new_run
from flashdig.bench.timing import float32_precision

SUITE = "kvcache-conformance"
# arguments of `append_and_gather`
GATHERED = (
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cu_seqlens_k", "page_table"),
    *("cache_batch_idx", "cache_leftpad", "cu_seqlens_q", "seqused_q", "cu_seqlens_k_new"),
    *("rotary_cos", "rotary_sin", "rotary_seqlens", "q_descale", "k_descale", "v_descale"),
)


def judge(given: Mapping[str, Any]) -> str | None:
    """What is wrong with the kernels' results for one case; None when all is right."""
    import torch

    from flashdig import attention_with_kvcache
    from flashdig.bench.gate import poison, poisoned_allocator
    from flashdig.kernels.cache_plain import append_and_gather

    ours: dict[str, Any] = {
        n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in given.items()
    }
    if given["q"].is_cuda:
        poison(2**22, given["q"].device)
        out, lse = attention_with_kvcache(**ours, return_lse=True, backend="triton")
    else:
        with poisoned_allocator():
            out, lse = attention_with_kvcache(**ours, return_lse=True, backend="triton")
    plain: dict[str, Any] = {
        n: given[n].clone() if given.get(n) is not None else None for n in GATHERED
    }
    if plain["k"] is not None and plain["k"].dim() == 3:
        plain["cu_seqlens_k_new"] = plain["cu_seqlens_q"]
    masked = bool(given.get("causal")) or given.get("window") is not None
    turning: dict[str, Any] = {
        "rotary_interleaved": given.get("rotary_interleaved", True),
        "advances": masked,
    }
    append_and_gather(**plain, **turning)
    for name in ("k_cache", "v_cache"):
        turned = name == "k_cache" and given.get("rotary_cos") is not None
        problem = _cache_problem(ours[name], plain[name], given[name], turned)
        if problem:
            return f"{name}: {problem}"
    if given["batch_invariant"]:
        problem = _variance(ours, given, out, lse)
        if problem:
            return problem
    # attention is judged over the keys that the kernels stored
    positions = given.get("rotary_seqlens", given["cache_seqlens"])
    plain |= {"k": None, "v": None, "k_cache": ours["k_cache"], "v_cache": ours["v_cache"]}
    plain |= {"cache_seqlens": given["cache_seqlens"] + _lengths_new(given)}
    plain |= {"rotary_seqlens": positions}
    return _result_problem(given, append_and_gather(**plain, **turning), out, lse)


def _lengths_new(given: Mapping[str, Any]) -> Any:
    """Keys that the case appends to each sequence."""
    if given.get("k") is None:
        return 0
    if given["k"].dim() == 4:
        return given["k"].shape[1]
    return given["cu_seqlens_q"].diff()


def _bits(x: Any) -> Any:
    import torch

    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _cache_problem(found: Any, expected: Any, before: Any, turned: bool) -> str | None:
    """Slots that were not written keep their bits. New rows have the expected ones: they are copied
    or divided as IEEE 754 says, then rounded; those turned by rotary may be a neighbour."""
    import torch

    untouched = _bits(expected) == _bits(before)
    if not torch.equal(_bits(found)[untouched], _bits(before)[untouched]):
        return "a slot that holds no new key changed"
    a, b = found[~untouched], expected[~untouched]
    if not turned:
        different = int((_bits(a) != _bits(b)).sum())
        return f"{different} elements of new rows have other bits" if different else None
    if found.element_size() == 1:
        near = (_place(a) - _place(b)).abs() <= 1
    else:
        step = 2 * torch.finfo(found.dtype).eps
        near = (a.float() - b.float()).abs() <= step * b.float().abs() + 1e-6
    if not near.all():
        return f"new rows differ by {float((a.float() - b.float()).abs().max()):.3g}"
    return None


def _place(x: Any) -> Any:
    """The number of an fp8 value in order, both zeros 0; finite ones only."""
    import torch

    bits = x.view(torch.uint8).int()
    return torch.where(bits >= 128, 128 - bits, bits)


def _variance(ours: Mapping[str, Any], given: Mapping[str, Any], out: Any, lse: Any) -> str | None:
    """A sequence alone, its last token alone, over the cache as it is now: the same bits."""
    import torch

    from flashdig import attention_with_kvcache

    if ours.get("cu_seqlens_q") is not None or ours.get("rotary_cos") is not None:
        return None
    batch, tokens = out.shape[:2]
    b = batch - 1
    alone: dict[str, Any] = {}
    for name, x in ours.items():
        per_sequence = isinstance(x, torch.Tensor) and name not in ("sinks", "alibi_slopes")
        alone[name] = x[b : b + 1] if per_sequence and name[1:] not in ("_cache",) else x
    for name in ("k_cache", "v_cache"):
        if given.get("page_table") is None and given.get("cache_batch_idx") is None:
            alone[name] = ours[name][b : b + 1]
    slopes = ours.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:
        alone["alibi_slopes"] = slopes[b : b + 1]
    new = 0 if ours.get("k") is None else ours["k"].shape[1]
    alone["cache_seqlens"] = alone["cache_seqlens"] + new
    alone |= {"k": None, "v": None}
    masked = bool(given.get("causal")) or given.get("window") is not None
    starts = (0,) if not masked and tokens > 1 else (0, tokens - 1)
    for start in starts:
        alone["q"] = ours["q"][b : b + 1, start:]
        out_b, lse_b = attention_with_kvcache(**alone, return_lse=True, backend="triton")
        rest = out[b : b + 1, start:].contiguous()
        # NumPy's matrix products, which the interpreter takes, vary with a row's place in a tile
        same = torch.allclose if out.device.type == "cpu" else torch.equal
        if not same(out_b, rest) or not same(lse_b, lse[b : b + 1, :, start:]):
            return f"batch_invariant, but tokens {start} to {tokens} alone have other bits"
    return None


def _result_problem(given: Mapping[str, Any], gathered: Any, out: Any, lse: Any) -> str | None:
    import torch

    from flashdig.bench.gate import ERROR_FACTOR, ERROR_FLOOR, LSE_TOLERANCE
    from flashdig.kernels.reference import of_sequence, reference_attention

    names = ("causal", "window", "softcap")
    options = {name: given[name] for name in names if name in given}
    scale = given["q"].shape[-1] ** -0.5
    dtype = given["q"].dtype
    errors, eager_errors = [0.0], [0.0]
    for b, rows in enumerate(gathered.rows):
        q, k, v = (x[b][None] for x in (gathered.q, gathered.k, gathered.v))
        if gathered.dense is None:
            out_b, lse_b = out[rows][None], lse[:, rows][None]
        else:
            out_b, lse_b = out[b : b + 1], lse[b : b + 1]
        slopes = of_sequence(given.get("alibi_slopes"), b)
        terms = {**options, "softmax_scale": scale, "alibi_slopes": slopes}
        terms["sinks"] = given.get("sinks")
        exact, exact_lse = reference_attention(q, k, v, **terms)
        if not torch.equal(lse_b.isneginf(), exact_lse.isneginf()):
            return f"sequence {b}: rows without keys are not those of lse -inf"
        sees = ~exact_lse.isneginf()
        error = (lse_b.double() - exact_lse)[sees].abs()
        if not (error <= LSE_TOLERANCE * (1 + exact_lse[sees].abs())).all():
            return f"sequence {b}: lse is off by {float(error.max()):.3g}"
        if out_b.numel():
            errors.append(float((out_b.double() - exact).abs().max()))
            eager = eager_rounded(q, k, v, dtype, **terms)
            eager_errors.append(float((eager.double() - exact).abs().max()))
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    allowed = ERROR_FACTOR * max(eager_errors) + ERROR_FLOOR
    if not error <= allowed:
        return f"out is off by {error:.3g}, allowed {allowed:.3g}"
    if gathered.dense is None:
        inside = sum(r.stop - r.start for r in gathered.rows)
        if out[inside:].any() or not lse[:, inside:].isneginf().all():
            return "rows of no sequence are not 0 with lse -inf"
    return None


def eager_rounded(
    q: Any,
    k: Any,
    v: Any,
    dtype: Any,
    *,
    causal: bool = False,
    window: Any = None,
    softmax_scale: float,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sinks: Any = None,
) -> Any:
    """Eager attention of (1, seqlen, heads, dim) that rounds the scores, P and O to `dtype`."""
    import torch

    from flashdig.problem import Mask

    mask = Mask.from_arguments(causal, window)
    heads, seqlen_q, seqlen_k = q.shape[2], q.shape[1], k.shape[1]
    rows_q, keys, values = (x[0].transpose(0, 1).to(dtype).float() for x in (q, k, v))
    keys, values = (x.repeat_interleave(heads // k.shape[2], 0) for x in (keys, values))
    scores = (rows_q @ keys.mT).to(dtype).float() * softmax_scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(seqlen_q, device=q.device)[:, None] + mask.offset(seqlen_q, seqlen_k)
    distance = torch.arange(seqlen_k, device=q.device) - rows
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(heads, 1, 1) * distance.abs()
    left, right = mask.sides
    hidden = ((distance < -left) & (left >= 0)) | ((distance > right) & (right >= 0))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        column = sinks[:, None, None].expand(heads, seqlen_q, 1)
        scores = torch.cat((scores, column.to(scores.dtype)), dim=-1)
    dead = scores.isneginf().all(-1, keepdim=True)
    probs = torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
    out = (probs[..., :seqlen_k].to(dtype).float() @ values).to(dtype)
    return out.transpose(0, 1)[None]


def case_of(combinations: Sequence[Combination], number: int, n: int, device: str) -> Any:
    """Input n of a specialisation, one of two kinds; the same in every run."""
    draw, kind = random.Random(f"{number} {n}"), random.Random(f"kind {number} {n % 2}")
    return make_case(combinations[number], draw, kind, device)


def plan(device: str) -> list[Combination]:
    return covering_array(SMALL_FEATURES if device == "cpu" else FEATURES, may_meet)


@float32_precision("ieee")
def run_specialisation(number: int, device: str, inputs: int, deadline: float) -> list[str | None]:
    """What is wrong with each case; "skipped" for those that have not begun by then."""
    combinations = plan(device)
    found: list[str | None] = []
    for n in range(inputs):
        if time.time() > deadline:
            found.append("skipped")
            continue
        try:
            problem = judge(case_of(combinations, number, n, device))
        except Exception as error:  # a failed case must not end the suite
            lines = str(error).strip().splitlines() or [""]
            problem = f"{type(error).__name__}: {lines[0][:300]}"
        words = ", ".join(f"{name} {value}" for name, value in combinations[number].items())
        found.append(None if problem is None else f"{words}, input {n}: {problem}")
    return found


def run(
    device: str,
    inputs: int,
    count: int | None,
    limit_s: float,
    processes: int,
    say: Any = print,
) -> Any:
    """(problems of every case, specialisations that were run)."""
    deadline = time.time() + limit_s
    numbers = range(len(plan(device)[:count]))
    found: list[str | None] = []
    context = multiprocessing.get_context("spawn")
    begun = time.time()
    with ProcessPoolExecutor(min(processes, len(numbers)), mp_context=context) as pool:
        work = [pool.submit(run_specialisation, n, device, inputs, deadline) for n in numbers]
        for done in as_completed(work):
            problems = done.result()
            for problem in [p for p in problems if p not in (None, "skipped")][:2]:
                say(f"FAILED {problem}", flush=True)
            found += problems
            say(
                f"{len(found)} of {inputs * len(numbers)} cases, {time.time() - begun:.0f} s",
                flush=True,
            )
    return found, len(numbers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the grid; 0 when no case failed or was skipped, else 1."""
    parser = argparse.ArgumentParser(prog="python -m flashdig.bench.kvcache_conformance")
    parser.add_argument("--output", type=Path, help="record to append the run to")
    parser.add_argument("--specialisations", type=int, help="run only the first so many")
    parser.add_argument("--inputs", type=int, default=20, help="cases of each specialisation")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds")
    cores = max(1, (os.cpu_count() or 1) - 1)
    parser.add_argument("--processes", type=int, default=cores)
    given = parser.parse_args(arguments)
    command = shlex.join(["python", "-m", "flashdig.bench.kvcache_conformance", *sys.argv[1:]])
    started = new_run(command, collect(), revision())
    start = time.perf_counter()
    problems, count = run(
        given.device, given.inputs, given.specialisations, given.time_limit, given.processes
    )
    failures = [p for p in problems if p not in (None, "skipped")]
    features = SMALL_FEATURES if given.device == "cpu" else FEATURES
    row = {
        "kind": "test",
        "name": SUITE,
        "backend": "triton",
        "cases": len(problems),
        "passed": problems.count(None),
        "failed": len(failures),
        "skipped": problems.count("skipped"),
        "failures": failures,
        "features": {
            "specialisations": count,
            "inputs": given.inputs,
            "device": given.device,
            "pairs": len(feasible_pairs(features, may_meet)),
            "values": {name: len(values) for name, values in features.items()},
            "seconds": round(time.perf_counter() - start, 1),
        },
    }
    if given.output is not None:
        append_run(given.output, SUITE, started, [row])
    print({name: row[name] for name in ("cases", "passed", "failed", "skipped")}, row["features"])
    return 1 if failures or row["skipped"] else 0


if __name__ == "__main__":
    sys.exit(main())
