"""flashdig's kernels over a key-value cache, by name.

`flashdig_decode_bf16_d128_m16n128_causal_paged_split` attends, `flashdig_combine_bf16_v128` joins
parts of the keys; `flashdig_hopper_decode_bf16_d128_m64n128_causal_paged` does both.
"""

from __future__ import annotations

import re

from flashdig.readers.kernel_names.flashdig import part
from flashdig.readers.kernel_names.kernel_name import (
    DTYPES,
    KernelName,
    dtype_words,
    sentence,
    tensor_core_words,
    tile_words,
)
from flashdig.readers.kernel_names.symbol import Symbol

_FEATURES = {
    "varlen": "packed",
    "paged": "pages",
    "split": "keys in parts",
    "fp8cache": "fp8 cache",
    "softcap": "softcap",
    "alibi": "ALiBi",
    "sinks": "sinks",
}
_DTYPE = r"_(?P<dtype>fp32|tf32|fp16|bf16)"
_DECODE = re.compile(
    rf"^flashdig_(?:hopper_)?decode(?P<ragged>_ragged)?(?:_fp8(?P<fp8>)|{_DTYPE})"
    r"_d(?P<d>\d{1,4})(?:v(?P<v>\d{1,4}))?_m(?P<m>\d{1,4})n(?P<n>\d{1,4})"
    rf"(?:_(?P<mask>causal|window))?(?P<features>(?:_(?:{'|'.join(_FEATURES)}))*)$"
)
_COMBINE = re.compile(rf"^flashdig_combine{_DTYPE}_v(?P<v>\d{{1,4}})$")


def decode(symbol: Symbol) -> KernelName | None:
    """A kernel over a cache; None for anything else."""
    return _decode(symbol) or _combine(symbol)


def _decode(symbol: Symbol) -> KernelName | None:
    found = _DECODE.match(symbol.text)
    if found is None:
        return None
    # fp8 queries are multiplied as float16
    dtype = "float8_e4m3fn" if found["dtype"] is None else DTYPES[found["dtype"]]
    tile = (int(found["m"]), int(found["n"]))
    causal = {"causal": True, "window": None, None: False}[found["mask"]]
    head_dim = f"head_dim {found['d']}" + (f" (v: {found['v']})" if found["v"] else "")
    features = [_FEATURES[word] for word in found["features"].split("_") if word]
    return KernelName(
        name=symbol.name,
        family="flashdig",
        backend="flashdig",
        role="attention_forward",
        pass_="forward",
        dtype=dtype,
        tile=tile,
        head_dim=int(found["d"]),
        tensor_cores=dtype != "float32",
        causal=causal,
        words=sentence(
            "flashdig: attention over a cache",
            "sequences of different lengths" if found["ragged"] else "",
            dtype_words(dtype),
            head_dim,
            tile_words(tile),
            {True: "causal", False: "not causal", None: "in a window"}[causal],
            *features,
            tensor_core_words(dtype != "float32"),
        ),
    )


def _combine(symbol: Symbol) -> KernelName | None:
    found = _COMBINE.match(symbol.text)
    if found is None:
        return None
    what = "joins attention over parts of the keys"
    return part(symbol, "forward", DTYPES[found["dtype"]], what, f"head_dim_v {found['v']}")
