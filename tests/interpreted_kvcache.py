"""Runs the cache's kernels with Triton's interpreter, which is chosen before Triton is imported.

`python -m tests.interpreted_kvcache` prints, as JSON, what is wrong with each case, or null.
"""

import json
import os
import random
import sys

if __name__ == "__main__":  # not where tests only read its tables
    os.environ["TRITON_INTERPRET"] = "1"

import torch

from flashdig import attention_varlen, attention_with_kvcache, kept_cache_calls, run
from flashdig.bench.kvcache_cases import make_case
from flashdig.bench.kvcache_conformance import judge
from flashdig.evidence.quick_interpreter import quicken_interpreter
from flashdig.kernels.reference import reference_attention, reference_attention_varlen

PLAIN = {
    "dtype": "float32",
    "head_dims": (16, 16),
    "cache": "dense",
    "heads": (4, 2),
    "mask": "causal",
    "tokens": "few",
    "schedule": "auto",
    "append": "none",
    "terms": "none",
    "fp8": False,
}
# what a case has besides; each runs once
CASES = {
    "append with rotary to pages": {"cache": "page 5", "append": "rotary"},
    "packed, halves turned": {"tokens": "packed", "append": "rotary halves", "dtype": "float16"},
    "splits over pages of one key": {
        "cache": "page 1",
        "schedule": "splits",
        "terms": "softcap and sinks",
        "mask": "window",
        "tokens": "one",
    },
    "batch invariant": {"schedule": "invariant", "head_dims": (40, 24), "terms": "leftpad"},
    "fp8 cache": {"fp8": True, "dtype": "float16", "append": "new", "terms": "ALiBi"},
}
OTHERS = (
    "rounding to fp8",
    "lengths of every kind",
    "packed queries over pages",
    "a chunk beside tokens that decode",
    "a call that was made before",
)


def conformance(name):
    features = {**PLAIN, **CASES[name]}
    draw, kind = random.Random(name), random.Random(f"kind {name}")
    return judge(make_case(features, draw, kind, "cpu"))


def rounding():
    """Every number of both formats, halfway points, subnormal and huge numbers, as torch rounds."""
    from flashdig.kernels.triton.append_kv import append_rows

    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-24, 18, (2000,), generator=generator).float()
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        exact = torch.arange(256).to(torch.uint8).view(dtype).float().nan_to_num(0.0, 1e9, -1e9)
        drawn = torch.randn(2000, generator=generator) * exponents.exp2()
        halfway = exact[:126].lerp(exact[1:127], 0.5)
        x = torch.cat((drawn, exact, halfway))[: 148 * 16].view(1, 148, 1, 16)
        cache = torch.zeros(x.shape).to(dtype)
        start = torch.zeros(1, dtype=torch.int32)
        append_rows(x, cache, start, None, None, None, None, None, interleaved=True)
        wrong = cache.float() != x.clamp(-largest, largest).to(dtype).float()
        if wrong.any():
            return f"{dtype}: {x[wrong][0]} became {cache.float()[wrong][0]}"
    return None


def ragged():
    """Lengths of every kind, cut into pieces of a tile or two."""
    from flashdig.kernels.triton.decode_choose import DecodeTile
    from flashdig.kernels.triton.decode_launch import cache_attention

    torch.manual_seed(0)
    lengths = [0, 90, 16, 1]
    q, k, v = torch.randn(4, 1, 4, 16), torch.randn(4, 90, 2, 16), torch.randn(4, 90, 2, 24)
    sinks, seqlens = torch.randn(4), torch.tensor(lengths, dtype=torch.int32)
    out, lse = cache_attention(
        q, k, v, seqlens, *(None,) * 8, sinks, None, None, None,
        softmax_scale=0.25, softcap=0.0, window_left=-1, window_right=0, top_left=False,
        allow_tf32=False, seqlen_new=0, num_splits=0, batch_invariant=False,
        tile=DecodeTile(16, 16, 4, 2, 2), ragged=True,
    )  # fmt: skip
    for b, n in enumerate(lengths):
        one = slice(b, b + 1)
        expected = reference_attention(q[one], k[one, :n], v[one, :n], sinks=sinks)
        for name, a, e in zip(("out", "lse"), (out[one], lse[one]), expected, strict=True):
            if not torch.allclose(a.double(), e, atol=1e-5):
                return f"{name} of sequence {b} is off by {float((a - e).abs().max()):.3g}"
    return None


def packed_over_pages():
    """In place: the pages are not gathered."""

    def gathered(*inputs):
        raise AssertionError("the pages were gathered")

    run._gather_pages = gathered
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([1, 2, 2, 8], [3, 3, 10, 25]))
    table = torch.tensor([[1, 2, 0], [3, 3, 6], [5, 1, 4]], dtype=torch.int32)
    q, k, v = torch.randn(9, 4, 16), torch.randn(7, 5, 2, 16), torch.randn(7, 5, 2, 24)
    options = {"page_table": table, "causal": True, "window": (8, None)}
    options |= {"seqused_k": torch.tensor([0, 5, 14], dtype=torch.int32)}
    found = attention_varlen(q, k, v, cu_q, cu_k, **options, return_lse=True, backend="triton")
    expected = reference_attention_varlen(q, k, v, cu_q, cu_k, **options)
    for name, a, e in zip(("out", "lse"), found, expected, strict=True):
        if not torch.allclose(a.double(), e, atol=1e-5):
            return f"{name} is off by {float((a - e).abs().max()):.3g}"
    return None


def chunk_beside_decoding():
    """Two plans: sequences of few rows and of many, one without a query, rows of slack."""
    from flashdig.kernels.triton import decode_ragged_launch

    decode_ragged_launch.CHUNK_ROWS = 64
    kinds, launches = [], decode_ragged_launch._launches

    def noted(call, kind, *rest):
        kinds.append(kind)
        return launches(call, kind, *rest)

    decode_ragged_launch._launches = noted
    torch.manual_seed(0)
    lengths, queries = [70, 100, 33, 90], [1, 3, 0, 40]
    table = torch.randperm(28).view(4, 7).to(torch.int32)
    k, v = (torch.randn(28, 16, 2, 16).half() for _ in range(2))
    q = torch.randn(sum(queries) + 2, 4, 16).half()
    call = {"cache_seqlens": torch.tensor(lengths, dtype=torch.int32), "page_table": table}
    call["cu_seqlens_q"] = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    call |= {"causal": True, "window": (60, None), "return_lse": True}
    found = attention_with_kvcache(q, k, v, **call, backend="triton")
    if kinds != ["short", "long"]:
        return f"planned were {kinds}"
    expected = attention_with_kvcache(q.float(), k.float(), v.float(), **call, backend="reference")
    for name, a, e in zip(("out", "lse"), found, expected, strict=True):
        if not torch.allclose(a.float(), e, atol=2e-3):
            return f"{name} is off by {float((a.float() - e).abs().max()):.3g}"
    return None


def kept():
    """From the third of a kind on, calls are not checked again: the same results, at other
    addresses, and new keys arrive; with another option they take the long way."""
    torch.manual_seed(0)
    lengths = torch.tensor([3, 7], dtype=torch.int32)
    cos, sin = torch.rand(12, 8), torch.rand(12, 8)
    served = []
    again = kept_cache_calls.again

    def noted(*arguments):
        served.append(again(*arguments))
        return served[-1]

    kept_cache_calls.again = noted
    for n in range(5):
        q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
        caches = torch.randn(2, 12, 2, 16), torch.randn(2, 12, 2, 16)
        copies = [x.clone() for x in caches]
        call = {"k": k, "v": v, "rotary_cos": cos, "rotary_sin": sin, "cache_seqlens": lengths}
        call |= {"causal": True, "return_lse": True, "softcap": 3.0 if n < 4 else 4.0}
        versions = [x._version for x in caches]
        found = attention_with_kvcache(q, *caches, **call, backend="triton")
        before = served[-1] is not None
        expected = attention_with_kvcache(q, *copies, **call, backend="reference")
        if before != (n in (2, 3)):
            return f"call {n} was {'served' if before else 'not served'} as one made before"
        if before and [x._version for x in caches] == versions:
            return "autograd was not told that the caches changed"
        for a, e in zip((*found, *caches), (*expected, *copies), strict=True):
            if not torch.allclose(a, e, atol=1e-5):
                return f"call {n} is off by {float((a - e).abs().max()):.3g}"
    return None


def main() -> None:
    plain = ragged()  # as Triton's interpreter runs it by itself
    quicken_interpreter()
    found = {name: conformance(name) for name in CASES}
    calls = (rounding, lambda: plain, packed_over_pages, chunk_beside_decoding, kept)
    found |= {name: call() for name, call in zip(OTHERS, calls, strict=True)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
